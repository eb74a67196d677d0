"""`flatbed bench rows`: random rows of tables read and written, by row size, table size and tier.

On each tier, rows of several sizes in one table, and rows of one size in tables of several sizes; in
flatbed's way, by torch's indexing, and by CuPy's where it is installed, in turns in one run. Ids are new in
each call: for tables on the host and on disk they come from the host, for those on the device they are there.
Files are in the system's page cache: what is measured is the way to them, not a disk.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from flatbed.bench import reach_ways
from flatbed.bench.measure import free_memory
from flatbed.bench.reach_measure import BLOCK_WORDS, ReachSetting, Shape, measured
from flatbed.bench.reach_rows import TIERS, Direction, ReachRow, Storage, gigabytes, plain_copy
from flatbed.bench.rows import Machine, this_machine, write_rows
from flatbed.bench.tables_measure import Dma, dma_speed
from flatbed.cuda.host_memory import available_bytes

MB, GB = 10**6, 10**9
ROW_BYTES = (64, 256, 512, 1536, 4096)
USABLE = 0.85  # of what is free: others need some, too
Report = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The shapes on one tier."""

    table_bytes: tuple[int, ...]
    """Sizes of tables, with rows of `one_row` bytes."""
    one_table: int
    """The size of the table in which rows have all sizes; a smaller one where it has no room."""
    one_row: int = 512
    row_bytes: tuple[int, ...] = ROW_BYTES

    def shapes(self, room: int, n_ids: int) -> list[Shape]:
        """Those that there is room for: sizes of rows, then sizes of tables."""
        sizes = [size for size in self.table_bytes if size <= room]
        if not sizes:
            return []
        table = max((size for size in sizes if size <= self.one_table), default=min(sizes))
        by_row = [Shape(table, row, n_ids) for row in self.row_bytes]
        by_table = [Shape(size, self.one_row, n_ids) for size in sizes]
        return list(dict.fromkeys(by_row + by_table))


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are."""

    sweeps: dict[str, Sweep]
    n_ids: int
    """At most a quarter of a table's rows."""
    n_samples: int


