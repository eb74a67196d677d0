"""A table with a cache and one without: after any sequence of operations, they are equal bit by bit."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import flatbed
from tests.tables.tables import Twins, cached_rows

MOST_ROWS = 30
DIM = 3
ids = st.lists(st.integers(0, MOST_ROWS), max_size=25)


class CacheMachine(RuleBasedStateMachine):
    """Random operations on both tables."""

    storage: ClassVar[str] = "host"
    device: ClassVar[str] = "cpu"
    by_kernels: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        interpret = {"TRITON_INTERPRET": "1"} if self.by_kernels and self.device == "cpu" else {}
        self.environ = mock.patch.dict(os.environ, interpret)
        self.environ.start()
        self.files = tempfile.TemporaryDirectory()
        self.folder = Path(self.files.name)

    @initialize(n_rows=st.integers(1, 20), n_slots=st.integers(1, 24), policy=st.sampled_from(["lru", "lfu"]))
    def begin(self, n_rows: int, n_slots: int, policy: str) -> None:
        options = {"cache_policy": policy, "device": self.device}
        self.twins = Twins(self.storage, self.folder, n_slots, n_rows=n_rows, **options)
        self.emb = self.twins.cached

    def teardown(self) -> None:
        for emb in self.twins.both if hasattr(self, "twins") else ():
            emb.table.close(discard=True)
        self.files.cleanup()
        self.environ.stop()

    @property
    def n_rows(self) -> int:
        return int(self.emb.num_embeddings)

    @property
    def index(self) -> Any:
        """The maps of the cache, which no public function tells; None without a cache."""
        cache = self.emb.table._store.cache
        return None if cache is None else cache.index

    def rows(self, numbers: list[int]) -> Tensor:
        return torch.tensor([number % self.n_rows for number in numbers], dtype=torch.int64)

    # ---- lookups

    @rule(numbers=ids)
    def look_up(self, numbers: list[int]) -> None:
        """A lookup in training: ids as they occur, some of them several times."""
        given, before = self.rows(numbers), cached_rows(self.emb)
        stats = self.emb.table.cache_stats()
        assert torch.equal(*(emb(given) for emb in self.twins.both))
        after, found = cached_rows(self.emb), self.emb.table.cache_stats()
        wanted = set(given.tolist())
        if not found.rows or not wanted:
            return
        assert wanted & before <= after
        assert found.hits - stats.hits == len(wanted & before)
        assert found.misses - stats.misses == len(wanted - before)
        assert found.evictions - stats.evictions == len(before - after)
        assert found.written - stats.written <= len(before - after)
        assert found.overflow - stats.overflow == len(wanted - after)
        # Kernels keep the slots of prefetched batches, too.
        assert self.by_kernels or len(wanted - after) == max(0, len(wanted) - found.rows)

    @rule(numbers=ids, more=ids)
    def train(self, numbers: list[int], more: list[int]) -> None:
        self.twins.step(self.rows(numbers), self.rows(more))

    @rule(
        lists=st.lists(st.lists(st.integers(0, MOST_ROWS), max_size=8), max_size=3), depth=st.integers(1, 3)
    )
    def prefetch(self, lists: list[list[int]], depth: int) -> None:
        """Batches that are admitted ahead of time, then looked up and changed in their order."""
        batches = [self.rows(numbers) for numbers in lists]
        lookups = {self.emb: lambda batch: batch}
        for n, given in enumerate(flatbed.Prefetcher(batches, lookups, depth=depth)):
            self.twins.step(given)
            for other in flatbed.Prefetcher(batches, lookups, depth=depth) if n == 1 else ():
                self.read(other.tolist())  # an evaluation in the middle of an epoch

    @rule(numbers=ids)
    def read(self, numbers: list[int]) -> None:
        """Reads leave the cache alone."""
        given, before = self.rows(numbers), (cached_rows(self.emb), self.emb.table.cache_stats())
        with torch.no_grad():
            assert torch.equal(*(emb(given) for emb in self.twins.both))
        assert torch.equal(*(emb.read_rows(given) for emb in self.twins.both))
        assert before == (cached_rows(self.emb), self.emb.table.cache_stats())

    # ---- other changes

    @rule(numbers=ids, seed=st.integers(0, 9))
    def write_rows(self, numbers: list[int], seed: int) -> None:
        given = self.rows(numbers)
        values = torch.randn(len(given), DIM, generator=torch.Generator().manual_seed(seed))
        for emb in self.twins.both:
            emb.write_rows(given, values)

    @rule(numbers=ids)
    def write_between_backward_and_step(self, numbers: list[int]) -> None:
        given = self.rows(numbers)
        for emb, optimizer in zip(self.twins.both, self.twins.optimizers, strict=True):
            emb(given).sin().sum().backward()
            emb.write_rows(given[::2], torch.ones(len(given[::2]), DIM))
            emb(given[:3])
            optimizer.step()
            optimizer.zero_grad()

    @rule()
    @precondition(lambda self: self.storage != "disk")
    def write_by_views(self) -> None:
        views = [emb.weight for emb in self.twins.both]
        for view in views:
            view[1:9] *= 2
        self.twins.step(self.rows([2, 3, 8]))  # a view may be held over steps
        for view in views:
            view[-1] += 1

    @rule()
    def load_state_dict(self) -> None:
        weight = torch.arange(self.n_rows * DIM * 1.0).view(-1, DIM)
        for emb in self.twins.both:
            emb.load_state_dict({"weight": weight})

    @rule(with_state=st.booleans())
    def save_and_load(self, with_state: bool) -> None:
        for emb in self.twins.both:
            saved = emb.table if with_state else flatbed.Embedding(self.n_rows, DIM, seed=2).table
            saved.save(self.folder / "saved.safetensors")
            emb.write_rows([0], torch.zeros(1, DIM))
            emb.table.load(self.folder / "saved.safetensors")

    @rule(copied=st.booleans())
    def return_to_a_checkpoint(self, copied: bool) -> None:
        given = self.rows([*range(MOST_ROWS)])
        for n, (emb, optimizer) in enumerate(zip(self.twins.both, self.twins.optimizers, strict=True)):
            flatbed.save_checkpoint(self.folder / f"{n}", emb, optimizer, copy_disk_tables=copied)
        self.twins.step(given)
        for n, (emb, optimizer) in enumerate(zip(self.twins.both, self.twins.optimizers, strict=True)):
            flatbed.load_checkpoint(self.folder / f"{n}", emb, optimizer)

    @rule(dropped=st.booleans())
    def give_to_another_optimizer(self, dropped: bool) -> None:
        for emb in self.twins.both if dropped else ():
            emb.table.drop_state()
        self.twins.optimizers = [flatbed.optim.Adam(emb, lr=0.1) for emb in self.twins.both]

    @rule(more=st.integers(1, 5))
    @precondition(lambda self: self.n_rows < MOST_ROWS - 5)
    def resize(self, more: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* cannot be loaded any more")
            for emb, n_rows in [(emb, self.n_rows + more) for emb in self.twins.both]:
                emb.table.resize(n_rows)

    @rule(n_slots=st.integers(0, 40), policy=st.sampled_from(["lru", "lfu", None]), by_bytes=st.booleans())
    def another_cache(self, n_slots: int, policy: str | None, by_bytes: bool) -> None:
        table = self.emb.table
        nbytes = n_slots * (table.nbytes // self.n_rows)
        table.set_cache(**({"cache_bytes": nbytes} if by_bytes else {"cache_rows": n_slots}), policy=policy)
        self.emb(self.rows([1]))
        assert table.cache_stats().rows == min(n_slots, self.n_rows)

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), min_size=1, max_size=20))
    def warm(self, numbers: list[int]) -> None:
        given = self.rows(numbers)
        self.emb.table.warm(given)
        n_slots = self.emb.table.cache_stats().rows
        rows, times = torch.unique(given, return_counts=True)
        chosen = set(rows[times.argsort(descending=True, stable=True)][:n_slots].tolist())
        assert self.by_kernels or chosen <= cached_rows(self.emb)

    # ---- invariants

    @invariant()
    def every_row_is_what_it_should_be(self) -> None:
        if hasattr(self, "twins"):
            self.twins.check()

    @invariant()
    def maps_are_inverse(self) -> None:
        """`slot_of_row` and `row_of_slot` are inverse to each other, and free slots are clean."""
        if not hasattr(self, "twins") or self.index is None:
            return
        row_of_slot, slot_of_row = self.index.row_of_slot, self.index.slot_of_row
        slots, rows = ((a >= 0).nonzero().flatten() for a in (row_of_slot, slot_of_row))
        assert torch.equal(slot_of_row[row_of_slot[slots]].long(), slots)
        assert torch.equal(row_of_slot[slot_of_row[rows].long()], rows)
        assert not self.index.dirty[row_of_slot < 0].any()
        stats, nbytes = self.emb.table.cache_stats(), self.emb.table.nbytes // self.n_rows
        assert stats.bytes_read == (stats.misses - stats.overflow) * nbytes
        assert stats.bytes_written == stats.written * nbytes
        assert stats.hit_rate == stats.hits / max(1, stats.hits + stats.misses)


class OnDisk(CacheMachine):
    """Tables on disk."""

    storage = "disk"

    @rule()
    def checkpoint(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* cannot be loaded any more")
            self.emb.table.checkpoint()
        assert self.index is None or not self.index.dirty.any()


class ByKernels(CacheMachine):
    """Tables on the host whose caches are driven by kernels."""

    by_kernels = True
    device = "cuda" if torch.cuda.is_available() else "cpu"


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "prefetch": lambda machine: machine.prefetch([[1, 9], [9, 2, 2], []], 2),
    "write_rows": lambda machine: machine.write_rows([8, 12, 8], 1),
    "write between": lambda machine: machine.write_between_backward_and_step([8, 12, 1, 8]),
    "write_by_views": lambda machine: machine.write_by_views(),
    "load_state_dict": lambda machine: machine.load_state_dict(),
    "save": lambda machine: machine.save_and_load(True),
    "load without state": lambda machine: machine.save_and_load(False),
    "checkpoint": lambda machine: machine.return_to_a_checkpoint(False),
    "copied checkpoint": lambda machine: machine.return_to_a_checkpoint(True),
    "another optimizer": lambda machine: machine.give_to_another_optimizer(False),
    "drop_state": lambda machine: machine.give_to_another_optimizer(True),
    "resize": lambda machine: machine.resize(5),
    "another_cache": lambda machine: machine.another_cache(2, "lru", False),
    "no cache": lambda machine: machine.another_cache(0, None, True),
}


EACH = [
    (kind, name)
    for kind in (CacheMachine, OnDisk)
    for name in OPERATIONS
    if kind is CacheMachine or name != "write_by_views"  # files have no view that can be written to
]


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_each_operation(kind: type[CacheMachine], name: str) -> None:
    machine = kind()
    machine.begin(20, 6, "lfu")
    machine.train([1, 2, 3], [3, 4])
    assert cached_rows(machine.emb) == {1, 2, 3, 4}  # changed rows are in the cache when the operation begins
    OPERATIONS[name](machine)
    for _ in range(2):
        machine.every_row_is_what_it_should_be()
        machine.maps_are_inverse()
        machine.train([1, 2, 3], [3, 4])
        machine.train([5, 1, 19], [8, 8])
    machine.every_row_is_what_it_should_be()
    machine.teardown()


def run(machine: type[CacheMachine], max_examples: int, n_steps: int) -> None:
    limits = settings(max_examples=max_examples, stateful_step_count=n_steps, deadline=None)
    run_state_machine_as_test(machine, settings=limits)


def test_host_memory() -> None:
    run(CacheMachine, 40, 25)


def test_disk() -> None:
    run(OnDisk, 25, 25)


@pytest.mark.parametrize("where", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels(where: str) -> None:
    if where == "interpreter" and torch.cuda.is_available():
        pytest.skip("one process cannot both compile and interpret; the GPU runs the same test")
    run(ByKernels, 6, 15)
