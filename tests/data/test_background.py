"""Iteration in a thread: order, errors, and every way to end."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flatbed.data import worker as background
from flatbed.data.worker import Background, Last
from tests.data.fakes import NAME, running, wait_until


def made(items: Iterator[Any], depth: int = 2, dropped: list[Any] | None = None) -> Background[Any]:
    into: list[Any] = [] if dropped is None else dropped
    return Background(items, lambda item: item, depth=depth, name=NAME, drop=into.append)


def rest(found: Background[Any]) -> tuple[list[Any], BaseException | None]:
    found.start()
    taken = []
    while not isinstance(one := found.take(wait=True), Last):
        taken.append(one)
    return taken, one.error


def test_order_and_end() -> None:
    assert rest(made(iter(range(100)))) == (list(range(100)), None)
    assert rest(made(iter(()))) == ([], None)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_further_ahead_than_asked(depth: int) -> None:
    seen = []

    def items() -> Iterator[int]:
        for i in range(20):
            seen.append(i)
            yield i

    found = made(items(), depth)
    found.start()
    for i in range(20):
        assert wait_until(lambda i=i: len(seen) == min(20, i + depth))  # type: ignore[misc]
        time.sleep(0.002)
        assert len(seen) == min(20, i + depth)
        assert found.take(wait=True) == i
    found.close()


def test_nothing_runs_before_it_is_started() -> None:
    gone = []

    class Items:
        def __iter__(self) -> Items:
            return self

        def __next__(self) -> int:
            raise AssertionError

        def __del__(self) -> None:
            gone.append(True)

    found = made(iter(Items()))
    assert not running()
    found.close()
    assert gone
    found.start()
    assert not running()


def test_an_error_comes_in_its_turn_with_its_traceback() -> None:
    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("here")

    taken, error = rest(made(failing()))
    assert taken == [1, 2]
    assert isinstance(error, KeyError)
    names = []
    trace = error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names[-1] == "failing"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError()])
def test_any_error_arrives(error: BaseException) -> None:
    class Items:
        def __iter__(self) -> Items:
            return self

        def __next__(self) -> int:
            raise error

    assert rest(made(iter(Items())))[1] is error


def test_nothing_is_waited_for_unless_asked() -> None:
    go = threading.Event()

    def slow() -> Iterator[int]:
        go.wait(20)
        yield 1

    found = made(slow())
    found.start()
    assert found.take(wait=False) is None
    go.set()
    assert found.take(wait=True) == 1
    found.close()


def test_what_was_not_taken_is_dropped_once() -> None:
    dropped: list[int] = []
    found = made(iter(range(100)), 4, dropped)
    found.start()
    assert found.take(wait=True) == 0
    assert wait_until(lambda: found._ready.qsize() == 4)
    found.close()
    found.close()
    assert sorted(dropped) == [1, 2, 3, 4]
    assert not running()


def test_a_thread_in_the_loader_is_left_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops what it made, when it comes back."""
    monkeypatch.setattr(background, "JOIN_SECONDS", 0.05)
    dropped: list[int] = []
    inside, go = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        inside.set()
        go.wait(20)
        yield 1
        raise AssertionError("it should have stopped")

    found = made(slow(), 2, dropped)
    found.start()
    inside.wait(20)
    begin = time.monotonic()
    found.close()
    assert time.monotonic() - begin < 10
    assert running()
    go.set()
    assert wait_until(lambda: not running())
    assert dropped == [1]


def test_the_iterator_is_released_at_the_end_and_at_an_error() -> None:
    class Items:
        def __init__(self, n: int) -> None:
            self.n = n

        def __iter__(self) -> Items:
            return self

        def __next__(self) -> int:
            self.n -= 1
            if self.n < 0:
                raise StopIteration
            if self.n == 100:
                raise ValueError
            return self.n

    for n in (3, 103):
        items = Items(n)
        gone = weakref.ref(items)
        found = made(iter(items))
        del items
        _, error = rest(found)
        del error
        found.close()
        assert gone() is None


def test_the_thread_does_as_its_maker() -> None:
    def modes() -> Iterator[Any]:
        while True:
            yield torch.is_grad_enabled(), torch.get_default_device()

    with torch.no_grad(), torch.device("meta"):
        found = made(modes())
        found.start()
    assert found.take(wait=True) == (False, torch.device("meta"))
    found.close()
    assert torch.is_grad_enabled()


def test_random_delays() -> None:
    """All items, in order, and each of them taken or dropped, whenever it is closed."""
    chance = random.Random(5)

    def items(n: int) -> Iterator[int]:
        delays = random.Random(n)
        for i in range(n):
            if delays.random() < 0.3:
                time.sleep(delays.random() * 0.002)
            yield i

    for _ in range(60):
        n, dropped = chance.randrange(30), []  # type: ignore[var-annotated]
        found, taken = made(items(n), chance.randint(1, 4), dropped), []
        found.start()
        for _ in range(chance.randrange(40)):
            one = found.take(wait=chance.random() < 0.7)
            if isinstance(one, Last):
                break
            if one is not None:
                taken.append(one)
            if chance.random() < 0.2:
                time.sleep(chance.random() * 0.002)
        found.close()
        assert taken == list(range(len(taken)))
        assert sorted(dropped) == list(range(len(taken), len(taken) + len(dropped)))
    assert not running()


def test_closing_in_the_thread_itself() -> None:
    """As the garbage collector may."""
    ended = []

    def items() -> Iterator[int]:
        yield 1
        found.close()
        ended.append(True)
        yield 2

    found = made(items())
    found.start()
    assert wait_until(lambda: bool(ended) and not running())
    gc.collect()


