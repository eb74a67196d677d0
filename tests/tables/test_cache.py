"""Which rows a cache holds, what it counts, and the order between training and prefetches."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import flatbed
from flatbed.cuda.driver import Driver, DriverError
from flatbed.kernels import cache as decisions
from flatbed.kernels._triton import cache as kernels
from flatbed.kernels._triton import decision_graphs
from flatbed.tables import row_store
from flatbed.tables.cache import gpu, host_copy
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.grads import RowGrads, merge_grads
from flatbed.tables.prefetch import RowPrefetch
from flatbed.tables.storage.disk import DiskStorage
from tests.tables.tables import cached_rows

CPU = torch.device("cpu")
DIM = 3


def made(n_rows: int, n_slots: int, policy: str = "lru", **options: Any) -> Any:
    return flatbed.Embedding(n_rows, DIM, cache_rows=n_slots, cache_policy=policy, **options)


def admit(emb: Any, rows: Any) -> None:
    """Look rows up in training."""
    emb(torch.as_tensor(rows, dtype=torch.int64))


def cache_of(emb: Any) -> Any:
    return emb.table._store.ensure_cache(1)


# ---- eviction


def test_lru_evicts_the_oldest_rows(where: str) -> None:
    """The oldest of eight random slots is among the oldest ninth, on average."""
    n_slots = 64
    emb = made(1000, n_slots, device=where)
    for first in range(0, 3 * n_slots, 8):
        admit(emb, range(first, first + 8))
    index = cache_of(emb).index
    oldest_first = index.row_of_slot[index.stamp.argsort()].tolist()
    admit(emb, range(500, 512))
    ages = [oldest_first.index(row) for row in set(oldest_first) - cached_rows(emb) if row >= 0]
    assert len(ages) == 12
    assert sum(ages) / len(ages) < n_slots / 3
    assert max(ages) < n_slots * 3 / 4


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_only_lfu_keeps_frequent_rows_during_a_scan(policy: str, where: str) -> None:
    emb = made(1000, 24, policy, device=where)
    for _ in range(8):
        admit(emb, range(8))
    for number in range(6):
        admit(emb, range(100 + 8 * number, 108 + 8 * number))
    n_kept = len(cached_rows(emb) & set(range(8)))
    assert n_kept >= 7 if policy == "lfu" else n_kept <= 2


def test_lfu_forgets_old_uses(where: str) -> None:
    emb = made(1000, 4, "lfu", device=where)
    for _ in range(4):
        admit(emb, [0, 1])
    for number in range(25):
        admit(emb, range(20 + 2 * number, 22 + 2 * number))
    assert not cached_rows(emb) & {0, 1}


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("n_slots", "n_missing"), [(40, 40), (300, 150), (1000, 3), (300, 400)])
def test_every_free_slot_is_found(n_slots: int, n_missing: int, policy: str, kernel_device: str) -> None:
    """Also if so many are kept that random draws miss the others; no slot is given twice."""
    emb = made(2000, n_slots, policy, device=kernel_device)
    cache = cache_of(emb)
    kept = torch.arange(max(0, n_slots - n_missing), device=kernel_device)
    assert prefetch(cache, kept, 0) is not None
    missing = torch.arange(1000, 1000 + n_missing, device=kernel_device)
    found = kernels.decide(cache.index, missing.to(torch.int32), 1)
    slots = found.slots[:n_missing]
    given = slots[slots >= 0].tolist()
    assert len(set(given)) == len(given) == min(n_missing, n_slots)
    assert {int(row) for row in cache.index.row_of_slot[slots[slots >= 0]]} <= set(missing.tolist())
    assert set(kept.tolist()) <= cached_rows(emb)
    cache.index.moving = False


# ---- decisions of an index on the host


def select(index: Any, rows: list[int]) -> decisions.Placement:
    return decisions.decide(index, np.array(rows))


def maps(index: Any) -> list[list[int]]:
    return [index.slot_of_row.tolist(), index.row_of_slot.tolist(), index.dirty.tolist()]


def test_victims_are_selected_before_any_map_changes() -> None:
    """Free slots and the oldest go before ties."""
    index = decisions.CacheIndex(20, 4, policy="lru", device=CPU)
    decisions.assign(index, select(index, [1, 2, 3]))
    before = maps(index)
    placement = select(index, [3, 7, 8, 9])
    assert maps(index) == before
    assert (placement.victims == -1).all()  # none of them has changed
    assert placement.n_rows == 4
    decisions.assign(index, placement)
    assert set(index.row_of_slot.tolist()) == {3, 7, 8, 9}
    index = decisions.CacheIndex(100, 8, policy="lru", device=CPU)
    index.clock.fill_(9)
    index.stamp[:] = torch.tensor([5, 5, 5, 5, 5, 5, decisions.FREE, 1])
    assert set(select(index, [3, 7, 8]).slots.tolist()) >= {6, 7}
    index.stamp[[0, 3]] = 11  # kept at the next tick
    index.stamp[[1, 2, 4, 6, 7]] = 12
    placement = select(index, [10, 11, 12])
    assert placement.slots.tolist() == [5]
    assert not placement.is_whole
    assert placement.rows.tolist() == [10]


def write_in_part(index: Any, placement: decisions.Placement, n_lines: int) -> None:
    """Assign slots up to a line of `assign`."""
    n_seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal n_seen
        if frame.f_code is not decisions.assign.__code__:
            return None
        if event == "line":
            n_seen += 1
            if n_seen > n_lines:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        decisions.assign(index, placement)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("is_overwritten", [True, False])
@pytest.mark.parametrize("n_lines", range(12))
def test_an_admission_is_taken_back(n_lines: int, is_overwritten: bool) -> None:
    """After any line of it: changed rows have their slots again, or no row has them."""
    index = decisions.CacheIndex(20, 4, policy="lfu", device=CPU)
    decisions.assign(index, select(index, [1, 2, 3]))
    index.dirty[index.slot_of_row[[1, 3]].long()] = 1
    of_1, of_3 = index.slot_of_row[[1, 3]].tolist()
    placement = select(index, [3, 7, 8])
    assert set(placement.victims.tolist()) <= {1, -1}
    write_in_part(index, placement, n_lines)
    for _ in range(2):
        decisions.take_back(index, placement, is_overwritten=is_overwritten)
        cached = {row: slot for row, slot in enumerate(index.slot_of_row.tolist()) if slot >= 0}
        assert cached == {row: slot for slot, row in enumerate(index.row_of_slot.tolist()) if row >= 0}
        assert cached[3] == of_3
        assert {7, 8}.isdisjoint(cached)
        if 1 in placement.victims:
            assert cached.get(1) == (None if is_overwritten else of_1)
        assert {slot for slot, dirty in enumerate(index.dirty.tolist()) if dirty} == {
            cached[row] for row in (1, 3) if row in cached
        }


# ---- rows that are kept for coming batches


def prefetch(cache: Any, rows: Any, window: int, *, ends: bool = False) -> LookupBatch | None:
    """Admit rows ahead of time. `ends`: the step with them ends at once."""
    keys = torch.as_tensor(rows, device=cache.device)
    found = cache.prefetch(keys, window=window, reservation=None)
    if keys.is_cuda:
        torch.cuda.synchronize()  # a prefetcher decides in "decisions", and orders the moves after it
    cache.issue_moves()
    batch = None if found is None else LookupBatch(keys.shape, *found[:2], cache, found[2])
    if batch is not None and ends:
        cache.end_prefetch(batch)
    return batch


def test_slots_of_the_last_admissions_are_kept(kernel_device: str) -> None:
    emb = made(100, 12, device=kernel_device)
    cache = cache_of(emb)
    batches = []
    for n in range(6):
        if n > 2:
            cache.end_prefetch(batches[n - 3])
        batches.append(prefetch(cache, range(4 * n, 4 * n + 4), 2))
        admit(emb, [])  # empty batches do not count
    for n, batch in enumerate(batches):
        assert cache.protects(batch) == (n >= 3)
        assert batch.keys.dtype == torch.int32  # as in captured lookups, for which kernels must be loaded
    assert cached_rows(emb) == set(range(12, 24))
    assert prefetch(cache, range(50, 55), 2) is None  # 5 + 4 + 4 rows do not fit
    admit(emb, range(50, 55))  # in the training stream it keeps those that fit: the last four rows
    assert [cache.protects(batch) for batch in batches] == [*5 * [False], True]
    assert {*range(20, 24), *range(50, 55)} <= cached_rows(emb)


def test_two_loops_over_one_table(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And batches of different numbers of lookups: all rows are prefetched, and stay until their step."""
    emb, admit_here = made(200, 150, device=kernel_device), mock.Mock(wraps=gpu.GpuCache.admit)
    monkeypatch.setattr(gpu.GpuCache, "admit", lambda *args, **options: admit_here(*args, **options))
    chance = torch.Generator().manual_seed(0)
    batches = [[*torch.randint(200, (n % 3 + 1, 6), generator=chance)] for n in range(16)]
    loops = [
        flatbed.Prefetcher(batches[first::2], {emb: lambda batch: list(batch)}, depth=2) for first in (0, 1)
    ]
    for both in zip(*loops, strict=True):
        for batch in both:
            for ids in batch:
                emb(ids)
    assert not admit_here.called
    assert not cache_of(emb)._live


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("n_slots", [100, 600, 1000])
def test_windows_beside_a_loop_that_waits(n_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are few of them, since each has its own graphs. Rows of the loop that waits stay if they fit."""
    emb, windows, decide = made(1000, n_slots), list[int](), decision_graphs.cache.decide

    def note(index: Any, keys: Tensor, window: int, **options: Any) -> Any:
        windows.append(window)
        return decide(index, keys, window, **options)

    monkeypatch.setattr(decision_graphs.cache, "decide", note)
    chance = torch.Generator().manual_seed(0)
    batches = [torch.randint(1000, (8,), generator=chance) for _ in range(60)]
    waits = iter(flatbed.Prefetcher(batches[:5], {emb: lambda ids: ids}))
    held = next(waits)
    batch = emb.table._prefetched[0]
    for ids in flatbed.Prefetcher(batches, {emb: lambda ids: ids}):
        emb(ids)
    assert len(set(windows)) <= (1 if n_slots == 1000 else 6)
    assert cache_of(emb).protects(batch) == (n_slots > 100)
    emb(held)


@pytest.mark.usefixtures("interpreted")
def test_windows_that_grow_leave_graphs_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a loop that waits, each window is used for a while. Later loops need the few graphs."""
    emb = made(400, 180)
    simulate_graphs(monkeypatch, cache_of(emb))
    batches = [torch.randint(400, (2, 2)) for _ in range(60)]
    lookups: Any = {emb: lambda ids: [*ids]}
    waits = iter(flatbed.Prefetcher(batches, lookups, depth=3))
    next(waits)
    for _ in flatbed.Prefetcher(batches, lookups, depth=3):
        pass
    kinds = [graph.kind for graph in cache_of(emb)._graphs._graphs]
    assert kinds.count((2, 7)) >= 8


def decided(policy: str) -> tuple[list[Tensor], Any]:
    """Prefetch batches of several sizes into a cache with room for all rows. Returns results and cache."""
    cache, chance = cache_of(made(1000, 900, policy, device="cuda")), torch.Generator().manual_seed(0)
    batches = []
    for size in (64, 64, 63, 64, 0, 63, 7, 64, 0):
        batches.append(prefetch(cache, torch.randint(900, (size,), generator=chance), 3, ends=True))
    results = [cache.index.counts, (cache.index.slot_of_row >= 0)]
    for batch in batches:  # after all of them: no graph writes to the results of another batch
        found, n = batch.unique, batch.keys.numel()
        results += [found.rows, found.inverse, found.order, found.starts[: n + 1], found.rank[:n]]
    return [result.cpu() for result in results], cache


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_graphs_decide_as_launches_do(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, cache = decided(policy)
    assert not cache._graphs._graphs
    monkeypatch.setattr(decision_graphs, "N_EAGER", 1)
    replayed, cache = decided(policy)
    assert [graph.kind[0] for graph in cache._graphs._graphs] == [64, 64, 63, 64]  # all results are in use
    assert all(map(torch.equal, replayed, launched))


@pytest.mark.gpu
def test_a_graph_of_inference_mode_is_replayed_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_graphs, "N_EAGER", 1)
    cache = cache_of(made(100, 50, device="cuda"))
    with torch.inference_mode():
        for n in range(3):
            prefetch(cache, [n, n + 1], 2, ends=True)
    assert [graph.kind for graph in cache._graphs._graphs] == [(2, 2)]
    batch = prefetch(cache, [7, 5], 2, ends=True)
    assert batch is not None
    assert batch.unique.rows.tolist() == [5, 7]
    assert int(cache.index.counts[1]) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["begin_capture", "decide", "end_capture"])
