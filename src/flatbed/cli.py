"""The `flatbed` command. Commands import what they need when they run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatbed.word2vec.commands import neighbors, word2vec

if TYPE_CHECKING:
    from flatbed.doctor import Finding

MOST = 10**18
"""Greatest size in an option of `flatbed doctor`: far beyond any table, with products that fp64 can hold."""

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
app.command()(word2vec)
app.command()(neighbors)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="Folder of flatbed.save_checkpoint, or file of a table.")],
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Take the rows of a damaged table on disk as they are."),
    ] = False,
) -> None:
    """Read a checkpoint, or the file of a table, and say if it is damaged. Only --forget changes a file."""
    from flatbed.checkpoint.load_table import check_path
    from flatbed.errors import FlatbedError

    try:
        typer.echo(check_path(path.absolute(), forget=forget))
    except (FlatbedError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@app.command()
def doctor(
    context: typer.Context,
    table_gb: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=MOST, help="Say where a table of this size, with its optimizer state, fits."
        ),
    ] = None,
    rows: Annotated[
        float | None,
        typer.Option(min=1, max=MOST, help="Model a table of so many rows, 6.5e9 for example, instead."),
    ] = None,
    dim: Annotated[
        int, typer.Option(min=1, max=MOST, help="Weights in each row of that table, in fp32.")
    ] = 128,
    optimizer: Annotated[str, typer.Option(help="Its optimizer, a class of flatbed.optim.")] = "adam",
    ranks: Annotated[
        int, typer.Option(min=1, max=MOST, help="GPUs that share its rows, 8 on each host.")
    ] = 1,
    ids: Annotated[int, typer.Option(min=1, max=MOST, help="Ids that each rank looks up per step.")] = 65_536,
    hit_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the rows that are in caches; skewed ids: 0.9.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at torch, GPU, memory, bus and disk. With --table-gb, recommend a storage for a table.

    With --rows, print what a table of that size needs, estimated by flatbed.cost_model; nothing is measured.
    With one rank, say whether it fits into the free memory or on the disk of this machine.
    """
    from flatbed.doctor import GB, examine, plan

    if rows is None:
        for option in context.command.params:
            if option.name not in ("table_gb", "as_json") and context.params[option.name] != option.default:
                raise typer.BadParameter(f"{option.opts[0]} describes a table: give --rows, too")
        findings = examine(None if table_gb is None else int(table_gb * GB))
    else:
        try:
            findings = plan(int(rows), dim, optimizer, ranks=ranks, ids=ids, hit_rate=hit_rate)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    if as_json:
        records = [{"name": name, **finding._asdict()} for name, finding in findings.items()]
        typer.echo(json.dumps(records, indent=1, ensure_ascii=False))
        return
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=120)).print(_findings_table(findings))


def _findings_table(findings: Mapping[str, Finding]) -> Table:
    marks = {True: Text("✓", "green"), False: Text("✗", "red"), None: Text("–", "dim")}
    table = Table(title="flatbed doctor", title_style="bold", show_lines=False)
    for column in ("", "probe", "found", "meaning"):
        table.add_column(column)
    for name, finding in findings.items():
        cells = (Text(name), Text(finding.value), Text(finding.meaning))
        table.add_row(marks[finding.ok], *cells, style="dim" if finding.ok is None else "")
    return table
