"""The prefetcher: what it asks of tables and in which order, what it refuses, and that it leaves nothing."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed.data import Prefetcher, lookups
from flatbed.data import worker as background
from tests.data.fakes import (
    ROWS,
    FakeAhead,
    as_arrays,
    batches,
    items,
    loader,
    running,
    wait_for_next,
    wait_until,
    workers,
)


def first(batch: Any) -> int:
    return int(batch["items"][0])


def note(prefetcher: Prefetcher, seen: list[int]) -> None:
    """Iterate, with time for the thread to be ahead."""
    for batch in prefetcher:
        seen.append(first(batch))
        time.sleep(0.01)


# ---- the order of things


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_every_batch_in_order(emb: flatbed.Embedding, aheads: list[FakeAhead], depth: int) -> None:
    given = batches(10)
    found = list(Prefetcher(given, {emb: items}, depth=depth))
    assert len(found) == 10
    assert all(one is other for one, other in zip(found, given, strict=True)), "on a CPU nothing is copied"
    (ahead,) = aheads
    for what in ("stage", "admit", "begin", "finish"):
        names = ("admit", "admit front") if what == "admit" else (what,)
        assert ahead.said(*names) == list(range(10)), what
    assert not ahead.said("drop")
    assert {staged.thread for staged in ahead.staged} == {"flatbed-prefetch"}


def test_calls_around_a_step(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    """When the loop has batch k, those up to k + depth - 1 are admitted, and k - 1 is finished."""
    depth = 3
    for k, _ in enumerate(prefetched := iter(Prefetcher(batches(10), {emb: items}, depth=depth))):
        (ahead,) = aheads
        assert ahead.said("begin") == list(range(k + 1))
        assert ahead.said("finish") == list(range(k))
        admitted = ahead.said("admit", "admit front")
        assert admitted[: k + 1] == list(range(k + 1))
        assert len(admitted) <= min(10, k + depth)
        wait_for_next(prefetched)
    for k in range(1, 8):
        calls = [(what, ids[0][0]) for what, ids, *_ in ahead.calls if what != "stage"]
        assert (
            calls.index(("finish", k - 1)) < calls.index(("admit", k + depth - 1)) < calls.index(("begin", k))
        )


def test_refused_rows_are_asked_for_again_in_front(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    prefetched = iter(Prefetcher(batches(6), {emb: items}, depth=2))
    aheads[0].room = lambda staged, front: front and staged.ids[0][0] != 3
    wait_for_next(prefetched)
    for _ in prefetched:
        wait_for_next(prefetched)
    calls = [(what, ids[0][0]) for what, ids, *_ in aheads[0].calls if "admit" in what]
    assert calls == [
        ("admit front", 0),
        *(pair for k in range(1, 6) for pair in (("admit", k), ("admit front", k))),
    ]
    order = [what for what, ids, *_ in aheads[0].calls if ids[0][0] == 2]
    assert order == ["stage", "admit", "admit front", "begin", "finish"]
    place = aheads[0].calls.index
    assert place(("admit front", [[2] * 4], True)) < place(("admit", [[3] * 4], False)), (
        "the front comes first"
    )


def test_several_tables_and_lookups(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    bag = flatbed.EmbeddingBag(ROWS, 2, device="cpu")
    again = flatbed.Embedding.from_table(emb.table)
    given = [{"items": np.array([i, 1], np.uint8), "more": [[i], [2]]} for i in range(4)]
    asked = {
        emb: lambda b: b["items"],
        bag.table: lambda b: (b["items"], b["items"].view(1, 2)),
        again: lambda b: b["more"],
    }
    found = list(Prefetcher(given, asked))
    assert [b["items"].tolist() for b in found] == [[i, 1] for i in range(4)]
    assert [a.table for a in aheads] == [emb.table, bag.table]
    assert [s.ids for s in aheads[0].staged] == [[[i, 1], [[i], [2]]] for i in range(4)]
    assert [s.ids for s in aheads[1].staged] == [[[i, 1], [[i, 1]]] for i in range(4)]


@pytest.mark.parametrize(
    "ids", [[3, 4], (3, 4), np.array([3, 4], np.int16), torch.tensor([3, 4], dtype=torch.int32), range(3, 5)]
)
def test_kinds_of_ids(emb: flatbed.Embedding, aheads: list[FakeAhead], ids: Any) -> None:
    list(Prefetcher([1], {emb: lambda _: ids}))
    assert aheads[0].staged[0].ids == [[3, 4]]


def test_no_ids_at_all(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    list(Prefetcher([1], {emb: lambda _: []}))
    assert aheads[0].staged[0].ids == [[]]


def test_each_iteration_begins_anew(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    prefetcher = Prefetcher(batches(5), {emb: items})
    for _ in range(2):
        assert [first(b) for b in prefetcher] == list(range(5))
    one, other = iter(prefetcher), iter(prefetcher)
    for i in range(5):
        assert first(next(one)) == first(next(other)) == i
    assert list(one) == list(other) == []
    assert next(one, None) is None
    assert len(aheads) == 4


def test_length(emb: flatbed.Embedding) -> None:
    assert len(Prefetcher(batches(5), {emb: items})) == 5
    with pytest.raises(TypeError, match="len"):
        len(Prefetcher(iter([]), {emb: items}))


def test_without_tables() -> None:
    given = [np.arange(3), np.arange(4)]
    found = list(Prefetcher(given, {}, device="cpu"))
    assert [b.tolist() for b in found] == [[0, 1, 2], [0, 1, 2, 3]]


def test_anything_to_iterate_over(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    class Old:
        def __getitem__(self, i: int) -> Any:
            return batches(3)[i]

    assert [first(b) for b in Prefetcher(Old(), {emb: items})] == [0, 1, 2]  # type: ignore[arg-type]
    assert [first(b) for b in Prefetcher((b for b in batches(3)), {emb: items})] == [0, 1, 2]


def test_random_order_is_that_of_the_loader(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    """Whether the training draws random numbers in between or not."""

    def order(with_prefetcher: bool, num_workers: int) -> list[Any]:
        torch.manual_seed(3)
        plain = loader(24, 4, shuffle=True, num_workers=num_workers)
        seen: list[Any] = []
        for _ in range(2):
            for batch in Prefetcher(plain, {emb: items}) if with_prefetcher else plain:
                seen.append((batch["items"].tolist(), float(torch.rand(()))))
        return seen

    for num_workers in (0, 2):
        assert order(True, num_workers) == order(False, num_workers)


# ---- refusals


def test_mistakes_are_named(emb: flatbed.Embedding) -> None:
    given: Any
    for given, found in ((emb, "Embedding"), (None, "NoneType"), (items, "function")):
        with pytest.raises(TypeError, match=f"lambda batch.*found {found}"):
            Prefetcher([], given)
    for given, found in (
        (nn.Embedding(3, 3), "Embedding .give"),
        ("items", "str"),
        (nn.Sequential(emb), "Sequential"),
    ):
        with pytest.raises(TypeError, match=f"found {found}"):
            Prefetcher([], {given: items})
    with pytest.raises(TypeError, match=r"Table\(50 × 4.*found str"):
        Prefetcher([], {emb: "items"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="found int"):
        Prefetcher(3, {emb: items})  # type: ignore[arg-type]
    for depth in (0, -1):
        with pytest.raises(ValueError, match=f"found {depth}"):
            Prefetcher([], {emb: items}, depth=depth)
    for depth in (1.5, True, "2"):
        with pytest.raises(TypeError, match="depth must be an integer"):
            Prefetcher([], {emb: items}, depth=depth)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device"):
        Prefetcher([], {})
    with pytest.raises(flatbed.FlatbedError, match="meta"):
        Prefetcher([], {}, device="meta")


def test_devices_must_agree(emb: flatbed.Embedding, monkeypatch: pytest.MonkeyPatch) -> None:
    other = flatbed.Embedding(7, 4)
    prefetcher = Prefetcher([], {emb: items, other: items})
    assert prefetcher.device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"Table\(50 × 4.*computes on cpu, and batches are to go on cuda:1"):
        Prefetcher([], {emb: items}, device="cuda:1")
    monkeypatch.setattr(other.table.store, "device", torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"Table\(7 × 4.*computes on cuda:0, and Table\(50 × 4.* on cpu"):
        iter(prefetcher)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (None, "NoneType"),
        ({"a": 1}, "dict"),
        (torch.zeros(3), "torch.float32"),
        (np.zeros(3), "float64"),
        ([1.5], "list"),
        ([[1], [2, 3]], "list"),
        ([torch.tensor([1]), None], "NoneType"),
        ("1", "str"),
    ],
)
def test_ids_that_are_none(emb: flatbed.Embedding, aheads: list[FakeAhead], ids: Any, found: str) -> None:
    with pytest.raises(TypeError, match=rf"Table\(50 × 4.*found {found}"):
        list(Prefetcher([1], {emb: lambda _: ids}))


def test_ids_out_of_range(emb: flatbed.Embedding) -> None:
    """Raised when the batch's turn comes, not before, by the table itself."""
    given = [torch.tensor([1]), torch.tensor([2, ROWS]), torch.tensor([3])]
    prefetched = iter(Prefetcher(given, {emb: lambda b: b}))
    assert next(prefetched).tolist() == [1]
    with pytest.raises(IndexError, match=f"id {ROWS} at position 1"):
        next(prefetched)
    assert list(prefetched) == []


