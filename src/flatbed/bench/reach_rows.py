"""Rows of `flatbed bench rows`: random rows of tables read and written, by size, tier and way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flatbed.bench.rows import Machine, Record

BENCHMARK = "rows"
FLATBED, CUPY = "flatbed", "CuPy"
TORCH = "torch index, .to()"
TORCH_PINNED = "torch, pinned between"  # index_select into pinned memory, .to(non_blocking=True)
TORCH_DEVICE = "torch index_select"
TORCH_FILE = "torch mapped, .to()"
PAGE_CACHE = "file in the page cache"

Storage = Literal["device", "host", "disk"]
TIERS: tuple[Storage, ...] = ("device", "host", "disk")
Direction = Literal["read", "write"]
Clock = Literal["gpu", "wall"]


@dataclass(frozen=True, slots=True)
class ReachRow(Record):
    """Random distinct rows of a table, read to the computing device or written from it, in one way.

    Ids are new in every call. They come from the host, in pinned memory, for tables on the host and on disk,
    and are on the device for tables there: the same for all ways, which bring them where they need them
    within the time that is measured.
    """

    tier: Storage
    way: str
    memory: str
    """What the table is in: managed, registered, pageable, plain on a CPU, the device's, or a file that the
    system has in memory."""
    direction: Direction
    clock: Clock
    """GPU time where only the GPU works; else wall time from an idle device until it is idle again."""
    table_bytes: int
    row_bytes: int
    n_ids: int
    n_samples: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    gb_per_s: float
    """10⁹ bytes of rows a second, at p50."""
    dma_gb_per_s: float
    """What a plain copy of pinned memory reached in this direction, in the same run."""
    share_of_dma: float
    ok: bool
    """Whether every byte that a timed call read or wrote is as it should be."""

    @property
    def spread(self) -> tuple[float, float]:
        """10⁹ bytes a second, at p80 and at p20 of the times."""
        slow, fast = (self.n_ids * self.row_bytes / (1e6 * time) for time in (self.p80_ms, self.p20_ms))
        return slow, fast


def rows_of(records: Iterable[Record]) -> list[ReachRow]:
    """Those of `flatbed bench rows`."""
    return [record for record in records if isinstance(record, ReachRow)]


def newest(records: Iterable[Record]) -> list[list[ReachRow]]:
    """Rows by device and tier; a later row replaces an earlier one that is about the same."""
    found: dict[tuple[str, str], dict[tuple[object, ...], ReachRow]] = {}
    for row in rows_of(records):
        about = row.way, row.direction, row.table_bytes, row.row_bytes
        found.setdefault((row.machine.device, row.tier), {})[about] = row
    return [list(rows.values()) for rows in found.values()]


def swept(rows: Sequence[ReachRow]) -> tuple[int, int]:
    """The size of table that most sizes of rows were measured in, and the row of most sizes of tables."""
    shapes = {(row.table_bytes, row.row_bytes) for row in rows}
    table = max(shapes, key=lambda one: (sum(one[0] == other for other, _ in shapes), one[0]))[0]
    row = max(shapes, key=lambda one: (sum(one[1] == other for _, other in shapes), -one[1]))[1]
    return table, row


def gigabytes(nbytes: int) -> str:
    """A size of a table for people."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.3g} MB"


def plain_copy(machine: Machine) -> str:
    """What the speeds are beside; on a CPU nothing is pinned."""
    return "a plain copy" if machine.device == "cpu" else "a plain copy of pinned memory"


def summary(row: ReachRow) -> str:
    """A row as one line, for those who watch."""
    mark = "" if row.ok else "  FAILED its check"
    what = f"{row.tier} {row.direction:5s} {row.way}, {gigabytes(row.table_bytes)}"
    times = f"{row.p50_ms:8.3f} ms ({row.p20_ms:.3f} to {row.p80_ms:.3f})"
    slow, fast = row.spread
    speed = f"{row.gb_per_s:7.2f} GB/s ({slow:.2f} to {fast:.2f})"
    return f"{what}, {row.n_ids:,} × {row.row_bytes:,} B: {times}  {speed}{mark}"


def file_name(machine: Machine) -> str:
    """What the rows are stored as, without the suffix: h200-rows."""
    words = re.findall(r"[a-z0-9]+", machine.device.lower())
    brand = {"nvidia", "amd", "geforce", "instinct"}
    return f"{'-'.join(word for word in words if word not in brand)}-rows"
