"""Whole steps on one table: ids on the host, lookup, loss, backward, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatbed.bench.measure import free_memory, percentiles, synchronize
from flatbed.bench.rows import Machine
from flatbed.bench.tables_measure import SEED, wall_time
from flatbed.bench.tables_reference import Difference, Reference, compare
from flatbed.bench.tables_rows import BENCHMARK, FLATBED, HOST, TrainRow
from flatbed.bench.tables_ways import RECIPES, Trainee, make_target, trainees

CHECKED_STEPS = 3
WARM_UP_STEPS = 5
FIT_DIM = 128
FIT_LIMIT_BYTES = 4 * 10**9


@dataclass(frozen=True, slots=True)
class StepSetting:
    """How large, how often, where."""

    n_rows: int
    dim: int
    n_ids: int
    optimizer: str
    steps: int
    device: torch.device
    machine: Machine
    case: str = "step"
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """Ids on the host, the same for all ways, and what the rows are to become."""

    checked: list[Tensor]
    warm_up: list[Tensor]
    single: list[Tensor]
    together: list[Tensor]
    target: Tensor


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the GPU; None on a CPU."""

    peak: int | None
    growth: int | None


def make_batches(setting: StepSetting) -> Batches:
    """Uniform ids, fresh for every step.

    Half of those that are checked come again, to meet their state, and elsewhere, with another gradient.
    """
    generator = torch.Generator().manual_seed(SEED)

    def draw(n_batches: int) -> list[Tensor]:
        return [
            torch.randint(setting.n_rows, (setting.n_ids,), generator=generator) for _ in range(n_batches)
        ]

    checked, half = draw(CHECKED_STEPS), setting.n_ids // 2
    for ids in checked[1:]:
        ids[:half] = checked[0][:half][torch.randperm(half, generator=generator)]
    target = make_target(setting.n_ids, setting.dim, generator).to(setting.device)
    return Batches(checked, draw(WARM_UP_STEPS), draw(setting.steps), draw(setting.steps), target)


def run(setting: StepSetting, *, left_out: Callable[[str, str], object]) -> Iterator[TrainRow]:
    """Rows as they are found; a peer that does not run here is named and left out."""
    batches = make_batches(setting)
    expected = Reference(RECIPES[setting.optimizer], batches.checked, batches.target)
    for way, make in trainees(setting.device, left_out=left_out).items():
        try:
            yield _measure(setting, way, make, batches, expected)
        except Exception as error:  # of any kind: it must not cost what comes after it
            if way.startswith(FLATBED):
                raise
            left_out(way, f"{type(error).__name__}: {error}")
        free_memory(setting.device)


def run_fit(setting: StepSetting, *, limit_bytes: int = FIT_LIMIT_BYTES) -> Iterator[TrainRow]:
    """A table on the host that is larger than what the process may take of the GPU."""
    free_memory(setting.device)
    setting = replace(setting, case="fit", memory_limit_bytes=limit_bytes)
    with _limited(setting.device, limit_bytes):
        batches = make_batches(setting)
        expected = Reference(RECIPES[setting.optimizer], batches.checked, batches.target)
        make = trainees(setting.device, left_out=lambda way, why: None)[HOST]
        yield _measure(setting, HOST, make, batches, expected)
    free_memory(setting.device)


@contextmanager
def _limited(device: torch.device, nbytes: int) -> Iterator[None]:
    """Keep torch from taking more of the GPU."""
    gpu = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), gpu)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)


def _measure(
    setting: StepSetting,
    way: str,
    make: Callable[..., Trainee],
    batches: Batches,
    expected: Reference,
) -> TrainRow:
    device = setting.device
    free_memory(device)
    free_before = _free_bytes(device)
    trainee = make(
        setting.n_rows, setting.dim, RECIPES[setting.optimizer], device=device, n_ids=setting.n_ids
    )
    try:
        for ids in batches.checked:
            trainee.step(trainee.prepare(ids), batches.target)
        difference = compare(trainee.read(expected.rows), expected)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for ids in batches.warm_up:
            trainee.step(trainee.prepare(ids), batches.target)
        single, together_ms = _read(trainee, batches, device)
        memory = Memory(None, None)
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) + trainee.further_bytes()
            memory = Memory(peak, (free_before or 0) - (_free_bytes(device) or 0))
    finally:
        synchronize(device)
        trainee.close()
    return _row(setting, trainee, single, together_ms=together_ms, memory=memory, difference=difference)


def _read(trainee: Trainee, batches: Batches, device: torch.device) -> tuple[list[float], float]:
    """Times of steps one by one, and per step of as many in a row, in ms."""
    single, together = ([trainee.prepare(ids) for ids in some] for some in (batches.single, batches.together))
    target = batches.target
    times = [wall_time(lambda ids=ids: trainee.step(ids, target), device) for ids in single]  # type: ignore[misc]
    synchronize(device)
    begin = time.perf_counter()
    for ids in together:
        trainee.step(ids, target)
    synchronize(device)
    return times, 1e3 * (time.perf_counter() - begin) / len(together)


def _free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _row(
    setting: StepSetting,
    trainee: Trainee,
    times: list[float],
    *,
    together_ms: float,
    memory: Memory,
    difference: Difference,
) -> TrainRow:
    p20, p50, p80 = percentiles(times)
    return TrainRow(
        benchmark=BENCHMARK,
        case=setting.case,
        way=trainee.way,
        optimizer=setting.optimizer,
        n_rows=setting.n_rows,
        dim=setting.dim,
        n_ids=setting.n_ids,
        table_bytes=trainee.table_bytes,
        n_samples=len(times),
        p20_ms=p20,
        p50_ms=p50,
        p80_ms=p80,
        together_ms=together_ms,
        peak_memory_bytes=memory.peak,
        growth_bytes=memory.growth,
        memory_limit_bytes=setting.memory_limit_bytes,
        n_checked_rows=len(difference.of_rows),
        n_wrong_rows=difference.n_wrong,
        max_abs_error=difference.largest,
        ok=difference.n_wrong == 0,
        machine=setting.machine,
    )
