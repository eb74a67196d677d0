"""A stand-in for what fetches rows, which writes down what it is asked for; loaders; and what is running."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatbed.data.prefetcher import NAME, Prefetched
from flatbed.tables.table import Table

ROWS = 50


@dataclass(eq=False)
class Staged:
    number: int
    ids: list[list[int]]
    thread: str
    brought: bool = False
    brought_by: str = ""
    begun: bool = False
    finished: bool = False
    dropped: bool = False

    @property
    def ended(self) -> bool:
        return self.finished or self.dropped


@dataclass(eq=False)
class FakeAhead:
    """Checks the order of calls, each with its own thread."""

    table: Table
    room: Callable[[Staged, bool], bool] = lambda staged, front: True
    staged: list[Staged] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    keep: bool = True
    brings: bool = False
    brought: list[Any] = field(default_factory=list)

    def waits(self, staged: Staged) -> bool:
        return False

    def bring(self, staged: Staged) -> None:
        assert not staged.ended
        assert not staged.brought
        staged.brought = True
        staged.brought_by = threading.current_thread().name
        if self.keep:
            self.brought.append(staged.ids)

    def stage(self, ids: list[Tensor]) -> Staged:
        assert all(one.device.type == "cpu" for one in ids)
        for one in ids:
            if one.numel() and not 0 <= int(one.min()) <= int(one.max()) < self.table.num_embeddings:
                raise IndexError(f"out of range: {int(one.max())}")
        staged = Staged(len(self.calls), [one.tolist() for one in ids], threading.current_thread().name)
        if self.keep:
            self.staged.append(staged)
        self._note("stage", staged)
        return staged

    def admit(self, staged: Staged, ids: list[Tensor], *, after: Any, front: bool) -> bool:
        assert not staged.ended
        assert staged.brought
        assert not staged.begun
        assert [one.tolist() for one in ids] == staged.ids
        done = self.room(staged, front)
        self._note("admit front" if front else "admit", staged, done)
        return done

    def begin(self, staged: Staged) -> None:
        assert not staged.begun
        assert not staged.ended
        staged.begun = True
        self._note("begin", staged)

    def finish(self, staged: Staged, after: Any) -> None:
        assert staged.begun
        assert not staged.ended
        staged.finished = True
        self._note("finish", staged)

    def drop(self, staged: Staged) -> None:
        assert not staged.ended
        staged.dropped = True
        self._note("drop", staged)

    def _note(self, what: str, staged: Staged, *more: Any) -> None:
        if self.keep:
            self.calls.append((what, staged.ids, *more))

    def said(self, *what: str) -> list[Any]:
        return [ids[0][0] for name, ids, *_ in self.calls if name in what]


class Numbered(Dataset[dict[str, Any]]):
    """Item i has i as its id."""

    def __init__(self, n: int, fail_at: int | None = None) -> None:
        self.n, self.fail_at = n, fail_at

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == self.fail_at:
            raise ValueError(f"item {i} is bad")
        return {"items": np.int64(i), "values": np.full(3, i, np.float32)}


def loader(
    n: int = 20, batch_size: int = 4, *, fail_at: int | None = None, **options: Any
) -> DataLoader[Any]:
    return DataLoader(Numbered(n, fail_at), batch_size=batch_size, **options)


def as_arrays(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate without torch, whose spawned workers may abort when they are ended while they send a tensor."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def batches(n: int, size: int = 4) -> list[dict[str, Tensor]]:
    """Batch i has ids that are all i."""
    return [
        {"items": torch.full((size,), i % ROWS), "values": torch.full((size,), float(i))} for i in range(n)
    ]


def items(batch: Any) -> Any:
    return batch["items"]


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def workers() -> list[Any]:
    return multiprocessing.active_children()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it became true in time."""
    begin = time.monotonic()
    while not condition() and time.monotonic() < begin + seconds:
        if time.monotonic() > begin + 1:
            gc.collect()
        time.sleep(0.002)
    return condition()


def wait_for_next(prefetched: Prefetched) -> None:
    """Until the loader is as far ahead as it may be: what follows is then always the same."""
    iteration = prefetched._iteration
    iteration.background.start()
    assert wait_until(lambda: iteration.background._ready.qsize() == iteration.depth or not running())


@contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Instead of hanging, say where every thread is, and end."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
