"""A lane without a GPU: copies are carried out later, by a thread, from what is in the ring by then."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from flatbed.data import feeder
from flatbed.data.feeder import Fed, Iteration
from flatbed.data.staging import Ring
from flatbed.data.transfer import Sent

CPU = torch.device("cpu")


class Reached:
    """An event."""

    def __init__(self) -> None:
        self.flag = threading.Event()
        self.flag.set()

    def synchronize(self) -> None:
        assert self.flag.wait(20), "nothing reaches this event"

    def query(self) -> bool:
        return self.flag.is_set()


class LateLane:
    """The device is the CPU; the time until a copy is carried out is drawn from a seed."""

    device = CPU

    def __init__(self, *, seed: int = 0, most_seconds: float = 0.0005) -> None:
        self.chance = random.Random(seed)
        self.most_seconds = most_seconds
        self.todo: SimpleQueue[Any] = SimpleQueue()
        self.n_sent = 0
        self.n_arrived = 0
        self.fail_at: int | None = None
        self.stall = threading.Event()
        self.stall.set()
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._carry_out, name="late lane", daemon=True)
        self.thread.start()

    def _carry_out(self) -> None:
        while (one := self.todo.get()) is not None:
            self.stall.wait(20)
            if isinstance(one, Reached):
                one.flag.set()
                continue
            if self.most_seconds:
                time.sleep(self.chance.random() * self.most_seconds)
            target, source = one
            # By numpy: an interpreter that exits ends this thread wherever it waits for its lock, and torch
            # would take that for an error.
            target.numpy()[...] = source.numpy()
            del one, target, source

    def within(self) -> Any:
        return nullcontext()

    def send(self, target: Tensor, source: Tensor) -> None:
        with self._lock:
            self.n_sent += 1
            if self.n_sent == self.fail_at:
                raise RuntimeError("the device is gone")
        self.todo.put((target, source))

    def mark(self, event: Any = None) -> Any:
        event = Reached() if event is None else event
        event.flag.clear()
        self.todo.put(event)
        return event

    def settle(self) -> None:
        self.mark().synchronize()

    def made(self, origins: set[torch.device]) -> list[Any]:
        return []

    def wait(self, events: list[Any], tensors: list[Tensor]) -> None:
        raise AssertionError("nothing is on a GPU")

    def current(self) -> Any:
        return None

    def reached(self, current: Any, event: Any = None) -> Any:
        return Reached() if event is None else event

    def arrive(self, sent: Sent, current: Any) -> Any:
        sent.arrived.synchronize()
        self.n_arrived += 1
        return sent.batch

    def close(self) -> None:
        self.stall.set()
        self.todo.put(None)
        self.thread.join(20)


@contextmanager
def lane(**options: Any) -> Iterator[LateLane]:
    made = LateLane(**options)
    try:
        yield made
    finally:
        made.close()


def ring(n_chunks: int = 3, chunk_bytes: int = 4096) -> Ring:
    return Ring(torch.zeros(n_chunks * chunk_bytes, dtype=torch.uint8), chunk_bytes)


def fed(
    batches: Any, through: LateLane, *, of: Ring | None = None, depth: int = 2, at_once: bool = False
) -> Fed:
    """An iteration as for a GPU."""
    return Fed(Iteration(iter(batches), of or ring(), through, depth, at_once=at_once))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == feeder.NAME]
