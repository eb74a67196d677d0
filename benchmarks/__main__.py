"""Run benchmarks and show stored rows.

python -m benchmarks step gpt-like resnet-like:sgd --json rows.json --png rows.png
python -m benchmarks cache step --variant flatbed --variant "flatbed, prefetched"
python -m benchmarks show rows.json
python -m benchmarks fill --check
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import pages, plot, report
from benchmarks.harness import Options
from benchmarks.rows import Row, read_rows, write_rows

BENCHMARKS = (
    *("step", "roofline", "fsdp", "tables", "rows", "cache", "overlap", "topk", "data", "speedtorch"),
    *("trace", "shards", "word2vec"),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in BENCHMARKS:
        module = import_module(f"benchmarks.cases.{name}")
        doc = str(module.__doc__)
        command = commands.add_parser(name, help=doc.splitlines()[0], description=doc, formatter_class=raw)
        command.add_argument("cases", nargs="*", help=f"of {', '.join(module.CASES)}; default: all")
        command.add_argument("--variant", action="append", default=[], help="measure only these; repeatable")
        command.add_argument("--device", choices=("cpu", "cuda"), default=None)
        command.add_argument("--quick", action="store_true", help="tiny sizes; the default on a CPU")
        command.add_argument("--steps", type=int, help="timed steps, turns, samples or seeds per variant")
        command.add_argument("--folder", type=Path, help="where files of tables on disk are made")
        command.add_argument("--json", type=Path, help="store the rows; written after every row")
        command.add_argument("--append", action="store_true", help="keep the rows that are in the file")
        command.add_argument("--png", type=Path, help="draw the rows")
    show = commands.add_parser("show", help="print stored rows as markdown tables")
    show.add_argument("files", nargs="+", type=Path)
    show.add_argument("--png", type=Path, help="draw the rows")
    fill = commands.add_parser("fill", help="render the tables of README and docs from stored rows")
    fill.add_argument("--check", action="store_true", help="only report pages that are out of date")
    fill.add_argument("pages", nargs="*", type=Path, help="default: README and docs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 1 where a check failed or a page is out of date."""
    asked = parse(arguments)
    if asked.command == "fill":
        stale = pages.fill(asked.pages or pages.PAGES, check=asked.check)
        for page in stale:
            print(f"{page}: {'out of date' if asked.check else 'filled'}")
        return int(asked.check and bool(stale))
    if asked.command == "show":
        rows = [row for file in asked.files for row in read_rows(file)]
    else:
        rows = measure(asked)
    print(report.to_markdown(rows))
    if asked.png:
        plot.write_plot(rows, asked.png)
    failed = list(dict.fromkeys(f"{row['case']}: {row['variant']}" for row in rows if row["ok"] is False))
    if failed:
        print(f"FAILED their checks: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def measure(asked: argparse.Namespace) -> list[Row]:
    """Run one benchmark, and store its rows as they are found."""
    on_gpu = asked.device == "cuda" or (asked.device is None and torch.cuda.is_available())
    device = torch.device("cuda:0" if on_gpu else "cpu")
    options = Options(
        device, asked.quick, tuple(asked.cases), tuple(asked.variant), asked.steps, asked.folder
    )
    module = import_module(f"benchmarks.cases.{asked.command}")
    known = {case.partition(":")[0] for case in module.CASES}
    unknown = [case for case in options.cases if case.partition(":")[0] not in known]
    if unknown:
        raise SystemExit(f"unknown cases {', '.join(unknown)}; there are {', '.join(module.CASES)}")
    rows: list[Row] = []
    kept = read_rows(asked.json) if asked.append and asked.json.exists() else []
    for row in module.run(options):
        rows.append(row)
        options.report(report.one_line(row))
        if asked.json:
            write_rows([*kept, *rows], asked.json)
    return rows


if __name__ == "__main__":
    sys.exit(main())
