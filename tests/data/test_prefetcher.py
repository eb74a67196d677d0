"""Prefetcher: batches in order, lookups selected once, and nothing left behind, however a loop ends."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import flatbed
from flatbed import FlatbedError, Prefetcher
from flatbed.data import pipeline
from flatbed.data import prefetcher as prefetcher_module
from tests.cases import DEVICES
from tests.data.fakes import (
    ROWS,
    FakePrefetch,
    Fakes,
    batches,
    collect,
    first,
    loader,
    threads,
    wait_until,
    workers,
)
from tests.tables.test_cache import Stream

DEPTHS = [0, 1, 3]


# ---- batches


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_batch_in_order(emb: flatbed.Embedding, prefetches: Fakes, depth: int) -> None:
    found = list(Prefetcher(batches(20), {emb: "items"}, depth=depth))
    assert [first(batch) for batch in found] == list(range(20))
    (prefetch,) = prefetches
    for call in ("admit", "begin", "finish", *(["read"] if prefetch.reads_disk else [])):
        assert prefetch.numbers(call) == (list(range(20)) if depth else []), "no rows are prefetched"
    assert prefetch.numbers("check") == list(range(20))
    assert prefetch.depth == depth


@pytest.mark.parametrize("depth", DEPTHS)
def test_depth_is_the_number_of_batches_ahead(emb: flatbed.Embedding, prefetches: Fakes, depth: int) -> None:
    n_read = 0

    def counted() -> Iterator[Any]:
        nonlocal n_read
        for batch in batches(20):
            n_read += 1
            yield batch

    for n, _ in enumerate(Prefetcher(counted(), {emb: "items"}, depth=depth)):
        ahead = min(20, n + 1 + depth)
        assert n_read <= ahead
        assert wait_until(lambda ahead=ahead: n_read == ahead)  # type: ignore[misc]
        assert depth or not threads()


def test_rows_of_batches_that_are_ready_are_admitted_early(emb: flatbed.Embedding, prefetches: Fakes) -> None:
    prefetched = iter(Prefetcher(batches(7), {emb: "items"}, depth=3))
    next(prefetched)
    (prefetch,) = prefetches
    last = "read" if prefetch.reads_disk else "check"
    for n in range(1, 4):
        # The last of three batches ahead is being prepared: the two before it are ready.
        assert wait_until(lambda n=n: prefetch.numbers(last) == list(range(n + 3)))  # type: ignore[misc]
        next(prefetched)
        assert prefetch.numbers("begin") == list(range(n + 1))
        assert prefetch.numbers("finish") == list(range(n))
        assert prefetch.numbers("admit")[: n + 2] == list(range(n + 2))
    prefetched.close()
    assert prefetch.n_open == 0


@pytest.mark.parametrize("given", [batches(100), map(dict, batches(100))], ids=["list", "iterator"])
def test_one_thread_for_code_of_the_user_and_two_for_disk(
    emb: flatbed.Embedding, prefetches: Fakes, given: Any
) -> None:
    with iter(Prefetcher(given, {emb: "items"})) as prefetched:
        next(prefetched)
        (prefetch,) = prefetches
        in_thread = prefetch.reads_disk or not isinstance(given, list)
        assert len(threads()) == (2 if prefetch.reads_disk else in_thread)
        assert wait_until(lambda: len(prefetch.requests) == 3)
    main = {threading.get_ident()}
    used = prefetch.threads
    assert used["admit"] == used["begin"] == main
    assert used["check"].isdisjoint(main) == in_thread
    if prefetch.reads_disk:
        assert used["read"].isdisjoint(main | used["check"]), "the loader goes on meanwhile"


@pytest.mark.parametrize("n_small", [0, 1, 4])
@pytest.mark.parametrize("large", [{"nbytes": 2 * pipeline.INLINE_BYTES}, {"has_objects": True}], ids=str)
def test_threads_begin_with_the_first_large_batch(
    emb: flatbed.Embedding, prefetches: Fakes, monkeypatch: Any, large: Any, n_small: int
) -> None:
    """The size of objects that move themselves is not known: their pages are pinned when they are loaded."""

    def move(mover: Any, host: Any, *rest: Any) -> Any:
        return replace(moved(mover, host, *rest), **large if first(host.batch) >= n_small else {})

    moved = pipeline.BatchMover.move
    monkeypatch.setattr(pipeline.BatchMover, "move", move)
    assert list(map(first, Prefetcher(batches(9), {emb: "items"}))) == list(range(9))
    (prefetch,) = prefetches
    assert len(prefetch.threads["check"]) == (1 if prefetch.reads_disk else 2)
    assert prefetch.n_open == 0


def test_threads_begin_when_a_batch_is_late(
    emb: flatbed.Embedding, prefetches: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread waits for it once; later, it gets batches that are ready meanwhile."""
    monkeypatch.setattr(pipeline, "INLINE_SECONDS", -1.0)
    assert list(map(first, Prefetcher(batches(9), {emb: "items"}))) == list(range(9))
    assert len(prefetches[0].threads["check"]) == (1 if prefetches[0].reads_disk else 2)


