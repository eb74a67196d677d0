"""Timing: warm-up, fresh inputs, variants in turns, medians with p20 and p80.

Variants of a setting run in one process and take turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.rows import OURS, Row, make_row

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

    def row(self, benchmark: str, case: str, variant: str, **measured: Any) -> Row:
        """Build a row of this device."""
        return make_row(benchmark, case, variant, device=self.device, **measured)

    def skip(self, variant: str, error: Exception) -> None:
        """Report a variant of others that does not run here; an error of flatbed is raised."""
        if variant.startswith(OURS):
            raise error
        self.report(f"skipped {variant}: {type(error).__name__}: {error}")


# ---- clocks


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
    return source.nbytes / 1e9 / float(timer.blocked_autorange(min_run_time=0.2).median)


def bus_gb_per_s(device: torch.device) -> tuple[float, float]:
    """Measure plain copies of pinned memory to the device and back; on a CPU, between two buffers."""
    on_gpu = device.type == "cuda"
    host = torch.ones((256 if on_gpu else 16) << 20, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones_like(host, device=device)
    return copy_gb_per_s(there, host), copy_gb_per_s(host, there)


def host_ms(call: Callable[[], object], device: torch.device) -> float:
    """Measure time until a call returns, which on a GPU is before its kernels are done."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    took = 1e3 * (time.perf_counter() - begin)
    synchronize(device)
    return took


# ---- calls in turns


@dataclass(slots=True)
class Calls:
    """Times of one variant in ms, and whether all its checks passed."""

    times: list[float] = field(default_factory=list)
    ok: bool = True


def call_in_turns(
    calls: Mapping[str, Callable[[Any], Any]],
    draw: Callable[[], Any],
    options: Options,
    *,
    turns: int,
    per_turn: int = 1,
    warm_up: int = 1,
    clock: Callable[[Callable[[], object], torch.device], float] = wall_ms,
    before: Callable[[str, Any], object] = lambda name, value: None,
    check: Callable[[Any, Any], bool] = lambda result, value: True,
) -> dict[str, Calls]:
    """Time calls of all variants in turns, each on a fresh input.

    - `before`: prepares a variant for an input, untimed.
    - `check`: judges the result of a call on an input; it sees every call.
    - `warm_up`: turns that are not counted.
    """
    found = {name: Calls() for name in calls}
    for turn in range(warm_up + turns):
        for name in [*found]:
            try:
                for _ in range(per_turn):
                    value, results = draw(), []
                    before(name, value)
                    took = clock(lambda: results.append(calls[name](value)), options.device)  # noqa: B023
                    found[name].ok &= check(results[0], value)
                    found[name].times += [took] if turn >= warm_up else []
            except Exception as error:
                options.skip(name, error)
                del found[name]
    return found


# ---- steps in turns


@dataclass(frozen=True, slots=True)
class Plan:
    """How many steps of which kind. Steps of a block run back to back, with one wait at the end."""

    warm_up: int
    turns: int
    synchronized: int
    """Steps per turn that are timed one by one."""
    blocks: int
    """Blocks per turn."""
    block_steps: int
    settle: int = 5
    """Steps at the start of a turn that are not timed: a prefetcher fills its queue in them."""

    @property
    def n_steps(self) -> int:
        """Steps of one turn."""
        return self.settle + self.synchronized + self.blocks * self.block_steps


Steps = Callable[[Sequence[Any]], Iterator[object]]
"""Takes batches; each `next` runs one step."""


def each(step: Callable[[Any], object]) -> Steps:
    """Make steps of a function that takes one batch."""

    def steps(batches: Sequence[Any]) -> Iterator[object]:
        for batch in batches:
            yield step(batch)

    return steps


@dataclass(slots=True)
class Readings:
    """Times of one variant, in ms."""

    synchronized: list[float] = field(default_factory=list)
    back_to_back: list[float] = field(default_factory=list)
    step_bytes: int | None = None
    """GPU memory that steps took at most, on top of what was allocated before."""
    n_steps: int = 0


