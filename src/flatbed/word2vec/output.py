"""What the commands print: progress, and neighbours of words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

LINE_SECONDS = 10.0
"""Seconds between progress lines where stderr is not a terminal."""


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Yield `update(done, total, text="")`: a bar on stderr, or lines where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_printer(title)
        return
    columns = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, text="")
        yield lambda done, total, text="": bar.update(task, completed=done, total=total, text=text)


def _line_printer(title: str) -> Callable[..., None]:
    last = time.monotonic()

    def update(done: int, total: int, text: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            percent = f"{done / max(total, 1):.0%}"
            typer.echo(f"{title}: {done:,} of {total:,} ({percent}){text and f', {text}'}", err=True)

    return update


def neighbors_table(neighbors: dict[str, list[tuple[str, float]]]) -> Table:
    """Make a table of words with their neighbours and cosines."""
    table = Table(title="nearest neighbours", title_style="bold", box=None, padding=(0, 2))
    table.add_column("word", style="bold")
    table.add_column("neighbours and cosines")
    for word, found in neighbors.items():
        # Text, so that rich does not interpret [brackets] and :colons: in words.
        cells = [Text.assemble(other, (f" {cosine:.2f}", "dim")) for other, cosine in found]
        table.add_row(Text(word), Text("  ").join(cells))
    return table
