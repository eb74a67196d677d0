"""Signals while a `DataLoader` makes its workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Sampler

import flatbed
from flatbed.data import signals
from flatbed.data.signals import signals_later
from tests import programs
from tests.data.fakes import wait_until

NUMBERS = [signal.SIGINT, signal.SIGTERM]


class Ended(BaseException):
    """The error of a handler."""


def end(number: int, _: Any) -> None:
    raise Ended(number)


class Signalling(Sampler[int]):
    """A signal comes while workers are made: they get their first indices then."""

    def __init__(self, number: int) -> None:
        self.number, self.is_begun = number, False

    def __iter__(self) -> Iterator[int]:
        signal.raise_signal(self.number)
        self.is_begun = True
        return iter([0, 1])


@pytest.fixture(autouse=True)
def raising() -> Iterator[None]:
    """Signals raise, also where the tests run in the background, which ignores Control-C."""
    before = [(number, signal.signal(number, end)) for number in NUMBERS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in NUMBERS]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("is_generator", [False, True])
def test_signals_wait_until_there_are_workers(number: int, *, is_generator: bool) -> None:
    """Otherwise Python may lose them at a fork, and keep a lock that the loader thread needs."""
    sampler = Signalling(number)
    loader = DataLoader([1, 2], sampler=sampler, num_workers=1)

    def generator() -> Iterator[Any]:
        yield from loader

    with pytest.raises(Ended):
        signals_later(next, generator()) if is_generator else iter(flatbed.Prefetcher(loader))
    assert sampler.is_begun
    assert handlers() == [end, end]
    assert wait_until(lambda: not multiprocessing.active_children())


def test_the_first_batch_of_a_generator_can_be_interrupted() -> None:
    """It may take long."""
    batches = []

    def loader() -> Iterator[int]:
        signal.raise_signal(signal.SIGINT)
        batches.append(1)
        yield 1

    with pytest.raises(Ended):
        signals_later(next, loader())
    assert not batches


def making_workers(action: Callable[[], object]) -> None:
    """Run an action while a `DataLoader` makes its workers."""

    class Acting(Signalling):
        def __iter__(self) -> Iterator[int]:
            action()
            return iter([])

    signals_later(iter, DataLoader([1, 2], sampler=Acting(0), num_workers=1))


def test_signals_act_at_once_in_workers() -> None:
    """SIGTERM ends them, whatever its handler is: the parent waits for workers after it has sent that."""

    def status_after(number: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                signal.raise_signal(number)
            except Ended:
                os._exit(1)
            os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    found: list[int] = []
    making_workers(lambda: found.extend(map(status_after, NUMBERS)))
    assert found == [1, 0]
    assert handlers() == [end, end]


def test_every_signal_that_waited_is_handled() -> None:
    """Also if the handler of another one raises."""
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    with pytest.raises(Ended):
        making_workers(lambda: [signal.raise_signal(number) for number in NUMBERS])
    assert seen == [signal.SIGTERM]


@pytest.mark.parametrize("at", range(2 * len(NUMBERS)))
def test_no_signal_waits_after_an_error_between_two_handlers(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may come while handlers are set, or are set back."""
    set_handler, calls = signal.signal, count()

    def interrupted(number: int, handler: Any) -> Any:
        if number in NUMBERS and next(calls) == at:
            raise Ended
        return set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(Ended):
        signals_later(iter, [])
    monkeypatch.undo()
    monkeypatch.setattr(signals, "_makes_workers", lambda frame: True)
    for number in NUMBERS:
        with pytest.raises(Ended):
            signal.raise_signal(number)


def test_a_handler_that_torch_sets_meanwhile_stays() -> None:
    """That of SIGCHLD, with the first workers. It calls the one before."""
    seen: list[str] = []

    def by_torch(number: int, frame: Any) -> None:
        seen.append("torch")
        previous[0](number, frame)

    before = signal.signal(signal.SIGCHLD, lambda *_: seen.append("user"))
    previous: list[Any] = []
    try:
        signals_later(lambda _: previous.append(signal.signal(signal.SIGCHLD, by_torch)), None)
        for _ in range(2):
            signal.raise_signal(signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is by_torch
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert seen == ["torch", "user"] * 2


def test_handlers_stay_in_other_threads() -> None:
    """Only the main thread may set them."""
    found = []
    thread = threading.Thread(target=signals_later, args=(lambda _: found.append(handlers()), None))
    thread.start()
    thread.join()
    assert found == [[end, end]]


PROGRAM = """
import multiprocessing.process, os, signal, sys, time
import flatbed, torch
from torch.utils.data import DataLoader

where, is_generator, path = sys.argv[1:]
signal.alarm(60)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
started, n_begun, start = 0, 0, multiprocessing.process.BaseProcess.start
def begin(process):
    global started, n_begun
    n_begun += 1
    start(process)
    started += 1
    if started == 2 and where != "at":
        os.kill(os.getpid(), signal.SIGTERM)
multiprocessing.process.BaseProcess.start = begin
def in_parent():
    if where == "at":
        os.kill(os.getpid(), signal.SIGTERM)
def in_child():  # of the second worker: the machine is busy
    if n_begun == 2:
        time.sleep(1)
os.register_at_fork(after_in_parent=in_parent, after_in_child=in_child)
emb = flatbed.Embedding(100, 4, storage="disk", path=path)
loader = DataLoader(range(100), 2, num_workers=2)
if is_generator == "True":
    import torch.distributed.tensor  # so that generators begin in this thread
    def batches(loader):
        yield from loader
    loader = batches(loader)
for ids in flatbed.Prefetcher(loader, {emb: lambda ids: ids}):
    pass
"""


@pytest.mark.parametrize("where", ["at", "between"])
@pytest.mark.parametrize("is_generator", [False, True])
def test_a_signal_ends_a_program_that_makes_workers(
    where: str, tmp_path: Path, *, is_generator: bool
) -> None:
    """At a fork it was lost. Between a fork and the end of the loader's iterator, the exit hung."""
    done = programs.run(PROGRAM, where, is_generator, tmp_path / "table", finalize=True, ok=False)
    assert (done.returncode, done.stderr) == (7, "")
