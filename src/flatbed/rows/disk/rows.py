"""Moving the records of many rows between mapped files and memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, wait
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.rows.disk.file import MappedFile, Records
from flatbed.rows.disk.header import RECORDS_AT
from flatbed.rows.record import Record

CHUNK = 32 << 20
THREADS = 16  # more than cores: they wait for the disk, which answers many at a time
PART = 256 << 10

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


def take(records: Records, at: NDArray[Any], *, into: Records, pool: Executor) -> None:
    """Copy records, or as many of their first bytes as `into` takes; `at` is in range."""
    whole = into.dtype == records.dtype
    source = head(records, into.dtype.itemsize)

    def part(some: slice) -> None:
        if whole:
            # It has been seen to that nothing is clipped; only so numpy writes into `out` directly.
            np.take(source, at[some], out=into[some], mode="clip")
        else:
            into[some] = source[at[some]]  # np.take would first copy the whole table

    spread(part, len(at), nbytes=into.dtype.itemsize, pool=pool)


def put(table: MappedFile, at: NDArray[np.int64], *, records: Records, pool: Executor) -> None:
    """Replace records of a mapped file."""

    def part(some: slice) -> None:
        table.scatter(at[some], records[some])

    spread(part, len(at), nbytes=records.dtype.itemsize, pool=pool)


def spread(part: Callable[[slice], None], n_rows: int, *, nbytes: int, pool: Executor) -> None:
    """Do something with all rows, large parts of them at a time by several threads."""
    n_parts = min(THREADS, n_rows * nbytes // PART)
    if n_parts < 2:
        part(slice(0, n_rows))
        return
    step = -(-n_rows // n_parts)
    parts = [pool.submit(part, slice(start, start + step)) for start in range(0, n_rows, step)]
    try:
        for one in parts:
            one.result()
    finally:  # an interruption is not to leave threads at work
        wait(parts)


def write_rows(table: MappedFile, record: Record, rows: range, *, fill: Fill) -> None:
    """Write new rows, chunk by chunk, to room that was reserved for them."""
    step = max(1, CHUNK // record.nbytes)
    buffer = torch.empty(min(step, len(rows)), record.nbytes, dtype=torch.uint8, device="cpu")
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        records = buffer[: stop - start].zero_()
        fill(start, stop, records)
        table.write(RECORDS_AT + start * record.nbytes, records.numpy())
