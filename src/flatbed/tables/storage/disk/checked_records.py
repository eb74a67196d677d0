"""Records in a table's file: threads copy many at once, and each record has a checksum.

Checksums are four bytes per row after the records:

    [identity] [state] [records] [magic: 16 bytes] [checksum of each row: uint32]

A checksum of 0 means that none is known, as after `flatbed check --forget`. `resize` makes the file longer,
removes the magic, and writes new rows over the checksums. If it is killed, the file is too long and has no
magic: no checksum is known. A file of the exact length without magic is damaged.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.errors import DamagedFileError
from flatbed.tables.ids import check_range
from flatbed.tables.record import Record
from flatbed.tables.storage.base import Fill, row_blocks
from flatbed.tables.storage.disk.format import RECORDS_AT
from flatbed.tables.storage.disk.mapped_file import MappedFile, Records, Sums
from flatbed.tables.workers import Workers, split

# ---- copies by threads

READ_PART = 256 << 10  # bytes for a thread that waits for the disk
MEMORY_PART = 4 << 20  # bytes for a thread that copies within memory: starting a thread takes time
SUMMED_PART = 2 << 20  # bytes for a thread that also computes checksums
COLD_SHARE = 64  # if more than one row in 64 waited for a page, the file is taken to be on the disk


def as_records(rows: NDArray[np.uint8]) -> Records:
    """View (n, nbytes) of uint8 as (n,) records."""
    return rows.view(f"V{rows.shape[1]}")[:, 0]


def rows_of(ids: Tensor, n_rows: int) -> NDArray[np.int64]:
    """Convert ids to an array; raises IndexError if one is out of range."""
    rows = ids.to("cpu", torch.int64).reshape(-1)
    check_range(rows, n_rows)
    found: NDArray[np.int64] = rows.numpy()
    return found


def head(records: Records, nbytes: int) -> Records:
    """View the first `nbytes` bytes of every record."""
    if nbytes == records.dtype.itemsize:
        return records
    parts: Any = {"names": ["head"], "formats": [f"V{nbytes}"], "itemsize": records.dtype.itemsize}
    found: Records = records.view(np.dtype(parts))["head"]
    return found


def take(records: Records, at: NDArray[Any], into: Records, workers: Workers, file: MappedFile) -> None:
    """Copy records of a file at positions in range, or as many of their first bytes as fit into `into`.

    Many threads copy from the disk, and few from the page cache. The last reads of the file decide which of
    the two is assumed.
    """
    source, n_faults = head(records, into.itemsize), [0]

    def copy(some: slice) -> None:
        before = _disk_faults()
        if source is records:
            # Only with mode="clip" does numpy write into `out` directly.
            np.take(source, at[some], out=into[some], mode="clip")
        else:
            into[some] = source[at[some]]  # np.take would first copy the whole table
        n_faults.append(_disk_faults() - before)

    part_bytes = READ_PART if file.is_cold else MEMORY_PART
    split(workers, copy, len(at), n_parts=into.nbytes // part_bytes)
    if into.nbytes >= READ_PART:  # a smaller read says too little
        file.is_cold = COLD_SHARE * sum(n_faults) > len(at)


def _disk_faults() -> int:
    """Return how often this thread has waited for a page of a file."""
    import resource  # Windows does not have this module

    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


# ---- checksums


MAGIC = b"flatbed-sum2\r\n\x1a\n"
CHECKED = 1 << 20  # bytes of records checked at a time: their copy fits into a core's cache
DEVICE_PART = 16 << 20  # bytes of records summed at a time on a GPU
MAX_LISTED = 20  # damaged rows in a message
SUMMED = 1 << 19  # bytes of records summed at a time: part and product stay in a core's cache


def sums_at(n_rows: int, nbytes: int) -> int:
    """Return the offset of the checksums' magic, which is the end of the records."""
    return RECORDS_AT + n_rows * nbytes


def file_size(n_rows: int, nbytes: int) -> int:
    """Return the size of a table's file with checksums."""
    return sums_at(n_rows, nbytes) + len(MAGIC) + 4 * n_rows


