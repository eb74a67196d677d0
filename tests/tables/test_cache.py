"""Row caches by themselves: who stays and who goes, what is counted, and that nothing is lost."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flatbed
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
from flatbed.tables.cache import DeviceCache, HostCache, Reservation, build
from flatbed.tables.cache.admission_graph import Lease
from flatbed.tables.cache.in_flight import InFlight
from flatbed.tables.record import Field, Record
from flatbed.tables.storage.memory import host_storage

RECORD = Record((Field("weight", torch.float32, 3), Field("sum", torch.float32, 1)))
CPU = torch.device("cpu")


# ---- caches by themselves


def cache_of(
    where: str, n_rows: int, n_slots: int, policy: str = "lru", kind: Any = None
) -> DeviceCache | HostCache:
    device = torch.device("cuda", 0) if where == "cuda" else CPU
    home = host_storage(RECORD, n_rows, device)
    assert home.memory is not None
    home.memory.copy_(torch.arange(n_rows)[:, None].expand(-1, RECORD.nbytes))  # modulo 256
    if kind is HostCache:
        return HostCache(home, n_slots, policy=policy, device=device)
    return build(home, n_slots, policy=policy, device=device)


def come(cache: DeviceCache | HostCache, rows: Any, window: int | None = None) -> None:
    """A batch; with a window, one that comes ahead of time."""
    ids = torch.as_tensor(rows, dtype=torch.int64)
    if isinstance(cache, DeviceCache):
        keys = ids.to(cache.device)
        _ = cache.come(keys, None) if window is None else cache._come(keys, None, window=window)
    elif window is None:
        cache.come(torch.unique(ids))
    else:
        cache._come(torch.unique(ids), window=window)


def test_ids_of_the_host_are_checked_before_they_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then they were copied; but nothing has been launched, and whoever comes next has the same way."""
    cache = DeviceCache(host_storage(RECORD, 20, CPU), 10, policy="lru", device=CPU)
    taken: list[Any] = []
    weights, home = torch.ones(4, 3), []
    staged = SimpleNamespace(take=lambda ids: taken.append(ids.tolist()))
    passage = SimpleNamespace(staged=staged, look=lambda: weights)
    monkeypatch.setattr(cache.passages, "lease", lambda n, **how: Lease(passage, home))
    with pytest.raises(IndexError, match=r"id 20 at position \(1, 0\) is out of range for a table of 20"):
        cache.pass_through(torch.tensor([[3, 1], [20, 2]]))
    assert (home, cache.under_way.tick, cache.section) == ([passage], 0, 0)
    passed = cache.pass_through(torch.tensor([[3, 1], [19, 2]]))
    assert passed is not None
    assert passed[1] is weights
    assert taken == [[3, 1, 20, 2], [3, 1, 19, 2]]
    assert cache.under_way.tick == 1
    del passed
    assert home == [passage, passage]


def held(cache: DeviceCache | HostCache) -> set[int]:
    rows = cache.tags.row_of_slot
    return set(rows[rows >= 0].tolist())


def counts(cache: DeviceCache | HostCache) -> tuple[int, ...]:
    stats = cache.stats()
    return tuple(getattr(stats, name) for name in COUNTS)


def test_the_longest_unused_leave(where: str) -> None:
    """Of eight slots at random the oldest: a place in the oldest ninth, on average."""
    n_slots = 64
    cache = cache_of(where, 1000, n_slots)
    for first in range(0, 3 * n_slots, 8):
        come(cache, range(first, first + 8))
    oldest_first = cache.tags.row_of_slot[cache.tags.stamp.argsort()].tolist()
    come(cache, range(500, 512))
    places = [oldest_first.index(row) for row in set(oldest_first) - held(cache) if row >= 0]
    assert len(places) == 12
    assert sum(places) / len(places) < n_slots / 3
    assert max(places) < n_slots * 3 / 4


