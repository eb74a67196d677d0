"""Every example in a docstring, in the README and in the docs runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import typer.main

import flatbed
from benchmarks import pages
from benchmarks.__main__ import BENCHMARKS
from flatbed.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [m.name for m in pkgutil.walk_packages(flatbed.__path__, "flatbed.") if "cli" not in m.name]


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str) -> None:
    """Examples can be pasted: they have the names that they import. Short ones import nothing."""
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(importlib.import_module(module), module):
        if "import " in (test.docstring or ""):
            test.globs = {}
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


def test_commands_exist() -> None:
    """Commands in blocks and in the text of pages have the names and options of the programs."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    n_found = 0
    for page in PAGES:
        for program, line in re.findall(
            r"(?:^|`)(flatbed|python -m benchmarks) ([a-z][^`#\n]*)", page.read_text(), re.M
        ):
            name, *words = line.split()
            options = {word for word in words if word.startswith("--")}
            if program == "flatbed" and name in commands:
                known = {
                    option
                    for param in commands[name].params
                    for option in (*param.opts, *param.secondary_opts)
                }
                assert options <= known, f"{page.name}: {line}"
                n_found += 1
            elif program != "flatbed" and "NAME" not in line:
                assert name in (*BENCHMARKS, "show", "fill"), f"{page.name}: {line}"
                cases = [word for word in words if not word.startswith("-") and name in BENCHMARKS]
                known = importlib.import_module(f"benchmarks.cases.{name}").CASES if cases else ()
                assert set(cases) <= set(known), f"{page.name}: {line}"
                n_found += 1
            else:
                assert program != "flatbed" or not options, f"{page.name}: {line}"
    assert n_found > 15


def test_tables_are_those_of_the_stored_rows() -> None:
    stale = pages.fill(PAGES, check=True)
    assert not stale, "run: python -m benchmarks fill"