def row_sums(records: Records) -> Sums:
    """Return the checksum of each record, never 0.

    It is the upper half of a weighted sum of the record's 32-bit words, modulo 2^64 (multilinear hashing). A
    changed record keeps its checksum with a chance of about 2^-32. Words of 64 bits would be worse: the
    weights are odd, so that the changes of two highest bits would cancel.
    """
    words = records.view(np.uint8).reshape(len(records), records.dtype.itemsize).view(np.uint64)
    weights = _weights(2 * words.shape[1]).reshape(2, -1)
    sums, step = np.empty(len(records), np.uint32), max(1, SUMMED // records.dtype.itemsize)
    for start in range(0, len(words), step):
        part = words[start : start + step]
        # Of two words, the lower one gets the weight w, and the upper one the second weight plus 2^32 w.
        total = np.einsum("ij,j->i", part, weights[0])
        total += np.einsum("ij,j->i", part >> np.uint64(32), weights[1])
        sums[start : start + step] = total >> np.uint64(32)
    return np.maximum(sums, 1, out=sums)


def device_row_sums(records: Tensor) -> Tensor:
    """Return the checksums of `row_sums` as int64, computed on the device of the records.

    The records are uint8 of shape (n, nbytes).
    """
    words, mask = records.view(torch.int64), (1 << 32) - 1
    first, second = _device_weights(2 * words.shape[1], records.device)
    # In parts, since products take as much memory as the records.
    parts = torch.split(words, max(1, DEVICE_PART // records.shape[1]))
    totals = [(part * first).sum(1) + ((part >> 32 & mask) * second).sum(1) for part in parts]
    sums: Tensor = torch.cat(totals) >> 32 & mask
    return sums.clamp(min=1)


@lru_cache
def _device_weights(count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(_weights(count).view(np.int64)).view(2, -1).to(device)


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
    """Return whether a file of `n_rows` rows has checksums."""
    found = np.zeros(len(MAGIC), np.uint8)
    file.read(sums_at(n_rows, nbytes), found)
    return found.tobytes() == MAGIC


def map_records(file: MappedFile, n_rows: int, nbytes: int) -> Records:
    """Map records, and their checksums unless a `resize` is writing over them."""
    expected = file_size(n_rows, nbytes)
    if file.size < expected:
        raise DamagedFileError(
            f"{file.path} has {file.size} bytes, but {n_rows} rows of {nbytes} bytes need {expected}: it was "
            "cut short; restore it from a copy"
        )
    is_summed = has_sums(file, n_rows, nbytes)
    if file.size == expected and not is_summed:
        raise DamagedFileError(
            f"the mark before the checksums of {file.path} is damaged; restore the file from a copy, or run "
            f"`flatbed check --forget {file.path}` to take all rows as they are"
        )
    at = sums_at(n_rows, nbytes) + len(MAGIC) if is_summed else None
    return file.map(RECORDS_AT, nbytes, count=n_rows, random=True, sums_at=at)


def write_sums(table: MappedFile, nbytes: int, sums: Sums) -> None:
    """Write the checksums of all rows durably. They may replace rows that a `resize` wrote and took back."""
    at = sums_at(len(sums), nbytes)
    table.write(at + len(MAGIC), sums)
    table.sync()  # otherwise, after a loss of power, the magic may precede bytes that are not checksums
    table.write(at, MAGIC)
    table.sync()


def drop_sums(table: MappedFile, nbytes: int) -> None:
    """Remove the magic durably. The file was made longer before."""
    assert table.sums is not None
    n_rows, table.sums = len(table.sums), None
    table.sync()  # the length must be durable first: by it, `map_records` knows that the file is not damaged
    table.write(sums_at(n_rows, nbytes), bytes(len(MAGIC)))
    table.sync()


def replace_sums(table: MappedFile, nbytes: int, sums: Sums) -> None:
    """Write the checksums of all rows of a file from which `drop_sums` has removed them."""
    write_sums(table, nbytes, sums)
    table.truncate(file_size(len(sums), nbytes))
    map_records(table, len(sums), nbytes)


def write_rows(table: MappedFile, record: Record, rows: range, *, fill: Fill) -> Sums:
    """Write new rows, block by block, to space that was reserved for them; returns their checksums."""
    sums = [np.empty(0, np.uint32)]
    for start, stop in row_blocks(rows.start, rows.stop, record.nbytes):
        records = torch.zeros(stop - start, record.nbytes, dtype=torch.uint8, device="cpu")
        fill(start, stop, records)
        table.write(RECORDS_AT + start * record.nbytes, records.numpy())
        sums.append(row_sums(as_records(records.numpy())))
    return np.concatenate(sums)


# ---- checks


def check_rows(file: MappedFile, rows: NDArray[np.int64], workers: Workers) -> None:
    """Raise `DamagedFileError` if a mapped row is not as it was written. Each row is compared only once."""
    records, sums, checked = file.rows, file.sums, file.checked
    if records is None or sums is None or checked is None:
        return
    fresh = rows[~checked[rows]]
    nbytes = records.dtype.itemsize
    step, wrong = max(1, CHECKED // nbytes), list[int]()

    def compare(part: slice) -> None:
        some = fresh[part]
        for start in range(0, len(some), step):
            at = some[start : start + step]
            wrong.extend(at[(sums[at] != 0) & (sums[at] != row_sums(records[at]))].tolist())

    if len(fresh):
        split(workers, compare, len(fresh), n_parts=nbytes * len(fresh) // MEMORY_PART)
        if wrong:
            raise DamagedRowsError(file.path, sorted(wrong))
        checked[fresh] = True


class DamagedRowsError(DamagedFileError):
    """Rows of a file are not as they were written."""

    def __init__(self, path: Path, rows: list[int]) -> None:
        self.rows = rows
        some = ", ".join(map(str, rows[:MAX_LISTED]))
        others = f" and {len(rows) - MAX_LISTED:,} others" if len(rows) > MAX_LISTED else ""
        super().__init__(
            f"in {path} the checksum of row {some}{others} is wrong: restore the file from a copy, or run "
            f"`flatbed check --forget {path}` to take all rows as they are, without their checksums"
        )