# ---- errors


def bad_loader() -> Iterator[Any]:
    yield from batches(3)
    raise ZeroDivisionError("in the loader")


def test_an_error_of_the_loader(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    seen: list[int] = []
    with pytest.raises(ZeroDivisionError, match="in the loader") as caught:
        note(Prefetcher(bad_loader(), {emb: items}, depth=2), seen)
    assert seen == [0, 1, 2]
    assert "bad_loader" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert all(staged.finished for staged in aheads[0].staged)
    assert not running()


def test_an_error_of_one_table_drops_what_others_staged(
    emb: flatbed.Embedding, aheads: list[FakeAhead]
) -> None:
    other = flatbed.Embedding(2, 4)
    with pytest.raises(IndexError):
        list(Prefetcher(batches(5), {emb: items, other: items}))
    one, two = aheads
    assert one.said("stage") == [0, 1, 2]
    assert one.said("drop") == [2]
    assert two.said("finish") == [0, 1]


@pytest.mark.parametrize("where", ["stage", "admit", "begin", "finish"])
def test_errors_in_between(
    emb: flatbed.Embedding, aheads: list[FakeAhead], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real = getattr(FakeAhead, where)

    def failing(self: FakeAhead, staged: Any, *args: Any, **kwargs: Any) -> Any:
        made = real(self, staged, *args, **kwargs)
        if len(self.said(where, f"{where} front")) == 3:
            raise ZeroDivisionError(where)
        return made

    monkeypatch.setattr(FakeAhead, where, failing)
    prefetched = iter(Prefetcher(batches(9), {emb: items}, depth=3))
    with pytest.raises(ZeroDivisionError):
        list(prefetched)
    assert list(prefetched) == []
    assert not running()
    lost = [staged for staged in aheads[0].staged if not staged.ended]
    assert len(lost) == (where == "stage"), "whoever fails in stage has not handed it over"


@pytest.mark.parametrize("where", ["ids", "loader"])
def test_stop_iteration_does_not_end_the_loop(
    emb: flatbed.Embedding, aheads: list[FakeAhead], where: str
) -> None:
    def stop(batch: Any) -> Any:
        if where == "ids" and first(batch) == 2:
            raise StopIteration
        return batch["items"]

    def stopping() -> Iterator[Any]:
        for batch in batches(5):
            if where == "loader" and first(batch) == 2:
                raise StopIteration
            yield batch

    seen: list[int] = []
    with pytest.raises(RuntimeError, match="StopIteration"):
        note(Prefetcher(stopping(), {emb: stop}), seen)
    assert seen == [0, 1]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also in a process that was begun in the background, where shells have signals ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_it_waits(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    """Control-C in a loop whose loader never comes back."""
    go = threading.Event()

    def stuck() -> Iterator[Any]:
        yield batches(1)[0]
        go.wait(60)

    def interrupt() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    prefetched = iter(Prefetcher(stuck(), {emb: items}))
    next(prefetched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "JOIN_SECONDS", 0.2)
        thread = threading.Thread(target=interrupt)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(prefetched)
        assert time.monotonic() - begin < 20
        thread.join()
    go.set()
    assert list(prefetched) == []


# ---- every way to leave


def leave_by_break(prefetcher: Prefetcher) -> None:
    for batch in prefetcher:
        if first(batch) == 2:
            break


def leave_by_error(prefetcher: Prefetcher) -> None:
    with suppress(KeyError):
        for batch in prefetcher:
            if first(batch) == 2:
                raise KeyError


def leave_by_del(prefetcher: Prefetcher) -> None:
    prefetched = iter(prefetcher)
    next(prefetched)
    del prefetched


def leave_by_close(prefetcher: Prefetcher) -> None:
    prefetched = iter(prefetcher)
    next(prefetched)
    prefetched.close()
    prefetched.close()
    assert list(prefetched) == []


def leave_by_with(prefetcher: Prefetcher) -> None:
    with iter(prefetcher) as prefetched:
        next(prefetched)


def leave_at_once(prefetcher: Prefetcher) -> None:
    iter(prefetcher)


def leave_in_a_circle(prefetcher: Prefetcher) -> None:
    prefetched = iter(prefetcher)
    next(prefetched)
    circle: list[Any] = [prefetched]
    circle.append(circle)
    del circle, prefetched
    gc.collect()


WAYS = [
    leave_by_break,
    leave_by_error,
    leave_by_del,
    leave_by_close,
    leave_by_with,
    leave_at_once,
    leave_in_a_circle,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("endless", [False, True])
def test_nothing_is_left_running(
    emb: flatbed.Embedding, aheads: list[FakeAhead], way: Any, endless: bool
) -> None:
    closed = []

    def some() -> Iterator[Any]:
        try:
            while True:
                yield from batches(6)
                if not endless:
                    return
        finally:
            closed.append(True)

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return some()

    way(Prefetcher(Loader(), {emb: items}, depth=3))
    gc.collect()
    assert not running(), "it has ended by now"
    assert closed or way is leave_at_once
    assert all(staged.ended for staged in aheads[0].staged)


@pytest.mark.parametrize(
    ("way", "context"),
    [
        *((way, "fork") for way in (leave_by_break, leave_by_del, leave_by_close, leave_by_error)),
        (leave_by_break, "spawn"),  # which takes long to start
    ],
)
def test_no_worker_is_left(emb: flatbed.Embedding, aheads: list[FakeAhead], way: Any, context: str) -> None:
    """The loader's iterator is released, although the loader itself lives on."""
    plain = loader(64, 1, num_workers=2, multiprocessing_context=context, collate_fn=as_arrays)
    way(Prefetcher(plain, {emb: items}))
    assert not running()
    assert wait_until(lambda: not workers())
    assert all(staged.ended for staged in aheads[0].staged)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers(emb: flatbed.Embedding, aheads: list[FakeAhead], context: str) -> None:
    plain = loader(20, 4, num_workers=2, multiprocessing_context=context, collate_fn=as_arrays)
    found = [b["items"].tolist() for b in Prefetcher(plain, {emb: items})]
    assert found == [b["items"].tolist() for b in loader(20, 4)]


def test_workers_that_stay(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    """Persistent ones share one iterator: each loop begins when the thread before is gone."""
    plain = loader(32, 1, num_workers=2, persistent_workers=True)
    prefetcher = Prefetcher(plain, {emb: items}, depth=3)
    for stop in (3, 1, 7, 40):
        seen = []
        for batch in prefetcher:
            seen.append(first(batch))
            if len(seen) == stop:
                break
        assert seen == list(range(min(stop, 32)))
    del plain, prefetcher, batch
    assert wait_until(lambda: not workers())


def test_an_error_in_a_worker(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    seen: list[int] = []
    with pytest.raises(ValueError, match="item 9 is bad"):
        note(Prefetcher(loader(20, 2, num_workers=2, fail_at=9), {emb: items}), seen)
    assert seen == [0, 2, 4, 6]
    assert not workers(), "with the error at hand, and without the collector"


def test_an_error_beside_workers(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(Prefetcher(loader(20, 2, num_workers=2), {emb: lambda _: 1 // 0}))
    assert not workers()
    del caught


def test_an_interrupt_while_it_ends(
    emb: flatbed.Embedding, aheads: list[FakeAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does when a worker dies: everything is dropped all the same."""
    raised = []

    def join(self: threading.Thread, seconds: float | None = None) -> None:
        if self.name == "flatbed-prefetch" and not raised:
            raised.append(True)
            raise RuntimeError("DataLoader worker is killed by signal")
        real(self, seconds)

    real = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", join)
    inside = threading.Event()

    def slow() -> Iterator[Any]:
        yield from batches(2)
        inside.set()
        time.sleep(0.2)
        yield from batches(1)

    prefetched = iter(Prefetcher(slow(), {emb: items}))
    next(prefetched)
    inside.wait(20)
    prefetched.close()
    assert raised
    assert not running()
    assert all(staged.ended for staged in aheads[0].staged)


def test_garbage_is_collected(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    """The thread keeps neither the iterator nor the prefetcher nor a batch."""
    prefetcher = Prefetcher([b["items"] + 0 for b in batches(6)], {emb: lambda b: b})
    prefetched = iter(prefetcher)
    next(prefetched)
    aheads[0].staged.clear()
    gone = [weakref.ref(prefetcher), weakref.ref(prefetched), weakref.ref(prefetched._iteration)]
    del prefetcher
    assert gone[0]() is None
    del prefetched
    assert [ref() for ref in gone] == [None, None, None]
    assert not running()


def test_a_batch_is_the_loops_alone(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    """Once the loop has let go of it, its memory is free, though the iteration goes on."""

    def fresh() -> Iterator[Any]:
        for i in range(6):
            yield torch.full((2,), i)

    prefetched = iter(Prefetcher(fresh(), {emb: lambda b: b.clone()}, depth=1))
    background = prefetched._iteration.background
    for _ in range(4):
        batch = next(prefetched)
        assert wait_until(lambda: background._ready.qsize() == 1)
        gone = weakref.ref(batch)
        del batch
        assert gone() is None
    prefetched.close()


def test_errors_do_not_keep_the_loader(emb: flatbed.Embedding, aheads: list[FakeAhead]) -> None:
    class Loader:
        def __iter__(self) -> Loader:
            return self

        def __next__(self) -> Any:
            raise ValueError

    made = Loader()
    gone = weakref.ref(made)
    with suppress(ValueError):
        list(Prefetcher(made, {emb: items}))
    del made
    assert gone() is None, "without the collector"


# ---- for long


def test_ten_thousand_steps(
    emb: flatbed.Embedding, aheads: list[FakeAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither objects nor threads nor memory grow."""

    def some() -> Iterator[Any]:
        for i in range(10_000):
            yield {"items": np.array([i % ROWS]), "values": torch.zeros(2)}

    monkeypatch.setattr(lookups, "ahead_of", lambda table: FakeAhead(table, keep=False))
    counts = []
    for k, _ in enumerate(Prefetcher(some(), {emb: items}, depth=3)):
        if k in (1_000, 9_000):
            gc.collect()
            tensors = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
            counts.append((len(gc.get_objects()), tensors, threading.active_count()))
    (objects, tensors, threads), (objects_then, tensors_then, threads_then) = counts
    assert objects_then - objects < 100, counts
    assert tensors_then - tensors < 12, counts
    assert threads_then == threads


def test_hundreds_of_iterations(emb: flatbed.Embedding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ahead_of", lambda table: FakeAhead(table, keep=False))
    prefetcher = Prefetcher(batches(4), {emb: items})
    counts = []
    for k in range(300):
        for batch in prefetcher:
            if k % 2 and first(batch) == 1:
                break
        if k in (50, 299):
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert not running()
    assert counts[1] - counts[0] < 100, counts


@pytest.mark.parametrize("seed", range(4))
def test_random_delays(emb: flatbed.Embedding, aheads: list[FakeAhead], seed: int) -> None:
    """No deadlock, nothing lost, whoever is slow and wherever it ends."""
    chance, delays = random.Random(seed), random.Random(seed + 100)

    def nap(source: random.Random) -> None:
        if source.random() < 0.2:
            time.sleep(source.random() * 0.003)

    def slow(n: int, bad: bool) -> Iterator[Any]:
        for batch in batches(n):
            nap(delays)
            yield batch
        if bad:
            raise LookupError

    for _ in range(25):
        n, bad, depth = chance.randrange(1, 40), chance.random() < 0.3, chance.randint(1, 5)
        stop = chance.randrange(60)
        prefetched = iter(Prefetcher(slow(n, bad), {emb: items}, depth=depth))
        aheads[-1].room = lambda staged, front: front or staged.number % 3 > 0
        seen: list[int] = []
        try:
            for batch in prefetched:
                seen.append(first(batch))
                nap(chance)
                if len(seen) == stop:
                    break
        except LookupError:
            assert bad
        prefetched.close()
        assert seen == list(range(len(seen)))
        assert len(seen) == min(n, stop or n)
        assert all(staged.ended for staged in aheads[-1].staged)
        assert not running()
