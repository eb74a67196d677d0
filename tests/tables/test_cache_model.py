"""Caches against a plain dictionary: whatever is done in whatever order, every row is what it should be."""

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
from flatbed.tables.cache import DeviceCache, HostCache
from flatbed.tables.lookup import find

MOST_ROWS = 30
DIM = 5  # 20 bytes of 32
COUNTS = ("hits", "misses", "evictions", "written", "overflow")


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
        self.home_writes: list[int] = []

    @initialize(n_rows=st.integers(1, 20), n_slots=st.integers(1, 24), policy=st.sampled_from(["lru", "lfu"]))
    def begin(self, n_rows: int, n_slots: int, policy: str) -> None:
        path = Path(self.folder.name) / "table" if self.storage == "disk" else None
        emb = flatbed.Embedding(
            n_rows,
            DIM,
            init="zeros",
            storage=self.storage,
            path=path,
            cache_rows=n_slots,
            cache_policy=policy,
        )
        self.table = emb.table
        self.store = self.table.store
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

    # ---- what is known of it

    @property
    def cache(self) -> Any:
        return self.store.cache

    @property
    def n_rows(self) -> int:
        return len(self.expected)

    def ids(self, numbers: list[int]) -> Tensor:
        """Distinct rows that exist."""
        return torch.tensor(sorted({number % self.n_rows for number in numbers}), dtype=torch.int64)

    def wanted(self, rows: Tensor) -> Tensor:
        return torch.stack([self.expected[row] for row in rows.tolist()]) if len(rows) else torch.empty(0)

    def remember(self, rows: Tensor, records: Tensor) -> None:
        for row, record in zip(rows.tolist(), records, strict=True):
            self.expected[row] = record.clone()

    def records(self, n: int) -> Tensor:
        return torch.randint(256, (n, self.nbytes), dtype=torch.uint8, generator=self.draw)

    def here(self) -> dict[int, bool]:
        """The rows in the cache, and whether they have changed."""
        if self.cache is None:
            return {}
        tags = self.cache.tags
        slots = (tags.row_of_slot >= 0).nonzero().flatten()
        rows, dirty = tags.row_of_slot[slots].tolist(), tags.dirty[slots].tolist()
        return {row: bool(changed) for row, changed in zip(rows, dirty, strict=True)}

    def watch(self) -> None:
        """The cache as it is now is the one that is counted with, and whose writes are seen."""
        cache = self.cache
        if cache is self.counted:
            return
        self.counted, self.counts = cache, dict.fromkeys(COUNTS, 0)
        if isinstance(cache, HostCache):
            send = cache._send_home

            def seen(slots: Tensor, rows: Tensor, records: Tensor) -> None:
                assert cache.tags.dirty[slots].all(), "clean rows were written home"
                self.home_writes += rows.tolist()
                send(slots, rows, records)

            cache._send_home = seen  # type: ignore[method-assign]

    # ---- what can be done

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=25))
    def come(self, numbers: list[int]) -> None:
        """A lookup of a training: ids as they occur, some of them several times."""
        ids = torch.tensor([number % self.n_rows for number in numbers], dtype=torch.int64)
        cache = self.store.cache_for(len(ids))
        self.watch()
        before, rows = self.here(), set(ids.tolist())
        self.home_writes = []
        batch = find(self.table, ids, training=True)
        assert batch.cache is cache
        if cache is None:
            return
        after = self.here()
        hits = rows & before.keys()
        gone = before.keys() - after.keys()
        n_missing = len(rows) - len(hits)
        n_free = cache.n_slots - len(hits)
        written = {row for row in gone if before[row]}
        if isinstance(cache, HostCache):
            assert sorted(self.home_writes) == sorted(written)
        assert hits <= after.keys()  # what is used at the time stays
        assert not any(after[row] for row in after.keys() - before.keys())  # those that came are as at home
        overflow = max(0, n_missing - n_free)
        assert len(rows & after.keys()) == len(rows) - overflow
        assert {row: changed for row, changed in before.items() if row not in gone}.items() <= after.items()
        changes = (len(hits), n_missing, len(gone), len(written), overflow)
        for name, more in zip(COUNTS, changes, strict=True):
            self.counts[name] += more

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=12))
    def scatter(self, numbers: list[int]) -> None:
        """A step, or write_rows."""
        rows = self.ids(numbers)
        records = self.records(len(rows))
        self.table.access.scatter_(rows, records)
        self.remember(rows, records)

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=25), times=st.integers(1, 3))
    def train(self, numbers: list[int], times: int) -> None:
        """The same rows are looked up and changed."""
        for _ in range(times):
            self.come(numbers)
            self.scatter(numbers)

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=12))
    def weights(self, numbers: list[int]) -> None:
        rows = self.ids(numbers)
        values = torch.randn(len(rows), DIM, generator=self.draw)
        self.table.write_rows(rows, values)
        assert torch.equal(self.table.read_rows(rows), values)
        self.remember(rows, self.table.access.gather(rows))  # the bytes behind a weight are nobody's

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), max_size=12), short=st.booleans())
    def gather(self, numbers: list[int], short: bool) -> None:
        rows = self.ids(numbers)[torch.randperm(len(self.ids(numbers)), generator=self.draw)]
        nbytes = DIM * 4 if short else self.nbytes
        found = self.table.access.gather(rows, nbytes)
        assert found.shape == (len(rows), nbytes)
        if len(rows):
            assert torch.equal(found, self.wanted(rows)[:, :nbytes])

    @rule(data=st.data())
    @precondition(lambda self: self.cache is not None)
    def read(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.n_rows))
        stop = data.draw(st.integers(start, self.n_rows))
        found = self.cache.read(start, stop)
        assert torch.equal(found.flatten(), self.wanted(torch.arange(start, stop)).flatten())

    @rule(data=st.data())
    @precondition(lambda self: self.cache is not None)
    def write(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.n_rows))
        records = self.records(data.draw(st.integers(0, self.n_rows - start)))
        self.cache.write_(start, records)
        self.remember(torch.arange(start, start + len(records)), records)

    @rule()
    def flush(self) -> None:
        self.store.flush()
        assert not any(self.here().values())
        self.all_at_home()

    @rule()
    def drop(self) -> None:
        self.store.flush(drop=True)
        assert not self.here()
        self.all_at_home()

    def all_at_home(self) -> None:
        every = torch.arange(self.n_rows)
        assert torch.equal(self.store.ensure_layout().gather(every), self.wanted(every))

    @rule(n_slots=st.integers(0, 24), policy=st.sampled_from(["lru", "lfu", None]))
    def another_cache(self, n_slots: int, policy: str | None) -> None:
        self.table.set_cache(n_slots, policy=policy)
        assert self.cache is None
        self.all_at_home()

    @rule(more=st.integers(1, 5))
    @precondition(lambda self: self.n_rows < MOST_ROWS - 5)
    def resize(self, more: int) -> None:
        for row in range(self.n_rows, self.n_rows + more):
            self.expected[row] = torch.zeros(self.nbytes, dtype=torch.uint8)
        self.table.resize(self.n_rows)
        assert self.cache is None
        self.all_at_home()

    @rule(numbers=st.lists(st.integers(0, MOST_ROWS), min_size=1, max_size=20))
    def warm(self, numbers: list[int]) -> None:
        ids = torch.tensor([number % self.n_rows for number in numbers])
        self.store.cache_for(len(ids))
        self.watch()
        before = self.here()
        self.table.warm(ids)
        if self.cache is None:
            return
        rows, times = torch.unique(ids, return_counts=True)
        chosen = set(rows[times.argsort(descending=True, stable=True)][: self.cache.n_slots].tolist())
        after = self.here()
        gone = before.keys() - after.keys()
        assert chosen <= after.keys()
        hits = len(chosen & before.keys())
        changes = (hits, len(chosen) - hits, len(gone), sum(before[row] for row in gone), 0)
        for name, more in zip(COUNTS, changes, strict=True):
            self.counts[name] += more

    # ---- what always holds

    @invariant()
    def each_in_its_place(self) -> None:
        """The two maps are inverse to each other, and nothing free has changed."""
        if not hasattr(self, "table") or self.cache is None:
            return
        kind = DeviceCache if self.interpreted and self.storage == "host" else HostCache
        assert type(self.cache) is kind
        tags = self.cache.tags
        slots = (tags.row_of_slot >= 0).nonzero().flatten()
        assert torch.equal(tags.slot_of_row[tags.row_of_slot[slots]].long(), slots)
        rows = (tags.slot_of_row >= 0).nonzero().flatten()
        assert torch.equal(tags.row_of_slot[tags.slot_of_row[rows].long()], rows)
        assert len(rows) == len(slots)
        assert not tags.dirty[tags.row_of_slot < 0].any()
        assert len(tags.slot_of_row) == self.n_rows
        assert tags.direct == (self.cache.n_slots == self.n_rows)

    @invariant()
    def every_row_is_what_it_should_be(self) -> None:
        if not hasattr(self, "table"):
            return
        if isinstance(self.cache, HostCache):
            self.cache.arrive()
        home = self.store.ensure_layout().gather(torch.arange(self.n_rows))
        for row, expected in self.expected.items():
            slot = -1 if self.cache is None else int(self.cache.tags.slot_of_row[row])
            record = home[row] if slot < 0 else self.cache.records[slot]
            assert torch.equal(record, expected), row
            if slot >= 0 and not self.cache.tags.dirty[slot]:
                assert torch.equal(home[row], expected), row

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
    """The same over a file."""

    storage = "disk"

    @rule()
    def checkpoint(self) -> None:
        self.table.checkpoint()
        assert self.store.unsaved_rows == 0
        assert not any(self.here().values())


class ByKernels(CacheMachine):
    """The same where kernels decide."""

    interpreted = True


TestHostMemory = CacheMachine.TestCase
TestHostMemory.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestDisk = OnDisk.TestCase
TestDisk.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestKernels = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not there")(
    ByKernels.TestCase
)
TestKernels.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
