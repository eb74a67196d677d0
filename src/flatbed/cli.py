"""The `flatbed` command. What needs torch is imported by the commands that use it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flatbed._version import __version__
from flatbed.bench.commands import bench
from flatbed.bench.terminal import console
from flatbed.word2vec.commands import neighbors, word2vec

if TYPE_CHECKING:
    from flatbed.doctor import Finding

app = typer.Typer(
    help="Training memory where it should be: measure it, and see what this machine offers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(bench, name="bench")
app.command()(word2vec)
app.command()(neighbors)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"flatbed {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Training memory where it should be: measure it, and see what this machine offers."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at python, torch, GPU, memory and copy speeds, and say what anything missing means."""
    from flatbed.doctor import examine, torch_is_usable

    findings = examine()
    if as_json:
        typer.echo(json.dumps([finding.to_dict() for finding in findings], indent=1, ensure_ascii=False))
    else:
        console().print(_findings_table(findings))
    if not torch_is_usable():
        raise typer.Exit(1)


def _findings_table(findings: Sequence[Finding]) -> Table:
    marks = {True: Text("✓", "green"), False: Text("✗", "red"), None: Text("–", "dim")}
    table = Table(title="flatbed doctor", title_style="bold", show_lines=False)
    for column in ("", "what", "found", "meaning"):
        table.add_column(column)
    for finding in findings:
        style = "dim" if finding.ok is None else ""
        cells = (Text(finding.name), Text(finding.value), Text(finding.meaning))
        table.add_row(marks[finding.ok], *cells, style=style)
    return table
