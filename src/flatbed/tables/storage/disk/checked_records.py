"""Records in a table's file: copies of many of them by threads, and a checksum of each.

Checksums are four bytes per row after the records:

    [identity] [state] [records] [magic: 16 bytes] [checksum of each row: uint32]

A checksum of 0 means that none is known. Files of earlier versions end with their records, and get checksums
as their rows change. `State.has_sums` says that a file has them. An interrupted `resize` leaves a file
without magic that is longer, if only by a byte. Without magic, a file of the exact length is damaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.errors import DamagedFileError
from flatbed.tables.record import Record
from flatbed.tables.storage.base import Fill
from flatbed.tables.storage.disk.format import RECORDS_AT
from flatbed.tables.storage.disk.mapped_file import MappedFile, NoSpace, Records, Sums

# ---- copies by threads


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


# ---- checksums


MAGIC = b"flatbed-sum2\r\n\x1a\n"
CHUNK = 32 << 20
FLUSH_EVERY = 8  # chunks
CHECKED = 1 << 20  # bytes of records copied at a time, which fit into a core's cache
SUMMED = 1 << 18  # bytes of records summed at a time: part and product stay in a core's cache


def sums_at(n_rows: int, nbytes: int) -> int:
    """Return the offset of the checksums' magic, which is the end of the records."""
    return RECORDS_AT + n_rows * nbytes


def file_size(n_rows: int, nbytes: int) -> int:
    """Return the size of a table's file with checksums."""
    return sums_at(n_rows, nbytes) + len(MAGIC) + 4 * n_rows


