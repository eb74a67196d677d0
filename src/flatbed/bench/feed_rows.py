"""Rows of `flatbed bench feed`: batches moved, epochs fed, rows of arrays read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from flatbed.bench.rows import Machine, Record

BENCHMARK = "feed"
CASES = ("epoch", "bandwidth", "rows")
FEEDER, PLAIN = "flatbed Feeder", "torch.from_numpy().to()"
GENERATED = "flatbed Feeder, from a generator"
LOADER = "DataLoader(pin_memory=True), .to(non_blocking=True)"
READER, READER_COPY = "flatbed RowReader, in place", "flatbed RowReader, copy=True"
NUMPY, TORCH = "numpy.take, pin, .to()", "torch index on the CPU, .to()"


@dataclass(frozen=True, slots=True)
class BandwidthRow(Record):
    """Batches of numpy arrays, one after the other, to the device, in one way."""

    case: str
    way: str
    n_arrays: int
    batch_bytes: int
    n_batches: int
    """In each reading; times are those of a batch, on average over them, from an idle device on."""
    n_samples: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    gb_per_s: float
    """10⁹ bytes a second, at p50."""
    dma_gb_per_s: float
    """What a plain copy of pinned memory reached in the same run."""
    share_of_dma: float
    ok: bool
    """Whether every byte arrived as it was, in a pass that was not timed."""


@dataclass(frozen=True, slots=True)
class EpochRow(Record):
    """An epoch of batches, each with a computation of a given length."""

    case: str
    way: str
    batch_bytes: int
    n_batches: int
    factor: float
    """Compute over transfer, as it was to be."""
    compute_ms: float
    """Of a batch, alone, in the same run."""
    transfer_ms: float
    """Of a batch, at the speed of a plain copy of pinned memory."""
    n_samples: int
    p20_ms: float
    """Wall time per batch, from an idle device until it is idle again at the end of the epoch."""
    p50_ms: float
    p80_ms: float
    ratio: float
    """p50 over the larger of compute and transfer: 1 is perfect."""
    ok: bool


@dataclass(frozen=True, slots=True)
class ReadRow(Record):
    """Random rows of a large numpy array, by ids on the host, in one way."""

    case: str
    way: str
    memory: str
    """What the reader says of itself; "" for others."""
    array_bytes: int
    row_bytes: int
    n_ids: int
    n_samples: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    gb_per_s: float
    dma_gb_per_s: float
    share_of_dma: float
    ok: bool


FeedRow = BandwidthRow | EpochRow | ReadRow
RowT = TypeVar("RowT", BandwidthRow, EpochRow, ReadRow)


def rows_of(records: Iterable[Record]) -> list[FeedRow]:
    """Those of `flatbed bench feed`."""
    return [record for record in records if isinstance(record, BandwidthRow | EpochRow | ReadRow)]


def newest(records: Iterable[Record], kind: type[RowT]) -> list[list[RowT]]:
    """Rows of one kind by device; a later row replaces an earlier one that is about the same."""
    found: dict[str, dict[tuple[object, ...], RowT]] = {}
    for row in records:
        if isinstance(row, kind):
            found.setdefault(row.machine.device, {})[_about(row)] = row
    return [list(rows.values()) for rows in found.values()]


def _about(row: FeedRow) -> tuple[object, ...]:
    if isinstance(row, BandwidthRow):
        return row.way, row.n_arrays, row.batch_bytes
    if isinstance(row, EpochRow):
        return row.way, row.batch_bytes, row.factor
    return row.way, row.array_bytes, row.row_bytes, row.n_ids


def size(nbytes: int) -> str:
    """Bytes for people, in powers of two."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def describe(row: BandwidthRow) -> str:
    """What a batch is."""
    if row.n_arrays == 1:
        return size(row.batch_bytes)
    return f"{row.n_arrays:,} × {size(row.batch_bytes // row.n_arrays)}"


def on_cpu(row: FeedRow) -> bool:
    """Where nothing crosses a bus, speeds beside one mean nothing."""
    return row.machine.device == "cpu"


def summary(row: FeedRow) -> str:
    """A row as one line, for those who watch."""
    mark = "" if row.ok else "  FAILED its check"
    times = f"{row.p50_ms:9.3f} ms ({row.p20_ms:.3f} to {row.p80_ms:.3f})"
    if isinstance(row, EpochRow):
        what = f"epoch {row.way}: compute {row.compute_ms:.3f} ms, transfer {row.transfer_ms:.3f} ms a batch"
        return f"{what}: {times}, {row.ratio:.3f} × the larger{mark}"
    speed = "" if on_cpu(row) else f"{row.gb_per_s:6.2f} GB/s, {row.share_of_dma:.0%} of DMA"
    if isinstance(row, BandwidthRow):
        return f"bandwidth {row.way}, {describe(row)}: {times}  {speed}{mark}"
    return f"rows {row.way}, {row.n_ids:,} × {size(row.row_bytes)}: {times}  {speed}{mark}"


def file_name(machine: Machine) -> str:
    """What the rows are stored as, without the suffix: h200-feed."""
    words = re.findall(r"[a-z0-9]+", machine.device.lower())
    brand = {"nvidia", "amd", "geforce", "instinct"}
    return f"{'-'.join(word for word in words if word not in brand)}-feed"
