"""Pinned memory that bytes pass through on their way to a GPU, and the threads that fill it.

It is a ring of chunks. Whoever has bytes takes a free one, fills it, issues its copy to the GPU and gives it
back with an event: whoever takes it next waits until the copy is done. No thread ever holds two.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.rows import memory
from flatbed.rows.cuda_host import DriverError

Array = np.ndarray[Any, Any]

CHUNK_BYTES = 32 << 20  # where torch's threads fill one together: to wake them takes a while
RING_BYTES = 96 << 20
PIECE_BYTES = 4 << 20  # where each thread fills its own: long enough for Python, short enough to be shared
PIECES_BYTES = 128 << 20
NAME = "flatbed-copy"
MOST_THREADS = 16  # one fills 3 to 10 GB a second, PCIe 5 takes 55
JOIN_SECONDS = 5.0


# ---- where bytes go


class Event(Protocol):
    """Something on the device that will have been reached."""

    def synchronize(self) -> None:
        """Wait for it."""

    def query(self) -> bool:
        """Whether it was reached."""


class Lane(Protocol):
    """A stream of copies to a device, used by several threads."""

    device: torch.device

    def enter(self) -> None:
        """Once in each thread of ours that issues copies and nothing else."""

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

    def enter(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(self.stream)
        relax_capture()

    def within(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self.stream)
        return context

    def send(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self, event: Any = None) -> Any:
        event = torch.cuda.Event(blocking=True) if event is None else event  # type: ignore[no-untyped-call,unused-ignore]
        event.record(self.stream)
        return event

    def settle(self) -> None:
        self.stream.synchronize()


def relax_capture() -> None:
    """Let this thread allocate and wait while another one captures a graph, which that does not concern."""
    exchange = _exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(2)))  # CU_STREAM_CAPTURE_MODE_RELAXED, of this thread alone


@lru_cache(maxsize=1)
def _exchange_capture_mode() -> Any:
    if torch.version.cuda is None:
        return None
    with suppress(OSError, AttributeError):
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return None


# ---- pinned memory


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of the ring."""

    memory: Tensor
    array: Array
    gone: Any = None
    """The event behind the copy of what was in it last."""


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


_rings: weakref.WeakValueDictionary[tuple[torch.device, int], Ring] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def ring_for(device: torch.device, *, in_pieces: bool) -> Ring:
    """The ring of a GPU, made if nobody has it; it goes when nobody has it any more.

    `in_pieces`: one of many small chunks, for several threads at a time.
    """
    chunk_bytes, nbytes = (PIECE_BYTES, PIECES_BYTES) if in_pieces else (CHUNK_BYTES, RING_BYTES)
    with _lock:
        ring = _rings.get((device, chunk_bytes))
        if ring is None:
            ring = _rings[device, chunk_bytes] = Ring(_pinned(nbytes, device), chunk_bytes)
        return ring


def _pinned(nbytes: int, device: torch.device) -> Tensor:
    """Exactly so much, given back to the system at its end, where that can be had."""
    with suppress(FlatbedError, DriverError):
        return memory.allocate(nbytes, device=device, kind="registered").tensor
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


# ---- the way through


class Piece(Protocol):
    """What goes through one chunk."""

    def go(self, carrier: Carrier) -> None:
        """Have it carried."""


class Carrier:
    """Takes bytes through a ring, in whichever thread brings them."""

    n_threads = 1
    by_torch = True
    """Whether torch's threads fill a chunk together."""

    def __init__(self, ring: Ring, lane: Lane) -> None:
        self.ring = ring
        self.lane = lane

    def run(self, pieces: Sequence[Piece], own: Sequence[Piece] = ()) -> None:
        """Carry all of them. Their sources may change once this returns; copies may go on.

        `own`: those that are too small to be handed to another thread.
        """
        for piece in pieces:
            piece.go(self)
        for piece in own:
            piece.go(self)

    def carry(self, target: Tensor, fill: Callable[[Array], None]) -> None:
        """Have a chunk filled, and issue the copy of its first bytes to `target`, bytes on the device."""
        chunk = self.ring.take()
        try:
            fill(chunk.array)
            try:
                self.lane.send(target, chunk.memory[: target.numel()])
                chunk.gone = self.lane.mark(chunk.gone)
            except BaseException:  # whatever became of the copy
                with suppress(Exception):
                    self.lane.settle()
                raise
        finally:
            self.ring.give(chunk)

    def stop(self) -> None:
        """Begin no piece any more. Waits for nothing."""

    def close(self) -> None:
        """Stop, and wait for threads. Call it as often as you like."""

    def is_helper(self) -> bool:
        """Whether the current thread is one of those that help."""
        return False


