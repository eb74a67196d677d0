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

from flatbed.feed import background
from flatbed.feed.background import Background, Last
from tests.feed.fakes import NAME, running, wait_until


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
