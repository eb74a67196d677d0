"""Threads of a disk table: those that copy records, and counts of those that read its file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.tables.storage.disk.mapped_file import MappedFile, Records

T = TypeVar("T")

THREADS = 16  # more than cores: threads wait for the disk, which serves many requests at a time
READ_PART = 256 << 10  # bytes for a thread that waits for the disk
MEMORY_PART = 8 << 20  # bytes for a thread that copies within memory: starting one costs the training thread
COLD_SHARE = 64  # from one page in so many rows on that was not in memory, threads wait for the disk


def as_records(rows: NDArray[np.uint8]) -> Records:
    """View (n, nbytes) of uint8 as (n,) records."""
    return rows.view(f"V{rows.shape[1]}")[:, 0]


def rows_of(ids: Tensor, n_rows: int) -> NDArray[np.int64]:
    """Convert ids; raises IndexError for one that is out of range."""
    rows: NDArray[np.int64] = ids.to("cpu", torch.int64).reshape(-1).numpy()
    if len(rows) and (rows.min() < 0 or rows.max() >= n_rows):
        at = int(np.argmax((rows < 0) | (rows >= n_rows)))
        raise IndexError(f"id {rows[at]} is out of range for a table of {n_rows} rows (batch position {at})")
    return rows


def head(records: Records, nbytes: int) -> Records:
    """View the first `nbytes` bytes of every record."""
    if nbytes == records.dtype.itemsize:
        return records
    parts: Any = {"names": ["head"], "formats": [f"V{nbytes}"], "itemsize": records.dtype.itemsize}
    found: Records = records.view(np.dtype(parts))["head"]
    return found


class CopyThreads(ThreadPoolExecutor):
    """Threads for `split`: many while rows are read from the disk, few while they are in the page cache."""

    def __init__(self) -> None:
        super().__init__(THREADS, thread_name_prefix="flatbed-disk")
        self.part_bytes = READ_PART
        """Bytes that one thread reads, by where the rows of the last reads were."""


def submit(pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> Future[T]:
    """Run a function in the pool, or at once where the pool takes no more: at exit, or out of threads."""
    done: Future[T] = Future()
    calls = [args]

    def run() -> None:
        try:
            given = calls.pop()
        except IndexError:
            return  # the pool raised after it had queued the call, and the call ran below
        try:
            done.set_result(function(*given))
        except BaseException as error:
            done.set_exception(error)

    try:
        pool.submit(run)
    except RuntimeError:
        run()
    return done


def split(pool: ThreadPoolExecutor, copy: Callable[[slice], None], n_rows: int, *, n_parts: int) -> None:
    """Call `copy` with slices that cover all rows, in at most `n_parts` threads, this one included."""
    n_parts = max(1, min(THREADS, n_parts))
    step = max(1, -(-n_rows // n_parts))
    others = [submit(pool, copy, slice(start, start + step)) for start in range(step, n_rows, step)]
    try:
        copy(slice(0, step))
        for other in others:
            other.result()
    finally:  # after an interruption, no thread may go on writing
        wait(others)


def take(
    records: Records, at: NDArray[Any], *, into: Records, where: NDArray[np.int64] | slice, pool: CopyThreads
) -> None:
    """Copy records, or as many of their first bytes as `into` takes, to positions `where` of it.

    The caller has checked that `at` is in range.
    """
    is_whole = into.dtype == records.dtype
    nbytes = into.dtype.itemsize
    source = head(records, nbytes)
    n_faults: list[int] = []

    def copy(some: slice) -> None:
        before = _disk_faults()
        if not isinstance(where, slice):
            into[where[some]] = source[at[some]]
        elif is_whole:
            # Only with mode="clip" does numpy write into `out` directly.
            np.take(source, at[some], out=into[where][some], mode="clip")
        else:
            into[where][some] = source[at[some]]  # np.take would first copy the whole table
        n_faults.append(_disk_faults() - before)

    split(pool, copy, len(at), n_parts=nbytes * len(at) // pool.part_bytes)
    if nbytes * len(at) >= READ_PART:  # fewer rows say too little
        pool.part_bytes = READ_PART if COLD_SHARE * sum(n_faults) > len(at) else MEMORY_PART


def _disk_faults() -> int:
    """Return how often this thread has waited for a page of a file."""
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def put(table: MappedFile, at: NDArray[np.int64], *, records: Records, pool: CopyThreads) -> None:
    """Replace records of a mapped file."""

    def copy(some: slice) -> None:
        table.scatter(at[some], records[some])

    split(pool, copy, len(at), n_parts=records.nbytes // MEMORY_PART)


class Readers:
    """Threads that read a table's file without the storage's lock.

    A reader enters while it holds the lock. The thread that holds the lock and is about to change or close
    the file waits for all others to leave. Readers are counted by thread, so that a thread which was
    interrupted while leaving does not wait for itself.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._threads.discard(threading.get_ident())
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until no other thread reads."""
        me = {threading.get_ident()}
        with self._changed:
            self._changed.wait_for(lambda: self._threads <= me)