def test_iterations_do_not_disturb_each_other(emb: flatbed.Embedding, prefetches: Fakes) -> None:
    prefetcher = Prefetcher(batches(5), {emb: "items"})
    for _ in range(2):
        assert [first(batch) for batch in prefetcher] == list(range(5))
    one, other = iter(prefetcher), iter(prefetcher)
    for i in range(5):
        assert first(next(one)) == first(next(other)) == i
    assert list(one) == list(other) == []
    assert next(one, None) is None
    assert len(prefetches) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_order_is_that_of_the_loader(emb: flatbed.Embedding, num_workers: int) -> None:
    """Also if the training loop draws random numbers in between."""

    def order(is_prefetched: bool) -> list[Any]:
        torch.manual_seed(3)
        plain = loader(24, 4, shuffle=True, num_workers=num_workers)
        seen: list[Any] = []
        for _ in range(2):
            for batch in Prefetcher(plain, {emb: "items"}) if is_prefetched else plain:
                seen.append((batch["items"].tolist(), float(torch.rand(()))))
        return seen

    assert order(True) == order(False)


def test_a_batch_belongs_to_the_loop_alone(emb: flatbed.Embedding, prefetches: Fakes) -> None:
    """A batch that the loop drops is freed, though its step is not over."""
    made = ({"items": torch.full((4,), i)} for i in range(5))
    prefetched = iter(Prefetcher(made, {emb: "items"}))
    next(prefetched)
    batch = next(prefetched)
    held = weakref.ref(batch["items"])
    del batch
    assert wait_until(lambda: held() is None)
    prefetched.close()


class Reusing(IterableDataset[Any]):
    """Yields one array, one tensor and a view of it again and again, with other contents."""

    def __iter__(self) -> Iterator[Any]:
        array, tensor = np.zeros(9), torch.zeros(4, 2, dtype=torch.long)
        for i in range(20):
            array[:], tensor[:] = i, i
            yield {"array": array, "items": tensor[:, 0], "nested": [tensor]}


class ReusingList(list[Any]):
    __iter__ = Reusing.__iter__  # type: ignore[assignment]


