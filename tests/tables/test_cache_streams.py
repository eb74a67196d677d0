"""Order between training and prefetches: no admission moves a row while other work uses it.

Streams are simulated: they know which work is ordered before their next work. Kernels are interpreted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from flatbed.kernels._triton import cache as kernels
from flatbed.tables.cache import gpu
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.cache.gpu import GpuCache
from tests.tables.test_cache import cache_of

N_ROWS = 24


@dataclass(eq=False)
class Stream:
    """A simulated stream; events are sets of the work before them."""

    before: set[int] = field(default_factory=set)

    def record_event(self) -> frozenset[int]:
        return frozenset(self.before)

    def wait_event(self, event: frozenset[int]) -> None:
        self.before |= event

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


@dataclass
class Work:
    """Kernels that use rows, or an admission that moves rows."""

    rows: set[int]
    is_admission: bool
    before: set[int]


class Simulation:
    """A cache, a training stream and a prefetch stream, and all work that was issued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_slots: int, depth: int, n_lookups: int) -> None:
        cache = cache_of("cpu", N_ROWS, n_slots)
        assert isinstance(cache, GpuCache)
        self.cache, self.window = cache, (depth + 2) * n_lookups - 1
        self.training, self.side = Stream(), Stream()
        self.current = self.training
        self.work: list[Work] = []
        self.pending: list[list[LookupBatch]] = []
        self.begun: list[list[LookupBatch]] = []
        cache.device = torch.device("cuda")
        admit = kernels.admit

        def issue_admission(index: Any, keys: Tensor, *args: Any, **options: Any) -> Any:
            before = index.slot_of_row.clone()
            found = admit(index, keys, *args, **options)
            self.issue(set((index.slot_of_row != before).nonzero().flatten().tolist()), is_admission=True)
            return found

        monkeypatch.setattr(kernels, "admit", issue_admission)
        monkeypatch.setattr(gpu, "is_capturing", lambda device: False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)

    def issue(self, rows: set[int], *, is_admission: bool = False) -> None:
        self.work.append(Work(rows, is_admission, set(self.current.before)))
        self.current.before.add(len(self.work) - 1)

    def prefetch(self, lookups: list[Tensor]) -> None:
        self.current, batches = self.side, []
        for keys in lookups:
            found = self.cache.prefetch(keys, window=self.window, reservation=None)
            if found is not None:
                ready: Any = self.side.record_event()
                batches.append(LookupBatch(keys.shape, keys, found[0], self.cache, found[1], ready=ready))
        self.current = self.training
        self.pending.append(batches)

    def begin(self) -> None:
        batches = self.pending.pop(0)
        for batch in batches:
            self.training.wait_event(batch.ready)  # type: ignore[arg-type]
        if batches:
            self.cache.begin(batches[0].admission)
        self.begun.append(batches)

    def use(self, batch: LookupBatch | None, rows: Tensor) -> None:
        self.cache.location_for(batch, update=True)
        self.issue(set(rows.tolist()))

    def conflicts(self) -> int:
        """Pairs of an admission and other work on the rows that it moves, in no order."""
        found = 0
        for (i, one), (j, other) in combinations(enumerate(self.work), 2):
            if i not in other.before and j not in one.before:
                both = one.is_admission and other.is_admission
                found += both or bool((one.is_admission or other.is_admission) and one.rows & other.rows)
        return found


def simulate(monkeypatch: pytest.MonkeyPatch, seed: int) -> Simulation:
    draw = random.Random(seed)
    depth, n_lookups = draw.choice([0, 1, 2]), draw.choice([1, 1, 2])
    simulation = Simulation(monkeypatch, draw.choice([6, 12, 20, N_ROWS]), depth, n_lookups)

    def ids() -> Tensor:
        return torch.tensor(
            [draw.randrange(N_ROWS) for _ in range(draw.choice([0, 1, 2, 3]))], dtype=torch.int64
        )

    for _ in range(14):
        while len(simulation.pending) < depth + 1:
            simulation.prefetch([ids() for _ in range(n_lookups)])
        simulation.begin()
        for batch in simulation.begun[-1]:
            simulation.use(batch, batch.keys)  # lookup
        other = draw.choice(["none", "none", "none", "admit", "read", "late"])
        if other == "admit":
            keys = ids()
            unique, number = simulation.cache.admit(keys)
            simulation.use(LookupBatch(keys.shape, keys, unique, simulation.cache, number), keys)
        elif other == "read":
            simulation.use(None, torch.arange(0, N_ROWS, 5))
        batches = [batch for held in simulation.begun[-3:] for batch in held]
        for batch in batches if other == "late" else simulation.begun[-1]:
            simulation.use(batch, batch.keys)  # step
    return simulation


@pytest.mark.usefixtures("kernel_device")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
class TestOrder:
    @pytest.mark.parametrize("seed", range(10))
    def test_no_conflicts(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        assert simulate(monkeypatch, seed).conflicts() == 0

    def test_prefetches_overlap_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With room for all batches, a prefetch does not wait for the batch in hand, nor the other way."""
        simulation = Simulation(monkeypatch, N_ROWS, 1, 1)
        simulation.prefetch([torch.tensor([1, 2])])
        simulation.begin()
        (batch,) = simulation.begun[0]
        simulation.use(batch, batch.keys)
        simulation.prefetch([torch.tensor([3, 4])])
        simulation.use(batch, batch.keys)
        lookup, admission, step = simulation.work[1:]
        assert 1 not in admission.before
        assert 2 not in step.before
        assert simulation.conflicts() == 0
        assert lookup.rows == {1, 2}

    @pytest.mark.parametrize("name", ["protects", "_wait_for_training", "wait_for_prefetch"])
    def test_each_rule_is_needed(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without one of the rules there are conflicts."""
        monkeypatch.setattr(GpuCache, name, lambda *_: True)
        n_conflicts = 0
        for seed in range(10):
            with monkeypatch.context() as patch:
                n_conflicts += simulate(patch, seed).conflicts()
        assert n_conflicts > 0