def time_in_turns(
    variants: Mapping[str, Steps],
    draw: Callable[[int], Sequence[Any]],
    plan: Plan,
    options: Options,
    *,
    around: Callable[[str, Callable[[], None]], None] = lambda name, turn: turn(),
) -> dict[str, Readings]:
    """Time every variant in turns on fresh batches; `around` may look at counters before and after a turn."""
    found: dict[str, Readings] = {}

    def attempt(name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            options.skip(name, error)
            del found[name]

    for name, steps in variants.items():
        found[name] = Readings()
        attempt(name, partial(_drain, steps, draw(plan.warm_up)))
    for _ in range(plan.turns):
        for name in [*found]:
            turn = partial(_time_turn, variants[name], draw(plan.n_steps), plan, found[name], options.device)
            attempt(name, partial(around, name, turn))
    return found


def _drain(steps: Steps, batches: Sequence[Any]) -> None:
    for _ in steps(batches):
        pass


def _time_turn(
    make: Steps, batches: Sequence[Any], plan: Plan, readings: Readings, device: torch.device
) -> None:
    steps = make(batches)
    before = allocated_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(plan.settle):
        next(steps)
    for _ in range(plan.synchronized):
        readings.synchronized.append(wall_ms(lambda: next(steps), device))

    def block() -> None:
        for _ in range(plan.block_steps):
            next(steps)

    for _ in range(plan.blocks):
        readings.back_to_back.append(wall_ms(block, device) / plan.block_steps)
    readings.n_steps += plan.n_steps
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - before
        readings.step_bytes = max(peak, readings.step_bytes or 0)


class TorchGraph:
    """A training step in a CUDA graph, as a user of torch alone writes it: warm up, capture, copy, replay."""

    WARM_UP = 3

    def __init__(self, step: Callable[[Any], object], example: Sequence[Tensor]) -> None:
        self._inputs = [tensor.clone() for tensor in example]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UP):
                step(self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step(self._inputs)

    def __call__(self, batch: Sequence[Tensor]) -> None:
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(batch), non_blocking=True)
        self._graph.replay()


# ---- memory, ids, checks


def allocated_bytes(device: torch.device) -> int:
    """Return GPU memory that tensors hold; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_memory(device: torch.device) -> None:
    """Return unused memory to the system, so that the next variant starts as the first one did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def unique_ids(n_rows: int, n_ids: int, generator: torch.Generator) -> Tensor:
    """Draw different rows in random order."""
    if n_rows < 16 * n_ids:
        return torch.randperm(n_rows, generator=generator, device=generator.device)[:n_ids]
    drawn = torch.randint(n_rows, (2 * n_ids,), generator=generator, device=generator.device)
    unique: Tensor = torch.unique(drawn)
    order = torch.randperm(len(unique), generator=generator, device=generator.device)
    return unique[order[:n_ids]]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors hold the same bytes, on any devices."""
    return torch.equal(*(t.detach().cpu().contiguous().view(torch.uint8) for t in (found, expected)))


def pinned(array: Any) -> Tensor:
    """Copy a numpy array to new pinned memory."""
    copy: Tensor = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
    copy.numpy()[...] = array
    return copy


class Products:
    """A stand-in for a model: matrix products that take about `ms` per call."""

    def __init__(self, ms: float, device: torch.device) -> None:
        n, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (64, torch.float32)
        self._matrix = torch.eye(n, dtype=dtype, device=device)
        self._out = torch.empty_like(self._matrix)
        self.n_products = 20
        times = [gpu_ms(self, device) for _ in range(10)][5:]
        self.n_products = max(1, round(20 * ms / sorted(times)[len(times) // 2]))

    def __call__(self) -> None:
        for _ in range(self.n_products):
            torch.mm(self._matrix, self._matrix, out=self._out)