class ReusingWorkers(DataLoader[Any]):
    """Starts a worker, and makes batches in this process."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _, batch in zip(super().__iter__(), Reusing(), strict=True):
            yield batch


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "wrap",
    [
        iter,
        lambda data: data,
        lambda data: DataLoader(data, batch_size=None),
        lambda data: ReusingList(),
        lambda data: ReusingWorkers(data, batch_size=None, num_workers=1),
    ],
    ids=["iterator", "own", "DataLoader", "list", "workers"],
)
def test_a_loader_may_write_to_its_batches_again(
    emb: flatbed.Embedding, prefetches: Fakes, wrap: Any, depth: int
) -> None:
    for i, batch in enumerate(Prefetcher(wrap(Reusing()), {emb: "items"}, depth=depth)):
        n_ahead = min(20, i + 1 + depth) if depth else 0
        assert wait_until(lambda n=n_ahead: len(prefetches[0].requests) >= n)  # type: ignore[misc]
        assert batch["array"].tolist() == [i] * 9
        assert batch["items"].tolist() == [i] * 4
        assert batch["nested"][0].tolist() == [[i, i]] * 4
    assert i == 19


# ---- generators


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_generator_goes_on_after_a_break_and_not_after_its_end(depth: int) -> None:
    prefetcher = Prefetcher((i for i in range(50)), device="cpu", depth=depth)
    for _ in prefetcher:
        break
    rest = list(prefetcher)
    assert rest == list(range(rest[0], 50))
    assert rest[0] <= 1 + depth
    for _ in range(2):
        with pytest.raises(FlatbedError, match="generator can be read once: give a list"):
            iter(prefetcher)
    assert list(Prefetcher(iter([]), device="cpu")) == []


@pytest.mark.parametrize("has_dtensors", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_the_thread_in_which_a_generator_begins(
    ends: bool, has_dtensors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread, if workers that it forks elsewhere would crash."""
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    if has_dtensors:
        monkeypatch.setitem(sys.modules, "torch.distributed.tensor", mock.Mock())
    threads = []

    def batches() -> Iterator[Any]:
        threads.append(threading.current_thread())
        if ends:
            return
        for i in range(3):
            yield torch.tensor(i)
            threads.append(threading.current_thread())

    found = [int(i) for i in Prefetcher(batches(), device="cpu")]
    assert found == ([] if ends else [0, 1, 2])
    assert (threads[0] is threading.main_thread()) == has_dtensors
    assert threading.main_thread() not in threads[1:]


def test_errors_of_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also Control-C reaches the loader thread, which tells other ranks."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", mock.Mock())
    for error in (ValueError("no data"), KeyboardInterrupt()):

        def batches(error: BaseException = error) -> Iterator[Any]:
            raise error
            yield

        with pytest.raises(type(error)):
            list(Prefetcher(batches(), device="cpu"))


