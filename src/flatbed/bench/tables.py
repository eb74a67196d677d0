"""`flatbed bench tables`: rows that live on the host, moved and trained.

Four cases: records moved by the kernels (move), SpeedTorch's own benchmark (speedtorch), whole steps in
several ways (step), and a table larger than the memory allowed on the GPU (fit).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flatbed.bench import tables_move, tables_speedtorch, tables_step
from flatbed.bench.measure import free_memory
from flatbed.bench.rows import Machine
from flatbed.bench.tables_measure import Dma, dma_speed
from flatbed.bench.tables_move import MoveSetting, Shape
from flatbed.bench.tables_rows import CASES, MoveRow, TrainRow
from flatbed.bench.tables_step import StepSetting
from flatbed.bench.tables_ways import RECIPES

FIT_STEPS = 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are."""

    move_bytes: int
    speedtorch_bytes: int
    fit_bytes: int
    step_rows: int


SIZES = {
    "cuda": Sizes(30 * 10**9, 10 * 10**9, 40 * 10**9, 20_000_000),
    "cpu": Sizes(10**9, 10**9, 10**9, 1_000_000),
}
N_IDS = {"move": 65_536, "speedtorch": 131_072, "step": 65_536, "fit": 65_536}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured, and how long; None stands for what the case has by itself."""

    device: torch.device
    machine: Machine
    gigabytes: float | None = None
    n_rows: int | None = None
    dim: int = 128
    n_ids: int | None = None
    optimizer: str = "adam"
    repeats: int = 30


Report = Callable[[str], object]
"""Called with what should be known beside the rows."""


def find_cases(device: torch.device, names: list[str]) -> list[str]:
    """The cases to run: those asked for, or all that the device offers."""
    offered = [case for case in CASES if case != "fit" or device.type == "cuda"]
    for name in names:
        if name not in offered:
            raise ValueError(f"no case named {name!r} on {device.type}; there are {', '.join(offered)}")
    return [case for case in offered if not names or case in names]


def check(case: str, setting: Setting) -> None:
    """Raise ValueError if a table has too few rows for distinct ids, before anything is measured."""
    if case not in ("move", "speedtorch"):
        return
    nbytes, n_ids = _bytes_and_ids(case, setting)
    shapes = tables_move.shapes(nbytes) if case == "move" else [Shape(nbytes, 4 * tables_speedtorch.DIM)]
    n_rows = min(shape.n_rows for shape in shapes)
    if n_rows < n_ids:
        raise ValueError(
            f"{case}: {n_ids:,} distinct ids asked of tables of {n_rows:,} rows: give fewer --ids, or more "
            f"--gigabytes"
        )


def run(case: str, setting: Setting, *, report: Report) -> Iterator[MoveRow | TrainRow]:
    """Rows of one case, each as soon as it is found."""

    def left_out(way: str, reason: str) -> None:
        report(f"{case}: {way} is left out: {reason}")

    if case in ("move", "speedtorch"):
        dma = dma_speed(setting.device)
        report(f"a plain copy of pinned memory: {dma.to:.1f} GB/s to the device, {dma.back:.1f} GB/s back")
        moves = _move_setting(case, setting, dma)
        yield from (
            tables_move.run(moves) if case == "move" else tables_speedtorch.run(moves, left_out=left_out)
        )
    elif case == "step":
        yield from tables_step.run(_step_setting(setting), left_out=left_out)
    else:
        yield from tables_step.run_fit(_fit_setting(setting))
    free_memory(setting.device)


def _move_setting(case: str, setting: Setting, dma: Dma) -> MoveSetting:
    nbytes, n_ids = _bytes_and_ids(case, setting)
    return MoveSetting(nbytes, n_ids, setting.repeats, setting.device, dma, setting.machine)


def _bytes_and_ids(case: str, setting: Setting) -> tuple[int, int]:
    sizes = SIZES[setting.device.type]
    own = {"move": sizes.move_bytes, "speedtorch": sizes.speedtorch_bytes, "fit": sizes.fit_bytes}
    nbytes = own[case] if setting.gigabytes is None else int(1e9 * setting.gigabytes)
    return nbytes, setting.n_ids or N_IDS[case]


def _step_setting(setting: Setting) -> StepSetting:
    return StepSetting(
        n_rows=setting.n_rows or SIZES[setting.device.type].step_rows,
        dim=setting.dim,
        n_ids=setting.n_ids or N_IDS["step"],
        optimizer=setting.optimizer,
        steps=setting.repeats,
        device=setting.device,
        machine=setting.machine,
    )


def _fit_setting(setting: Setting) -> StepSetting:
    """As many rows as fill the size with weight and state."""
    nbytes, n_ids = _bytes_and_ids("fit", setting)
    n_fields = 1 + len(RECIPES[setting.optimizer].state)
    return StepSetting(
        n_rows=max(1, nbytes // (n_fields * 4 * setting.dim)),
        dim=setting.dim,
        n_ids=n_ids,
        optimizer=setting.optimizer,
        steps=FIT_STEPS,
        device=setting.device,
        machine=setting.machine,
    )
