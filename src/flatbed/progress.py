"""A progress bar for long operations: shown after two seconds, on a terminal, by the first rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 2.0  # seconds before a bar appears


@contextmanager
def progress(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield `advance(n)`, which counts `unit`s, for example "rows"; "bytes" are shown as MB and GB."""
    if not sys.stderr.isatty() or not _is_first_rank():
        yield lambda n: None
        return
    begin, done = time.monotonic(), 0
    bars: list[Progress] = []

    def advance(n: int) -> None:
        nonlocal done
        done += n
        if not bars and done < total and time.monotonic() - begin >= PATIENCE:
            bars.append(_bar(unit))
            bars[0].add_task(description, total=total)
            bars[0].start()
        for bar in bars:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield advance
    finally:
        for bar in bars:
            bar.stop()


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _bar(unit: str) -> Progress:
    from rich import progress as rich
    from rich.console import Console

    count = rich.TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}")
    return rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.DownloadColumn() if unit == "bytes" else count,
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def note(message: str) -> None:
    """Write a line to stderr. It is not a warning, so that filters of warnings cannot hide it."""
    sys.stderr.write(f"flatbed: {message}\n")