def test_a_capture_that_fails_changes_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = decided("lru")
    owner, decide = (kernels, kernels.decide) if step == "decide" else (Driver, getattr(Driver, step))

    def fail(*args: Any, **options: Any) -> Any:
        found = decide(*args, **options)
        if owner is Driver or "out" in options:
            raise DriverError("the driver does not like it")
        return found

    monkeypatch.setattr(owner, step, fail)
    monkeypatch.setattr(decision_graphs, "N_EAGER", 1)
    state = torch.cuda.get_rng_state()
    with pytest.warns(UserWarning, match="could not be used .the driver does not like it"):
        found, cache = decided("lru")
    assert not cache._graphs._graphs
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.synchronize()  # fails inside of a capture


def simulate_graphs(monkeypatch: pytest.MonkeyPatch, cache: Any, replay: Any = lambda: None) -> None:
    """Let graphs call their functions again, from the third batch of a size on."""
    monkeypatch.setattr(decision_graphs, "N_EAGER", 1)
    monkeypatch.setattr(
        decision_graphs, "Graph", lambda function, *_: mock.Mock(replay=lambda: replay() or function())
    )
    cache._graphs._can_capture = True


@pytest.mark.usefixtures("interpreted")
def test_a_replay_that_fails_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there had been no graph: decisions are made once, and the cache can be used."""
    emb, replays = made(100, 40), mock.Mock(side_effect=[None, DriverError("not now")])
    cache = cache_of(emb)
    simulate_graphs(monkeypatch, cache, replays)
    found = []
    for n in range(2):
        found.append(prefetch(cache, [n, n + 1, 30], 2))
    with pytest.warns(UserWarning, match="could not be used .not now"):
        found += [prefetch(cache, [n, n + 1, 30], 2) for n in range(2, 5)]
    assert replays.call_count == 2
    assert [batch.unique.rows.tolist() for batch in found if batch] == [[n, n + 1, 30] for n in range(5)]
    assert int(cache.index.clock) == 5
    assert cached_rows(emb) == {*range(6), 30}
    emb(torch.tensor([1]))  # the cache is in order


@pytest.mark.usefixtures("interpreted")
def test_a_graph_is_replayed_again_when_its_decisions_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(made(100, 40))
    simulate_graphs(monkeypatch, cache)
    # One is launched, three are captured.
    held: list[Any] = [prefetch(cache, [n, n + 1], 2, ends=True) for n in range(4)]
    assert len(cache._graphs._graphs) == 3
    del held[1]
    held.append(prefetch(cache, [50, 60], 2, ends=True))
    assert len(cache._graphs._graphs) == 3
    held.append(prefetch(cache, [51, 61], 2, ends=True))
    assert len(cache._graphs._graphs) == 4
    expected = [[0, 1], [2, 3], [3, 4], [50, 60], [51, 61]]
    assert [batch.unique.rows.tolist() for batch in held] == expected
    assert [batch.keys.tolist() for batch in held] == expected


@pytest.mark.usefixtures("interpreted")
def test_graphs_are_for_a_number_of_keys_and_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for a smaller window would evict rows that are in use."""
    cache = cache_of(made(100, 40))
    simulate_graphs(monkeypatch, cache)
    for window, n in [(1, 2), (2, 2), (1, 3)] * 3:
        prefetch(cache, range(n), window, ends=True)
    assert [graph.kind for graph in cache._graphs._graphs] == [(2, 1), (2, 2), (3, 1)]