def test_a_generator_is_read_once_if_it_fails() -> None:
    prefetcher = Prefetcher((1 // i for i in (1, 0, 1)), device="cpu")
    with pytest.raises(ZeroDivisionError):
        list(prefetcher)
    with pytest.raises(FlatbedError, match="to an error, and a generator can be read once"):
        list(prefetcher)


# ---- pin


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_begin_anew(copied: Any) -> None:
    emb = flatbed.Embedding(ROWS, 2)
    prefetcher = Prefetcher(batches(5), {emb: "items"})
    next(iter(prefetcher))
    twin, of_twin = copied((emb, prefetcher))
    assert [first(batch) for batch in of_twin] == list(range(5))
    assert [*of_twin._selectors] == [twin.table]


@pytest.mark.gpu
def test_pin_copies_the_arrays_of_a_list_once() -> None:
    given = [{"x": np.full(100_000, i), "s": "text"} for i in range(4)]
    prefetcher = Prefetcher(given, device="cuda", pin=True)
    for _ in range(2):
        assert [int(batch["x"][-1]) for batch in prefetcher] == [0, 1, 2, 3]
        given[0]["x"][:] = 7  # the copy was made at the first iteration


# ---- lookups


@dataclass
class Data:
    items: Any
    other: int = 3


@pytest.mark.parametrize(
    ("make", "selector"),
    [
        (lambda ids: {"items": ids}, "items"),
        (lambda ids: {3: ids}, 3),
        (lambda ids: (ids, 1), 0),
        (lambda ids: [1, ids], -1),
        (Data, "items"),
        (lambda ids: ids, lambda batch: batch),
        (lambda ids: {"a": {"b": [ids]}}, lambda batch: batch["a"]["b"][0].tolist()),
        (lambda ids: ids, lambda batch: batch.to(torch.uint64)),
    ],
)
def test_keys_and_functions(emb: flatbed.Embedding, prefetches: Fakes, make: Any, selector: Any) -> None:
    list(Prefetcher([make(np.array([4, 5])), make(torch.tensor([[6]]))], {emb: selector}))
    assert [request.ids for request in prefetches[0].requests] == [[[4, 5]], [[6]]]


def test_errors_name_the_key_of_the_ids() -> None:
    users, items = (flatbed.Embedding(ROWS, 4) for _ in range(2))
    batches = [{"users": torch.arange(3), "items": torch.tensor([1, ROWS])}]
    with pytest.raises(IndexError, match=r"the lookups of Table\(.*\) by 'items': id"):
        next(iter(flatbed.Prefetcher(batches, {users: "users", items: "items"})))


def test_several_tables_and_lookups(emb: flatbed.Embedding, prefetches: Fakes) -> None:
    """A function is called once for each batch, with tensors on the host."""
    other, tied = flatbed.EmbeddingBag(ROWS, 4), flatbed.Embedding.from_table(emb.table)
    seen: list[Any] = []

    def select(batch: Any) -> Any:
        seen.append((type(batch["items"]), batch["items"].device.type))
        return [batch["items"], batch["items"] + 1]

    given = [{"items": batch["items"].numpy()} for batch in batches(2)]
    list(Prefetcher(given, {emb: select, other.table: "items", tied: lambda batch: []}))
    assert seen == [(torch.Tensor, "cpu")] * 2
    by_table = {prefetch.table: [request.ids for request in prefetch.requests] for prefetch in prefetches}
    assert by_table[emb.table] == [[[0] * 4, [1] * 4, []], [[1] * 4, [2] * 4, []]]
    assert by_table[other.table] == [[[0] * 4], [[1] * 4]]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("bad", [ROWS, -1])
def test_ids_out_of_range_raise_with_their_batch(emb: flatbed.Embedding, bad: int, depth: int) -> None:
    given = [torch.arange(4), np.arange(4), torch.tensor([[1], [bad]])]
    seen: list[Any] = []
    with pytest.raises(IndexError, match=rf"Table.*id {bad} at position.*{ROWS} rows"):
        seen.extend(Prefetcher(given, {emb: lambda batch: batch}, depth=depth))
    assert len(seen) == 2


@pytest.mark.gpu
def test_ids_of_the_batch_are_not_copied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted: list[Any] = []

    class Prefetch(FakePrefetch):
        def admit(self, request: Any, moved: dict[int, torch.Tensor]) -> None:
            ids = [moved[id(one)] for one in request.tensors]
            assert torch.cuda.current_stream() == pipeline.stream_for(ids[0].device, "decisions")
            admitted.append(ids)
            super().admit(request, moved)

    monkeypatch.setattr(prefetcher_module, "RowPrefetch", Prefetch)
    emb = flatbed.Embedding(ROWS, 4, device="cuda")
    lookups = {emb: lambda batch: [batch["items"], batch["items"] + 1]}
    for n, batch in enumerate(Prefetcher(batches(10), lookups)):
        assert admitted[n][0] is batch["items"]
        assert torch.equal(admitted[n][1], batch["items"] + 1)


def test_a_table_that_grows_in_the_loop() -> None:
    """Ids are out of range only if there are no rows when the batch is handed out."""
    emb = flatbed.Embedding(10, 4)
    given = [torch.arange(4) + 5 * n for n in range(4)]
    seen = 0
    for n, ids in enumerate(Prefetcher(given, {emb: lambda batch: batch}, depth=3)):
        seen += len(emb(ids))
        if n == 1:
            emb.table.resize(20)
    assert seen == 16


# ---- refusals


def test_devices_must_agree(emb: flatbed.Embedding, monkeypatch: pytest.MonkeyPatch) -> None:
    other = flatbed.Embedding(ROWS, 4)
    monkeypatch.setattr(other.table._store, "device", torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"computes on cuda:0, and batches .* to cpu.*\.to\(\)"):
        Prefetcher([], {emb: "items", other: "items"})


# ---- errors


@pytest.mark.parametrize("call", ["check", "read", "admit", "begin", "finish"])
def test_errors_of_tables_are_raised_and_nothing_stays_open(
    emb: flatbed.Embedding, prefetches: Fakes, call: str
) -> None:
    def fail(name: str, number: int) -> None:
        if (name, number) == (call, 2):
            raise OSError(f"{call} failed")

    other = flatbed.Embedding(ROWS, 4)
    prefetched = iter(Prefetcher(batches(6), {other: "items", emb: "items"}, depth=2))
    prefetches[1].fail = fail
    if call == "read" and not prefetches[1].reads_disk:
        prefetched.close()
        return
    seen: list[int] = []
    with pytest.raises(OSError, match=f"{call} failed"):
        collect(prefetched, seen)
    assert seen == list(range(len(seen)))
    assert len(seen) <= 3
    assert wait_until(lambda: not threads())
    assert [prefetch.n_open for prefetch in prefetches] == [0, 0]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("where", ["loader", "selector"])
@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_errors_are_raised_when_their_turn_comes(
    emb: flatbed.Embedding, prefetches: Fakes, depth: int, where: str, error: BaseException
) -> None:
    def fail(batch: Any) -> Any:
        if first(batch) == 3:
            raise error
        return batch["items"] if where == "selector" else batch

    given = map(fail, batches(10)) if where == "loader" else batches(10)
    lookups = {emb: fail if where == "selector" else "items"}
    seen: list[int] = []
    with pytest.raises(type(error)) as raised:
        collect(Prefetcher(given, lookups, depth=depth), seen)
    in_thread = where == "loader" or prefetches[0].reads_disk
    if not in_thread and not isinstance(error, Exception):  # Ctrl-C in the training thread
        assert seen == list(range(max(0, 3 - depth)))
    else:
        assert seen == [0, 1, 2]
    assert raised.value is error
    assert any(entry.name == "fail" for entry in raised.traceback), "with its traceback"
    assert prefetches[0].n_open == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_stop_iteration_in_a_selector_does_not_end_the_loop(emb: flatbed.Embedding, depth: int) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Prefetcher(batches(3), {emb: lambda batch: next(iter(()))}, depth=depth))


def is_main_thread_in_next() -> bool:
    return sys._current_frames()[threading.main_thread().ident or 0].f_code.co_name == "_take_batches"


def test_an_interrupt_while_the_loop_waits(
    emb: flatbed.Embedding, prefetches: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C in a loop whose loader does not return."""
    monkeypatch.setattr(pipeline, "JOIN_SECONDS", 0.1)
    go = threading.Event()

    def stuck() -> Iterator[Any]:
        yield batches(1)[0]
        assert go.wait(120)

    def interrupt() -> None:
        assert wait_until(is_main_thread_in_next)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        prefetched = iter(Prefetcher(stuck(), {emb: "items"}))
        next(prefetched)
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            next(prefetched)
        interrupter.join(60)
    finally:
        signal.signal(signal.SIGINT, before)
        go.set()
    assert list(prefetched) == []
    assert prefetches[0].n_open == 0


# ---- ends


def leave_by_break(prefetcher: Prefetcher) -> None:
    for batch in prefetcher:
        if first(batch) == 2:
            break


def leave_by_error(prefetcher: Prefetcher) -> None:
    with suppress(KeyError):
        for _ in prefetcher:
            raise KeyError


def leave_by_del(prefetcher: Prefetcher) -> None:
    next(iter(prefetcher))


def leave_by_close(prefetcher: Prefetcher) -> None:
    with iter(prefetcher) as prefetched:
        next(prefetched)
        prefetched.close()
    assert list(prefetched) == []


def leave_at_once(prefetcher: Prefetcher) -> None:
    iter(prefetcher)


def leave_in_a_cycle(prefetcher: Prefetcher) -> None:
    prefetched = iter(prefetcher)
    next(prefetched)
    cycle: list[Any] = [prefetched]
    cycle.append(cycle)
    del cycle, prefetched
    gc.collect()


WAYS = [leave_by_break, leave_by_error, leave_by_del, leave_by_close, leave_at_once, leave_in_a_cycle]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [0, 3])
def test_every_end_releases_everything(
    emb: flatbed.Embedding, prefetches: Fakes, way: Any, depth: int
) -> None:
    closed = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            try:
                while True:
                    yield from batches(6)
            finally:
                closed.append(True)

    way(Prefetcher(Loader(), {emb: "items"}, depth=depth))
    assert wait_until(lambda: not threads())
    assert closed or way is leave_at_once
    assert all(prefetch.n_open == 0 for prefetch in prefetches)


@pytest.mark.parametrize("way", [leave_by_break, leave_by_del, leave_by_close, leave_by_error])
def test_no_worker_process_is_left(emb: flatbed.Embedding, way: Any) -> None:
    way(Prefetcher(loader(1000, 1, num_workers=1), {emb: lambda batch: batch["items"] % ROWS}))
    assert wait_until(lambda: not workers())


def test_persistent_workers(emb: flatbed.Embedding) -> None:
    plain = loader(16, 4, num_workers=1, persistent_workers=True)
    prefetcher = Prefetcher(plain, {emb: "items"})
    for _ in range(3):
        for batch in prefetcher:
            assert first(batch) == 0
            break
        assert [first(batch) for batch in prefetcher] == [0, 4, 8, 12]
    del batch, plain, prefetcher


def test_a_new_loop_waits_for_the_loader_of_the_last_one(
    emb: flatbed.Embedding, prefetches: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "JOIN_SECONDS", 0.0)
    n_inside = 0

    class Alone:
        """May be in one thread at a time."""

        def __iter__(self) -> Iterator[Any]:
            return map(self.load, batches(5))

        def load(self, batch: Any) -> Any:
            nonlocal n_inside
            assert n_inside == 0
            n_inside += 1
            time.sleep(0.01)
            n_inside -= 1
            return batch

    prefetcher = Prefetcher(Alone(), {emb: "items"})
    for _ in range(5):
        for _ in prefetcher:
            break
    assert [first(batch) for batch in prefetcher] == list(range(5))


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_code_that_selects_ids_may_close_the_loop(emb: flatbed.Embedding, depth: int) -> None:
    """In the training thread: no later batch is handed out."""

    def select(batch: Any) -> Any:
        if first(batch) == 7:
            prefetched.close()
        return batch["items"]

    prefetched = iter(Prefetcher(batches(20), {emb: select}, depth=depth))
    seen: list[int] = []
    collect(prefetched, seen)
    assert seen == list(range(7 - depth))
    assert not emb.table._prefetched


def test_a_loader_thread_may_close_at_any_time(emb: flatbed.Embedding, prefetches: Fakes) -> None:
    """The training thread may be at work on the batches before."""
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            prefetched = iter(Prefetcher(map(dict, batches(20)), {emb: "items"}, depth=5))

            def close(call: str, number: int, prefetched: Any = prefetched) -> None:
                if (call, number) == ("check", 7):
                    prefetched.close()

            prefetches[-1].fail = close
            seen: list[int] = []
            collect(prefetched, seen)
            assert seen == list(range(len(seen)))
            assert wait_until(lambda: prefetches[-1].n_open == 0)
    finally:
        sys.setswitchinterval(switch_interval)


def test_settings_of_torch_are_those_of_the_loop() -> None:
    def look() -> Iterator[Any]:
        yield torch.is_grad_enabled(), torch.get_num_threads(), torch.zeros(1).device.type

    with torch.no_grad(), torch.device("meta"):
        (here,) = look()
        (there,) = Prefetcher(look(), device="cpu")
    assert there == here


def test_settings_of_threads_are_not_those_of_a_stream() -> None:
    """The context of a stream sets the current GPU, too."""
    iterator = iter(Prefetcher((torch.get_default_device() for _ in range(3)), device="cpu"))
    iterator._in_decisions = torch.device("meta")
    assert {device.type for device in iterator} == {"cpu"}


# ---- streams, simulated: memory of the stream "decisions" is used again after the work of the loop


class Event(set[int]):
    """The work before an event."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking

    def record(self, stream: Stream) -> None:
        self.clear()  # a stream that waits has copied it
        self.update(stream.before)


class Rows(Stream):
    device_index = 0


def test_copies_wait_for_every_stream_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    users, rows = [Stream(), Stream()], Rows()
    current = users[0]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    iterator = iter(Prefetcher(batches(8), device="cpu"))
    iterator._decisions = rows
    for step, user in enumerate([0, 1, 1, 0, 1, 1, 1, 0]):
        current = users[user]
        next(iterator)
        assert rows.before == {*range(2 * step)}
        current.before.add(2 * step)
        users[1 - user].before.add(2 * step + 1)  # on a batch of another stream
    iterator.close()


class OnGpu(torch.Tensor):
    """Ids of a list that are on the GPU already."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True
    record_stream = mock.Mock()


@pytest.mark.parametrize("prefetches", [False], indirect=True)
def test_ids_on_the_gpu_are_kept_for_admissions(
    emb: flatbed.Embedding, prefetches: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop may be left before it waits for the admissions of later batches."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    given = [batch["items"].as_subclass(OnGpu) for batch in batches(3)]
    iterator = iter(Prefetcher(given, {emb: lambda batch: batch}, device="cpu"))
    iterator._decisions, iterator._moves = rows, _ = Rows(), Rows()
    next(iterator)
    assert OnGpu.record_stream.call_args_list == [mock.call(rows)] * 3
    iterator.close()


def test_memory_of_dropped_batches_is_kept_for_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the training stream, which has not waited for "decisions"."""
    record, rows, training = mock.Mock(), Rows(), Rows()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: training)
    monkeypatch.setattr(pipeline, "stream_for", lambda *_: rows)
    monkeypatch.setattr(pipeline.MovedBatch, "record_stream", record)
    iterator = iter(Prefetcher(batches(8), device="cpu"))
    iterator._decisions = rows
    for _ in range(2):
        next(iterator)
    assert not record.called  # the loop waits for the copies of its own batches
    iterator._pipeline.mover.on_gpu = True
    (ahead, _) = iterator._pipeline.batches_ahead
    iterator._pipeline.in_use.moved = ahead.moved  # interrupted as it is handed out
    iterator.close()
    assert record.call_args_list == [mock.call(rows, targets_only=True)] * 3


def test_memory_of_admissions_is_kept_until_rows_wait_for_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another loop of the device could be given it, while the step uses it."""
    request = Stream()  # anything that can be referred to weakly
    finished = weakref.ref(request)
    alive = []

    class WatchedRows(Rows):
        def wait_event(self, event: Any) -> None:
            alive.append(finished() is not None)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    iterator = iter(Prefetcher(batches(8), device="cpu"))
    iterator._decisions = WatchedRows()
    next(iterator)
    iterator._pipeline.in_use.requests.append((mock.Mock(finish=lambda *_, **__: None), request))
    del request
    next(iterator)
    assert alive == [True, True]
    assert finished() is None
    iterator.close()


@DEVICES
def test_hundreds_of_iterations_do_not_grow(device: str) -> None:
    emb = flatbed.Embedding(ROWS, 4, device=device)
    prefetcher, counts, nbytes = Prefetcher(batches(4), {emb: "items"}), [], []
    for n in range(200):
        for _ in prefetcher:
            if n % 2:
                break
        if n in (50, 199):
            gc.collect()
            counts.append(len(gc.get_objects()))
            nbytes.append(torch.cuda.memory_allocated())
    assert counts[1] < counts[0] + 200
    assert nbytes[1] <= nbytes[0] + (1 << 20)
