"""Calls in threads: order, errors, ends, and interruptions."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from flatbed.tables import workers as workers_module
from flatbed.tables.workers import Call, Workers, split
from tests.data.fakes import wait_until


def submitted(workers: Workers, function: Callable[..., Any], *args: Any) -> Call[Any]:
    call = Call(function, *args)
    workers.submit(call)
    return call


def test_one_thread_makes_calls_in_order() -> None:
    seen: list[int] = []
    with closing(Workers(1)) as workers:
        calls = [submitted(workers, seen.append, number) for number in range(100)]
        for call in calls:
            call.wait()
    assert seen == [*range(100)]
    assert submitted(workers, threading.get_ident).result() == threading.get_ident()


def test_errors_are_raised_where_a_result_is_asked_for() -> None:
    with closing(Workers(1)) as workers:
        failed, later = submitted(workers, int, "x"), submitted(workers, int, "5")
        assert later.result() == 5
        for _ in range(2):
            with pytest.raises(ValueError, match="'x'"):
                failed.result()
        assert isinstance(failed.error, ValueError)


def test_a_canceled_call_is_not_made_or_has_ended() -> None:
    begun, go_on = threading.Event(), threading.Event()
    made: list[str] = []

    def first() -> None:
        begun.set()
        go_on.wait(20)
        made.append("first")

    with closing(Workers(1)) as workers:
        calls = [submitted(workers, first), submitted(workers, made.append, "second")]
        assert begun.wait(20)
        calls[1].cancel()
        threading.Timer(0.05, go_on.set).start()
        calls[0].cancel()
        assert made == ["first"]
        submitted(workers, made.append, "third").wait()
    assert made == ["first", "third"]


def test_threads_end_with_their_owner() -> None:
    workers, together = Workers(3), threading.Barrier(3, timeout=20)

    def meet() -> int:
        together.wait()  # in three threads at a time
        return threading.get_ident()

    threads = {call.result() for call in [submitted(workers, meet) for _ in range(3)]}
    assert len(threads) == 3
    assert threads <= sys._current_frames().keys()
    del workers
    gc.collect()
    assert wait_until(lambda: threads.isdisjoint(sys._current_frames()))


def test_calls_are_made_here_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers_module, "start_new_thread", fail)
    seen: list[int] = []
    with closing(Workers(2)) as workers:
        for number in range(5):
            submitted(workers, seen.append, number).wait()
        with pytest.raises(ZeroDivisionError):
            submitted(workers, lambda: 1 // 0).result()
    assert seen == [*range(5)]


@pytest.mark.parametrize("n", [0, 1, 5, 16, 100])
@pytest.mark.parametrize("n_parts", [0, 1, 3, 50])
def test_split_covers_every_item_once(n: int, n_parts: int) -> None:
    seen: list[int] = []
    with closing(Workers()) as workers:
        split(workers, lambda some: seen.extend(range(n)[some]), n, n_parts=n_parts)
    assert sorted(seen) == [*range(n)]


def test_no_part_goes_on_after_an_error() -> None:
    begun, made = threading.Event(), list[int]()

    def fail_first(some: slice) -> None:
        if some.start == 0:
            assert begun.wait(20)
            raise KeyboardInterrupt
        begun.set()
        made.append(some.start)

    with closing(Workers(2)) as workers, pytest.raises(KeyboardInterrupt):
        split(workers, fail_first, 32, n_parts=16)
    n_made = len(made)
    submitted(workers, int).wait()
    assert len(made) == n_made
