"""Fill the tables of README and docs from stored rows: python benchmarks/fill_tables.py [--check].

A table stands between `<!-- rows FILE -->` and `<!-- end rows -->`, FILE under benchmarks/results/; that
of summary.py stands between `<!-- summary -->` and `<!-- end summary -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import summary
from quality import rows as quality_rows

from flatbed.bench.report import read, to_markdown

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end summary -->)", re.S)
TABLE = re.compile(r"(<!-- rows (?P<file>\S+) -->\n).*?(<!-- end rows -->)", re.S)


def filled(text: str) -> str:
    """The page with every table made anew from its rows."""

    def table(match: re.Match[str]) -> str:
        path = ROOT / "benchmarks" / "results" / match["file"]
        of_quality = path.name.endswith("-quality.json")  # a kind of rows that only this folder knows
        text = quality_rows.to_markdown(path) if of_quality else to_markdown(read(path))
        return f"{match[1]}{text.strip()}\n{match[3]}"

    text = TABLE.sub(table, text)
    return SUMMARY.sub(lambda match: f"{match[1]}{summary.table()}\n{match[2]}", text)


def main() -> int:
    """Rewrite the pages, or with --check only say which are out of date."""
    stale = [page for page in PAGES if filled(page.read_text()) != page.read_text()]
    for page in stale:
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)}: its tables are not those of the stored rows")
        else:
            page.write_text(filled(page.read_text()))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
