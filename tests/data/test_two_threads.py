"""Tables on disk: one thread has the loader, another one the file. And ids functions that fail."""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import flatbed
from flatbed.data import Prefetcher, lookups
from flatbed.data.prefetcher import NAME
from flatbed.data.worker import Background
from flatbed.tables.prefetch import RowPrefetch
from tests.data.fakes import ROWS, FakeAhead, batches, items, loader, running, wait_until, workers

THREADS = [NAME, f"{NAME}-rows"]


@pytest.fixture
def slow_files(monkeypatch: pytest.MonkeyPatch) -> list[FakeAhead]:
    """As of tables on disk."""
    made: list[FakeAhead] = []

    def make(table: Any) -> FakeAhead:
        made.append(FakeAhead(table, brings=True))
        return made[-1]

    monkeypatch.setattr(lookups, "ahead_of", make)
    return made


def on_disk(folder: Path) -> flatbed.Embedding:
    return flatbed.Embedding(ROWS, 4, storage="disk", path=folder / "a.bed")


def names() -> list[str]:
    return sorted(thread.name for thread in running())


# ---- who does what


def test_each_has_its_own_part(emb: flatbed.Embedding, slow_files: list[FakeAhead]) -> None:
    other = flatbed.Embedding(ROWS, 4)
    list(Prefetcher(batches(10), {emb: items, other: items}, depth=3))
    for ahead in slow_files:
        assert {staged.thread for staged in ahead.staged} == {THREADS[0]}
        assert {staged.brought_by for staged in ahead.staged} == {THREADS[1]}
        assert [ids[0][0] for ids in ahead.brought] == list(range(10))


