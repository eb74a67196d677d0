"""Caches against a dictionary: after any sequence of operations, every row is what it should be."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import flatbed
from flatbed.tables.lookup import RowPrefetch
from tests.tables.tables import COUNTS

MOST_ROWS = 30
DIM = 5  # 20 bytes of 32


class CacheMachine(RuleBasedStateMachine):
    """A table with a cache, and a dictionary of what its records should be."""

    storage: ClassVar[str] = "host"
    interpreted: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.before = os.environ.get("TRITON_INTERPRET")
        if self.interpreted:
            os.environ["TRITON_INTERPRET"] = "1"
        self.folder = tempfile.TemporaryDirectory()
        self.draw = torch.Generator().manual_seed(0)
        self.counted: Any = None
        self.counts = dict.fromkeys(COUNTS, 0)

    @initialize(n_rows=st.integers(1, 20), n_slots=st.integers(1, 24), policy=st.sampled_from(["lru", "lfu"]))
    def begin(self, n_rows: int, n_slots: int, policy: str) -> None:
        path = Path(self.folder.name) / "table" if self.storage == "disk" else None
        options: dict[str, Any] = {"init": "zeros", "storage": self.storage, "path": path}
        self.emb = flatbed.Embedding(n_rows, DIM, cache_rows=n_slots, cache_policy=policy, **options)
        self.table = self.emb.table
        self.store = self.table._store
        self.nbytes = self.store.ensure_layout().record.nbytes
        self.expected = {row: torch.zeros(self.nbytes, dtype=torch.uint8) for row in range(n_rows)}

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close(discard=True)
        self.folder.cleanup()
        if self.interpreted:
            os.environ.pop("TRITON_INTERPRET")
            if self.before is not None:
                os.environ["TRITON_INTERPRET"] = self.before

    # ---- expectations

    @property
    def cache(self) -> Any:
        return self.store.cache

    @property
    def n_rows(self) -> int:
        return len(self.expected)

    def ids(self, numbers: list[int]) -> Tensor:
        """Unique rows in range."""
        return torch.tensor(sorted({number % self.n_rows for number in numbers}), dtype=torch.int64)

    def wanted(self, rows: Tensor) -> Tensor:
        return torch.stack([self.expected[row] for row in rows.tolist()]) if len(rows) else torch.empty(0)

    def remember(self, rows: Tensor, records: Tensor) -> None:
        for row, record in zip(rows.tolist(), records, strict=True):
            self.expected[row] = record.clone()

    def records(self, n: int) -> Tensor:
        return torch.randint(256, (n, self.nbytes), dtype=torch.uint8, generator=self.draw)

    def cached(self) -> dict[int, bool]:
        """The rows in the cache, and True for those that have changed."""
        if self.cache is None:
            return {}
        index = self.cache.index
        slots = (index.row_of_slot >= 0).nonzero().flatten()
        rows, dirty = index.row_of_slot[slots].tolist(), index.dirty[slots].tolist()
        return {row: bool(changed) for row, changed in zip(rows, dirty, strict=True)}

    def count(self, *changes: int) -> None:
        for name, more in zip(COUNTS, changes, strict=True):
            self.counts[name] += more

    def follow_cache(self) -> None:
        """Begin to count again if the table has another cache."""
        if self.cache is not self.counted:
            self.counted, self.counts = self.cache, dict.fromkeys(COUNTS, 0)

    # ---- operations

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=25))
    def look_up(self, numbers: list[int]) -> None:
        """A lookup in training: ids as they occur, some of them several times."""
        ids = torch.tensor([number % self.n_rows for number in numbers], dtype=torch.int64)
        cache = self.store.ensure_cache(len(ids))
        self.follow_cache()
        before, rows = self.cached(), set(ids.tolist())
        self.emb(ids)
        if cache is None:
            return
        after = self.cached()
        hits = rows & before.keys()
        evicted = before.keys() - after.keys()
        overflow = max(0, len(rows) - cache.n_slots)
        if self.interpreted and self.storage == "host":  # slots of prefetched batches are kept, too
            overflow = len(rows - after.keys())
        assert hits <= after.keys()
        assert not any(after[row] for row in after.keys() - before.keys())  # admitted rows are unchanged
        assert len(rows & after.keys()) == len(rows) - overflow
        kept = {row: changed for row, changed in before.items() if row not in evicted}
        assert kept.items() <= after.items()
        n_written = sum(before[row] for row in evicted)
        self.count(len(hits), len(rows) - len(hits), len(evicted), n_written, overflow)

    @rule(
        lists=st.lists(st.lists(st.integers(0, MOST_ROWS), max_size=8), max_size=3), depth=st.integers(0, 2)
    )
    def prefetch(self, lists: list[list[int]], depth: int) -> None:
        """Batches that are admitted ahead of time, then looked up and changed in their order."""
        prefetcher = RowPrefetch(self.table, depth)
        batches = [torch.tensor([n % self.n_rows for n in numbers], dtype=torch.int64) for numbers in lists]
        requests = []
        for ids in batches:
            requests.append(prefetcher.check([ids], at_once=True))
            prefetcher.read(requests[-1])
            prefetcher.admit(requests[-1], {id(ids): ids})
        for ids, request in zip(batches, requests, strict=True):
            prefetcher.begin(request)
            found = self.emb(ids).detach()
            expected = self.wanted(ids)[:, : DIM * 4].contiguous() if len(ids) else found
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
            self.scatter(ids.tolist())
            prefetcher.finish(request)
        assert not self.table._prefetched
        self.follow_cache()
        stats = self.table.cache_stats()
        self.counts = {name: getattr(stats, name) for name in COUNTS}

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=12))
    def scatter(self, numbers: list[int]) -> None:
        """A step, or write_rows."""
        rows = self.ids(numbers)
        records = self.records(len(rows))
        self.table._row_io.scatter_(rows, records)
        self.remember(rows, records)

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=25), times=st.integers(1, 3))
    def train(self, numbers: list[int], times: int) -> None:
        """Lookups and changes of the same rows."""
        for _ in range(times):
            self.look_up(numbers)
            self.scatter(numbers)

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=12))
    def weights(self, numbers: list[int]) -> None:
        rows = self.ids(numbers)
        values = torch.randn(len(rows), DIM, generator=self.draw)
        self.table.write_rows(rows, values)
        assert torch.equal(self.table.read_rows(rows), values)
        self.remember(rows, self.table._row_io.gather(rows))  # the padding behind a weight may change

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=12), short=st.booleans())
    def gather(self, numbers: list[int], short: bool) -> None:
        rows = self.ids(numbers)[torch.randperm(len(self.ids(numbers)), generator=self.draw)]
        nbytes = DIM * 4 if short else self.nbytes
        found = self.table._row_io.gather(rows, nbytes)
        assert found.shape == (len(rows), nbytes)
        if len(rows):
            assert torch.equal(found, self.wanted(rows)[:, :nbytes])

    @rule()
    def flush(self) -> None:
        self.store.flush()
        assert not any(self.cached().values())
        self.check_storage()

    @rule()
    def drop(self) -> None:
        self.store.flush(drop=True)
        assert not self.cached()
        self.check_storage()

    def check_storage(self) -> None:
        every = torch.arange(self.n_rows)
        assert torch.equal(self.store.ensure_layout().gather(every), self.wanted(every))

    @rule(n_slots=st.integers(0, 24), policy=st.sampled_from(["lru", "lfu", None]))
    def another_cache(self, n_slots: int, policy: str | None) -> None:
        self.table.set_cache(n_slots, policy=policy)
        assert self.cache is None
        self.check_storage()

    @rule(more=st.integers(1, 5))
    @precondition(lambda self: self.n_rows < MOST_ROWS - 5)
    def resize(self, more: int) -> None:
        for row in range(self.n_rows, self.n_rows + more):
            self.expected[row] = torch.zeros(self.nbytes, dtype=torch.uint8)
        self.table.resize(self.n_rows)
        assert self.cache is None
        self.check_storage()

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), min_size=1, max_size=20))
    def warm(self, numbers: list[int]) -> None:
        ids = torch.tensor([number % self.n_rows for number in numbers])
        self.store.ensure_cache(len(ids))
        self.follow_cache()
        before = self.cached()
        self.table.warm(ids)
        if self.cache is None:
            return
        rows, times = torch.unique(ids, return_counts=True)
        chosen = set(rows[times.argsort(descending=True, stable=True)][: self.cache.n_slots].tolist())
        after = self.cached()
        gone = before.keys() - after.keys()
        overflow = len(chosen - after.keys())
        assert overflow == 0 or self.interpreted  # slots of prefetched batches are kept
        hits = len(chosen & before.keys())
        changes = (hits, len(chosen) - hits, len(gone), sum(before[row] for row in gone), overflow)
        self.count(*changes)

    # ---- invariants

    @invariant()
    def maps_are_inverse(self) -> None:
        """`slot_of_row` and `row_of_slot` are inverse to each other, and free slots are clean."""
        if not hasattr(self, "table") or self.cache is None:
            return
        assert hasattr(self.cache, "writer") != (self.interpreted and self.storage == "host")
        index = self.cache.index
        slots = (index.row_of_slot >= 0).nonzero().flatten()
        assert torch.equal(index.slot_of_row[index.row_of_slot[slots]].long(), slots)
        rows = (index.slot_of_row >= 0).nonzero().flatten()
        assert torch.equal(index.row_of_slot[index.slot_of_row[rows].long()], rows)
        assert len(rows) == len(slots)
        assert not index.dirty[index.row_of_slot < 0].any()
        assert len(index.slot_of_row) == self.n_rows
        assert index.direct == (self.cache.n_slots == self.n_rows)

    @invariant()
    def every_row_is_what_it_should_be(self) -> None:
        if not hasattr(self, "table"):
            return
        if hasattr(self.cache, "writer"):  # the host decides
            self.cache.writer.finish()
        stored = self.store.ensure_layout().gather(torch.arange(self.n_rows))
        for row, expected in self.expected.items():
            slot = -1 if self.cache is None else int(self.cache.index.slot_of_row[row])
            record = stored[row] if slot < 0 else self.cache.records[slot]
            assert torch.equal(record, expected), row
            if slot >= 0 and not self.cache.index.dirty[slot]:
                assert torch.equal(stored[row], expected), row

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "table") or self.cache is None or self.cache is not self.counted:
            return
        stats = self.table.cache_stats()
        assert {name: getattr(stats, name) for name in COUNTS} == self.counts
        assert stats.rows == self.cache.n_slots
        assert stats.bytes_read == (stats.misses - stats.overflow) * self.nbytes
        assert stats.bytes_written == stats.written * self.nbytes
        total = stats.hits + stats.misses
        assert stats.hit_rate == (stats.hits / total if total else 0.0)


class OnDisk(CacheMachine):
    """A table on disk."""

    storage = "disk"

    @rule()
    def checkpoint(self) -> None:
        self.table.checkpoint()
        assert self.store.unsaved_rows == 0
        assert not any(self.cached().values())


class ByKernels(CacheMachine):
    """A table on the host whose cache is driven by kernels."""

    interpreted = True


TestHostMemory = CacheMachine.TestCase
TestHostMemory.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestDisk = OnDisk.TestCase
TestDisk.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestKernels = pytest.mark.skipif(torch.cuda.is_available(), reason="without the interpreter")(
    ByKernels.TestCase
)
TestKernels.settings = settings(max_examples=10, stateful_step_count=12, deadline=None)