def test_rows_in_use_again_and_again_stay(where: str) -> None:
    """Each half of them is used in every second batch, among many that are never used again."""
    cache = cache_of(where, 1000, 64)
    halves = [range(10), range(10, 20)]
    n_hits = []
    for number in range(24):
        before = cache.stats().hits
        cold = range(100 + 8 * number, 108 + 8 * number)
        come(cache, [*halves[number % 2], *cold])
        n_hits.append(cache.stats().hits - before)
    assert n_hits[:2] == [0, 0]
    assert sum(n_hits[2:]) >= 0.95 * 10 * len(n_hits[2:])


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_frequent_rows_outlast_a_scan(policy: str, where: str) -> None:
    """Where what is used least leaves, rows of many batches do not make room for rows of one."""
    cache = cache_of(where, 1000, 48, policy)
    for _ in range(12):
        come(cache, range(16))
    for number in range(20):
        come(cache, range(100 + 8 * number, 108 + 8 * number))
    stayed = len(held(cache) & set(range(16)))
    assert stayed >= 15 if policy == "lfu" else stayed <= 4


def test_old_uses_fade(where: str) -> None:
    """Rows that were frequent long ago make room in the end."""
    cache = cache_of(where, 1000, 4, "lfu")
    for _ in range(4):
        come(cache, [0, 1])
    for number in range(30):
        come(cache, range(20 + 2 * number, 22 + 2 * number))
    assert not held(cache) & {0, 1}


def test_those_of_the_batch_and_of_the_window_stay(where: str) -> None:
    for window, stay in ((0, set()), (1, {4, 5, 6, 7}), (2, set(range(8)))):
        cache = cache_of(where, 100, 8)
        come(cache, range(4))
        come(cache, range(4, 8))
        come(cache, range(20, 24), window)
        assert stay <= held(cache)
        n_overflow = 4 if window == 2 else 0
        assert counts(cache) == (0, 12, 4 - n_overflow, 0, n_overflow)
        assert len(held(cache)) == 8


def test_a_batch_larger_than_the_cache(where: str) -> None:
    cache = cache_of(where, 40, 5)
    come(cache, [3, 4])
    come(cache, range(20))
    assert {3, 4} <= held(cache) <= set(range(20))
    assert counts(cache) == (2, 20, 0, 0, 15)
    rows = torch.arange(40, device=cache.device)
    expected = torch.arange(40, dtype=torch.uint8)[:, None].expand(-1, RECORD.nbytes)
    assert torch.equal(cache.gather(rows).cpu(), expected)
    new = torch.full((20, RECORD.nbytes), 200, dtype=torch.uint8)
    cache.scatter_(rows[:20], new.to(cache.gather(rows[:1]).device))
    assert torch.equal(cache.gather(rows).cpu(), torch.cat([new, expected[20:]]))
    assert cache.stats().written == 0
    cache.flush()
    assert torch.equal(cache.home.gather(torch.arange(40)), torch.cat([new, expected[20:]]))


@pytest.mark.parametrize("n_ids", [1, 2, 7])
def test_weights_where_the_batch_says(n_ids: int, kernel_device: str) -> None:
    """The address of the output is read when the kernel runs, and a number that the host is told."""
    from flatbed.kernels._triton.cache import look, look_there

    cache = cache_of(kernel_device, 40, 5)
    assert isinstance(cache, DeviceCache)
    come(cache, [3, 4])
    ids = torch.tensor([3, 39, 4, -1, 40, 3, 0], dtype=torch.int32, device=cache.device)[:n_ids]
    outs = [torch.full((n_ids, 3), 7.0, device=cache.device) for _ in range(2)]
    seen = torch.zeros(1, dtype=torch.int64, pin_memory=kernel_device == "cuda")
    for number, out in enumerate(outs):
        told = torch.tensor([out.data_ptr(), 100 + number], device=cache.device)
        look_there(cache.place, ids, told, seen, 3, torch.float32, 40)
    expected = look(cache.place, ids, 3, torch.float32, 40)
    if kernel_device == "cuda":
        torch.cuda.synchronize()
    assert seen.item() == 101
    assert all(same_bits(out, expected) for out in outs)
    assert not (expected == 7.0).any()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_a_slot_for_every_row(where: str) -> None:
    """Then nothing is ever evicted, and rows have the slots of their own number."""
    cache = cache_of(where, 10, 10)
    for rows in ([9, 0], [1, 1, 9], range(10)):
        come(cache, rows)
    assert cache.tags.row_of_slot.tolist() == list(range(10))
    assert counts(cache) == (4, 10, 0, 0, 0)