def test_the_loader_goes_on_while_rows_are_read(
    emb: flatbed.Embedding, slow_files: list[FakeAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=20)
    real = FakeAhead.bring

    def bring(self: FakeAhead, staged: Any) -> None:
        if staged.ids[0][0] == 2:
            both.wait()
        real(self, staged)

    def given() -> Iterator[Any]:
        yield from batches(3)
        both.wait()
        yield from batches(5)[3:]

    monkeypatch.setattr(FakeAhead, "bring", bring)
    assert len(list(Prefetcher(given(), {emb: items}, depth=1))) == 5


@pytest.mark.parametrize("depth", [1, 3])
def test_how_many_batches_are_held(emb: flatbed.Embedding, slow_files: list[FakeAhead], depth: int) -> None:
    """Twice `depth`, of which the loop has one, and one that is being loaded."""
    seen = []

    def given() -> Iterator[Any]:
        for batch in batches(30):
            seen.append(batch)
            yield batch

    prefetched = iter(Prefetcher(given(), {emb: items}, depth=depth))
    for n in range(12):
        next(prefetched)
        most = n + 1 + (depth - 1) + depth + 1
        assert wait_until(lambda n=n: len(seen) >= n + 1 + depth + 1)  # type: ignore[misc]
        time.sleep(0.002)
        assert len(seen) <= most
    prefetched.close()


def test_one_thread_for_memory_and_two_for_files(tmp_path: Path) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield torch.arange(3)

    for emb, expected in ((flatbed.Embedding(ROWS, 4), THREADS[:1]), (on_disk(tmp_path), THREADS)):
        with iter(Prefetcher(endless(), {emb: lambda b: b})) as prefetched:
            next(prefetched)
            assert names() == expected
        assert not running()


def test_rows_are_read_in_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a batch, each once, as the modes of the loop have it."""
    emb = on_disk(tmp_path)
    seen: list[Any] = []
    real = RowPrefetch._read

    def read(self: RowPrefetch, rows: Any) -> None:
        seen.append((threading.current_thread().name, torch.is_grad_enabled(), rows.tolist()))
        real(self, rows)

    monkeypatch.setattr(RowPrefetch, "_read", read)
    given = [torch.tensor([i + 2, i, i, i + 1]) for i in range(6)]
    with torch.no_grad():
        list(Prefetcher(given, {emb: lambda b: [b, b.flip(0)]}))
    assert seen == [(THREADS[1], False, [i, i + 1, i + 2]) for i in range(6)]


def test_what_is_staged_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each lookup its rows; without a cache nothing, and one thread is enough."""
    emb = on_disk(tmp_path)
    ahead = RowPrefetch(emb.table)
    ids = [torch.tensor([[3, 1], [3, 2]]), torch.tensor([], dtype=torch.int32), torch.tensor([7])]
    monkeypatch.setattr(emb.table.store, "device", torch.device("cuda", 0))
    assert ahead.brings
    staged = ahead.stage(ids)
    assert staged.to_read is None
    assert [rows.tolist() for rows in staged.to_bring] == [[1, 2, 3], [], [7]]
    emb.table.set_cache(0)
    assert not ahead.brings
    assert not ahead.stage(ids).to_bring
    with torch.no_grad():
        assert ahead.brings
        assert ahead.stage(ids).to_read.tolist() == [1, 2, 3, 7]  # type: ignore[union-attr]


class NoStream:
    """A stream that has done all."""

    def record_event(self) -> None: ...


@pytest.mark.parametrize("error", [OSError, flatbed.FlatbedError, None])
def test_tickets_of_a_batch_that_fails_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """As for a GPU: rows of the first lookup are in the cache when those of the second cannot be read."""
    emb = flatbed.Embedding(ROWS, 4, storage="disk", path=tmp_path / "a.bed", cache_rows=20)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    monkeypatch.setattr(RowPrefetch, "_only_reads", False)
    monkeypatch.setattr("flatbed.tables.prefetch.stream_for", lambda *_: NoStream())
    monkeypatch.setattr("flatbed.tables.prefetch.Within", lambda _: nullcontext())
    cache: Any = emb.table.store.cache_for(8)
    real, came = cache.come_early, []

    def come_early(rows: Any) -> Any:
        came.append((threading.current_thread().name, rows.tolist()))
        if len(came) == 4 and error is not None:
            raise error("the disk is gone")
        return real(rows)

    monkeypatch.setattr(cache, "come_early", come_early)
    prefetched = iter(Prefetcher([torch.arange(i, i + 4) for i in range(3)], {emb: lambda b: [b, b + 9]}))
    next(prefetched)
    if error is None:
        assert len(list(prefetched)) == 2
    else:
        with pytest.raises(error, match="the disk is gone"):
            next(prefetched)
    assert came[:4] == [(THREADS[1], list(range(i, i + 4))) for i in (0, 9, 1, 10)]
    assert not cache.under_way.tickets
    assert not emb.table.tickets
    optimizer.zero_grad()
    emb.table.close(discard=True)


# ---- ends


def test_an_error_of_the_file_comes_in_its_turn(
    emb: flatbed.Embedding, slow_files: list[FakeAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = flatbed.Embedding(ROWS, 4)
    real = FakeAhead.bring

    def failing(self: FakeAhead, staged: Any) -> None:
        real(self, staged)
        if self.table is other.table and staged.ids[0][0] == 3:
            raise OSError("the disk is gone")

    monkeypatch.setattr(FakeAhead, "bring", failing)
    prefetched = iter(Prefetcher(batches(20), {emb: items, other: items}, depth=3))
    assert [int(next(prefetched)["items"][0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(prefetched)
    assert not running()
    for ahead in slow_files:
        assert all(staged.ended for staged in ahead.staged), "tickets of the batch that failed, too"


def test_no_worker_is_left_after_an_error_of_the_file(
    emb: flatbed.Embedding, slow_files: list[FakeAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: FakeAhead, staged: Any) -> None:
        raise StopIteration

    monkeypatch.setattr(FakeAhead, "bring", failing)
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        list(Prefetcher(loader(20, 2, num_workers=2), {emb: items}))
    assert not workers()
    assert not running()
    del caught


def test_a_new_loop_waits_for_the_loader_of_the_last(
    emb: flatbed.Embedding, slow_files: list[FakeAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the thread that reads files has ended: a loader may not be in two threads at a time."""
    monkeypatch.setattr("flatbed.data.worker.JOIN_SECONDS", 0.01)
    inside, go_on = threading.Event(), threading.Event()
    at_once: list[int] = []
    most: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for n, batch in enumerate(batches(4)):
                at_once.append(n)
                most.append(len(at_once))
                if n == 2:
                    inside.set()
                    go_on.wait(20)
                at_once.pop()
                yield batch

    prefetcher = Prefetcher(Loader(), {emb: items}, depth=1)
    prefetched = iter(prefetcher)
    next(prefetched)
    inside.wait(20)
    prefetched.close()
    del prefetched
    gc.collect()
    assert names() == THREADS[:1]
    threading.Timer(0.2, go_on.set).start()
    assert len(list(prefetcher)) == 4
    assert max(most) == 1


def test_a_new_loop_waits_once_for_all_that_are_left(
    emb: flatbed.Embedding, slow_files: list[FakeAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each thread, nor for each of the loops that were left."""
    monkeypatch.setattr("flatbed.data.worker.JOIN_SECONDS", 0.01)
    monkeypatch.setattr("flatbed.data.prefetcher.LEFT_SECONDS", 0.3)
    inside, go_on = threading.Semaphore(0), threading.Event()
    waits: list[float] = []
    join = Background.join

    def noted(self: Background[Any], seconds: float | None = None) -> None:
        if seconds is not None:
            waits.append(seconds)
        join(self, seconds)

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            yield from batches(1)
            inside.release()
            go_on.wait(20)
            yield from batches(1)

    monkeypatch.setattr(Background, "join", noted)
    prefetcher = Prefetcher(Loader(), {emb: items})
    for n in range(3):
        waits.clear()
        prefetched = iter(prefetcher)
        assert len(waits) >= min(n, 1), "there are some that are still in the loader"
        assert sum(waits) <= 0.3, "each waits for as long as it is given"
        next(prefetched)
        assert inside.acquire(timeout=20)
        prefetched.close()
        del prefetched
    go_on.set()
    assert wait_until(lambda: not running())


def test_neither_objects_nor_threads_grow(emb: flatbed.Embedding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ahead_of", lambda table: FakeAhead(table, keep=False, brings=True))
    prefetcher = Prefetcher(batches(40), {emb: items}, depth=3)
    counts = []
    for k in range(150):
        for n, _ in enumerate(prefetcher):
            if k % 2 and n == k % 7:
                break
        assert not running()
        if k in (30, 149):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 100, counts


# ---- ids functions that fail


class TwoParts(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


@pytest.mark.parametrize(
    ("batch", "error", "said"),
    [
        ({"ids": 1, 2: 3}, KeyError("items"), r"type dict with the keys 'ids', 2 \(KeyError: 'items'\)"),
        ({}, KeyError("items"), r"type dict without any keys"),
        (
            OrderedDict(zip(range(20), range(20), strict=True)),
            KeyError(),
            r"type OrderedDict .* 7 and 12 more",
        ),
        ({(1, 2): 3}, KeyError("items"), r"with the keys tuple"),
        (
            (1, 2, 3),
            IndexError("tuple index out of range"),
            r"type tuple of length 3 \(IndexError: tuple ind",
        ),
        (
            torch.zeros(2, 3),
            AttributeError("no items"),
            r"type Tensor of shape \(2, 3\) \(AttributeError: no it",
        ),
        (7, ZeroDivisionError(), r"type int \(ZeroDivisionError\): it must return the ids"),
    ],
)
def test_a_function_that_fails(
    emb: flatbed.Embedding, slow_files: list[FakeAhead], batch: Any, error: Exception, said: str
) -> None:
    def fail(_: Any) -> Any:
        raise error

    with pytest.raises(type(error), match=rf"the ids function for Table\(50 × 4.*{said}") as caught:
        list(Prefetcher([batch], {emb: fail}))
    assert type(caught.value) is type(error)
    assert caught.value.__cause__ is error


def test_an_error_that_cannot_be_made_again(emb: flatbed.Embedding) -> None:
    def fail(_: Any) -> Any:
        raise TwoParts("one", "other")

    with pytest.raises(
        RuntimeError, match=r"failed on a batch of type int \(TwoParts: one other\)"
    ) as caught:
        list(Prefetcher([7], {emb: fail}))
    assert isinstance(caught.value.__cause__, TwoParts)
