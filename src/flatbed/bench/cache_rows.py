"""Rows of `flatbed bench cache`: steps through a row cache, and records swapped over the bus."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from flatbed.bench.rows import Machine, Record

BENCHMARK = "cache"
CASES = ("step", "sizes", "rows", "swap", "disk")
FLATBED, TORCH = "flatbed", "torch"


@dataclass(frozen=True, slots=True)
class CacheRow(Record):
    """Whole steps on one table in one way: ids on the host, lookup, loss, backward, update."""

    case: str
    way: str
    distribution: str
    """How ids are drawn: "uniform", "zipf 1.05", or "half hits" (half of them always the same rows)."""
    optimizer: str
    storage: str
    n_rows: int
    dim: int
    record_bytes: int
    """Of a row: weight and state."""
    n_ids: int
    cache_rows: int
    """0: none."""
    policy: str | None
    depth: int
    """Of the prefetcher; 0: none."""
    captured: bool
    """Whether a step is the replay of a CUDA graph."""
    warm_up_steps: int
    n_samples: int
    p20_ms: float
    """Wall time of a step, from an idle device until it is idle again."""
    p50_ms: float
    p80_ms: float
    block_steps: int
    """So many steps in a row, with one wait at their end, make one reading per step."""
    n_blocks: int
    in_row_p20_ms: float
    in_row_p50_ms: float
    in_row_p80_ms: float
    host_pace_p50: float | None
    """A loop in Python between these, over the fastest such loop: 2 is a host at half its speed."""
    hits_per_step: float | None
    """Distinct rows of a batch. A captured step after a prefetcher counts them once more, as hits."""
    misses_per_step: float | None
    written_per_step: float | None
    """Rows that went home."""
    model_ms: float | None
    """A step in a row of the model alone, where there is one beside the table."""
    peak_memory_bytes: int | None
    """Memory of the GPU that tensors held at most, beside what was there before; None on a CPU."""
    max_abs_error: float
    """Largest difference to torch's SparseAdam over a small table, in the same way from the same ids."""
    ok: bool
    """Whether the small table's bits are those without a cache, and the large one's rows came home."""

    @property
    def hit_rate(self) -> float | None:
        """Hits among the distinct rows of a batch, where they are counted once."""
        if self.hits_per_step is None or self.misses_per_step is None or (self.captured and self.depth):
            return None
        rows = self.misses_per_step + self.hits_per_step
        return self.hits_per_step / rows if rows else None

    @property
    def model_ratio(self) -> float | None:
        """Steps with the model, over the model alone."""
        return None if self.model_ms is None else self.in_row_p50_ms / self.model_ms


@dataclass(frozen=True, slots=True)
class SwapRow(Record):
    """Records read from the host and others written there, both at once."""

    case: str
    way: str
    memory: str
    """What the table's memory is: managed, registered, or plain on a CPU."""
    table_bytes: int
    record_bytes: int
    n_misses: int
    n_samples: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    gb_per_s: float
    """10⁹ bytes of records a second, both ways together, at p50."""
    dma_gb_per_s: float
    """What copies of pinned memory of the same size, both ways at once, reached in the same run."""
    share_of_dma: float
    ok: bool
    """Whether a sample of the records arrived, at both ends, as they were."""


Result = CacheRow | SwapRow
RowT = TypeVar("RowT", bound=Record)


def rows_of(records: Iterable[Record]) -> list[Result]:
    """Those of `flatbed bench cache`."""
    return [record for record in records if isinstance(record, CacheRow | SwapRow)]


def newest(rows: Iterable[RowT], kind: tuple[str, ...]) -> list[RowT]:
    """A later row replaces an earlier one that has the same values of these fields."""
    found: dict[Hashable, RowT] = {}
    for row in rows:
        found[tuple(getattr(row, name) for name in kind)] = row
    return list(found.values())


STEP_KIND = (
    *("case", "way", "distribution", "optimizer", "storage", "n_rows", "dim", "n_ids"),
    *("cache_rows", "policy", "depth", "captured"),
)
SWAP_KIND = ("way", "memory", "table_bytes", "record_bytes", "n_misses")


def steps_of(records: Iterable[Record], case: str) -> list[list[CacheRow]]:
    """Rows of steps of one case, by device; the newest of each kind."""
    found = [row for row in records if isinstance(row, CacheRow) and row.case == case]
    return _by_device(found, STEP_KIND)


def swaps_of(records: Iterable[Record]) -> list[list[SwapRow]]:
    """Rows of records swapped, by device; the newest of each kind."""
    return _by_device([row for row in records if isinstance(row, SwapRow)], SWAP_KIND)


def _by_device(rows: list[RowT], kind: tuple[str, ...]) -> list[list[RowT]]:
    devices = dict.fromkeys(row.machine.device for row in rows)
    return [newest([row for row in rows if row.machine.device == device], kind) for device in devices]


def summary(row: Result) -> str:
    """A row as one line, for those who watch."""
    mark = "" if row.ok else "  FAILED its check"
    times = f"{row.p50_ms:8.3f} ms ({row.p20_ms:.3f} to {row.p80_ms:.3f})"
    if isinstance(row, SwapRow):
        what = f"{row.case} {row.way}, {row.memory}, {row.n_misses:,} × {row.record_bytes} B"
        return f"{what}: {times}  {row.gb_per_s:6.2f} GB/s, {row.share_of_dma:.0%} of DMA{mark}"
    what = f"{row.case} {row.way}, {row.distribution}, {row.n_rows:,} × {row.dim}, {describe_cache(row)}"
    rate = "" if row.hit_rate is None else f", {row.hit_rate:.1%} hits"
    model = "" if row.model_ratio is None else f", {row.model_ratio:.2f} × the model's step"
    in_row = f"in a row {row.in_row_p50_ms:.3f} ms ({row.in_row_p20_ms:.3f} to {row.in_row_p80_ms:.3f})"
    return f"{what}: {in_row}, one by one {times.strip()}{rate}{model}{mark}"


def describe_cache(row: CacheRow) -> str:
    """How large the cache is, and who leaves it first."""
    return f"{row.policy} {row.cache_rows:,}" if row.cache_rows else "no cache"


def file_name(machine: Machine, case: str) -> str:
    """What a case's rows are stored as, without the suffix: h200-cache-step."""
    words = re.findall(r"[a-z0-9]+", machine.device.lower())
    brand = {"nvidia", "amd", "geforce", "instinct"}
    device = "-".join(word for word in words if word not in brand)
    return f"{device}-cache-{case}"