@pytest.mark.usefixtures("interpreted")
def test_graphs_have_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if losses of many batches are kept."""
    cache = cache_of(made(100, 90))
    simulate_graphs(monkeypatch, cache)
    monkeypatch.setattr(decision_graphs, "MAX_BYTES", 3 * 20 * decision_graphs.KEY_BYTES)
    held = [prefetch(cache, range(n, n + 20), 2) for n in range(8)]
    nbytes = [graph.out.memory.nbytes for graph in cache._graphs._graphs]
    assert len(nbytes) == 3
    assert sum(nbytes) <= decision_graphs.MAX_BYTES
    assert [batch.unique.rows.tolist() for batch in held if batch] == [[*range(n, n + 20)] for n in range(8)]


@pytest.mark.usefixtures("interpreted")
def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a size for each batch there would be no end of them."""
    index = decisions.CacheIndex(100, 100, policy="lru", device=CPU)
    graphs, captured = decision_graphs.DecisionGraphs(index, torch.int32, "decisions"), []
    graphs._can_capture = True

    def capture(_: Any, kind: tuple[int, int], *__: Any) -> Any:
        captured.append(kind[0])
        return mock.Mock(kind=kind, is_free=True, **{"out.memory.nbytes": 68 * kind[0]})

    monkeypatch.setattr(decision_graphs, "DecisionGraph", capture)
    for n in (*range(1, 200), *[7] * 10, *[8] * 5, *[*range(20, 60)] * 6):
        graphs.find(n, 2, captures=True)
    assert captured[:2] == [7, 8]
    assert len(captured) == decision_graphs.MAX_GRAPHS
    assert len(graphs._n_uses) <= decision_graphs.MAX_KINDS


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("fails", [False, True])
def test_rows_of_a_file_are_reserved_by_graphs(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread captures them. Reservations have memory of their own."""
    emb = made(100, 60, storage="disk", path=tmp_path / "table", seed=5)
    cache, replay = cache_of(emb), mock.Mock(return_value=None)
    if fails:
        replay.side_effect = DriverError("not now")
    simulate_graphs(monkeypatch, cache, replay)
    reserved = []
    with pytest.warns(UserWarning, match="not now") if fails else nullcontext():
        for n in range(5):
            reserved.append(cache.reserve(torch.tensor([7 * n, 7 * n + 2, 7 * n])))
            assert len(cache._graphs._graphs) == (1 if n > 1 and not fails else 0)
            cache.prefetch(torch.empty(0), window=0, reservation=reserved[-1])
    assert replay.call_count == (1 if fails else 3)
    for n, found in enumerate(reserved):
        rows = [7 * n, 7 * n + 2]
        assert (found.keys.tolist(), found.n_rows) == ([*rows, 7 * n], 2)
        assert found.unique.rows.tolist()[:2] == rows
        assert set(rows) <= cached_rows(emb)
    every = torch.arange(100)
    assert torch.equal(emb.read_rows(every), made(100, 60, seed=5).read_rows(every))


@pytest.mark.usefixtures("interpreted")
def test_rows_of_a_file_that_are_reserved_during_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread asks for the graph that is being captured: there is one in the end."""
    cache = cache_of(made(100, 60, storage="disk", path=tmp_path / "table"))
    simulate_graphs(monkeypatch, cache)
    make, reserved = decision_graphs.Graph, []

    def capture(function: Any, *args: Any) -> Any:
        thread = threading.Thread(target=lambda: reserved.append(cache.reserve(torch.tensor([50, 51]))))
        thread.start()
        thread.join()
        return make(function, *args)

    monkeypatch.setattr(decision_graphs, "Graph", capture)
    for n in range(6):
        cache.prefetch(torch.empty(0), window=0, reservation=cache.reserve(torch.tensor([2 * n, 2 * n + 1])))
    assert len(cache._graphs._graphs) == len(reserved) == 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("reason", ["a direct lookup", "a capture of the user"])
def test_where_rows_of_a_file_have_no_graphs(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emb = made(100, 60, storage="disk", path=tmp_path / "table")
    cache = cache_of(emb)
    simulate_graphs(monkeypatch, cache)
    monkeypatch.setattr(host_copy, "is_capturing", lambda device: reason == "a capture of the user")
    for n in range(5):
        if reason == "a direct lookup":
            admit(emb, [n, n + 1])
        else:
            cache.reserve(torch.tensor([n, n + 1]))
        cache.prefetch(torch.empty(0), window=0, reservation=None)
    assert not cache._graphs._graphs
    assert cached_rows(emb) == {*range(6)}


@pytest.mark.usefixtures("interpreted")
def test_an_interruption_before_a_replay_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a graph still has the decisions of the replay before."""
    emb = made(100, 60, storage="disk", path=tmp_path / "table")
    cache, replay = cache_of(emb), mock.Mock(side_effect=[None, KeyboardInterrupt, None])
    simulate_graphs(monkeypatch, cache, replay)
    for rows in ([1, 2], [3, 4], [5, 6]):
        cache.prefetch(torch.empty(0), window=0, reservation=cache.reserve(torch.tensor(rows)))
    assert replay.call_count == 1
    with pytest.raises(KeyboardInterrupt):
        cache.reserve(torch.tensor([7, 8]))
    assert cached_rows(emb) == {*range(1, 7)}
    assert cache.reserve(torch.tensor([7, 8])) is not None
    assert cached_rows(emb) == {*range(1, 9)}


@pytest.mark.usefixtures("interpreted")
def test_memory_of_a_deleted_cache_waits_for_the_streams_that_used_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream "files" may still fill slots when a model is deleted."""
    cache = cache_of(made(100, 40, storage="disk", path=tmp_path / "t.bed"))
    used: list[tuple[int, Any]] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: used.append((self.data_ptr(), stream)))
    monkeypatch.setattr(cache, "device", torch.device("cuda", 0))
    streams = [mock.MagicMock(), mock.MagicMock()]
    for stream in (*streams, *streams):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        with cache.lock, cache._ordered():
            pass
    for tensor in (cache.records, cache.index.slot_of_row, cache.index.dirty, cache.index.clock):
        assert [stream for address, stream in used if address == tensor.data_ptr()] == streams


def test_reserved_rows_stay_until_they_are_released(tmp_path: Path) -> None:
    emb = made(100, 12, storage="disk", path=tmp_path / "table")
    cache = cache_of(emb)
    first, second = (cache.reserve(torch.tensor(rows)) for rows in ([1, 2, 3, 4], [3, 4, 5, 6]))
    assert None not in (first, second)
    assert cache.reserve(torch.arange(20, 27)) is None  # 6 slots are free
    for number in range(10):
        admit(emb, range(30 + 6 * number, 40 + 6 * number))
        assert set(range(1, 7)) <= cached_rows(emb)
    cache.release(first, None)
    assert cache.reserve(torch.arange(20, 28)) is not None
    assert cached_rows(emb) == {3, 4, 5, 6, *range(20, 28)}


def test_gradients_of_several_lookups_are_protected_together(tmp_path: Path) -> None:
    """A step with two lookups of a disk table takes no lock, and so does not wait for the disk."""
    emb = made(100, 12, storage="disk", path=tmp_path / "table")
    cache = cache_of(emb)

    def looked_up(rows: list[int]) -> tuple[Any, RowGrads]:
        reservation = cache.reserve(torch.tensor(rows))
        keys, unique, admission = cache.prefetch(torch.tensor(rows), window=0, reservation=reservation)
        batch = LookupBatch(keys.shape, keys, unique, cache, admission)
        return reservation, RowGrads(unique.rows, torch.ones(len(rows), DIM), batch=batch)

    (first, of_first), (second, of_second) = looked_up([1, 2, 3]), looked_up([3, 4])
    merged = merge_grads([of_first, of_second], 100)
    assert merged.rows[merged.rows >= 0].tolist() == [1, 2, 3, 4]
    assert merged.batch is not None
    assert cache.protects(merged.batch)
    cache.release(second, None)
    assert not cache.protects(merged.batch)
    assert merge_grads([of_first, of_second], 100).batch is None
    assert cache.protects(of_first.batch)
    cache.drop()
    assert not cache.protects(of_first.batch)
    assert not first.is_live


def test_a_loop_that_pauses_does_not_keep_the_rows_of_others(tmp_path: Path) -> None:
    emb = made(100, 12, storage="disk", path=tmp_path / "table")
    cache = cache_of(emb)
    paused = [cache.reserve(torch.tensor(rows)) for rows in ([1, 2], [2, 3])]
    for first in range(10, 80, 3):
        reservation = cache.reserve(torch.arange(first, first + 5))
        assert None not in (*paused, reservation)
        assert {1, 2, 3, *range(first, first + 5)} <= cached_rows(emb)
        cache.release(reservation, None)
    admit(emb, range(90, 99))
    assert cached_rows(emb) == {1, 2, 3, *range(90, 99)}
    cache.release(paused[0], None)
    assert cache.reserve(torch.arange(10, 20)) is not None
    assert cached_rows(emb) == {2, 3, *range(10, 20)}


@pytest.mark.parametrize("kind", ["numpy", "kernels"])
def test_rows_that_occur_again_are_reserved_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated ids of a batch, and rows of several batches."""
    if kind == "kernels" and not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    device = "cuda" if kind == "kernels" and torch.cuda.is_available() else "cpu"
    emb = made(100, 12, storage="disk", path=tmp_path / "table", device=device)
    cache = cache_of(emb)
    assert cache.reserve(torch.tensor([1, 2, 3] * 5, device=device)) is not None
    assert cache.reserve(torch.tensor([1, 2, 3, *range(4, 9)], device=device)) is not None
    assert cache.reserve(torch.tensor([1, 2, 3, 50, 51, 52, 53, 54], device=device)) is None
    last = cache.reserve(torch.tensor([1, 2, 3, *range(50, 54)] * 2, device=device))
    assert last is not None
    assert last.n_rows == 7
    assert cached_rows(emb) == {*range(1, 9), *range(50, 54)}
    emb.table.close(discard=True)


def test_failed_admissions_keep_no_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emb = made(100, 6, storage="disk", path=tmp_path / "table")
    cache = cache_of(emb)
    reservation = cache.reserve(torch.arange(3))
    with monkeypatch.context() as patch:
        patch.setattr(host_copy, "decide", mock.Mock(side_effect=MemoryError))
        for _ in range(3):
            with pytest.raises(MemoryError):
                admit(emb, [10])
    cache.release(reservation, None)
    assert cache.reserve(torch.arange(20, 26)) is not None
    assert cached_rows(emb) == {*range(20, 26)}


def test_a_cache_that_is_replaced_is_freed(tmp_path: Path) -> None:
    """The storage outlives it."""
    emb = made(100, 6, storage="disk", path=tmp_path / "table")
    admit(emb, [1])
    emb.write_rows([1], torch.ones(1, DIM))
    index = weakref.ref(cache_of(emb).index)
    emb.table.set_cache(0)
    gc.collect()
    assert index() is None
    assert emb.table._store.unsaved_rows == 1
    emb.table.close(discard=True)


def test_no_row_is_admitted_while_all_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emb = made(30, 10, storage="disk", path=tmp_path / "table")
    cache, read = cache_of(emb), DiskStorage.read
    with ThreadPoolExecutor(1) as pool:

        def read_slowly(*args: Any) -> Tensor:
            found.append(pool.submit(cache.reserve, torch.arange(8)))
            with suppress(TimeoutError):
                found[-1].result(timeout=0.2)
            return read(*args)

        found: list[Any] = []
        monkeypatch.setattr(DiskStorage, "read", read_slowly)
        emb.table._store.draw_again(7)
        assert found[0].result() is not None
    monkeypatch.undo()
    kept = emb.read_rows(range(8))
    emb.table.set_cache(0)
    assert torch.equal(emb.read_rows(range(8)), kept)
    emb.table.close(discard=True)


def test_an_interrupted_release_does_not_keep_rows_for_good(tmp_path: Path) -> None:
    emb = made(100, 12, storage="disk", path=tmp_path / "table")
    cache = cache_of(emb)
    cache.release(cache.reserve(torch.arange(6)), None)

    class Live(set[Any]):
        def discard(self, _: Any) -> None:
            raise KeyboardInterrupt

    cache._live, live = Live(cache._live), cache._live
    with pytest.raises(KeyboardInterrupt):
        admit(emb, [20])
    cache._live = live
    admit(emb, range(30, 42))
    assert cached_rows(emb) == {*range(30, 42)}


def test_reservations_of_another_thread(tmp_path: Path) -> None:
    """One thread reserves and releases rows while the other reads and writes rows."""
    emb = made(200, 40, storage="disk", path=tmp_path / "table")
    cache, expected = cache_of(emb), emb.read_rows(range(200))
    stop = threading.Event()

    def reserve_and_release() -> None:
        draw = torch.Generator().manual_seed(0)
        while not stop.is_set():
            reservation = cache.reserve(torch.randperm(200, generator=draw)[:12].sort().values)
            if reservation is not None:
                with cache.lock:
                    assert set(reservation.unique.rows.tolist()) <= cached_rows(emb)
                cache.release(reservation, None)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(reserve_and_release)
        try:
            draw = torch.Generator().manual_seed(1)
            for number in range(60):
                rows = torch.randperm(200, generator=draw)[:15].sort().values
                assert torch.equal(emb(rows), expected[rows])
                expected[rows] = float(number)
                emb.write_rows(rows, expected[rows])
        finally:
            stop.set()
        done.result()
    emb.table.checkpoint()
    assert torch.equal(emb.read_rows(range(200)), expected)
    emb.table.close()


# ---- warming, size


def test_warming_by_counts(where: str) -> None:
    emb = made(100, 3, "lfu", device=where)
    emb.table.warm([5, 6, 7, 8, 5], counts=[1.0, 10, 30, 20, 12])  # 13 uses of row 5
    assert cached_rows(emb) == {5, 7, 8}
    for number in range(5):
        admit(emb, [20 + number])
    assert cached_rows(emb) >= {7, 8}  # the others were used less
    with pytest.raises(ValueError, match="negative"):
        emb.table.warm([1, 2], counts=[1.0, -1.0])
    for storage in ("host", "device"):  # without a cache there is nothing to do
        flatbed.Embedding(10, DIM, storage=storage).table.warm([1, 2])


def test_default_size(where: str) -> None:
    """Four batches on a GPU, and no cache on a CPU."""
    emb = flatbed.Embedding(100_000, DIM, device=where)
    for n, expected in ((100, 400), (1000, 4000), (10, 4000)):
        admit(emb, range(n))
        assert emb.table.cache_stats().rows == (expected if where == "cuda" else 0)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cache_rows": -1}, ValueError, "cache_rows.*-1"),
    ({"cache_bytes": "1G"}, TypeError, "cache_bytes.*'1G'"),
    ({"cache_rows": 2, "cache_bytes": 512}, ValueError, "not both; found 2 and 512"),
    ({"cache_rows": 3, "storage": "device"}, ValueError, "cache_rows=3"),
    ({"cache_bytes": 3, "storage": "device"}, ValueError, "cache_bytes=3"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG, ids=str)
def test_wrong_sizes(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    """They raise, and a table that exists keeps its cache."""
    with pytest.raises(kind, match=message):
        flatbed.Embedding(30, DIM, **options)
    sizes = dict(options)
    storage = sizes.pop("storage", "host")
    emb = made(30, 0 if storage == "device" else 6, storage=storage)
    admit(emb, [1, 2])
    with pytest.raises(kind):
        emb.table.set_cache(**sizes)
    assert emb.table.cache_stats().rows == (0 if storage == "device" else 6)


def test_too_few_bytes_for_a_record() -> None:
    emb = flatbed.Embedding(1000, 8, cache_bytes=100)
    flatbed.optim.Adam(emb, lr=0.1)
    with pytest.raises(flatbed.FlatbedError, match="a single record, which takes 128 bytes"):
        admit(emb, [1, 2])
    emb.table.set_cache(cache_bytes=0)
    admit(emb, [1, 2])


# ---- order between training and prefetches: no admission moves a row while other work uses it
#
# Streams are simulated: they know which work is ordered before their next work. Kernels are interpreted.


N_ROWS = 24


@dataclass(eq=False)
class Stream:
    """A simulated stream; events are sets of the work before them."""

    before: set[int] = field(default_factory=set)
    stream_id = property(id)

    def record_event(self) -> frozenset[int]:
        return frozenset(self.before)

    def wait_event(self, event: frozenset[int]) -> None:
        self.before |= event

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


@dataclass
class Work:
    """Kernels that use rows, or one part of an admission: decisions on rows, or moves of their records."""

    rows: set[int]
    part: str | None
    before: set[int]
    memory: int
    """Address of the decisions that are written, or read by moves and steps; 0 for none."""


class Simulation:
    """A cache, a training stream and the streams of prefetches, and all work that was issued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_slots: int, depth: int, n_lookups: int) -> None:
        self.emb = made(N_ROWS, n_slots)
        self.cache, self.window = cache_of(self.emb), (depth + 1) * n_lookups - 1
        self.training = self.current = Stream()
        self.streams = {"decisions": Stream(), "moves": Stream()}
        self.work: list[Work] = []
        self.moving: dict[int, set[int]] = {}
        self.memory: list[Tensor] = []  # kept, so that each address stands for one piece of memory
        self.pending: list[tuple[list[LookupBatch], Any]] = []
        self.begun: list[list[LookupBatch]] = []
        self.cache.device = torch.device("cuda")
        decide, move = kernels.decide, kernels.move

        def issue_decisions(index: Any, keys: Tensor, *args: Any, **options: Any) -> Any:
            before = index.slot_of_row.clone()
            found = decide(index, keys, *args, **options)
            self.memory.append(found.memory)
            self.moving[id(found.memory)] = set((index.slot_of_row != before).nonzero().flatten().tolist())
            self.issue(self.moving[id(found.memory)], "decisions", memory=found.memory)
            return found

        def issue_moves(decided: Any, location: Any, stream: Stream | None = None) -> None:
            move(decided, location)
            self.issue(self.moving[id(decided.memory)], "moves", stream, decided.memory)

        monkeypatch.setattr(kernels, "decide", issue_decisions)
        monkeypatch.setattr(kernels, "move", issue_moves)
        monkeypatch.setattr(gpu, "is_capturing", lambda device: False)
        monkeypatch.setattr(gpu, "stream_for", lambda device, purpose: self.streams[purpose])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)

    def issue(
        self,
        rows: set[int],
        part: str | None = None,
        stream: Stream | None = None,
        memory: Tensor | None = None,
    ) -> None:
        stream, address = stream or self.current, 0 if memory is None else memory.untyped_storage().data_ptr()
        self.work.append(Work(rows, part, set(stream.before), address))
        stream.before.add(len(self.work) - 1)

    def prefetch(self, lookups: list[Tensor]) -> None:
        self.current, batches = self.streams["decisions"], []
        for keys in lookups:
            found = self.cache.prefetch(keys, window=self.window, reservation=None)
            if found is not None:
                batches.append(LookupBatch(keys.shape, *found[:2], self.cache, found[2]))
        self.current = self.training
        self.streams["moves"].wait_stream(self.streams["decisions"])
        self.cache.issue_moves()
        self.pending.append((batches, self.streams["moves"].record_event()))

    def begin(self) -> None:
        batches, ready = self.pending.pop(0)
        self.training.wait_event(ready)
        self.begun.append(batches)

    def end(self) -> None:
        """End the step of the last batch that was begun."""
        for batch in self.begun[-1] if self.begun else []:
            self.cache.end_prefetch(batch)

    def use(self, batch: LookupBatch | None, rows: Tensor) -> None:
        self.cache.location_for(batch)
        self.issue(set(rows.tolist()), memory=None if batch is None else batch.unique.rows)

    def leave(self) -> None:
        """Leave the loop: its batches end, and work on them goes on."""
        self.cache.prefetch_after(self.training)
        self.cache.prefetch_after(self.streams["moves"])
        self.end()
        for batches, _ in self.pending:
            for batch in batches:
                self.cache.end_prefetch(batch)
        self.pending, self.begun = [], []

    def conflicts(self) -> int:
        """Pairs of equal parts of admissions, or of a part and other work on its rows, in no order.

        Also work that uses decisions while others are written to their memory.
        """
        found = 0
        for (i, one), (j, other) in combinations(enumerate(self.work), 2):
            if i in other.before or j in one.before:
                continue
            if one.part == other.part:
                found += one.part is not None
            else:
                found += None in (one.part, other.part) and bool(one.rows & other.rows)
            found += one.memory == other.memory != 0 and "decisions" in (one.part, other.part)
        return found


