"""A progress bar for what may take long: seen only if it does, and only on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

PATIENCE = 2.0  # seconds before a bar appears


@contextmanager
def progress(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`, to be called from any thread with what was done since the last call.

    `unit` names what is counted, e.g. "rows"; "bytes" are shown in MB and GB.
    """
    if not sys.stderr.isatty():
        yield _nothing
        return
    bar = _Bar(description, total, unit)
    try:
        yield bar.advance
    finally:
        bar.stop()


def _nothing(n: int) -> None:
    """Nobody looks."""


class _Bar:
    def __init__(self, description: str, total: int, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = 0
        self.shown: tuple[Progress, TaskID] | None = None
        self.due = time.monotonic() + PATIENCE
        self.lock = threading.Lock()

    def advance(self, n: int) -> None:
        with self.lock:
            self.done += n
            if self.shown is None and self.done < self.total and time.monotonic() >= self.due:
                self.shown = self._show()
            if self.shown is not None:
                bar, task = self.shown
                bar.update(task, completed=self.done)

    def stop(self) -> None:
        with self.lock:
            if self.shown is not None:
                self.shown[0].stop()
            self.shown, self.due = None, float("inf")

    def _show(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        amount: ProgressColumn = TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}")
        if self.unit == "bytes":
            amount = DownloadColumn()
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            amount,
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        task = bar.add_task(self.description, total=self.total, completed=self.done, unit=self.unit)
        bar.start()
        return bar, task
