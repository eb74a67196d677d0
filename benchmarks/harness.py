"""Timing: variants in turns, fresh inputs, medians with p20 and p80.

Variants of a setting run in one process and take turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.rows import OURS, Row, environment

SEED = 20
SLEEP_CYCLES_PER_MS = 2_000_000
"""GPU clock cycles in a millisecond, at most."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, where, and for how long. `quick` takes tiny sizes, which is the default on a CPU."""

    device: torch.device
    quick: bool = False
    cases: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    steps: int | None = None
    folder: Path | None = None
    report: Callable[[str], object] = field(default=lambda line: print(line, file=sys.stderr, flush=True))

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_small(self) -> bool:
        return self.quick or not self.on_gpu

    def wants(self, case: str) -> bool:
        """Tell whether a case was asked for."""
        return not self.cases or case in self.cases

    def choose(self, variants: Mapping[str, T]) -> dict[str, T]:
        """Select the variants that were asked for, or all."""
        chosen = {name: made for name, made in variants.items() if not self.variants or name in self.variants}
        if not chosen:
            asked = ", ".join(self.variants)
            self.report(f"no variant named {asked} here; there are: {', '.join(variants)}")
        return chosen

    def skip(self, variant: str, error: Exception) -> None:
        """Report a variant of others that does not run here; an error of flatbed is raised."""
        if variant.startswith(OURS):
            raise error
        self.report(f"skipped {variant}: {type(error).__name__}: {error}")

    def row(
        self,
        name: str,
        variant: str,
        setting: Mapping[str, Any],
        metrics: Mapping[str, Any],
        *,
        n_samples: int,
        ok: bool | None,
    ) -> Row:
        """Build a row; `name` is a benchmark and its case. Metrics that are None are left out."""
        benchmark, case = name.split()
        return {
            "benchmark": benchmark,
            "case": case,
            "setting": dict(setting),
            "variant": variant,
            "metrics": {key: value for key, value in metrics.items() if value is not None},
            "n_samples": n_samples,
            "ok": ok,
            **environment(self.device.type),
            "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }


# ---- clocks

Clock = Callable[[Callable[[], object], torch.device], float]


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_ms(call: Callable[[], object], device: torch.device) -> float:
    """Measure wall time from an idle device until it is idle again."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def host_ms(call: Callable[[], object], device: torch.device) -> float:
    """Measure time until a call returns, which on a GPU is before its kernels are done."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def gpu_ms(call: Callable[[], object], device: torch.device, *, host_ms: float = 1.0) -> float:
    """Measure GPU time from the first kernel to the last; on a CPU, wall time.

    The GPU sleeps for `host_ms` first, so that every kernel is queued before the first one starts.
    """
    if device.type != "cuda":
        return wall_ms(call, device)
    torch.cuda._sleep(int(host_ms * SLEEP_CYCLES_PER_MS))  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def copy_gb_per_s(target: Tensor, source: Tensor) -> float:
    """Measure how many 10⁹ bytes per second a plain copy moves."""
    names = {"target": target, "source": source}
    timer = Timer("target.copy_(source, non_blocking=True)", globals=names)
    seconds = 0.2 if target.is_cuda or source.is_cuda else 0.01
    return source.nbytes / 1e9 / float(timer.blocked_autorange(min_run_time=seconds).median)


def bus_gb_per_s(device: torch.device) -> tuple[float, float]:
    """Measure plain copies of pinned memory to the device and back; on a CPU, between two buffers."""
    on_gpu = device.type == "cuda"
    host = torch.ones((256 if on_gpu else 16) << 20, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones_like(host, device=device)
    return copy_gb_per_s(there, host), copy_gb_per_s(host, there)


def time_alone(call: Callable[[], object], device: torch.device) -> float:
    """Measure one call in a block of 20, as the median of five."""

    def block() -> None:
        for _ in range(20):
            call()

    return median(wall_ms(block, device) / 20 for _ in range(5))


# ---- turns


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of steps. Steps of a block run back to back, with one synchronization at the end."""

    turns: int
    warm_up: int = 1
    """Steps of each variant before the first turn."""
    settle: int = 0
    """Steps at the start of a turn that are not timed: a prefetcher fills its queue in them."""
    synchronized: int = 0
    """Steps per turn that are timed one by one."""
    blocks: int = 0
    """Blocks per turn."""
    block_steps: int = 1

    @property
    def n_steps(self) -> int:
        """Steps of one turn."""
        return self.settle + self.synchronized + self.blocks * self.block_steps


@dataclass(slots=True)
class Readings:
    """Times of one variant in ms, GPU memory of its steps, and whether all its checks passed."""

    synchronized: list[float] = field(default_factory=list)
    back_to_back: list[float] = field(default_factory=list)
    step_bytes: int = 0
    """GPU memory that steps took at most, on top of what was allocated before."""
    ok: bool = True


Steps = Callable[[Sequence[Any]], Iterator[Any]]
"""Takes inputs; each `next` runs one step and returns its result."""


def each(step: Callable[[Any], Any]) -> Steps:
    """Make steps of a function of one input."""
    return lambda inputs: map(step, inputs)


def time_in_turns(
    variants: Mapping[str, Steps],
    draw: Callable[[int], Sequence[Any]],
    plan: Plan,
    options: Options,
    *,
    clock: Clock = wall_ms,
    before: Callable[[str, Any], object] = lambda name, value: None,
    check: Callable[[Any, Any], bool] = lambda result, value: True,
) -> dict[str, Readings]:
    """Time every variant in turns, each step on a fresh input.

    - `before`: prepares a variant for an input, untimed; blocks do without.
    - `check`: judges the result of a step on an input; blocks do without.
    """
    found = {name: Readings() for name in variants}
    device = options.device

    def run_turn(name: str, inputs: Sequence[Any], *, is_warm_up: bool) -> None:
        readings, steps, values = found[name], variants[name](inputs), iter(inputs)

        def step() -> float:
            value, results = next(values), []
            before(name, value)
            took = clock(lambda: results.append(next(steps)), device)
            readings.ok &= check(results[0], value)
            return took

        for _ in range(plan.warm_up if is_warm_up else plan.settle):
            step()
        if not is_warm_up:
            readings.synchronized += [step() for _ in range(plan.synchronized)]
            for _ in range(plan.blocks):
                took = clock(lambda: [next(steps) for _ in range(plan.block_steps)], device)
                readings.back_to_back.append(took / plan.block_steps)
        for _ in steps:  # lets generators finish
            raise AssertionError("a turn has more steps than its plan")

    for number in range(plan.turns + 1):
        for name in [*found]:
            inputs = draw(plan.n_steps if number else plan.warm_up)
            allocated = reset_peak(device)
            try:
                run_turn(name, inputs, is_warm_up=number == 0)
            except Exception as error:
                options.skip(name, error)
                del found[name]
            else:
                found[name].step_bytes = max(found[name].step_bytes, peak_bytes(device) - allocated)
    return found


# ---- memory, bits, a stand-in for a model


def allocated_bytes(device: torch.device) -> int:
    """Return GPU memory that tensors hold; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> int:
    """Forget the peak of GPU memory; returns what is allocated now."""
    synchronize(device)  # starts CUDA
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return allocated_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of GPU memory since `reset_peak`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def free_memory(device: torch.device) -> None:
    """Return unused memory to the system, so that the next variant starts as the first one did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors hold the same bytes, on any devices."""
    return torch.equal(*(t.detach().cpu().contiguous().view(torch.uint8) for t in (found, expected)))


class Products:
    """A stand-in for a model: matrix products that take about `ms` per call."""

    def __init__(self, ms: float, device: torch.device) -> None:
        n, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (64, torch.float32)
        self._matrix = torch.eye(n, dtype=dtype, device=device)
        self._out = torch.empty_like(self._matrix)
        self.n_products = 20
        self.n_products = max(1, round(20 * ms / median([gpu_ms(self, device) for _ in range(10)][5:])))

    def __call__(self, _: object = None) -> None:
        for _ in range(self.n_products):
            torch.mm(self._matrix, self._matrix, out=self._out)
