"""`flatbed bench cache`: hot rows on the device, over tables on the host or on disk.

Five cases: whole steps in several ways (step), hits and time against the cache's size under both policies
(sizes), time against the table's and the cache's rows (rows), the kernel that swaps records (swap), and a
table on disk beside a model (disk).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flatbed.bench import cache_disk, cache_step, cache_swap
from flatbed.bench.cache_check import Checker
from flatbed.bench.cache_measure import LeftOut, Plan, Stage
from flatbed.bench.cache_rows import CASES, Result
from flatbed.bench.cache_step import LAWS, StepSetting
from flatbed.bench.cache_swap import SwapSetting
from flatbed.bench.cache_ways import Shape
from flatbed.bench.host import this_host
from flatbed.bench.measure import free_memory
from flatbed.bench.rows import Machine


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are."""

    n_rows: int
    dim: int
    n_ids: int
    cache_rows: int
    sizes: tuple[int, ...]
    """Of caches, in `sizes` and in `rows`."""
    table_rows: tuple[int, ...]
    """Of tables in `rows`; one of them is `n_rows`."""
    narrow_dim: int
    """Of the tables in `rows`: the largest has to fit on the host."""
    narrow_cache_rows: int
    n_misses: int
    record_bytes: int
    disk_rows: int
    disk_cache_rows: int
    model_ms: float
    check_rows: int = 20_000
    check_ids: int = 2048


FULL = Sizes(
    n_rows=20_000_000,
    dim=128,
    n_ids=65_536,
    cache_rows=2_000_000,
    sizes=(131_072, 262_144, 524_288, 1_048_576, 2_097_152, 4_194_304),
    table_rows=(2_000_000, 20_000_000, 60_000_000),
    narrow_dim=32,
    narrow_cache_rows=524_288,
    n_misses=59_000,
    record_bytes=1536,
    disk_rows=4_000_000,
    disk_cache_rows=1_000_000,
    model_ms=5.0,
)
QUICK = Sizes(
    n_rows=4000,
    dim=8,
    n_ids=64,
    cache_rows=800,
    sizes=(256, 512),
    table_rows=(1000, 4000),
    narrow_dim=4,
    narrow_cache_rows=300,
    n_misses=50,
    record_bytes=384,
    disk_rows=2000,
    disk_cache_rows=1000,
    model_ms=0.5,
    check_rows=500,
    check_ids=48,
)
FULL_PLAN = Plan()
QUICK_PLAN = Plan(warm_up=8, synced=4, blocks=2, block_steps=3)
DEPTHS = (2, 4)