def test_counts_of_a_small_case(where: str) -> None:
    cache = cache_of(where, 100, 4)
    come(cache, [1, 1, 2])
    assert counts(cache) == (0, 2, 0, 0, 0)
    come(cache, [2, 3, 4])
    assert counts(cache) == (1, 4, 0, 0, 0)
    rows = torch.tensor([2, 3], device=cache.device)
    cache.scatter_(rows, cache.gather(rows))
    come(cache, [5, 6, 7, 8])  # all others leave, and two of them have changed
    assert counts(cache) == (1, 8, 4, 2, 0)
    come(cache, [])
    come(cache, [5, 6, 7, 8, 9])
    assert counts(cache) == (5, 9, 4, 2, 1)
    stats = cache.stats()
    assert (stats.rows, stats.bytes_read, stats.bytes_written) == (4, 8 * RECORD.nbytes, 2 * RECORD.nbytes)
    assert stats.hit_rate == 5 / 14


def choose(tags: CacheIndex, rows: list[int]) -> Placement:
    return select_victims(tags, probe(tags, torch.tensor(rows)))


def test_nothing_but_times_changes_until_records_are_moved() -> None:
    tags = CacheIndex(20, 4, policy="lru", device=CPU)
    insert(tags, choose(tags, [1, 2, 3]))  # slots that were free
    maps = tags.slot_of_row.clone(), tags.row_of_slot.clone(), tags.dirty.clone()
    arrivals = choose(tags, [3, 7, 8, 9])
    assert all(
        torch.equal(*pair)
        for pair in zip(maps, (tags.slot_of_row, tags.row_of_slot, tags.dirty), strict=True)
    )
    assert set(arrivals.rows.tolist()) == {7, 8, 9}
    assert len(set(arrivals.slots.tolist())) == 3
    assert (arrivals.old >= 0).sum() == 2
    assert (arrivals.victims == -1).all()  # none of them has changed
    evict(tags, arrivals)
    assert tags.slot_of_row.tolist().count(-1) == len(tags.slot_of_row) - 1  # row 3 stays
    insert(tags, arrivals)
    assert set(tags.row_of_slot.tolist()) == {3, 7, 8, 9}
    assert (tags.slot_of_row >= 0).sum() == 4


def test_free_slots_and_the_oldest_go_before_ties() -> None:
    tags = CacheIndex(100, 8, policy="lru", device=torch.device("cpu"))
    tags.clock.fill_(9)
    tags.stamp[:] = torch.tensor([5, 5, 5, 5, 5, 5, FREE, 1])
    assert set(choose(tags, [3, 7, 8]).slots.tolist()) >= {6, 7}


@pytest.mark.parametrize("n", [1, 777, 20_000, 99_999])
def test_of_very_many_slots_those_go_that_are_as_good_as_the_lowest(n: int) -> None:
    generator = np.random.default_rng(n)
    slots, scores = np.arange(5, 100_005), generator.random(100_000, np.float32)
    found = _lowest(slots, scores, n)
    assert len(np.unique(found)) == len(found) == n
    assert scores[found - 5].max() <= n / 100_000 + 0.05
    for ties in (np.zeros_like(scores), (scores > 0.5).astype(np.float32)):
        found = _lowest(slots, ties, n)
        assert len(np.unique(found)) == n
        assert (ties[found - 5] > 0).sum() == max(0, n - (ties == 0).sum())


@pytest.mark.parametrize("n", [1, 3, 700, 999])
def test_of_a_few_slots_exactly_the_lowest_go(n: int) -> None:
    scores = np.random.default_rng(n).integers(0, 300, 1000)
    found = _lowest(np.arange(1000), scores, n)
    assert sorted(scores[found]) == sorted(scores)[:n]


def test_victims_are_chosen_without_anybody_s_random_numbers() -> None:
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        cache = cache_of("cpu", 100, 8)
        for first in range(0, 60, 5):
            come(cache, range(first, first + 5))
        results.append(cache.tags.row_of_slot.clone())
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*results)


# ---- batches that came ahead of time


def early(cache: DeviceCache | HostCache, rows: list[int]) -> Any:
    """A ticket; None if there is no room."""
    ids = torch.tensor(rows, device=cache.device)
    if isinstance(cache, DeviceCache):
        return cache.come_early(ids, None) if cache.has_room(len(rows)) else None
    return cache.come_early(ids)


