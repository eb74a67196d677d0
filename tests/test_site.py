"""The pages: built without warnings, complete; links lead somewhere, and numbers are stored ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

import flatbed
from flatbed import word2vec
from flatbed.compat import speedtorch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MODULES = ("optim", "compat", "word2vec")


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))


# ---- links


def slugs(page: Path) -> set[str]:
    """The anchors that a page has both where it is built and where the repository is shown."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        shown = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        built = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip())
        found |= {shown} & {built}
    return found


def broken(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    bad = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        known = target.suffix != ".md" or not anchor or (target.exists() and anchor in slugs(target))
        if not target.exists() or not known:
            bad.append(link)
    return bad


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, prose(page)) == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "[a](docs/nowhere.md) [b](docs/cache.md#nowhere) [c](#nowhere) [d](docs/cache.md#cuda-graphs)"
    assert broken(ROOT / "README.md", text) == ["docs/nowhere.md", "docs/cache.md#nowhere", "#nowhere"]


# ---- what there is


def documented() -> list[str]:
    pages = sorted(DOCS.glob("api*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]


def test_every_public_name_is_in_the_api() -> None:
    names = {f"flatbed.{name}" for name in flatbed.__all__ if name not in (*MODULES, "__version__")}
    for module in (flatbed.optim, speedtorch, word2vec):
        names |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert names - set(documented()) == set()


def test_the_api_has_no_name_twice() -> None:
    assert len(documented()) == len(set(documented()))


def test_every_page_is_in_the_nav() -> None:
    """Each once."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    listed = re.findall(r": (\S+\.md)$", nav, re.M)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_fits_the_page(page: Path) -> None:
    """Within 80 columns: longer lines are cut off, or scroll."""
    if page.name == "CONTRIBUTING.md":  # not part of the site
        return
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


def test_the_site_asks_nothing_from_elsewhere(site: Path) -> None:
    elsewhere = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    for page in site.glob("*.html"):
        assert elsewhere.findall(page.read_text()) == [], page.name
    assert (site / "search" / "search_index.js").exists()  # search works in a folder, without a server


def test_examples_in_docstrings_are_code(site: Path) -> None:
    api = (site / "api-tables.html").read_text()
    assert "&gt;&gt;&gt;" in api
    assert "<blockquote>" not in api


def test_wide_tables_scroll_on_narrow_pages(site: Path) -> None:
    """The theme lets tables without a class scroll: its style sheet alone, and its script by a wrapper."""
    found = {page.name: page.read_text() for page in site.glob("*.html")}
    tables = {name: re.findall(r"<table\b[^>]*>", text) for name, text in found.items()}
    assert sum(map(len, tables.values())) > 30
    for name, tags in tables.items():
        assert [tag for tag in tags if "class" in tag] == [], name
        article = re.search(r"<article class=\"[^\"]*\bmd-typeset\b.*</article>", found[name], re.S)
        assert not tags or (article is not None and article[0].count("<table") == len(tags)), name
    (sheet,) = {
        name for text in found.values() for name in re.findall(r"assets/\S+/main\.\w+\.min\.css", text)
    }
    style, (script,) = (site / sheet).read_text(), (site / "assets/javascripts").glob("bundle.*.min.js")
    assert re.search(r"\.md-typeset table:not\(\[class\]\)\{[^}]*max-width:100%;overflow:auto", style)
    assert re.search(r"\.md-typeset__scrollwrap\{[^}]*overflow-x:auto", style)
    assert re.search(r"table:not\(\[class\]\)", script.read_text())
    assert "md-typeset__scrollwrap" in script.read_text()
    viewport = '<meta name="viewport" content="width=device-width,initial-scale=1">'
    assert all(viewport in text for text in found.values())


# ---- numbers of "Choosing a storage"


def cells(pattern: str) -> list[list[str]]:
    """The rows of tables whose line matches."""
    lines = re.findall(r"^\| (.+) \|$", (DOCS / "choosing-a-storage.md").read_text(), re.M)
    return [
        [cell.strip() for cell in re.split(r" ?\| ?", line)] for line in lines if re.search(pattern, line)
    ]


@pytest.mark.parametrize(
    ("label", "name", "options"),
    [
        ("SGD", "SGD", {}),
        ("RowwiseAdagrad", "RowwiseAdagrad", {}),
        ("SGD with momentum, Adagrad, Lion", "SGD", {"momentum": 0.9}),
        ("SGD with momentum, Adagrad, Lion", "Adagrad", {}),
        ("SGD with momentum, Adagrad, Lion", "Lion", {}),
        ("Adam, AdamW, SparseAdam, Adamax", "Adam", {}),
        ("Adam, AdamW, SparseAdam, Adamax", "AdamW", {}),
        ("Adam, AdamW, SparseAdam, Adamax", "SparseAdam", {}),
        ("Adam, AdamW, SparseAdam, Adamax", "Adamax", {}),
        ("Adam with `amsgrad`", "Adam", {"amsgrad": True}),
        ("Adam with `per_row_steps`", "Adam", {"per_row_steps": True}),
    ],
)
def test_sizes_of_records_are_true(label: str, name: str, options: dict[str, Any]) -> None:
    (found,) = [row for row in cells(r" B, [\d.]+ GB") if row[0] == label]
    for cell, dtype in zip(found[2:], (torch.float32, torch.bfloat16), strict=True):
        emb = flatbed.Embedding(65_104_166, 128, dtype=dtype)  # nothing is allocated
        getattr(flatbed.optim, name)([emb.table], **options)
        stored = emb.table.nbytes
        assert cell == f"{stored // emb.num_embeddings:,} B, {stored / 1e9:.1f} GB"
