"""The pages: built without warnings, complete; links lead somewhere, and numbers are stored ones."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flatbed
from flatbed import word2vec
from flatbed.compat import speedtorch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
MODULES = ("optim", "compat", "word2vec")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Those of pages that are not part of the site: mkdocs checks the others."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", (ROOT / page).read_text()))
    for path, anchor in re.findall(r"\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]+))?\)", prose):
        target = ROOT / (path or page)
        assert target.exists(), path
        headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", target.read_text()), re.M) if anchor else []
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{path}#{anchor}"


# ---- what there is


def test_the_api_has_every_public_name_once() -> None:
    pages = sorted(DOCS.glob("api*.md"))
    documented = [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    names = {f"flatbed.{name}" for name in flatbed.__all__ if name not in (*MODULES, "__version__")}
    for module in (flatbed.optim, speedtorch, word2vec):
        names |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert names - set(documented) == set()
    assert len(documented) == len(set(documented))


def test_the_api_names_every_error() -> None:
    """All but `OtherVersion`, which is always raised again as another one."""
    page = (ROOT / "docs/api.md").read_text()
    sources = (path.read_text() for path in (ROOT / "src").rglob("*.py"))
    names = [name for text in sources for name in re.findall(r"^class (\w+)\(FlatbedError\)", text, re.M)]
    assert [name for name in names if not re.search(rf"^\| `[\w.]*{name}`", page, re.M)] == ["OtherVersion"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_fits_the_page(page: Path) -> None:
    """Within 80 columns: longer lines are cut off, or scroll."""
    lines = [line for block in FENCE.findall(page.read_text()) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 80] == []


# ---- building


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; a warning is an error."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(  # not with --quiet, under which warnings are not counted
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert len(list(folder.glob("*.html"))) > len(list(DOCS.glob("*.md")))  # and one for missing pages
    return folder


def test_the_site(site: Path) -> None:
    """It asks nothing from elsewhere, and examples in docstrings are code that fits the page."""
    elsewhere = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    for page in site.glob("*.html"):
        text = page.read_text()
        assert elsewhere.findall(text) == [], page.name
        code = html.unescape(re.sub("<[^>]+>", "", "\n".join(re.findall("(?s)<pre.*?</pre>", text))))
        assert [line for line in code.splitlines() if len(line) > 80] == [], page.name
    assert (site / "search" / "search_index.js").exists()  # search works in a folder, without a server
    api = (site / "api-tables.html").read_text()
    assert "&gt;&gt;&gt;" in api
    assert "<blockquote>" not in api


# ---- numbers of "Choosing a storage"


@pytest.mark.parametrize(
    ("label", "optimizers"),
    [
        ("SGD", {"SGD": {}}),
        ("RowwiseAdagrad", {"RowwiseAdagrad": {}}),
        ("SGD with momentum, Adagrad, Lion", {"SGD": {"momentum": 0.9}, "Adagrad": {}, "Lion": {}}),
        ("Adam, AdamW, SparseAdam, Adamax", {"Adam": {}, "AdamW": {}, "SparseAdam": {}, "Adamax": {}}),
        ("Adam with `amsgrad`", {"Adam": {"amsgrad": True}}),
        ("Adam with `per_row_steps`", {"Adam": {"per_row_steps": True}}),
    ],
)
def test_sizes_of_records_are_true(label: str, optimizers: dict[str, dict[str, Any]]) -> None:
    lines = (DOCS / "choosing-a-storage.md").read_text().splitlines()
    (found,) = [line.split(" | ")[2:] for line in lines if re.match(rf"\| {label} \|.* B, [\d.]+ GB", line)]
    for name, options in optimizers.items():
        for cell, dtype in zip(found, (torch.float32, torch.bfloat16), strict=True):
            emb = flatbed.Embedding(65_104_166, 128, dtype=dtype)  # nothing is allocated
            getattr(flatbed.optim, name)([emb.table], **options)
            stored = emb.table.nbytes
            assert cell.strip(" |") == f"{stored // emb.num_embeddings:,} B, {stored / 1e9:.1f} GB"
