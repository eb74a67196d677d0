"""Rows of `flatbed bench tables`: records moved, and steps taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from flatbed.bench.rows import Machine, Record

BENCHMARK = "tables"
CASES = ("move", "speedtorch", "step", "fit")
FLATBED, TORCH, CUPY = "flatbed", "torch", "CuPy"
KERNEL, ROWS, CUPY_GPU = f"{FLATBED} kernel", f"{FLATBED} read_rows, write_rows", f"{CUPY}, ids on the GPU"
HOST, DEVICE = f"{FLATBED} host", f"{FLATBED} device"
SPARSE, SPEEDTORCH = f"{TORCH} sparse", "SpeedTorch's way"

Direction = Literal["to", "back"]
Clock = Literal["gpu", "wall"]


@dataclass(frozen=True, slots=True)
class MoveRow(Record):
    """Random records of a table on the host, to the device that computes or back home, in one way."""

    case: str
    way: str
    direction: Direction
    memory: str
    """What the table's memory is: managed, registered, pageable, pinned, or plain on a CPU."""
    clock: Clock
    """GPU time, or wall time from an idle device until it is idle again."""
    table_bytes: int
    record_bytes: int
    n_ids: int
    n_samples: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    gb_per_s: float
    """10⁹ bytes of records a second, at p50."""
    dma_gb_per_s: float
    """What a plain copy of pinned memory reached in this direction, in the same run."""
    share_of_dma: float
    ok: bool
    """Whether a sample of the last records arrived as they were."""


@dataclass(frozen=True, slots=True)
class TrainRow(Record):
    """Whole steps on one table, in one way: ids on the host, lookup, loss, backward, update."""

    case: str
    way: str
    optimizer: str
    n_rows: int
    dim: int
    n_ids: int
    table_bytes: int
    """Weights and state, wherever they are."""
    n_samples: int
    p20_ms: float
    """Wall time of a step, from an idle device until it is idle again."""
    p50_ms: float
    p80_ms: float
    together_ms: float
    """Wall time per step of as many steps, with one wait at the end of all."""
    peak_memory_bytes: int | None
    """Memory of the GPU that tensors held at most."""
    growth_bytes: int | None
    """How much less the GPU had free after the steps than before the table was made."""
    memory_limit_bytes: int | None
    """What the process was allowed to take of the GPU."""
    n_checked_rows: int
    n_wrong_rows: int
    """Rows that differ from those of a dense reference by more than the tolerance, after a few steps."""
    max_abs_error: float
    ok: bool


def rows_of(records: Iterable[Record]) -> list[MoveRow | TrainRow]:
    """Those of `flatbed bench tables`."""
    return [record for record in records if isinstance(record, MoveRow | TrainRow)]


def failed(record: MoveRow | TrainRow) -> bool:
    """Whether something is wrong that should not be: SpeedTorch loses updates of ids that come twice."""
    return not record.ok and record.way != SPEEDTORCH


RowT = TypeVar("RowT", MoveRow, TrainRow)


def group_moves(rows: Iterable[Record], case: str) -> list[list[MoveRow]]:
    """Rows of one case by number of ids and device; a later row replaces an earlier one of the same kind."""
    found = [row for row in rows if isinstance(row, MoveRow) and row.case == case]
    return _grouped(
        found,
        by=lambda row: (row.n_ids, row.machine.device),
        kind=lambda row: (row.way, row.memory, row.table_bytes, row.record_bytes, row.direction),
    )


def group_steps(rows: Iterable[Record], case: str) -> list[list[TrainRow]]:
    """Rows of one case by size, optimizer and device; a later row replaces an earlier one of its way."""
    found = [row for row in rows if isinstance(row, TrainRow) and row.case == case]
    return _grouped(
        found,
        by=lambda row: (row.n_rows, row.dim, row.n_ids, row.optimizer, row.machine.device),
        kind=lambda row: row.way,
    )


def _grouped(
    rows: Sequence[RowT], *, by: Callable[[RowT], Hashable], kind: Callable[[RowT], Hashable]
) -> list[list[RowT]]:
    groups: dict[Hashable, dict[Hashable, RowT]] = {}
    for row in rows:
        groups.setdefault(by(row), {})[kind(row)] = row
    return [list(kinds.values()) for kinds in groups.values()]


def summary(row: MoveRow | TrainRow) -> str:
    """A row as one line, for those who watch."""
    mark = "" if row.ok else "  FAILED its check" if failed(row) else ""
    times = f"{row.p50_ms:8.3f} ms ({row.p20_ms:.3f} to {row.p80_ms:.3f})"
    if isinstance(row, MoveRow):
        what = f"{row.case} {row.direction:4s} {row.way}, {row.memory}, {gigabytes(row.table_bytes)}"
        speed = f"{row.gb_per_s:6.2f} GB/s, {row.share_of_dma:.0%} of DMA"
        return f"{what}, {row.n_ids:,} × {row.record_bytes} B: {times}  {speed}{mark}"
    what = f"{row.case} {row.way}, {row.optimizer}, {row.n_rows:,} × {row.dim}, {row.n_ids:,} ids"
    memory = "" if row.peak_memory_bytes is None else f", {gigabytes(row.peak_memory_bytes)} of the GPU"
    wrong = f", {row.n_wrong_rows:,} of {row.n_checked_rows:,} rows wrong" if row.n_wrong_rows else ""
    return f"{what}: {times}, together {row.together_ms:.3f} ms{memory}{wrong}{mark}"


def gigabytes(nbytes: int) -> str:
    """A size for people."""
    return f"{nbytes / 1e9:.3g} GB"


def file_name(machine: Machine, case: str) -> str:
    """What a case's rows are stored as, without the suffix: h200-tables-move."""
    words = re.findall(r"[a-z0-9]+", machine.device.lower())
    brand = {"nvidia", "amd", "geforce", "instinct"}
    device = "-".join(word for word in words if word not in brand)
    return f"{device}-tables-{case}"
