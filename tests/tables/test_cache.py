"""Caches without a table: which rows stay, what is counted, which rows are protected."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatbed.kernels import rows as ops
from flatbed.kernels.cache import (
    COUNTS,
    FREE,
    CacheIndex,
    Placement,
    _lowest,
    evict,
    insert,
    probe,
    select_victims,
)
from flatbed.tables.cache import host_index
from flatbed.tables.cache.base import Cache, LookupBatch
from flatbed.tables.cache.gpu import GpuCache
from flatbed.tables.cache.host_index import HostIndexCache, Reservation
from flatbed.tables.cache.write_behind import WriteThrough
from flatbed.tables.factory import build_cache
from flatbed.tables.record import Field, Record
from flatbed.tables.storage.memory import host_storage

RECORD = Record((Field("weight", torch.float32, 3), Field("sum", torch.float32, 1)))
CPU = torch.device("cpu")


def cache_of(where: str, n_rows: int, n_slots: int, policy: str = "lru") -> Cache:
    """A cache over host memory; with its index on the host if no kernels are available."""
    device = torch.device("cuda", 0) if where == "cuda" else CPU
    storage = host_storage(RECORD, n_rows, device)
    assert storage.memory is not None
    storage.memory.copy_(torch.arange(n_rows)[:, None].expand(-1, RECORD.nbytes))  # modulo 256
    return build_cache(storage, n_slots, policy=policy, device=device)


def disk_cache_of(n_rows: int, n_slots: int, policy: str = "lru") -> HostIndexCache:
    cache = cache_of("cpu", n_rows, n_slots, policy)
    storage = cache.storage
    return HostIndexCache(storage, n_slots, policy=policy, device=CPU, writer=WriteThrough(storage))


def admit(cache: Cache, rows: Any) -> None:
    cache.admit(torch.as_tensor(rows, dtype=torch.int64, device=cache.device))


def read(cache: Cache, rows: Any) -> Tensor:
    rows = torch.as_tensor(rows, device=cache.index.clock.device)
    if isinstance(cache, GpuCache):
        return ops.gather(cache.location, rows, RECORD.nbytes).cpu()
    return cache.gather(rows).cpu()


def write(cache: Cache, rows: Any, records: Tensor) -> None:
    rows = torch.as_tensor(rows, device=cache.index.clock.device)
    if isinstance(cache, GpuCache):
        ops.scatter_(cache.location, rows, records.to(cache.device))
    else:
        cache.scatter_(rows, records)


def cached_rows(cache: Cache) -> set[int]:
    rows = cache.index.row_of_slot
    return set(rows[rows >= 0].tolist())


def counts(cache: Cache) -> tuple[int, ...]:
    stats = cache.stats()
    return tuple(getattr(stats, name) for name in COUNTS)


# ---- eviction


def test_lru_evicts_the_oldest_rows(where: str) -> None:
    """The oldest of eight random slots is among the oldest ninth, on average."""
    n_slots = 64
    cache = cache_of(where, 1000, n_slots)
    for first in range(0, 3 * n_slots, 8):
        admit(cache, range(first, first + 8))
    oldest_first = cache.index.row_of_slot[cache.index.stamp.argsort()].tolist()
    admit(cache, range(500, 512))
    ages = [oldest_first.index(row) for row in set(oldest_first) - cached_rows(cache) if row >= 0]
    assert len(ages) == 12
    assert sum(ages) / len(ages) < n_slots / 3
    assert max(ages) < n_slots * 3 / 4


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_only_lfu_keeps_frequent_rows_during_a_scan(policy: str, where: str) -> None:
    cache = cache_of(where, 1000, 48, policy)
    for _ in range(12):
        admit(cache, range(16))
    for number in range(20):
        admit(cache, range(100 + 8 * number, 108 + 8 * number))
    n_kept = len(cached_rows(cache) & set(range(16)))
    assert n_kept >= 15 if policy == "lfu" else n_kept <= 4


def test_lfu_forgets_old_uses(where: str) -> None:
    cache = cache_of(where, 1000, 4, "lfu")
    for _ in range(4):
        admit(cache, [0, 1])
    for number in range(30):
        admit(cache, range(20 + 2 * number, 22 + 2 * number))
    assert not cached_rows(cache) & {0, 1}


def test_batch_larger_than_the_cache(where: str) -> None:
    cache = cache_of(where, 40, 5)
    admit(cache, [3, 4])
    admit(cache, range(20))
    assert {3, 4} <= cached_rows(cache) <= set(range(20))
    assert counts(cache) == (2, 20, 0, 0, 15)
    expected = torch.arange(40, dtype=torch.uint8)[:, None].repeat(1, RECORD.nbytes)
    assert torch.equal(read(cache, range(40)), expected)
    expected[:20] = 200
    write(cache, range(20), expected[:20])
    assert torch.equal(read(cache, range(40)), expected)
    assert cache.stats().written == 0
    cache.flush()
    assert torch.equal(cache.storage.gather(torch.arange(40)), expected)


def test_slot_for_every_row(where: str) -> None:
    """Row i has slot i, and nothing is evicted."""
    cache = cache_of(where, 10, 10)
    for rows in ([9, 0], [1, 1, 9], range(10)):
        admit(cache, rows)
    assert cache.index.row_of_slot.tolist() == list(range(10))
    assert counts(cache) == (4, 10, 0, 0, 0)


def test_counts_of_a_small_case(where: str) -> None:
    cache = cache_of(where, 100, 4)
    admit(cache, [1, 1, 2])
    assert counts(cache) == (0, 2, 0, 0, 0)
    admit(cache, [2, 3, 4])
    assert counts(cache) == (1, 4, 0, 0, 0)
    write(cache, [2, 3], read(cache, [2, 3]))
    admit(cache, [5, 6, 7, 8])  # evicts all others, of which two have changed
    assert counts(cache) == (1, 8, 4, 2, 0)
    admit(cache, [])
    admit(cache, [5, 6, 7, 8, 9])
    assert counts(cache) == (5, 9, 4, 2, 1)
    stats = cache.stats()
    assert (stats.rows, stats.bytes_read, stats.bytes_written) == (4, 8 * RECORD.nbytes, 2 * RECORD.nbytes)
    assert stats.hit_rate == 5 / 14


def test_ids_that_are_not_contiguous(kernel_device: str) -> None:
    cache = cache_of(kernel_device, 40, 8)
    ids = torch.tensor([[3, 30], [4, 31], [3, 32]], device=kernel_device)[:, 0]
    unique, number = cache.admit(ids)
    assert cached_rows(cache) == {3, 4}
    weights = cache.lookup(LookupBatch(ids.shape, ids, unique, cache, number))
    assert weights is not None
    assert torch.equal(weights.cpu().view(torch.int32), read(cache, [3, 4, 3])[:, :12].view(torch.int32))


# ---- decisions of an index on the host


def select(index: CacheIndex, rows: list[int], pinned: Any = None) -> Placement:
    return select_victims(index, probe(index, torch.tensor(rows)), pinned=pinned)


def test_selecting_victims_changes_no_map() -> None:
    index = CacheIndex(20, 4, policy="lru", device=CPU)
    insert(index, select(index, [1, 2, 3]))
    before = index.slot_of_row.clone(), index.row_of_slot.clone(), index.dirty.clone()
    placement = select(index, [3, 7, 8, 9])
    for old, new in zip(before, (index.slot_of_row, index.row_of_slot, index.dirty), strict=True):
        assert torch.equal(old, new)
    assert set(placement.rows.tolist()) == {7, 8, 9}
    assert len(set(placement.slots.tolist())) == 3
    assert (placement.victims == -1).all()  # none of them has changed
    evict(index, placement)
    assert index.slot_of_row.tolist().count(-1) == len(index.slot_of_row) - 1
    insert(index, placement)
    assert set(index.row_of_slot.tolist()) == {3, 7, 8, 9}


def test_free_slots_and_the_oldest_go_before_ties() -> None:
    index = CacheIndex(100, 8, policy="lru", device=CPU)
    index.clock.fill_(9)
    index.stamp[:] = torch.tensor([5, 5, 5, 5, 5, 5, FREE, 1])
    assert set(select(index, [3, 7, 8]).slots.tolist()) >= {6, 7}
    pinned = np.array([1, 1, 1, 1, 1, 0, 1, 1], np.int32)
    assert select(index, [10, 11, 12], pinned).slots.tolist() == [5]


@pytest.mark.parametrize("n", [1, 777, 20_000, 99_999])
def test_victims_of_very_many_slots_have_low_scores(n: int) -> None:
    slots, scores = np.arange(5, 100_005), np.random.default_rng(n).random(100_000, np.float32)
    found = _lowest(slots, scores, n)
    assert len(np.unique(found)) == len(found) == n
    assert scores[found - 5].max() <= n / 100_000 + 0.05
    for ties in (np.zeros_like(scores), (scores > 0.5).astype(np.float32)):
        found = _lowest(slots, ties, n)
        assert len(np.unique(found)) == n
        assert (ties[found - 5] > 0).sum() == max(0, n - (ties == 0).sum())


@pytest.mark.parametrize("n", [1, 3, 700, 999])
def test_victims_of_few_slots_have_the_lowest_scores(n: int) -> None:
    scores = np.random.default_rng(n).integers(0, 300, 1000)
    assert sorted(scores[_lowest(np.arange(1000), scores, n)]) == sorted(scores)[:n]


# ---- admissions ahead of time, index on the GPU


def prefetch(cache: Cache, rows: Any, window: int) -> LookupBatch | None:
    keys = torch.as_tensor(rows, device=cache.device)
    found = cache.prefetch(keys, window=window, reservation=None)
    return None if found is None else LookupBatch(keys.shape, keys, found[0], cache, found[1])


def test_slots_of_the_last_admissions_are_kept(kernel_device: str) -> None:
    cache = cache_of(kernel_device, 100, 12)
    batches = [prefetch(cache, range(4 * n, 4 * n + 4), 2) for n in range(6)]
    for n, batch in enumerate(batches):
        assert batch is not None
        assert cache.protects(batch) == (n >= 3)
    assert cached_rows(cache) == set(range(12, 24))
    assert prefetch(cache, range(50, 55), 2) is None  # 5 + 4 + 4 rows do not fit
    admit(cache, range(50, 55))  # in the training stream it may evict all others
    assert not any(cache.protects(batch) for batch in batches)
    assert set(range(50, 55)) <= cached_rows(cache)


def test_work_on_earlier_batches_is_not_protected(kernel_device: str) -> None:
    cache = cache_of(kernel_device, 100, 100)
    first, second = (prefetch(cache, rows, 3) for rows in ([1, 2], [2, 3]))
    assert first is not None
    assert second is not None
    cache.begin(first.admission)
    assert cache.protects(first)
    assert cache.protects(second)
    cache.begin(second.admission)
    assert not cache.protects(first)
    cache.begin(first.admission)  # of another prefetcher, out of order
    assert not cache.protects(first)
    assert cache.protects(second)
    assert cache.oldest([second, first]) is first
    cache.drop()
    assert not cache.protects(second)
    assert not cache.protects(None)


def test_empty_admissions_are_not_counted(kernel_device: str) -> None:
    """The host's count of admissions is the device's clock."""
    cache = cache_of(kernel_device, 40, 12)
    prefetch(cache, [0, 1, 2, 3], 2)
    for _ in range(2):
        admit(cache, [])
    assert cache._n_admissions == int(cache.index.clock) == 1
    assert prefetch(cache, range(10, 18), 2) is not None
    assert int(cache.index.counts[4]) == 0


# ---- reservations, index on the host


def reserve(cache: HostIndexCache, rows: Any) -> Reservation | None:
    return cache.reserve(torch.as_tensor(rows, dtype=torch.int64))


def batch_of(cache: HostIndexCache, reservation: Reservation) -> LookupBatch:
    found = cache.prefetch(reservation.rows, window=0, reservation=reservation)
    assert found is not None
    return LookupBatch(reservation.rows.shape, reservation.rows, found[0], cache, found[1])


def test_reserved_rows_stay_until_they_are_released() -> None:
    cache = disk_cache_of(100, 12)
    first, second = reserve(cache, [1, 2, 3, 4]), reserve(cache, [3, 4, 5, 6])
    assert first is not None
    assert second is not None
    assert reserve(cache, range(20, 27)) is None  # 6 slots are free
    for number in range(10):
        admit(cache, range(30 + 6 * number, 40 + 6 * number))
        assert set(range(1, 7)) <= cached_rows(cache)
    cache.release(first, None)
    assert reserve(cache, range(20, 28)) is not None
    assert cached_rows(cache) == {3, 4, 5, 6, *range(20, 28)}
    assert cache.protects(batch_of(cache, second))


@pytest.mark.parametrize("method", ["retire", "abandon"])
def test_cache_that_is_given_up(method: str) -> None:
    cache = disk_cache_of(40, 6)
    before = cache.gather(torch.arange(40))
    reservation = reserve(cache, [1, 2])
    assert reservation is not None
    batch = batch_of(cache, reservation)
    new = torch.full((2, RECORD.nbytes), 99, dtype=torch.uint8)
    cache.scatter_(torch.tensor([1, 2]), new)
    getattr(cache, method)()
    assert not cached_rows(cache)
    assert not cache.protects(batch)
    cache.release(reservation, None)
    assert reserve(cache, [3]) is None
    expected = new if method == "retire" else before[1:3]
    assert torch.equal(cache.storage.gather(torch.tensor([1, 2])), expected)


def test_reservations_of_another_thread() -> None:
    """One thread reserves and releases rows while the other reads and writes rows."""
    cache = disk_cache_of(200, 40)
    expected = cache.gather(torch.arange(200))
    stop, failures = threading.Event(), []

    def run() -> None:
        draw = torch.Generator().manual_seed(0)
        try:
            while not stop.is_set():
                reservation = reserve(cache, torch.randperm(200, generator=draw)[:12].sort().values)
                if reservation is not None:
                    with cache.lock:
                        assert set(reservation.rows.tolist()) <= cached_rows(cache)
                    cache.release(reservation, None)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        draw = torch.Generator().manual_seed(1)
        for number in range(150):
            rows = torch.randperm(200, generator=draw)[:15].sort().values
            admit(cache, rows)
            assert torch.equal(cache.gather(rows), expected[rows])
            expected[rows] = number
            cache.scatter_(rows, expected[rows])
    finally:
        stop.set()
        thread.join()
    assert not failures
    cache.flush()
    assert torch.equal(cache.storage.gather(torch.arange(200)), expected)


# ---- storage that fails


class FailingStorage:
    """A storage whose reads or writes fail when told so."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.fails: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Any:
        if self.fails == "gather":
            raise OSError("cannot read")
        return self.storage.gather(ids, nbytes)

    def scatter_(self, ids: Tensor, records: Tensor) -> None:
        if self.fails == "scatter_":
            raise OSError("cannot write")
        self.storage.scatter_(ids, records)


