"""How steps are read: one by one and in a row, with what the cache did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from flatbed.bench.cache_ids import Batch, Source
from flatbed.bench.cache_ways import EAGER, Trainee, Way
from flatbed.bench.host import Host
from flatbed.bench.measure import synchronize
from flatbed.bench.tables_measure import wall_time
from flatbed.tables.cache import CacheStats

TURNS = 4
COUNTED = ("hits", "misses", "written")
SETTLE = 5  # steps before the readings of a turn: a graph is captured in them, a prefetcher begins
AT_ONCE = 100  # batches of a warm-up in memory at a time

LeftOut: TypeAlias = Callable[[str, str], object]
"""Called with a way that could not be measured, and why."""
Stage: TypeAlias = Callable[[str], object]
"""Called with its name at the beginning of each stage."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many steps of which kind, for each way."""

    warm_up: int = 200
    synced: int = 100
    blocks: int = 10
    block_steps: int = 20

    @property
    def n_steps(self) -> int:
        """Of one turn of one way."""
        return SETTLE + _part(self.synced) + _part(self.blocks) * self.block_steps


@dataclass(slots=True)
class Readings:
    """Times in ms, and counts of the cache over all steps around them."""

    synced: list[float] = field(default_factory=list)
    in_row: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    """Of the host, before and after each turn."""
    n_steps: int = 0
    counts: dict[str, int] | None = None
    peak_bytes: int | None = None
    last: Batch | None = None
    """The batch of the last step."""

    def count(self, before: CacheStats | None, after: CacheStats | None, n_steps: int) -> None:
        """What the cache has done in so many steps."""
        self.n_steps += n_steps
        if after is None:
            return
        self.counts = self.counts or dict.fromkeys(COUNTED, 0)
        for name in COUNTED:
            self.counts[name] += getattr(after, name) - (0 if before is None else getattr(before, name))

    def per_step(self, name: str) -> float | None:
        """How often something was counted in a step."""
        return None if self.counts is None else self.counts[name] / self.n_steps


def warm_up(trainee: Trainee, source: Source, n_steps: int) -> None:
    """Steps that nobody reads."""
    for first in range(0, n_steps, AT_ONCE):
        batches = source.draw(min(AT_ONCE, n_steps - first))
        for _ in trainee.steps(EAGER, batches):
            pass


def read_in_turns(
    trainee: Trainee,
    ways: Sequence[Way],
    source: Source,
    plan: Plan,
    *,
    device: torch.device,
    host: Host,
    left_out: LeftOut,
    baseline_bytes: int = 0,
) -> dict[Way, Readings]:
    """Readings of each way, in turns, on the same table; every batch is a new one.

    `baseline_bytes`: what was on the GPU before the cache. A way that fails is left out from there on.
    """
    found = {way: Readings() for way in ways}
    for _ in range(TURNS):
        for way in [*found]:
            batches = source.draw(plan.n_steps)
            before = trainee.stats()
            _begin_peak(device)
            try:
                with closing(trainee.steps(way, batches)) as steps:
                    read_turn(steps, plan, found[way], device, host)
            except Exception as error:  # of any kind: it must not cost what the others have found
                left_out(way.name, f"{type(error).__name__}: {error}")
                del found[way]
                continue
            _note_peak(found[way], device, baseline_bytes)
            found[way].count(before, trainee.stats(), len(batches))
            found[way].last = batches[-1]
    return found


def read_turn(
    steps: Iterator[None], plan: Plan, readings: Readings, device: torch.device, host: Host
) -> None:
    """One turn: all of the steps, beginning on a core that nobody else uses, if there is one.

    Nothing pauses in between: meanwhile a prefetcher would get further ahead than it can stay.
    """
    readings.paces.append(host.settle())
    for _ in range(SETTLE):
        next(steps)
    for _ in range(_part(plan.synced)):
        readings.synced.append(wall_time(lambda: next(steps), device))
    for _ in range(_part(plan.blocks)):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(plan.block_steps):
            next(steps)
        synchronize(device)
        readings.in_row.append(1e3 * (time.perf_counter() - begin) / plan.block_steps)
    readings.paces.append(host.pace())


def _part(n: int) -> int:
    """Of one turn."""
    return -(-n // TURNS)


def _begin_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _note_peak(readings: Readings, device: torch.device, baseline_bytes: int) -> None:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - baseline_bytes
        readings.peak_bytes = max(peak, readings.peak_bytes or 0)