def simulate(
    monkeypatch: pytest.MonkeyPatch, seed: int, *, is_ordered: bool = True, leaves: bool = False
) -> Simulation:
    """Take steps as a loop over a `Prefetcher` does. `is_ordered`: prefetches wait for earlier steps.

    `leaves`: by graphs of decisions, in several loops that are left early. The next one may be in another
    stream, which is in no order with the one before if the table is used in the loops alone.
    """
    draw = random.Random(seed)
    depth, n_lookups = draw.choice([0, 1, 2]), draw.choice([1, 1, 2])
    simulation = Simulation(monkeypatch, draw.choice([6, 12, 20, N_ROWS]), depth, n_lookups)
    if leaves:
        simulate_graphs(monkeypatch, simulation.cache)
    only_loops = leaves and draw.choice([True, False])

    def ids() -> Tensor:
        return torch.tensor(
            [draw.randrange(N_ROWS) for _ in range(draw.choice([0, 1, 2, 3]))], dtype=torch.int64
        )

    for number in range(28 if leaves else 14):
        if leaves and number % 7 == 6:
            simulation.leave()
            before, simulation.training = simulation.training, Stream()
            simulation.current = simulation.training
            if not only_loops:
                simulation.training.wait_stream(before)
        if is_ordered:
            simulation.streams["decisions"].wait_stream(simulation.training)
        simulation.end()
        while len(simulation.pending) < depth + 1:
            simulation.prefetch([ids() for _ in range(n_lookups)])
        simulation.begin()
        for batch in simulation.begun[-1]:
            simulation.use(batch, batch.keys)  # lookup
        other = draw.choice(["none", "none", "late"] + ["none", "admit", "read"] * (not only_loops))
        if other == "admit":
            keys = ids()
            unique, number = simulation.cache.admit(keys)
            simulation.use(LookupBatch(keys.shape, keys, unique, simulation.cache, number), keys)
        elif other == "read":
            simulation.use(None, torch.arange(0, N_ROWS, 5))
        batches = [batch for held in simulation.begun[-3:] for batch in held]
        for batch in batches if other == "late" else simulation.begun[-1]:
            simulation.use(batch, batch.keys)  # step
        del simulation.begun[:-3], batches
        batch = None  # its decisions may be gone
    return simulation


