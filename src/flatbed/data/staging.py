"""Pinned memory that bytes pass through on their way to a GPU.

It is a ring of chunks. Whoever has bytes takes a free one, fills it, issues its copy to the GPU and gives it
back with an event: whoever takes it next waits until the copy is done. No thread ever holds two.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda import host_memory as memory
from flatbed.cuda.driver import DriverError
from flatbed.cuda.streams import OrderedLock
from flatbed.errors import FlatbedError

Array = np.ndarray[Any, Any]

CHUNK_BYTES = 32 << 20  # torch's threads fill one together, and to wake them takes a while
RING_BYTES = 96 << 20  # more would not stay in the processor's caches
VIEWS = 64  # that a chunk remembers: batches look alike, mostly
SPARED = 1  # of torch's threads, for the loop: a copy is as late as the one that shares a core with it


# ---- where bytes go


class Event(Protocol):
    """Something on the device that will have been reached."""

    def synchronize(self) -> None:
        """Wait for it."""

    def query(self) -> bool:
        """Whether it was reached."""


class Lane(Protocol):
    """A stream of copies to a device."""

    device: torch.device

    def within(self) -> AbstractContextManager[Any]:
        """What is allocated and issued inside belongs to the lane."""

    def send(self, target: Tensor, source: Tensor) -> None:
        """Issue a copy of pinned bytes; it may be carried out later."""

    def mark(self, event: Any = None) -> Any:
        """An event behind all that was issued; the same one again, if given."""

    def settle(self) -> None:
        """Wait for all that was issued."""


class CudaLane:
    """A stream of a GPU."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.stream = stream

    def within(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def send(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self, event: Any = None) -> Any:
        event = torch.cuda.Event(blocking=True) if event is None else event  # type: ignore[no-untyped-call,unused-ignore]
        event.record(self.stream)
        return event

    def settle(self) -> None:
        self.stream.synchronize()


def spare_the_loop() -> None:
    """Let this thread copy with fewer threads than torch has, and all others have as many as ever."""
    n_threads = torch.get_num_threads()
    if SPARED and n_threads > SPARED:
        torch.set_num_threads(n_threads - SPARED)  # of this thread, and of all that begin later
        restore = threading.Thread(target=torch.set_num_threads, args=(n_threads,))
        restore.start()
        restore.join()


# ---- pinned memory


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of the ring."""

    memory: Tensor
    array: Array
    gone: Any = None
    """The event behind the copy of what was in it last."""
    views: dict[Any, Any] = field(default_factory=dict)
    """Its first bytes as what they have been."""

    def view(self, key: Any, make: Callable[[Chunk, Any], Any]) -> Any:
        """What `make` makes of it and `key`, or made earlier."""
        found = self.views.get(key)
        if found is None:
            if len(self.views) >= VIEWS:
                self.views.clear()
            with torch.inference_mode(False):  # or it could be written to in no other mode
                found = self.views[key] = make(self, key)
        return found


class Ring:
    """Chunks of pinned memory that are used again and again, by any number of threads."""

    def __init__(self, pinned: Tensor, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.n_chunks = pinned.numel() // chunk_bytes
        self._free: SimpleQueue[Chunk] = SimpleQueue()
        for i in range(self.n_chunks):
            part = pinned[i * chunk_bytes : (i + 1) * chunk_bytes]
            self._free.put(Chunk(part, part.numpy()))

    def take(self) -> Chunk:
        """A chunk that may be written to. Waits for the one whose copy was issued first."""
        chunk = self._free.get()
        try:
            if chunk.gone is not None and not chunk.gone.query():
                chunk.gone.synchronize()
        except BaseException:
            self._free.put(chunk)
            raise
        return chunk

    def give(self, chunk: Chunk) -> None:
        """Back, whether or not its copy is done."""
        self._free.put(chunk)


_rings: weakref.WeakValueDictionary[torch.device, Ring] = weakref.WeakValueDictionary()
_lock = OrderedLock("staging")


def ring_for(device: torch.device) -> Ring:
    """The ring of a GPU, made if nobody has it; it goes when nobody has it any more."""
    with _lock:
        ring = _rings.get(device)
        if ring is None:
            ring = _rings[device] = Ring(_pinned(RING_BYTES, device), CHUNK_BYTES)
        return ring


def _pinned(nbytes: int, device: torch.device) -> Tensor:
    """Exactly so much, given back to the system at its end, where that can be had."""
    with suppress(FlatbedError, DriverError):
        return memory.allocate(nbytes, device=device, kind="registered").tensor
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


# ---- the way through


class Carrier:
    """Takes bytes through a ring, in whichever thread brings them."""

    def __init__(self, ring: Ring, lane: Lane) -> None:
        self.ring = ring
        self.lane = lane

    def carry(self, target: Tensor, fill: Callable[[Array], None]) -> None:
        """Have a chunk filled, and issue the copy of its first bytes to `target`, bytes on the device.

        What it was filled from may change once this returns; the copy may go on.
        """

        def filled(chunk: Chunk) -> Tensor:
            fill(chunk.array)
            return chunk.memory[: target.numel()]

        self.carry_as(target, filled)

    def carry_as(self, target: Tensor, fill: Callable[[Chunk], Tensor]) -> None:
        """The same, where `fill` returns the tensor of the chunk that is to be copied."""
        chunk = self.ring.take()
        try:
            filled = fill(chunk)
            try:
                self.lane.send(target, filled)
                chunk.gone = self.lane.mark(chunk.gone)
            except BaseException:  # whatever became of the copy
                with suppress(Exception):
                    self.lane.settle()
                raise
        finally:
            self.ring.give(chunk)
