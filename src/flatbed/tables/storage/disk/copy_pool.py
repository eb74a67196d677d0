"""Moving the records of many rows between mapped files and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.tables.record import Record
from flatbed.tables.storage.disk.file import MappedFile, Records
from flatbed.tables.storage.disk.format import RECORDS_AT

T = TypeVar("T")

CHUNK = 32 << 20
THREADS = 16  # more than cores: they wait for the disk, which answers many at a time
FEW = 4  # where nobody waits for a disk: more get into each other's way, in Python and in the system
PART = 256 << 10
LARGE_PART = 16 << 20  # for one thread, where nobody waits
SLOW = 5e-6, 2e-9  # seconds for a record, and for each of its bytes, that tell a disk from memory

Fill = Callable[[int, int, Tensor], None]
"""fill(start, stop, records) writes the first records of rows start to stop, (stop - start, nbytes) of uint8,
into memory that is zero."""


def empty(n_rows: int, nbytes: int, given: Tensor | None = None) -> tuple[Records, NDArray[np.uint8]]:
    """Memory for records, as such and as bytes: (n_rows,) and (n_rows, nbytes)."""
    out: NDArray[np.uint8] = np.empty((n_rows, nbytes), np.uint8) if given is None else given.numpy()
    return as_records(out), out


def as_records(rows: NDArray[np.uint8]) -> Records:
    """(n, nbytes) of uint8 → (n,), without a copy."""
    return rows.view(f"V{rows.shape[1]}")[:, 0]


def head(records: Records, nbytes: int) -> Records:
    """The first bytes of every record, without a copy."""
    if nbytes == records.dtype.itemsize:
        return records
    parts: Any = {"names": ["head"], "formats": [f"V{nbytes}"], "itemsize": records.dtype.itemsize}
    found: Records = records.view(np.dtype(parts))["head"]
    return found


class _Once(Generic[T]):
    """Something to be done by whoever comes first."""

    def __init__(self, do: Callable[..., T], given: tuple[Any, ...]) -> None:
        self.done: Future[T] = Future()
        self._todo = [(do, given)]

    def __call__(self) -> None:
        try:
            do, given = self._todo.pop()
        except IndexError:
            return
        try:
            self.done.set_result(do(*given))
        except BaseException as error:
            self.done.set_exception(error)


class CopyPool:
    """Threads that copy parts of a whole, as many at a time as it takes: few in memory, many for a disk."""

    def __init__(self, most: int = THREADS, *, like: CopyPool | None = None) -> None:
        self._pool: ThreadPoolExecutor = (
            ThreadPoolExecutor(most, thread_name_prefix="flatbed-disk") if like is None else like._pool
        )
        self._part = PART if like is None else LARGE_PART
        self.slow = True
        """Whether it takes a disk's time, as far as is known; told by how long the last ones took."""

    def unhurried(self) -> CopyPool:
        """The same threads for what nobody waits for: each of them that begins keeps Python's other threads
        from their work, those that do have somebody waiting included.
        """
        return CopyPool(like=self)

    def spread(self, part: Callable[[slice], None], n_rows: int, *, nbytes: int) -> None:
        """Do something with all rows, large parts of them at a time by several threads, this one included."""
        most, least = (THREADS, PART) if self.slow else (FEW, self._part)
        n_parts = max(1, min(most, n_rows * nbytes // least))
        step = -(-n_rows // n_parts)
        seconds: list[float] = []

        def timed(start: int) -> None:
            begin = time.perf_counter()
            part(slice(start, min(start + step, n_rows)))
            seconds.append(time.perf_counter() - begin)

        if n_rows * nbytes < 2 * PART:  # which tells nothing
            part(slice(0, n_rows))
            return
        others = [self.submit(timed, start) for start in range(step, n_rows, step)]
        try:
            timed(0)
            for one in others:
                one.result()
        finally:  # an interruption is not to leave threads at work
            wait(others)
        record, byte = SLOW
        self.slow = sum(seconds) >= n_rows * (record + nbytes * byte)

    def submit(self, do: Callable[..., T], *given: Any) -> Future[T]:
        """Have something done by a thread, one after the other if there is only one."""
        once = _Once(do, given)
        try:
            self._pool.submit(once)
        except RuntimeError:  # the interpreter is about to exit, or the system has no thread left
            once()  # it may be in the queue nevertheless
        return once.done

    def close(self) -> None:
        """Threads that are at work go on to the end."""
        self._pool.shutdown(wait=False)


def take(
    records: Records,
    at: NDArray[Any],
    *,
    into: Records,
    where: NDArray[np.int64] | None = None,
    hands: CopyPool,
) -> None:
    """Copy records, or as many of their first bytes as `into` takes; `at` is in range.

    `where`: to which places of `into`; without it, to all.
    """
    whole = into.dtype == records.dtype
    source = head(records, into.dtype.itemsize)

    def part(some: slice) -> None:
        if where is not None:
            into[where[some]] = source[at[some]]
        elif whole:
            # It has been seen to that nothing is clipped; only so numpy writes into `out` directly.
            np.take(source, at[some], out=into[some], mode="clip")
        else:
            into[some] = source[at[some]]  # np.take would first copy the whole table

    hands.spread(part, len(at), nbytes=into.dtype.itemsize)


def put(table: MappedFile, at: NDArray[np.int64], *, records: Records, hands: CopyPool) -> None:
    """Replace records of a mapped file."""

    def part(some: slice) -> None:
        table.scatter(at[some], records[some])

    hands.spread(part, len(at), nbytes=records.dtype.itemsize)


def write_rows(table: MappedFile, record: Record, rows: range, *, fill: Fill) -> None:
    """Write new rows, chunk by chunk, to room that was reserved for them."""
    step = max(1, CHUNK // record.nbytes)
    buffer = torch.empty(min(step, len(rows)), record.nbytes, dtype=torch.uint8, device="cpu")
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        records = buffer[: stop - start].zero_()
        fill(start, stop, records)
        table.write(RECORDS_AT + start * record.nbytes, records.numpy())