@pytest.mark.usefixtures("interpreted")
class TestOrder:
    @pytest.mark.parametrize("seed", range(4))
    def test_no_conflicts(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        assert simulate(monkeypatch, seed).conflicts() == 0

    @pytest.mark.parametrize("seed", range(4))
    def test_no_conflicts_in_memory_of_graphs(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        simulation = simulate(monkeypatch, seed, leaves=True)
        written = [work.memory for work in simulation.work if work.part == "decisions"]
        assert len({*written}) < len(written), "no memory was written again"
        assert simulation.conflicts() == 0

    @pytest.mark.parametrize("rule", ["is_free", "prefetch_after"])
    def test_each_rule_of_graphs_is_needed(self, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if rule == "is_free":
            monkeypatch.setattr(decision_graphs.DecisionGraph, "is_free", True)
        else:
            monkeypatch.setattr(gpu.GpuCache, "prefetch_after", lambda *_: None)

        def has_conflicts(seed: int) -> bool:
            with monkeypatch.context() as patch:
                return simulate(patch, seed, leaves=True).conflicts() > 0

        assert any(map(has_conflicts, range(10)))

    def test_prefetches_overlap_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With room for all batches, a prefetch does not wait for the batch in hand, nor the other way."""
        simulation = Simulation(monkeypatch, N_ROWS, 1, 1)
        simulation.prefetch([torch.tensor([1, 2])])
        simulation.begin()
        (batch,) = simulation.begun[0]
        simulation.use(batch, batch.keys)
        simulation.prefetch([torch.tensor([3, 4])])
        simulation.use(batch, batch.keys)
        _, moves, lookup, decisions, more_moves, step = simulation.work
        assert (moves.before, lookup.before) == ({0}, {0, 1})
        assert (decisions.before, more_moves.before) == ({0}, {0, 1, 3})
        assert step.before == {0, 1, 2}
        assert simulation.conflicts() == 0
        assert lookup.rows == {1, 2}

    def test_a_captured_lookup_ends_prefetching(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A replay may read rows at any time."""
        simulation = Simulation(monkeypatch, N_ROWS, 1, 1)
        monkeypatch.setattr(gpu, "is_capturing", lambda device: True)
        simulation.use(None, torch.tensor([1, 2]))
        assert simulation.cache.prefetch(torch.tensor([3]), window=1, reservation=None) is None

    def test_work_waits_for_an_admission_that_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Moves that were decided before are issued by the next work."""
        simulation = Simulation(monkeypatch, N_ROWS, 1, 1)
        decide = kernels.decide

        def fail(index: Any, keys: Tensor, *args: Any) -> Any:
            if int(keys[0]) == 2:
                return decide(index, keys, *args)
            simulation.issue({1}, "decisions")
            raise MemoryError

        monkeypatch.setattr(kernels, "decide", fail)
        with pytest.raises(MemoryError):
            simulation.prefetch([torch.tensor([2, 4]), torch.tensor([1])])
        simulation.current = simulation.training
        monkeypatch.setattr(kernels, "decide", decide)
        simulation.cache.admit(torch.tensor([1, 2]))
        assert [work.part for work in simulation.work] == [*["decisions"] * 2, "moves", "decisions", "moves"]
        assert simulation.conflicts() == 0

    @pytest.mark.parametrize("is_left", [True, False])
    def test_memory_of_the_last_batch_is_kept_for_its_step(
        self, is_left: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And that of the two batches after it. A loop that goes on lets "decisions" wait instead."""
        emb, stream, record, begin = made(N_ROWS, N_ROWS), Stream(), mock.Mock(), RowPrefetch.begin
        monkeypatch.setattr(LookupBatch, "record_stream", record)
        monkeypatch.setattr(RowPrefetch, "begin", lambda self, request, _: begin(self, request, stream))
        batches = [torch.arange(n, n + 3) for n in range(5)]
        for n, ids in enumerate(flatbed.Prefetcher(batches, {emb: lambda batch: batch})):
            emb(ids)
            assert not record.called
            if is_left and n == 2:
                break
        assert record.call_args_list == [mock.call(stream)] * 3 * is_left
        assert cache_of(emb)._streams_of_left_loops == ({stream} if is_left else set())

    def test_a_prefetch_waits_for_loops_that_were_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Graphs of decisions write again to the memory that these may still use."""
        simulation, left = Simulation(monkeypatch, N_ROWS, 1, 1), Stream()
        left.before.add(7)
        simulation.cache.prefetch_after(left)
        simulation.use(None, torch.tensor([1]))
        simulation.prefetch([torch.tensor([2])])
        assert simulation.work[-2].part == "decisions"
        assert simulation.work[-2].before == {0, 7}

    def test_a_loop_that_is_left_while_a_graph_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the garbage collector, or by another thread."""
        simulation, left = Simulation(monkeypatch, N_ROWS, 1, 1), Stream()
        left.before.add(7)
        find = simulation.cache._graphs.find

        def find_and_leave(*args: Any, **options: Any) -> Any:
            simulation.cache.prefetch_after(left)
            return find(*args, **options)

        monkeypatch.setattr(simulation.cache._graphs, "find", find_and_leave)
        simulation.prefetch([torch.tensor([2])])
        assert simulation.work[0].before == {7}

    @pytest.mark.parametrize("name", ["protects", "wait_for_prefetch", None])
    def test_each_rule_is_needed(self, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without one of the rules there are conflicts."""
        if name is not None:
            monkeypatch.setattr(gpu.GpuCache, name, lambda *_: True)

        def has_conflicts(seed: int) -> bool:
            with monkeypatch.context() as patch:
                return simulate(patch, seed, is_ordered=name is not None).conflicts() > 0

        assert any(map(has_conflicts, range(10)))


def test_a_thread_that_makes_a_cache_waits_for_its_own_stream_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader thread may make one while the user captures a CUDA graph, which waiting for the GPU ends."""
    emb = flatbed.Embedding(9, 2, storage="disk", path=tmp_path / "table", cache_rows=4, device="cpu")
    store, stream = emb.table._store, mock.Mock()
    store.ensure_layout()
    with monkeypatch.context() as patch:
        patch.setattr(store, "device", torch.device("cuda", 0))
        patch.setattr(row_store, "is_capturing", lambda device: False)
        patch.setattr(row_store, "build_cache", lambda *_, **__: mock.Mock())
        patch.setattr(row_store, "synchronize", mock.Mock(side_effect=AssertionError))
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        assert store.ensure_cache(2) is not None
        stream.synchronize.assert_called_once_with()
        store.cache = None