FULL = Sizes(
    {
        "device": Sweep((1 * GB, 8 * GB, 32 * GB), one_table=8 * GB),
        "host": Sweep((1 * GB, 8 * GB, 32 * GB), one_table=8 * GB),
        "disk": Sweep((256 * MB, 1 * GB), one_table=256 * MB),
    },
    n_ids=65_536,
    n_samples=7,
)
SMALL = Sizes(
    {
        "host": Sweep((32 * MB, 128 * MB, 512 * MB), one_table=128 * MB),
        "disk": Sweep((32 * MB, 64 * MB, 128 * MB), one_table=64 * MB),
    },
    n_ids=65_536,
    n_samples=7,
)
QUICK = Sizes(
    {
        "device": Sweep((4 * MB, 16 * MB), one_table=16 * MB),
        "host": Sweep((4 * MB, 16 * MB), one_table=16 * MB),
        "disk": Sweep((4 * MB, 8 * MB), one_table=8 * MB),
    },
    n_ids=4096,
    n_samples=5,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured, and where."""

    device: torch.device
    machine: Machine
    dma: Dma
    sizes: Sizes
    folder: Path | None = None
    """Where files are made; the system's folder for temporary ones unless given."""


def make_setting(
    device: torch.device, *, quick: bool = False, samples: int | None = None, folder: Path | None = None
) -> Setting:
    """Small sizes without a GPU, tiny ones if asked for."""
    sizes = QUICK if quick else FULL if device.type == "cuda" else SMALL
    if samples is not None:
        sizes = replace(sizes, n_samples=samples)
    return Setting(device, this_machine(device.type), dma_speed(device), sizes, folder)


def find_tiers(device: torch.device, names: Sequence[str]) -> list[Storage]:
    """Those that were asked for, all unless given. On a CPU, the device's memory is the host's."""
    unknown = [name for name in names if name not in TIERS]
    if unknown:
        raise ValueError(f"a tier is one of {', '.join(TIERS)}; found {', '.join(unknown)}")
    if device.type == "cpu" and "device" in names:
        raise ValueError("on a CPU the device's memory is the host's: ask for the tier host")
    return [
        tier for tier in TIERS if (not names or tier in names) and (tier != "device" or device.type != "cpu")
    ]


def room(tier: Storage, setting: Setting) -> int:
    """The size of the largest table for which there is memory, here and now."""
    on_gpu = setting.device.type == "cuda"
    free = torch.cuda.mem_get_info(setting.device)[0] if on_gpu else available_bytes()
    if tier != "device":
        # Twice on the host, or in the page cache; and no more managed memory than the GPU has free.
        free = min(free, available_bytes() // 2)
    if tier == "disk":  # with a journal
        free = min(free, shutil.disk_usage(setting.folder or tempfile.gettempdir()).free // 4)
    return int(USABLE * free)


def find_shapes(tier: Storage, setting: Setting, *, report: Report) -> list[Shape]:
    """What is measured on a tier; what there is no room for is named and left out."""
    sweep, most = setting.sizes.sweeps[tier], room(tier, setting)
    for row in (sweep.one_row, *sweep.row_bytes):
        if row % 4 or 4 * BLOCK_WORDS % row:
            raise ValueError(
                f"rows have a size that divides {4 * BLOCK_WORDS}, in whole words; found {row} bytes"
            )
    for size in sweep.table_bytes:
        if size > most:
            report(f"{tier}: a table of {gigabytes(size)} is left out: there is room for {gigabytes(most)}")
    return sweep.shapes(most, setting.sizes.n_ids)


def run(tier: Storage, setting: Setting, *, report: Report) -> Iterator[ReachRow]:
    """Rows of one tier, as soon as they are found."""
    copy = plain_copy(setting.machine)
    report(f"{tier}: {copy} takes {setting.dma.to:.1f} GB/s to the device, {setting.dma.back:.1f} back")
    shapes = find_shapes(tier, setting, report=report)
    told: set[str] = set()

    def left_out(way: str, reason: str) -> None:
        if (line := f"{tier}: {way} is left out: {reason}") not in told:
            told.add(line)
            report(line)

    reaching = ReachSetting(
        setting.device, setting.machine, setting.dma, setting.sizes.n_samples, left_out, tier == "device"
    )
    for some in [[shape] for shape in shapes] if tier == "disk" else [shapes] if shapes else []:
        with _table(tier, some, reaching, setting.folder) as ways:
            # Reading before writing: until then it is known what is in every row.
            for direction in get_args(Direction):
                for shape in some:
                    yield from measured(ways(shape), shape, reaching, tier=tier, direction=direction)
        free_memory(setting.device)


def _table(
    tier: Storage, shapes: Sequence[Shape], setting: ReachSetting, folder: Path | None
) -> AbstractContextManager[reach_ways.WaysOf]:
    """One table that is seen in all shapes; a file has only one."""
    if tier == "disk":
        return reach_ways.on_disk(shapes[0], setting, folder)
    make = reach_ways.on_device if tier == "device" else reach_ways.on_host
    return make(max(shape.table_bytes for shape in shapes), setting)


def command(
    device: torch.device,
    tiers: Sequence[str],
    *,
    quick: bool,
    samples: int | None,
    folder: Path | None,
    json_path: Path | None,
    png: Path | None,
) -> None:
    """What `flatbed bench rows` does."""
    import typer

    from flatbed.bench.reach_plot import write_plot
    from flatbed.bench.reach_rows import summary
    from flatbed.bench.reach_table import tables
    from flatbed.bench.terminal import console, fail_on, say

    try:
        asked = find_tiers(device, tiers)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="TIERS") from error
    setting = make_setting(device, quick=quick, samples=samples, folder=folder)
    rows: list[ReachRow] = []
    for tier in asked:
        for row in run(tier, setting, report=say):
            rows.append(row)
            say(summary(row))
            if json_path is not None:
                write_rows(rows, json_path)
    for table in tables(rows):
        console().print(table)
    if json_path is not None:
        say(f"wrote {json_path}")
    if png is not None and rows:
        write_plot(rows, png)
        say(f"wrote {png}")
    fail_on(list(dict.fromkeys(f"{row.tier}: {row.way}" for row in rows if not row.ok)))
