"""`flatbed bench feed`: numpy batches to the device, beside a computation, and rows of arrays by number.

Three cases: epochs in which each batch is computed with (epoch), batches of several sizes in several ways
(bandwidth), and random rows of a large array (rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flatbed.bench import feed_measure, feed_read
from flatbed.bench.feed_measure import FeedSetting, Shape
from flatbed.bench.feed_rows import CASES, FeedRow
from flatbed.bench.measure import free_memory
from flatbed.bench.rows import Machine, this_machine, write_rows
from flatbed.bench.tables_measure import dma_speed

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are."""

    shapes: tuple[Shape, ...]
    epoch: Shape
    factors: tuple[float, ...]
    """Compute over transfer, in `epoch`."""
    array_bytes: int
    row_bytes: tuple[int, ...]
    n_ids: int
    source_bytes: int
    n_samples: int


FULL = Sizes(
    shapes=(
        # Large ones first: where smaller ones were freed they would share pages, and not go in place.
        Shape(1, 256 * MIB, 16),
        Shape(1, 64 * MIB, 64),
        Shape(1, 16 * MIB, 128),
        Shape(1, MIB, 1024),
        Shape(500, 16 << 10, 60),
    ),
    epoch=Shape(1, 64 * MIB, 128),
    factors=(0.5, 1.0, 2.0),
    array_bytes=2 << 30,
    row_bytes=(512, 2048),
    n_ids=65_536,
    source_bytes=512 * MIB,
    n_samples=5,
)
QUICK = Sizes(
    shapes=(Shape(1, 1 << 16, 20), Shape(1, MIB, 10), Shape(100, 1 << 10, 10)),
    epoch=Shape(1, MIB, 20),
    factors=(0.5, 2.0),
    array_bytes=16 * MIB,
    row_bytes=(512, 2048),
    n_ids=2000,
    source_bytes=8 * MIB,
    n_samples=3,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured, and where."""

    device: torch.device
    machine: Machine
    sizes: Sizes = FULL


def make_setting(device: torch.device, *, quick: bool = False, samples: int | None = None) -> Setting:
    """Small sizes without a GPU, or if asked for."""
    sizes = FULL if device.type == "cuda" and not quick else QUICK
    if samples is not None:
        sizes = replace(sizes, n_samples=samples)
    return Setting(device, this_machine(device.type), sizes)


def run(case: str, setting: Setting, *, report: Callable[[str], object]) -> Iterator[FeedRow]:
    """Rows of one case, each as soon as it is found."""
    sizes = setting.sizes
    dma = dma_speed(setting.device).to
    report(f"{case}: a plain copy of pinned memory takes {dma:.1f} GB/s to the device")
    feeding = FeedSetting(setting.device, setting.machine, dma, sizes.source_bytes, sizes.n_samples)
    if case == "bandwidth":
        for shape in sizes.shapes:
            yield from feed_measure.bandwidth(shape, feeding)
            free_memory(setting.device)
    elif case == "epoch":
        for factor in sizes.factors:
            yield from feed_measure.epoch(sizes.epoch, factor, feeding)
            free_memory(setting.device)
    else:
        yield from feed_read.read(sizes.array_bytes, sizes.row_bytes, sizes.n_ids, feeding)
    free_memory(setting.device)


def command(
    device: torch.device,
    cases: list[str],
    *,
    quick: bool,
    samples: int | None,
    json_path: Path | None,
    png: Path | None,
) -> None:
    """What `flatbed bench feed` does."""
    from flatbed.bench.feed_plot import write_plot
    from flatbed.bench.feed_rows import summary
    from flatbed.bench.feed_table import tables
    from flatbed.bench.terminal import console, fail_on, say

    setting = make_setting(device, quick=quick, samples=samples)
    rows: list[FeedRow] = []
    for case in [case for case in CASES if not cases or case in cases]:
        for row in run(case, setting, report=say):
            rows.append(row)
            say(summary(row))
            if json_path is not None:
                write_rows(rows, json_path)
    for table in tables(rows):
        console().print(table)
    if json_path is not None:
        say(f"wrote {json_path}")
    if png is not None:
        write_plot(rows, png)
        say(f"wrote {png}")
    fail_on(list(dict.fromkeys(f"{row.case}: {row.way}" for row in rows if not row.ok)))