# ---- threads


class Stopped(Exception):
    """There will be no more copies."""


class Job:
    """Pieces that threads carry together, and one part more, of whoever brings them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.error: BaseException | None = None
        self._pieces = deque(pieces)
        self._n_left = len(pieces) + 1
        self._lock = threading.Lock()
        self._undone = threading.Lock()
        self._undone.acquire()

    def next(self) -> Piece | None:
        """A piece that nobody has begun."""
        try:
            return self._pieces.popleft()
        except IndexError:
            return None

    def end(self, error: BaseException | None = None) -> None:
        """One is done, or has failed, and the others need not begin."""
        with self._lock:
            self._n_left -= 1
            if error is not None:
                self.error = self.error or error
                while self.next() is not None:
                    self._n_left -= 1
            if self._n_left == 0:
                self._undone.release()

    def wait(self) -> None:
        """Until all have ended; raises the first error."""
        self._undone.acquire()
        if self.error is not None:
            error, self.error = self.error, None  # the error's traceback has this frame
            try:
                raise error
            finally:
                del error


class Copiers(Carrier):
    """The same with threads. Each fills chunks of its own; whoever brings pieces is one of `n_threads`.

    They begin when they are needed first, and stay until the end. Python's own: torch's cannot be shared by
    two threads that use them at the same time without loss.
    """

    by_torch = False

    def __init__(self, ring: Ring, lane: Lane, n_threads: int) -> None:
        super().__init__(ring, lane)
        self.n_threads = n_threads
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._stopped = False
        self._caller: int | None = None

    def run(self, pieces: Sequence[Piece], own: Sequence[Piece] = ()) -> None:
        if self.n_threads == 1 or len(pieces) + bool(own) < 2:
            for piece in (*pieces, *own):
                self._go(piece)
            return
        job = Job(pieces)
        self._caller = threading.get_ident()
        self._wake(job, min(self.n_threads, len(pieces) + bool(own)) - 1)
        failed: BaseException | None = None
        try:
            for piece in own:
                self._go(piece)
        except BaseException as error:  # not before the others have ended: they read the same batch
            failed = error
        job.end(failed)
        del failed
        self._work(job)
        self._caller = None
        job.wait()

    def is_helper(self) -> bool:
        return threading.current_thread() in self._helpers

    def stop(self) -> None:
        self._stopped = True
        for _ in self._helpers:
            self._jobs.put(None)

    def close(self) -> None:
        self.stop()
        # If one of us is here, by the garbage collector, others may wait for what it has not finished.
        if not self.is_helper() and threading.get_ident() != self._caller:
            end = time.monotonic() + JOIN_SECONDS
            for helper in list(self._helpers):
                helper.join(max(0.0, end - time.monotonic()))

    def _wake(self, job: Job, n: int) -> None:
        for _ in range(min(n, len(self._helpers))):
            self._jobs.put(job)
        while len(self._helpers) < n and not self._stopped:
            thread = threading.Thread(target=self._help, name=NAME, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more: do without
                self.n_threads = len(self._helpers) + 1
                break
            self._helpers.append(thread)
            self._jobs.put(job)
        if self._stopped:  # maybe before the last one was known
            self.stop()

    def _help(self) -> None:
        failed: BaseException | None = None
        try:
            self.lane.enter()
        except BaseException as error:  # for whoever waits
            failed = error
        while (job := self._jobs.get()) is not None:
            if failed is None:
                self._work(job)
            elif job.next() is not None:
                job.end(failed)
            del job  # with what it was to copy, while another is waited for

    def _work(self, job: Job) -> None:
        while (piece := job.next()) is not None:
            try:
                self._go(piece)
            except BaseException as error:  # for whoever waits
                job.end(error)
                return
            job.end()

    def _go(self, piece: Piece) -> None:
        if self._stopped:
            raise Stopped
        piece.go(self)


def most_threads() -> int:
    """How many threads copy: as many as there are cores for, and as pay."""
    return min(MOST_THREADS, _usable_cores())


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1