def scaled(sizes: Sizes, factor: float) -> Sizes:
    """All numbers of rows and ids smaller, or larger, by a factor; records stay as they are."""

    def part(n: int) -> int:
        return max(1, round(n * factor))

    return replace(
        sizes,
        n_rows=part(sizes.n_rows),
        n_ids=part(sizes.n_ids),
        cache_rows=part(sizes.cache_rows),
        sizes=tuple(map(part, sizes.sizes)),
        table_rows=tuple(map(part, sizes.table_rows)),
        narrow_cache_rows=part(sizes.narrow_cache_rows),
        n_misses=part(sizes.n_misses),
        disk_rows=part(sizes.disk_rows),
        disk_cache_rows=part(sizes.disk_cache_rows),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured, and how long; `plan` is that of `step`, and the others' are shorter."""

    device: torch.device
    machine: Machine
    sizes: Sizes = FULL
    plan: Plan = FULL_PLAN
    folder: Path | None = None
    """Where the file of `disk` is made; None: where temporary files are."""

    @property
    def short(self) -> Plan:
        """For cases with many caches or slow steps."""
        plan = self.plan
        return replace(plan, synced=max(1, plan.synced // 5), blocks=max(1, plan.blocks * 3 // 5))


def make_setting(
    device: torch.device,
    machine: Machine,
    *,
    quick: bool = False,
    scale: float = 1.0,
    warm_up: int | None = None,
    steps: int | None = None,
    folder: Path | None = None,
) -> Setting:
    """What the device is for, or what was asked for; without a GPU all is tiny."""
    tiny = quick or device.type != "cuda"
    plan = QUICK_PLAN if tiny else FULL_PLAN
    if steps is not None:
        plan = replace(plan, synced=steps, blocks=max(1, 2 * steps // plan.block_steps))
    plan = plan if warm_up is None else replace(plan, warm_up=warm_up)
    return Setting(device, machine, scaled(QUICK if tiny else FULL, scale), plan, folder)


def find_cases(names: list[str]) -> list[str]:
    """The cases to run: those asked for, or all."""
    for name in names:
        if name not in CASES:
            raise ValueError(f"no case named {name!r}; there are {', '.join(CASES)}")
    return [case for case in CASES if not names or case in names]


def n_stages(case: str, setting: Setting) -> int:
    """How often a case tells what it is at."""
    sizes = setting.sizes
    if case == "step":
        shape = Shape(sizes.n_rows, sizes.dim, sizes.n_ids)
        mixes = [cache_step.step_mixes(law, shape, sizes.cache_rows, setting.device) for law in LAWS]
        return 1 + len(LAWS) + sum(map(len, mixes))
    counts = {
        "sizes": 1 + 4 * len(sizes.sizes),
        "rows": 3 * len(sizes.table_rows) + len(sizes.sizes),
        "swap": cache_swap.N_STAGES,
        "disk": cache_disk.N_STAGES,
    }
    return counts[case]


def run(case: str, setting: Setting, *, stage: Stage, left_out: LeftOut) -> Iterator[Result]:
    """Rows of one case, each as soon as it is found."""
    # Of all ways: to hand a backward pass over to another thread takes longer than much of what is measured.
    with torch.autograd.set_multithreading_enabled(False):
        yield from _run(case, setting, stage, left_out)
    free_memory(setting.device)


def _run(case: str, setting: Setting, stage: Stage, left_out: LeftOut) -> Iterator[Result]:
    sizes = setting.sizes
    if case == "swap":
        yield from cache_swap.run(_swaps(setting, stage))
    else:
        steps = _steps(case, setting, stage, left_out)
        if case == "step":
            yield from cache_step.run_step(steps, sizes.cache_rows)
        elif case == "sizes":
            yield from cache_step.run_sizes(steps, sizes.sizes)
        elif case == "rows":
            yield from cache_step.run_rows(steps, sizes.table_rows, sizes.narrow_cache_rows, sizes.sizes)
        else:
            yield from cache_disk.run(
                steps,
                sizes.disk_cache_rows,
                depths=DEPTHS,
                model_ms=sizes.model_ms,
                folder=setting.folder,
            )


def _steps(case: str, setting: Setting, stage: Stage, left_out: LeftOut) -> StepSetting:
    sizes = setting.sizes
    n_rows = sizes.disk_rows if case == "disk" else sizes.n_rows
    dim = sizes.narrow_dim if case == "rows" else sizes.dim
    return StepSetting(
        case=case,
        shape=Shape(n_rows, dim, sizes.n_ids),
        plan=setting.plan if case == "step" else setting.short,
        device=setting.device,
        machine=setting.machine,
        checker=Checker(dim, setting.device, n_rows=sizes.check_rows, n_ids=sizes.check_ids),
        host=this_host(),
        stage=stage,
        left_out=left_out,
    )


def _swaps(setting: Setting, stage: Stage) -> SwapSetting:
    sizes = setting.sizes
    return SwapSetting(
        n_rows=max(1, sizes.n_rows // 2),  # as good as all: rows are at random
        n_slots=sizes.cache_rows,
        record_bytes=sizes.record_bytes,
        n_misses=sizes.n_misses,
        repeats=max(3, setting.plan.synced // 3),
        device=setting.device,
        machine=setting.machine,
        stage=stage,
    )
