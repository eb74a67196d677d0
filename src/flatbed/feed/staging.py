"""Pinned memory that bytes pass through on their way to a GPU, and the threads that fill it.

The memory is a ring of chunks. A thread takes a free one, fills it, issues its copy to the GPU and gives it
back with an event: whoever takes it next waits until the copy is done. No thread ever holds two.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
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

CHUNK_BYTES = 4 << 20  # long enough for Python to keep up with the bus, short enough to begin early
RING_BYTES = 128 << 20
NAME = "flatbed-copy"
MOST_THREADS = 8  # these fill memory faster than PCIe 5 empties it
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
        """Once in each thread of ours."""

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
        """Threads of ours live on the stream, and may allocate while another captures a CUDA graph."""
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
            if chunk.gone is not None:
                chunk.gone.synchronize()
        except BaseException:
            self._free.put(chunk)
            raise
        return chunk

    def give(self, chunk: Chunk) -> None:
        """Back, whether or not its copy is done."""
        self._free.put(chunk)


_rings: weakref.WeakValueDictionary[torch.device, Ring] = weakref.WeakValueDictionary()
_lock = threading.Lock()


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


# ---- what chunks are filled with


class Part(Protocol):
    """Bytes to be, somewhere in a chunk."""

    def write(self, into: Array) -> None:
        """Into the chunk's bytes, where they belong."""


@dataclass(frozen=True, slots=True)
class Copied:
    """An array as it is, or in order and in this machine's byte order, if it is not."""

    at: int
    source: Array

    def write(self, into: Array) -> None:
        source = self.source
        target = into[self.at : self.at + source.nbytes]
        if source.dtype != np.uint8 or source.ndim != 1:
            target = target.view(source.dtype.newbyteorder("=")).reshape(source.shape)
        np.copyto(target, source)


@dataclass(frozen=True, slots=True)
class Taken:
    """Rows of an array, (n, bytes), by number."""

    at: int
    source: Array
    rows: Array

    def write(self, into: Array) -> None:
        shape = (len(self.rows), self.source.shape[1])
        target = into[self.at : self.at + shape[0] * shape[1]].reshape(shape)
        np.take(self.source, self.rows, axis=0, out=target, mode="clip")  # other modes copy twice


@dataclass(frozen=True, slots=True)
class Piece:
    """What goes through one chunk: parts of it filled on the host, then one copy to the device."""

    target: Tensor
    """Bytes on the device, as many as are copied."""
    parts: Sequence[Part]


# ---- threads


class Stopped(Exception):
    """There will be no more copies."""


class Job:
    """Pieces that threads carry out together."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = deque(pieces)
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._n_left = len(pieces)
        self._lock = threading.Lock()

    def next(self) -> Piece | None:
        """A piece that nobody has begun."""
        try:
            return self.pieces.popleft()
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
                self.done.set()


class Copiers:
    """Threads that take pieces through a ring. Whoever brings them takes part, as one of `n_threads`."""

    def __init__(self, ring: Ring, lane: Lane, n_threads: int) -> None:
        self.ring = ring
        self.lane = lane
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.n_threads = n_threads
        self._helpers: list[threading.Thread] = []
        self._stopped = False

    def run(self, pieces: Sequence[Piece]) -> None:
        """Fill chunks and issue their copies. Sources may change once it returns; copies may go on."""
        job = Job(pieces)
        if not pieces:
            return
        wanted = min(self.n_threads, len(pieces)) - 1
        while len(self._helpers) < wanted and not self._stopped:
            thread = threading.Thread(target=self._help, name=NAME, daemon=True)
            self._helpers.append(thread)
            thread.start()
        for _ in range(wanted):
            self._jobs.put(job)
        self._work(job)
        job.done.wait()
        if job.error is not None:
            error, job.error = job.error, None  # the error's traceback has this frame
            raise error

    def is_mine(self) -> bool:
        """Whether the current thread is one of those that help."""
        return threading.current_thread() in self._helpers

    def stop(self) -> None:
        """Begin no piece any more. Waits for nothing."""
        self._stopped = True
        for _ in self._helpers:
            self._jobs.put(None)

    def close(self) -> None:
        """Stop, and wait for the threads. Call it as often as you like."""
        self.stop()
        for helper in self._helpers:
            if helper is not threading.current_thread():
                helper.join(JOIN_SECONDS)

    def _help(self) -> None:
        try:
            self.lane.enter()
            failed: BaseException | None = None
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
                if self._stopped:
                    raise Stopped
                self._carry(piece)
            except BaseException as error:  # for whoever waits
                job.end(error)
                return
            job.end()

    def _carry(self, piece: Piece) -> None:
        chunk = self.ring.take()
        try:
            for part in piece.parts:
                part.write(chunk.array)
            try:
                self.lane.send(piece.target, chunk.memory[: piece.target.numel()])
                chunk.gone = self.lane.mark(chunk.gone)
            except BaseException:  # whatever became of the copy
                with suppress(Exception):
                    self.lane.settle()
                raise
        finally:
            self.ring.give(chunk)


def n_threads(wanted: Any) -> int:
    """How many threads copy: those asked for, or as many as pay."""
    if wanted is None:
        return min(MOST_THREADS, _usable_cores())
    if isinstance(wanted, bool) or not hasattr(wanted, "__index__"):
        raise TypeError(f"threads must be an integer, or None for as many as pay; found {wanted!r}")
    if not 1 <= wanted <= 256:
        raise ValueError(f"threads must be 1 to 256; found {wanted}")
    return int(wanted)


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1