# ---- two threads, one behind the other


def chained(
    items: Iterator[Any], depth: int = 2, dropped: list[Any] | None = None, then: Any = lambda item: item
) -> Background[Any]:
    into: list[Any] = [] if dropped is None else dropped
    first = Background(items, lambda item: item, depth=1, name=NAME, drop=into.append)
    return Background(first, then, depth=depth, name=f"{NAME}-then", drop=into.append)


def test_a_background_of_a_background() -> None:
    """Each in a thread of its own, that does as its maker."""
    seen: list[Any] = []

    def items() -> Iterator[int]:
        for i in range(50):
            seen.append((threading.get_ident(), torch.is_grad_enabled()))
            yield i

    def then(item: int) -> tuple[int, int, bool]:
        return item, threading.get_ident(), torch.is_grad_enabled()

    with torch.no_grad():
        found = chained(items(), then=then)
    taken, error = rest(found)
    assert error is None
    assert [item for item, *_ in taken] == list(range(50))
    (one,), (other,) = set(seen), {(thread, grad) for _, thread, grad in taken}
    assert one[0] != other[0]
    assert one[1] is other[1] is False
    assert wait_until(lambda: not running())


def test_both_are_at_work_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)

    def items() -> Iterator[int]:
        yield 0
        both.wait()
        yield 1

    def then(item: int) -> int:
        if item == 0:
            both.wait()
        return item

    assert rest(chained(items(), then=then)) == ([0, 1], None)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_first_is_one_item_further_ahead(depth: int) -> None:
    seen = []

    def items() -> Iterator[int]:
        for i in range(20):
            seen.append(i)
            yield i

    found = chained(items(), depth)
    found.start()
    for i in range(20):
        assert wait_until(lambda i=i: len(seen) == min(20, i + depth + 1))  # type: ignore[misc]
        time.sleep(0.002)
        assert len(seen) == min(20, i + depth + 1)
        assert found.take(wait=True) == i
    found.close()


@pytest.mark.parametrize("where", ["first", "then"])
def test_errors_of_either_come_in_their_turn(where: str) -> None:
    dropped: list[int] = []

    def failing() -> Iterator[int]:
        yield from range(3)
        if where == "first":
            raise KeyError("here")
        yield from range(3, 9)

    def then(item: int) -> int:
        if item == 3:
            raise KeyError("here")
        return item

    found = chained(failing(), 2, dropped, then)
    taken, error = rest(found)
    assert taken == [0, 1, 2]
    assert isinstance(error, KeyError)
    found.close()
    assert not running()
    assert set(dropped) <= {4, 5}


def test_the_second_ends_at_once_though_the_first_is_in_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "JOIN_SECONDS", 0.05)
    inside, go = threading.Event(), threading.Event()
    dropped: list[int] = []

    def slow() -> Iterator[int]:
        yield 0
        inside.set()
        go.wait(20)
        yield 1
        raise AssertionError("it should have stopped")

    found = chained(slow(), 2, dropped)
    found.start()
    inside.wait(20)
    assert found.take(wait=True) == 0
    found.close()
    assert wait_until(lambda: [thread.name for thread in running()] == [NAME])
    go.set()
    assert wait_until(lambda: not running())
    assert dropped == [1]


def test_an_error_keeps_neither_iterator() -> None:
    class Items:
        def __iter__(self) -> Items:
            return self

        def __next__(self) -> int:
            raise ValueError

    items = Items()
    gone = weakref.ref(items)
    found = chained(iter(items))
    del items
    _, error = rest(found)
    assert isinstance(error, ValueError)
    del error
    found.close()
    assert gone() is None, "without the collector"


def test_random_delays_in_both() -> None:
    chance = random.Random(6)

    def nap(source: random.Random) -> None:
        if source.random() < 0.3:
            time.sleep(source.random() * 0.002)

    for _ in range(60):
        n, dropped, lost = chance.randrange(30), [], []  # type: ignore[var-annotated]
        one, other = random.Random(n), random.Random(n + 1)
        fails = chance.random() < 0.2

        def items(n: int = n, one: random.Random = one) -> Iterator[int]:
            for i in range(n):
                nap(one)
                yield i

        def then(item: int, other: Any = other, fails: bool = fails, lost: list[int] = lost) -> int:
            nap(other)
            if fails and item == 7:
                lost.append(item)
                raise LookupError
            return item

        found, taken = chained(items(), chance.randint(1, 4), dropped, then), []
        found.start()
        for _ in range(chance.randrange(40)):
            item = found.take(wait=chance.random() < 0.7)
            if isinstance(item, Last):
                break
            if item is not None:
                taken.append(item)
            nap(chance)
        found.close()
        assert not running()
        assert taken == list(range(len(taken)))
        assert sorted(taken + dropped + lost) == list(range(len(taken) + len(dropped) + len(lost)))


@pytest.mark.parametrize("where", ["first", "then"])
def test_closing_in_either_thread(where: str) -> None:
    """As the garbage collector may: neither waits for the other."""
    ended, begin = [], time.monotonic()

    def close() -> None:
        found.close()
        ended.append(True)

    def items() -> Iterator[int]:
        yield 1
        if where == "first":
            close()
        yield 2

    def then(item: int) -> int:
        if where == "then":
            close()
        return item

    found = chained(items(), then=then)
    found.start()
    assert wait_until(lambda: bool(ended) and not running())
    assert time.monotonic() - begin < background.JOIN_SECONDS