def row_sums(records: Records) -> Sums:
    """Return the checksum of each record, never 0.

    A weighted sum, modulo 2^64, of its 32-bit words, of which the upper half is kept: multilinear hashing.
    Whatever has changed, the sum stays with a chance of about 2^-32. Longer words would not do: the weights
    are odd, and two signs that flip at their ends would cancel.
    """
    words = records.view(np.uint8).reshape(len(records), records.dtype.itemsize).view(np.uint64)
    weights = _weights(2 * words.shape[1]).reshape(2, -1)
    sums, step = np.empty(len(records), np.uint32), max(1, SUMMED // records.dtype.itemsize)
    for start in range(0, len(words), step):
        part = words[start : start + step]
        # The lower word of two has the first weight w, the upper one the second plus 2^32 w.
        total = np.einsum("ij,j->i", part, weights[0])
        total += np.einsum("ij,j->i", part >> np.uint64(32), weights[1])
        sums[start : start + step] = total >> np.uint64(32)
    return np.maximum(sums, 1, out=sums)


@lru_cache
def _weights(count: int) -> NDArray[np.uint64]:
    """Return pseudorandom odd numbers (splitmix64), part of the format."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        weights: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return weights


# ---- files


def has_sums(file: MappedFile, n_rows: int, nbytes: int) -> bool:
    """True if a file of so many rows has checksums."""
    found = np.zeros(len(MAGIC), np.uint8)
    file.read(sums_at(n_rows, nbytes), found)
    return found.tobytes() == MAGIC


def map_records(file: MappedFile, n_rows: int, nbytes: int, *, needs_sums: bool = False) -> Records:
    """Map records, and checksums if the file has them, which `needs_sums` requires.

    A file that is too short raises `DamagedFileError`.
    """
    end, longest = sums_at(n_rows, nbytes), file_size(n_rows, nbytes)
    with_sums = file.size > end and has_sums(file, n_rows, nbytes)
    expected = longest if with_sums or needs_sums else end
    if file.size < expected:
        raise DamagedFileError(
            f"{file.path} has {file.size} bytes, but {n_rows} rows of {nbytes} bytes need {expected}: it was "
            "cut short; restore it from a copy"
        )
    if needs_sums and not with_sums and file.size == longest:
        raise DamagedFileError(
            f"the mark before the checksums of {file.path} is damaged; restore the file from a copy, or run "
            "`flatbed check --forget` to take all rows as they are"
        )
    return file.map(
        RECORDS_AT, nbytes, count=n_rows, random=True, sums_at=end + len(MAGIC) if with_sums else None
    )


def add_sums(table: MappedFile, n_rows: int, nbytes: int) -> None:
    """Give a file without checksums space for them, where its disk has some. None is known yet."""
    with suppress(NoSpace):
        table.reserve(file_size(n_rows, nbytes))
        write_sums(table, nbytes, np.zeros(n_rows, np.uint32))
        table.truncate(file_size(n_rows, nbytes))
        map_records(table, n_rows, nbytes)


def write_sums(table: MappedFile, nbytes: int, sums: Sums) -> None:
    """Write the checksums of all rows durably, also over rows that a `resize` wrote and took back."""
    at = sums_at(len(sums), nbytes)
    table.write(at + len(MAGIC), sums)
    table.sync()  # after a loss of power, no magic may be before bytes that are no checksums
    table.write(at, MAGIC)
    table.sync()


def known_sums(table: MappedFile) -> Sums:
    """Copy the checksums of all rows; 0 for each without them."""
    assert table.rows is not None
    return np.zeros(len(table.rows), np.uint32) if table.sums is None else table.sums.copy()


def drop_sums(table: MappedFile, nbytes: int) -> None:
    """Remove the magic of a file that was made longer, durably."""
    sums, table.sums = table.sums, None
    if sums is not None:
        table.sync()  # first the length, by which `map_records` tells this from damage
        table.write(sums_at(len(sums), nbytes), bytes(len(MAGIC)))
        table.sync()


def write_rows(table: MappedFile, record: Record, rows: range, *, fill: Fill) -> Sums:
    """Write new rows, chunk by chunk, to space that was reserved for them; returns their checksums."""
    step = max(1, CHUNK // record.nbytes)
    buffer = torch.empty(min(step, len(rows)), record.nbytes, dtype=torch.uint8, device="cpu")
    sums = np.zeros(len(rows), np.uint32)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        records = buffer[: stop - start].zero_()
        fill(start, stop, records)
        table.write(RECORDS_AT + start * record.nbytes, records.numpy())
        begin = start - rows.start
        sums[begin : begin + len(records)] = row_sums(as_records(records.numpy()))
        if begin // step % FLUSH_EVERY == FLUSH_EVERY - 1:
            table.flush()
    return sums


# ---- checks


def check_rows(file: MappedFile, rows: NDArray[np.int64], pool: ThreadPoolExecutor) -> None:
    """Raise `DamagedFileError` if a mapped row is not as it was written; a row is compared once."""
    records, sums, checked = file.rows, file.sums, file.checked
    if records is None or sums is None or checked is None:
        return
    fresh = rows[~checked[rows]]
    nbytes = records.dtype.itemsize
    step = max(1, CHECKED // nbytes)

    def compare(part: slice) -> None:
        some = fresh[part]
        for start in range(0, len(some), step):
            at = some[start : start + step]
            _compare(file, at, records[at], sums[at])

    if len(fresh):
        split(pool, compare, len(fresh), n_parts=nbytes * len(fresh) // MEMORY_PART)
        checked[fresh] = True


def check_block(file: MappedFile, start: int, records: Records, *, changed: NDArray[np.int64]) -> None:
    """Check consecutive rows that were read, except for those at positions `changed`."""
    block = slice(start, start + len(records))
    if file.sums is None or file.checked is None or file.checked[block].all():
        return
    sums = file.sums[block].copy()
    sums[changed] = 0
    _compare(file, np.arange(block.start, block.stop), records, sums)
    file.checked[block] |= sums != 0


def _compare(file: MappedFile, rows: NDArray[np.int64], records: Records, sums: Sums) -> None:
    wrong = np.flatnonzero((sums != 0) & (row_sums(records) != sums))
    if len(wrong):
        others = f" and {len(wrong) - 1} near it" if len(wrong) > 1 else ""
        raise DamagedFileError(
            f"row {rows[wrong[0]]}{others} in {file.path} is not as it was written: its checksum is wrong; "
            "restore the file from a copy, or run `flatbed check --forget` to take all rows as they are"
        )