def test_rows_of_announced_batches_stay(where: str) -> None:
    cache = cache_of(where, 100, 12)
    tickets = [early(cache, [1, 2, 3, 4]), early(cache, [3, 4, 5, 6])]
    assert all(cache.covers(ticket) for ticket in tickets)
    assert not cache.has_room(5)
    tickets.append(early(cache, [7, 8, 9, 10]))
    assert set(range(1, 11)) <= held(cache)
    tickets[0].end()
    assert not cache.covers(tickets[0])
    tickets.append(early(cache, [20, 21, 22, 23]))
    assert {3, 4, 5, 6, 7, 8, 9, 10, 20, 21, 22, 23} == held(cache)
    come(cache, [30])  # one that was not announced: nobody knows what has become of the others
    assert not any(cache.covers(ticket) for ticket in tickets)


def test_batches_announced_by_another_thread() -> None:
    """Rows come and go there, while they are read and written here."""
    cache = cache_of("cpu", 200, 40, kind=HostCache)
    expected = cache.gather(torch.arange(200))
    stop, failures = threading.Event(), []

    def announce() -> None:
        draw = torch.Generator().manual_seed(0)
        try:
            while not stop.is_set():
                ticket = early(cache, torch.randperm(200, generator=draw)[:12].tolist())
                if ticket is not None:
                    with cache.lock:
                        assert not cache.covers(ticket) or set(ticket.rows.tolist()) <= held(cache)
                    ticket.end()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=announce)
    thread.start()
    try:
        draw = torch.Generator().manual_seed(1)
        for number in range(150):
            rows = torch.randperm(200, generator=draw)[:15].sort().values
            come(cache, rows)
            assert torch.equal(cache.gather(rows), expected[rows])
            expected[rows] = number
            cache.scatter_(rows, expected[rows])
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert torch.equal(cache.gather(torch.arange(200)), expected)
    cache.flush()
    assert torch.equal(cache.home.gather(torch.arange(200)), expected)


def test_there_is_no_room_for_too_many(where: str) -> None:
    cache = cache_of(where, 100, 6)
    ticket = early(cache, [1, 2, 3, 4])
    assert not cache.has_room(3)
    if isinstance(cache, HostCache):
        assert cache.come_early(torch.tensor([5, 6, 7])) is None
    ticket.end()
    assert cache.has_room(6)
    assert cache_of(where, 6, 6).has_room(1000)  # all rows fit


@pytest.mark.parametrize("kind", [HostCache, None])
def test_announced_batches_need_not_end_in_order(kind: Any, where: str) -> None:
    """A second loader over the same table (for validation, say) ends its batches in between."""
    cache = cache_of(where, 1000, 16, kind=kind)
    first = early(cache, [1, 2, 3, 4])
    for number in range(12):
        other = early(cache, list(range(100 + 8 * number, 108 + 8 * number)))
        assert cache.covers(first)
        assert {1, 2, 3, 4} <= held(cache), f"evicted by batch {number}"
        if other is not None:
            other.end()


@pytest.mark.parametrize("kind", [HostCache, None])
def test_an_announced_batch_is_there_as_a_whole(kind: Any, where: str) -> None:
    """Or not at all; also if one that was announced before it has been dropped."""
    cache = cache_of(where, 1000, 8, kind=kind)
    first = early(cache, [1])
    early(cache, list(range(10, 17))).end()
    ticket = early(cache, list(range(20, 27)))
    assert cache.covers(first)
    assert 1 in held(cache)
    if ticket is not None:
        assert cache.covers(ticket)
        assert set(range(20, 27)) <= held(cache)


@pytest.mark.parametrize("how", ["retire", "abandon"])
def test_a_cache_that_is_given_up(how: str) -> None:
    """Whoever still knows it, another thread for example, gets nothing from it any more."""
    cache = cache_of("cpu", 40, 6, kind=HostCache)
    before = cache.gather(torch.arange(40))
    ticket = early(cache, [1, 2])
    new = torch.full((2, RECORD.nbytes), 99, dtype=torch.uint8)
    cache.scatter_(torch.tensor([1, 2]), new)
    getattr(cache, how)()
    assert not held(cache)
    assert not cache.covers(ticket)
    assert early(cache, [3]) is None
    assert torch.equal(cache.home.gather(torch.tensor([1, 2])), new if how == "retire" else before[1:3])


# ---- what can fail