def failing(policy: str) -> tuple[HostIndexCache, Any]:
    storage: Any = FailingStorage(disk_cache_of(40, 6).storage)
    return HostIndexCache(storage, 6, policy=policy, device=CPU, writer=WriteThrough(storage)), storage


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("fails", ["gather", "scatter_"])
def test_admission_that_fails_changes_nothing(fails: str, policy: str) -> None:
    cache, storage = failing(policy)
    expected = storage.gather(torch.arange(40))
    admit(cache, range(6))
    for number in range(4):
        rows = torch.tensor(sorted(cached_rows(cache)))[:3]
        expected[rows] = 100 + number
        cache.scatter_(rows, expected[rows])
        before = cached_rows(cache), cache.index.dirty.clone()
        storage.fails = fails
        with pytest.raises(OSError, match="cannot"):
            admit(cache, [*list(before[0])[:2], *range(10 + 6 * number, 14 + 6 * number)])
        storage.fails = None
        assert cached_rows(cache) == before[0]
        assert torch.equal(cache.index.dirty, before[1])
        assert torch.equal(cache.gather(torch.arange(40)), expected)
        admit(cache, range(10 + 6 * number, 16 + 6 * number))
        assert torch.equal(cache.gather(torch.arange(40)), expected)
    cache.flush()
    assert torch.equal(storage.gather(torch.arange(40)), expected)


@pytest.mark.parametrize("method", ["flush", "drop"])
def test_flush_that_fails_keeps_the_rows(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_index, "FLUSH_BYTES", 2 * RECORD.nbytes)
    cache, storage = failing("lru")
    admit(cache, range(6))
    new = torch.full((6, RECORD.nbytes), 77, dtype=torch.uint8)
    cache.scatter_(torch.arange(6), new)
    storage.fails = "scatter_"
    with pytest.raises(OSError, match="cannot write"):
        getattr(cache, method)()
    storage.fails = None
    assert torch.equal(cache.gather(torch.arange(6)), new)
    getattr(cache, method)()
    assert torch.equal(storage.gather(torch.arange(6)), new)
