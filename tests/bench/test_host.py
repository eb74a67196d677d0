"""Cores that nobody else uses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from flatbed.bench import host
from flatbed.bench.host import QUIET, Host

CORES = 5


class Machine:
    """A host with cores of given speeds, on which a thread stays where it was put."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)
        self.allowed = set(range(len(times)))
        self.core = 0
        self.moves = 0

    def loop_time(self) -> float:
        return self.times[self.core]

    def getaffinity(self, thread: int) -> set[int]:
        assert thread == 0  # this one alone: others stay where they are
        return set(self.allowed)

    def setaffinity(self, thread: int, cores: set[int]) -> None:
        assert thread == 0
        self.allowed = set(cores)
        if self.core not in cores:
            self.core = min(cores)
            self.moves += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(*[2.0] * CORES)
    monkeypatch.setattr(host, "loop_time", made.loop_time)
    monkeypatch.setattr(os, "sched_getaffinity", made.getaffinity, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", made.setaffinity, raising=False)
    yield made
    assert made.allowed == set(range(CORES))  # whatever happened: the thread may go where it could before


def test_a_quiet_core_is_found(machine: Machine) -> None:
    machine.times[3] = 1.0
    quiet = Host()
    assert (quiet.fastest, machine.core) == (1.0, 3)
    machine.times[:] = [2.0, 1.1, 2.0, 1.9, 2.0]  # another one, later
    assert quiet.settle() == pytest.approx(1.1)
    assert machine.core == 1


def test_nobody_moves_without_need(machine: Machine) -> None:
    machine.times[3] = 1.0
    quiet = Host()
    before, machine.times[3] = machine.moves, 0.99 * QUIET
    assert quiet.settle() == pytest.approx(0.99 * QUIET)
    assert machine.moves == before


def test_the_best_of_slow_ones(machine: Machine) -> None:
    machine.times[0] = 1.0
    quiet = Host()
    machine.times[:] = [2.0, 1.9, 1.5, 2.0, 1.7]
    assert quiet.settle() == pytest.approx(1.5)
    assert machine.core == 2


def test_an_interruption_leaves_the_thread_free(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.times[0] = 1.0
    quiet = Host()
    machine.times[0] = 2.0

    def interrupted() -> float:
        if machine.core != 0:
            raise KeyboardInterrupt
        return machine.loop_time()

    monkeypatch.setattr(host, "loop_time", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quiet.settle()


def test_cores_that_are_forbidden(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are tried; if all are, the thread stays where it is."""
    machine.times[3] = 1.0

    def some(thread: int, cores: set[int]) -> None:
        if cores == {0}:
            raise PermissionError
        machine.setaffinity(thread, cores)

    def none(thread: int, cores: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", some)
    quiet = Host()
    assert (quiet.fastest, machine.core) == (1.0, 3)
    monkeypatch.setattr(os, "sched_setaffinity", none)
    machine.times[3] = 2.5
    assert quiet.settle() == 2.5
    assert Host().settle() == 1.0


def test_systems_that_do_not_tell(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    machine.times[0] = 1.0
    quiet = Host()
    machine.times[0] = 3.0
    assert quiet.settle() == 3.0


def test_this_machine() -> None:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    quiet = Host()
    assert quiet.settle() >= 1.0
    assert 0 < quiet.fastest < 1
    if cores is not None:
        assert os.sched_getaffinity(0) == cores
