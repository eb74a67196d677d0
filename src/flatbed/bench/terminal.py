"""What the commands show in the terminal: tables, lines, progress, and what went wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from flatbed.bench.rows import Record


def console() -> Console:
    """The terminal; where there is none, wide enough for the tables."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=120)


def say(line: str) -> None:
    """At once, even into a pipe: measuring takes minutes, and may be cut off."""
    typer.echo(line)
    sys.stdout.flush()


def present(
    rows: Sequence[Record], *, json_path: Path | None, png: Path | None, with_tables: bool = True
) -> None:
    """Show rows as tables, and write the files that were asked for."""
    from flatbed.bench import report
    from flatbed.bench.plot import write_plot
    from flatbed.bench.rows import write_rows

    if with_tables:
        for table in report.tables(rows):
            console().print(table)
    if json_path:
        write_rows(rows, json_path)
        typer.echo(f"wrote {json_path}")
    if png:
        write_plot(rows, png)
        typer.echo(f"wrote {png}")


def fail_on(ways: Sequence[str]) -> None:
    """Leave with an error, if any way led to other weights."""
    if ways:
        typer.echo(f"FAILED: not what the reference gives, in {', '.join(ways)}", err=True)
        raise typer.Exit(1)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; the block calls what it is given at the beginning of each stage."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stage = TextColumn("[dim]{task.description}")
    errors = Console(stderr=True)
    with Progress(*columns, stage, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=-1)

        def begin(description: str) -> None:
            bar.update(task, advance=1, description=description)

        yield begin


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Say what to do where the GPU is too small."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        typer.echo(f"Not enough GPU memory for this model; try another --model. {error}", err=True)
        raise typer.Exit(1) from error