class Failing:
    """A tier whose reads or writes fail when it is said so."""

    def __init__(self, tier: Any) -> None:
        self.tier = tier
        self.fails: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Any:
        if self.fails == "gather":
            raise OSError("cannot read")
        return self.tier.gather(ids, nbytes)

    def scatter_(self, ids: Tensor, records: Tensor) -> None:
        if self.fails == "scatter_":
            raise OSError("cannot write")
        self.tier.scatter_(ids, records)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("fails", ["gather", "scatter_"])
def test_a_home_that_fails(fails: str, policy: str) -> None:
    """Records and maps are as they were, and all goes on when it works again."""
    cache = cache_of("cpu", 40, 6, policy, kind=HostCache)
    home: Any = Failing(cache.home)
    cache.home = home
    expected = {row: torch.full((RECORD.nbytes,), row, dtype=torch.uint8) for row in range(40)}

    def whole() -> None:
        tags = cache.tags
        assert sorted(held(cache)) == (tags.slot_of_row >= 0).nonzero().flatten().tolist()
        for slot, row in enumerate(tags.row_of_slot.tolist()):
            assert row < 0 or int(tags.slot_of_row[row]) == slot
        home.fails = None
        found = cache.gather(torch.arange(40))
        assert all(torch.equal(found[row], record) for row, record in expected.items())

    come(cache, range(6))
    for round_ in range(4):
        rows = torch.tensor(sorted(held(cache)))[:3]
        cache.scatter_(rows, torch.full((3, RECORD.nbytes), 100 + round_, dtype=torch.uint8))
        expected |= {int(row): torch.full((RECORD.nbytes,), 100 + round_, dtype=torch.uint8) for row in rows}
        before = held(cache), cache.tags.dirty.clone()
        home.fails = fails
        with pytest.raises(OSError, match="cannot"):
            come(cache, [*list(before[0])[:2], *range(10 + 6 * round_, 14 + 6 * round_)])
        whole()
        assert held(cache) == before[0]
        assert torch.equal(cache.tags.dirty, before[1])  # what has changed is still to be written
        come(cache, range(10 + 6 * round_, 16 + 6 * round_))
        whole()
    cache.flush()
    assert all(torch.equal(home.gather(torch.tensor([row]))[0], record) for row, record in expected.items())


@pytest.mark.parametrize("method", ["flush", "drop"])
def test_a_flush_that_fails(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not written is still here."""
    monkeypatch.setattr("flatbed.tables.cache.host.WRITE_BYTES", 2 * RECORD.nbytes)
    cache = cache_of("cpu", 40, 6, kind=HostCache)
    home: Any = Failing(cache.home)
    cache.home = home
    come(cache, range(6))
    new = torch.full((6, RECORD.nbytes), 77, dtype=torch.uint8)
    cache.scatter_(torch.arange(6), new)
    home.fails = "scatter_"
    with pytest.raises(OSError, match="cannot write"):
        getattr(cache, method)()
    home.fails = None
    assert torch.equal(cache.gather(torch.arange(6)), new)
    getattr(cache, method)()
    assert torch.equal(home.gather(torch.arange(6)), new)


def test_empty_batches_take_no_turn(kernel_device: str) -> None:
    """The host's count of batches is the device's: else rows are kept that nobody has counted."""
    table = flatbed.Embedding(40, 4, device=kernel_device, cache_rows=12).table
    cache = table.store.cache_for(4)
    assert isinstance(cache, DeviceCache)
    early(cache, [0, 1, 2, 3])
    for _ in range(2):
        cache.come(torch.empty(0, dtype=torch.int64, device=kernel_device), None)
    assert cache.under_way.tick == int(cache.tags.clock) == 1
    assert cache.has_room(8)
    early(cache, list(range(10, 18)))
    assert int(cache.tags.counts[4]) == 0  # none had to stay at home


def test_tickets_end_while_the_lock_is_held() -> None:
    """The garbage collector may end one at any moment, in the thread that asks for others."""
    way = InFlight()
    held = [
        Reservation(None, torch.zeros(1), 0, torch.zeros(1), None, 0, way.come(3), None) for _ in range(3)
    ]
    for ticket in held:
        way.begin(ticket, 3)
    with way._lock:
        held[0].end()
    assert (way.window, way.n_rows, len(way.tickets)) == (2, 6, 2)
    held[2].end()
    assert (way.window, way.n_rows) == (2, 6)  # what came after the oldest has not left either
    held[1].end()
    assert (way.window, way.n_rows, way.tickets) == (0, 0, [])
