"""Every example in a docstring, in the README and in the docs runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import flatbed.compat.speedtorch
import flatbed.word2vec
from benchmarks import pages

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(flatbed.__path__, "flatbed.") if "cli" not in m.name]


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0


@pytest.mark.parametrize("module", [flatbed, flatbed.optim, flatbed.compat.speedtorch, flatbed.word2vec])
def test_examples_of_public_names_can_be_pasted(module: ModuleType) -> None:
    """They import what they use."""
    runner = doctest.DocTestRunner()
    for name in module.__all__:
        if callable(getattr(module, name)):
            for test in doctest.DocTestFinder(recurse=False).find(getattr(module, name), name, globs={}):
                runner.run(test)
    assert runner.failures == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages(page: Path) -> None:
    """The python blocks of a page, in order, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), namespace)
    assert blocks or page.name not in ("README.md", "flat.md")


def test_examples_have_docstrings() -> None:
    for name in ("FlatParams", "ContiguousParams"):
        assert ">>>" in getattr(flatbed, name).__doc__


def test_tables_are_those_of_the_stored_rows() -> None:
    stale = pages.fill(PAGES, check=True)
    assert not stale, "run: python -m benchmarks fill"
