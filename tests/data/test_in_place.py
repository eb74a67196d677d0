"""Arrays of a list that a feeder copies from where they are, from its second iteration on."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flatbed.data import feeder, packing, pins
from flatbed.data import transfer as conveyor
from flatbed.data import worker as background
from flatbed.data.feeder import Feeder
from flatbed.data.pins import Pins
from flatbed.data.transfer import Conveyor, Read
from flatbed.errors import FlatbedError
from tests.data.fake_driver import GPU, OWN_BYTES, FakeDriver, nothing_is_registered, own
from tests.data.fake_streams import LateLane, ring, threads
from tests.data.fakes import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the C library of Linux")
PART = 300 << 10


class Lazy:
    """An event that nothing reaches until somebody waits for it."""

    def __init__(self, lane: LazyLane) -> None:
        self.lane = lane
        self.n_marked = self.n_reached = 0

    @property
    def done(self) -> bool:
        return self.n_reached == self.n_marked

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.lane.carry_out(self)


class LazyLane:
    """Copies are made when somebody waits for an event behind them, and no sooner."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.todo: list[Any] = []
        self.in_place: list[bool] = []
        self.lock = threading.RLock()

    def within(self) -> Any:
        return nullcontext()

    def send(self, target: Tensor, source: Tensor) -> None:
        with self.lock:
            self.in_place.append(pins.is_ours(source.data_ptr()))
            self.todo.append((target, source))

    def mark(self, event: Any = None) -> Any:
        with self.lock:
            event = Lazy(self) if event is None else event
            event.n_marked += 1
            self.todo.append(event)
        return event

    def carry_out(self, until: Any = None) -> None:
        with self.lock:
            while self.todo and (until is None or not until.done):
                one = self.todo.pop(0)
                if isinstance(one, Lazy):
                    one.n_reached += 1
                else:
                    target, source = one
                    target.numpy()[...] = source.numpy()

    def settle(self) -> None:
        self.carry_out()

    def reads(self, begin: int, end: int) -> bool:
        sources = [one[1].data_ptr() for one in self.todo if not isinstance(one, Lazy)]
        return any(begin <= one < end for one in sources)

    def made(self, origins: Any) -> list[Any]:
        return []

    def wait(self, events: Any, tensors: Any) -> None:
        raise AssertionError("nothing is on a GPU")

    def current(self) -> Any:
        return None

    def reached(self, current: Any, event: Any = None) -> Any:
        return Lazy(self) if event is None else event

    def arrive(self, sent: Any, current: Any) -> Any:
        return sent.batch


class Setup:
    """Feeders that take the CPU for a GPU."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.lane: Any = LazyLane()
        self.at_once: list[bool] = []

    def feeder(self, batches: Any, **options: Any) -> Feeder:
        return Feeder(batches, GPU, **options)

    def epoch(self, feed: Feeder) -> list[Any]:
        """All batches, and whether each copy was made in place is in the lane's list."""
        self.lane.in_place.clear()
        found = list(feed)
        self.lane.settle()
        return found


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    made = Setup()
    fake: Any = made.driver
    monkeypatch.setattr(feeder, "device_for", lambda device: device)
    monkeypatch.setattr(feeder, "stream_for", lambda device, name: None)
    monkeypatch.setattr(feeder, "ring_for", lambda device: ring(40, 1 << 20))
    monkeypatch.setattr(feeder, "FeedLane", lambda device, stream: made.lane)
    monkeypatch.setattr(feeder, "Pins", partial(Pins, driver=fake))
    decide = Feeder._at_once

    def noted(self: Feeder) -> bool:
        made.at_once.append(decide(self))
        return made.at_once[-1]

    monkeypatch.setattr(Feeder, "_at_once", noted)
    yield made
    gc.collect()
    assert wait_until(lambda: not threads()), "a thread is left"
    assert not made.driver.registered
    assert nothing_is_registered()


def roots(n: int) -> list[Any]:
    """Arrays of their own, each with numbers of its own at both ends."""
    made = [own() for _ in range(n)]
    for i, array in enumerate(made):
        array[[0, 1 << 20, -1]] = 10 * i + 1, 10 * i + 2, 10 * i + 3
    return made


def ends(found: Tensor) -> list[int]:
    return [int(found[0]), int(found[1 << 20]), int(found[-1])]


def parts(n: int = 6) -> Any:
    """Parts of one array, all of which are different."""
    whole = own()
    whole[: n * PART] = np.random.default_rng(n).integers(0, 255, n * PART, np.uint8)
    return [whole[i * PART : (i + 1) * PART] for i in range(n)]


# ---- which way they go


@pytest.mark.parametrize("kind", [list, tuple])
def test_in_place_from_the_second_iteration_on(setup: Setup, kind: Any) -> None:
    given = roots(3)
    feed = setup.feeder(kind({"x": array, "y": np.array([i])} for i, array in enumerate(given)))
    for n in range(4):
        found = setup.epoch(feed)
        assert [ends(one["x"]) for one in found] == [[10 * i + k for k in (1, 2, 3)] for i in range(3)]
        assert [int(one["y"]) for one in found] == [0, 1, 2]
        assert setup.lane.in_place.count(True) == (0 if n == 0 else 3)
        if n:
            assert setup.lane.in_place.count(False) == 3, "the small ones"
        assert setup.driver.said("register") == (0 if n == 0 else 3)
    assert setup.at_once == [False, False, True, True], "a thread while there is something to be registered"
    assert not setup.driver.said("unregister")


def test_parts_of_one_array(setup: Setup) -> None:
    given = parts()
    feed = setup.feeder(given)
    for n in range(4):
        found = setup.epoch(feed)
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(found, given, strict=True))
        assert setup.lane.in_place == [n > 0] * 6
    assert setup.driver.said("register") == 1
    assert setup.at_once == [True, False, True, True]


def test_orders_and_locks(setup: Setup) -> None:
    numbers, other = own().reshape(33, 1 << 20), own().reshape((33, 1 << 20), order="F")
    numbers[:] = other[:] = np.random.default_rng(0).integers(0, 255, numbers.shape, np.uint8)
    locked = own(9)
    locked.flags.writeable = False
    given = [[other, locked, numbers.T, numbers.reshape(33, 1, 1024, 1024)]]
    feed = setup.feeder(given)
    for n in range(3):
        (found,) = setup.epoch(feed)
        for tensor, array in zip(found, given[0], strict=True):
            assert np.array_equal(tensor.numpy(), array)
        assert found[0].stride() == (1, 33)
        assert setup.lane.in_place.count(True) == (0 if n == 0 else 4)
    found[1][:] = 1
    assert locked[0] == 9, "the batch is a copy"


@pytest.mark.parametrize("kind", ["generator", "loader", "iterator", "own"])
def test_other_sources_are_staged_for_ever(setup: Setup, kind: str) -> None:
    given = parts(3)

    class Own(list[Any]):
        pass

    source: Callable[[], Any] = {
        "loader": lambda: DataLoader(given, batch_size=None, collate_fn=lambda one: one),
        "iterator": lambda: iter(given),
        "own": lambda: Own(given),
        "generator": lambda: (one for one in given),
    }[kind]
    feed = setup.feeder(source())
    for _ in range(3):
        feed.batches = source()
        setup.epoch(feed)
        assert not any(setup.lane.in_place)
    assert not setup.driver.log


def test_who_is_refused_is_staged(setup: Setup) -> None:
    given = roots(2)
    feed = setup.feeder(given)
    setup.driver.refuses = True
    for _ in range(4):
        assert [ends(one) for one in setup.epoch(feed)] == [[1, 2, 3], [11, 12, 13]]
        assert not any(setup.lane.in_place)
    assert setup.driver.said("register") == 2
    assert setup.at_once == [False] * 4


def test_what_is_beyond_the_limit_is_staged_by_the_thread(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "limit_bytes", lambda: 2 * OWN_BYTES + 2 * packing.mmap.PAGESIZE)
    feed = setup.feeder(roots(3))
    for n in range(4):
        assert [ends(one)[0] for one in setup.epoch(feed)] == [1, 11, 21]
        assert setup.lane.in_place.count(True) == (0 if n == 0 else 2)
    assert setup.at_once == [False] * 4


def test_arrays_that_are_replaced_between_epochs(setup: Setup) -> None:
    given = roots(3)
    feed = setup.feeder(given)
    for _ in range(3):
        setup.epoch(feed)
    given[1] = own(50)
    assert setup.driver.said("unregister") == 1, "that of before is gone"
    for _ in range(2):
        assert [ends(one)[0] for one in setup.epoch(feed)] == [1, 50, 21]
    assert (setup.driver.said("register"), setup.driver.said("unregister")) == (4, 1)
    assert setup.driver.said("synchronize") == 0, "nothing waited for the GPU"
    given[0][:2] = 99
    assert [ends(one)[0] for one in setup.epoch(feed)] == [99, 50, 21]


def test_lists_of_other_batches(setup: Setup) -> None:
    feed = setup.feeder(roots(2))
    for _ in range(3):
        setup.epoch(feed)
    feed.batches = roots(3)
    assert [ends(one)[0] for one in setup.epoch(feed)] == [1, 11, 21]
    assert setup.lane.in_place == [True] * 3
    assert len(setup.driver.registered) == 3


# ---- the arrays may be written to once the next batch is asked for


def overwriting(feed: Any, given: list[Any], value: int) -> tuple[list[Any], list[Any]]:
    """An epoch in which each array is written to once the next is asked for: what they had, and what came."""
    want = [array.copy() for array in given]
    found = []
    for i, batch in enumerate(feed):
        found.append(batch)
        if i:
            given[i - 1][:] = value
    return want, found


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_arrays_are_written_to_as_soon_as_the_next_batch_is_asked_for(setup: Setup, depth: int) -> None:
    given = parts(8)
    feed = setup.feeder(given, depth=depth)
    for n in range(4):
        want, found = overwriting(feed, given, 100 + n)
        given[-1][:] = 100 + n  # the end was asked for, too
        setup.lane.settle()
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(found, want, strict=True)), n
        for i, array in enumerate(given):
            array[:] = 8 * n + i


def test_no_later_copy_is_waited_for(setup: Setup) -> None:
    given = parts(8)
    feed = setup.feeder(given)
    for n in range(4):
        for i, _ in enumerate(feed):
            first = [pins.address_of(array) for array in given]
            if n:
                assert setup.lane.reads(first[i], first[i] + 1), "the batch itself is on its way"
                assert not any(setup.lane.reads(one, one + 1) for one in first[:i])
        setup.lane.settle()


def test_after_a_break_arrays_may_be_written_to(setup: Setup) -> None:
    given = parts(8)
    feed = setup.feeder(given)
    for n in range(4):
        want = [array.copy() for array in given]
        found = []
        for i, batch in enumerate(feed):
            found.append(batch)
            if i == 3:
                break
        assert not setup.lane.reads(0, 1 << 63) or n == 0
        for i, array in enumerate(given):
            array[:] = 8 * n + i
        setup.lane.settle()
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(found, want[:4], strict=True)), n
    assert [int(one[0]) for one in setup.epoch(feed)] == [24 + i for i in range(8)]


def test_a_tensor_of_such_an_array_may_be_written_to_as_well(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found to be pinned, and whose it is knows nothing of that."""
    whole = own()
    setup.epoch(feed := setup.feeder([whole]))
    setup.epoch(feed)
    monkeypatch.setattr(conveyor, "is_pinned", lambda address, nbytes: pins.is_ours(address))
    for leaf in (torch.from_numpy(whole), whole[: pins.MIN_BYTES - 1], torch.from_numpy(whole[: 1 << 17])):
        leaves = conveyor.Leaves([leaf], GPU)
        assert (len(leaves.others), leaves.in_place) == (1, True)
    leaves = conveyor.Leaves([whole[: 1 << 10]], GPU)
    assert (len(leaves.slots), leaves.in_place) == (1, False)
    backward = whole[: 1 << 17].reshape(1, -1)[::-1]  # dense, but nothing that torch would have
    leaves = conveyor.Leaves([backward], GPU)
    assert (len(leaves.slots), leaves.in_place) == (1, False)


def test_one_that_is_not_pinned_is_not_looked_for_among_ours(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands of them."""
    asked: list[int] = []
    monkeypatch.setattr(pins, "is_ours", lambda address: bool(asked.append(address)))
    pinned = [False]
    monkeypatch.setattr(conveyor, "is_pinned", lambda address, nbytes: pinned.pop(0))
    assert len(conveyor.Leaves([np.zeros(1 << 17)], GPU).slots) == 1
    assert not asked
    pinned[:] = [True, False]  # it has ended meanwhile
    assert len(conveyor.Leaves([np.zeros(1 << 17)], GPU).slots) == 1
    pinned[:] = [True, True]
    leaves = conveyor.Leaves([np.zeros(1 << 17)], GPU)
    assert (len(leaves.others), leaves.in_place, len(asked)) == (1, False, 3)


def test_a_tensor_with_a_gradient_of_such_an_array(setup: Setup) -> None:
    """It is moved by its own `to`, which reads the array as well."""
    whole, elsewhere = own().view(np.float32), own().view(np.float32)
    setup.epoch(feed := setup.feeder([whole]))
    setup.epoch(feed)
    for leaf in (torch.from_numpy(whole), torch.nn.Parameter(torch.from_numpy(whole[5:]))):
        leaves = conveyor.Leaves([leaf.requires_grad_()], GPU)
        assert (len(leaves.others), len(leaves.slots), leaves.in_place) == (1, 0, True)
    given = [
        torch.from_numpy(elsewhere).requires_grad_(),
        torch.eye(3).to_sparse(),
        torch.ones(3, device="meta"),
    ]
    leaves = conveyor.Leaves(given, GPU)
    assert (len(leaves.others), leaves.in_place) == (3, False)


# ---- how many events it takes


class Counting(LazyLane):
    """Knows what is held on to; an event that this waits for must not be used for another batch."""

    def __init__(self) -> None:
        super().__init__()
        self.n_marks = 0
        self.conveyors: list[Conveyor] = []

    def mark(self, event: Any = None) -> Any:
        self.n_marks += 1
        for made in self.conveyors:
            assert event is None or all(read.event is not event for read in list(made._read))
        return super().mark(event)


@pytest.fixture
def counting(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Counting:
    setup.lane = lane = Counting()

    def make(*arguments: Any, **options: Any) -> Conveyor:
        lane.conveyors.append(Conveyor(*arguments, **options))
        return lane.conveyors[-1]

    monkeypatch.setattr(feeder, "Conveyor", make)
    return lane


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_one_event_is_enough_if_nothing_is_staged(
    setup: Setup, counting: Counting, depth: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = parts(8)
    feed = setup.feeder(given, depth=depth)
    setup.epoch(feed)
    setup.epoch(feed)
    monkeypatch.setattr(Feeder, "_at_once", lambda self: at_once)
    for n in range(6):
        counting.n_marks = 0
        want, found = overwriting(feed, given, 100 + n)
        counting.settle()
        assert counting.n_marks == 8
        assert all(np.array_equal(a.numpy(), b) for a, b in zip(found, want, strict=True)), n
        for i, array in enumerate(given):
            array[:] = 8 * n + i
    assert not any(made._read for made in counting.conveyors)


@pytest.mark.parametrize("at_once", [False, True])
def test_two_events_if_something_is_staged_beside_it(
    setup: Setup, counting: Counting, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read in place is known to be under way before anything is staged, which may take a while."""
    given = [[part, np.array([i])] for i, part in enumerate(parts(8))]
    feed = setup.feeder(given)
    setup.epoch(feed)
    setup.epoch(feed)
    monkeypatch.setattr(Feeder, "_at_once", lambda self: at_once)
    for _ in range(4):
        counting.n_marks = 0
        found = setup.epoch(feed)
        assert counting.n_marks == 8 * 3, "that of the chunk, too"
        assert all(np.array_equal(a.numpy(), b) for (a, _), (b, _) in zip(found, given, strict=True))
        assert [int(y) for _, y in found] == [*range(8)]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_events_of_batches_with_and_without_something_staged(
    setup: Setup, counting: Counting, depth: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is given back by one side only, and to whom it came from."""
    given = [[part, np.array([i])] if i % 3 else [part] for i, part in enumerate(parts(12))]
    feed = setup.feeder(given, depth=depth)
    setup.epoch(feed)
    setup.epoch(feed)
    monkeypatch.setattr(Feeder, "_at_once", lambda self: at_once)
    for n in range(4):
        found = []
        for batch in feed:
            found.append(batch)
            made = counting.conveyors[-1]
            assert not {*map(id, made.spare_arrivals)} & {*map(id, made._spare_reads)}
        counting.settle()
        assert all(np.array_equal(a[0].numpy(), b[0]) for a, b in zip(found, given, strict=True)), n


def test_an_event_that_is_given_back_while_the_thread_looks_for_what_was_read() -> None:
    lane: Any = Counting()
    made = Conveyor(ring(), lane, 4, in_thread=False)
    lane.conveyors.append(made)

    class Late(Lazy):
        def query(self) -> bool:
            made.spare_arrivals.append(self)  # the loop, in its own thread, has just waited for it
            return False

    made._read.append(Read(Late(lane), [np.zeros(9)], is_arrival=True))
    made(np.ones(5))
    assert len(made.spare_arrivals) == 1
    made._read.clear()
    lane.settle()


@pytest.mark.parametrize("at_once", [False, True])
def test_pinned_memory_of_others_has_an_event_of_its_own(
    counting: Counting, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does not wait for it, and gives the other one back at once."""
    given = [torch.full((3,), float(i), requires_grad=True) for i in range(8)]
    monkeypatch.setattr(Feeder, "_at_once", lambda self: at_once)
    found = list(Feeder(given, GPU))
    assert counting.n_marks == 16
    assert all(a is b for a, b in zip(found, given, strict=True))
    counting.settle()


# ---- how long they stay


def test_an_array_that_is_dropped_on_its_way_is_kept_until_it_was_copied(setup: Setup) -> None:
    given = roots(3)
    feed = setup.feeder(given)
    for _ in range(2):
        setup.epoch(feed)
    reads = []
    setup.driver.on_unregister = lambda begin, end: reads.append(setup.lane.reads(begin, end))
    found = []
    for i, batch in enumerate(feed):
        given[i] = None
        found.append(batch)
    setup.lane.settle()
    assert [ends(one)[0] for one in found] == [1, 11, 21]
    del batch, found
    gc.collect()
    assert wait_until(lambda: not setup.driver.registered)
    assert reads == [False] * 3


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("how", ["break", "error", "close", "collected"])
def test_early_ends_with_arrays_that_go(
    setup: Setup, how: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = roots(4)
    feed = setup.feeder(given)
    setup.epoch(feed)
    setup.epoch(feed)
    monkeypatch.setattr(Feeder, "_at_once", lambda self: at_once)
    reads = []
    setup.driver.on_unregister = lambda begin, end: reads.append(setup.lane.reads(begin, end))
    found = iter(feed)
    next(found)
    next(found)
    if how == "error":
        with suppress(ZeroDivisionError):
            for _ in found:
                raise ZeroDivisionError
    elif how == "close":
        found.close()  # type: ignore[attr-defined]
    given.clear()
    del found, feed
    gc.collect()
    assert wait_until(lambda: not setup.driver.registered)
    assert reads == [False] * 4


class Step:
    """An event that the GPU comes to when the test has it so."""

    def __init__(self) -> None:
        self.waited, self.flag = threading.Event(), threading.Event()

    def query(self) -> bool:
        return self.flag.is_set()

    def synchronize(self) -> None:
        self.waited.set()
        assert self.flag.wait(20)


class Addresses(LazyLane):
    """Holds on to nothing that its copies read, as a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.copy = Step(), Step()
        self.n_sent = 0

    def reached(self, current: Any, event: Any = None) -> Any:
        return self.step

    def send(self, target: Tensor, source: Tensor) -> None:
        self.n_sent += 1
        if self.n_sent == 2:
            self.copy.synchronize()
        with self.lock:
            self.todo.append(source.data_ptr())

    def carry_out(self, until: Any = None) -> None:
        with self.lock:
            while self.todo and (until is None or not until.done):
                one = self.todo.pop(0)
                if isinstance(one, Lazy):
                    one.n_reached += 1

    def reads(self, begin: int, end: int) -> bool:
        return any(begin <= one < end for one in self.todo if not isinstance(one, Lazy))


@pytest.mark.parametrize("where", ["room", "copy"])
def test_a_thread_that_an_end_did_not_wait_for(
    setup: Setup, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a step that takes long, or in a copy: nothing reads what nobody keeps when it goes on."""
    monkeypatch.setattr(background, "JOIN_SECONDS", 0.05)
    given = roots(3)
    feed = setup.feeder(given, depth=1)
    for _ in range(2):
        setup.epoch(feed)
    monkeypatch.setattr(Feeder, "_at_once", lambda self: False)
    setup.lane = lane = Addresses()
    stuck, other = (lane.step, lane.copy) if where == "room" else (lane.copy, lane.step)
    other.flag.set()
    reads = []
    setup.driver.on_unregister = lambda begin, end: reads.append(lane.reads(begin, end))
    found: Any = iter(feed)
    next(found)
    assert stuck.waited.wait(20)
    found.close()
    assert threads(), "the end did not wait for it"
    n_sent = lane.n_sent
    given.clear()
    stuck.flag.set()
    assert wait_until(lambda: not threads())
    assert lane.n_sent == n_sent
    del found
    gc.collect()
    assert reads == [False] * 3
    assert not setup.driver.registered
    del feed


class Meanwhile:
    """An event; something else happens in another thread while somebody is at it."""

    def __init__(self, lane: LazyLane, happens: Any, *, done: bool) -> None:
        self.lane, self.happens, self.done = lane, happens, done
        self.n_waited = 0

    def _happen(self) -> None:
        happens, self.happens = self.happens, None
        if happens is not None:
            thread = threading.Thread(target=happens)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()

    def query(self) -> bool:
        self._happen()
        return self.done

    def synchronize(self) -> None:
        self._happen()
        self.n_waited += 1


@pytest.mark.parametrize("done", [True, False])
def test_an_end_while_the_thread_looks_for_what_was_read(done: bool) -> None:
    lane: Any = LazyLane()
    made = Conveyor(ring(), lane, 4, in_thread=False)
    array = np.zeros(9)
    kept = weakref.ref(array)
    made._read.append(Read(Meanwhile(lane, made.close, done=done), [array]))
    del array
    settled, real = [], lane.settle

    def settle() -> None:
        settled.append(done or kept() is not None)
        real()

    lane.settle = settle
    with pytest.raises(FlatbedError, match="this iteration has ended"):
        made(np.ones(5))
    assert settled == [True], "after which it may go"
    assert kept() is None
    assert not lane.todo
    with pytest.raises(FlatbedError, match="this iteration has ended"):
        made(np.ones(5))
    assert not lane.todo


def test_the_thread_keeps_more_while_an_end_waits() -> None:
    lane: Any = LazyLane()
    made = Conveyor(ring(), lane, 4, in_thread=False)
    array = np.zeros(9)
    source, target = torch.from_numpy(array), torch.ones(9, dtype=torch.float64)

    def issue() -> None:
        lane.send(target, source)
        made._keep([array])

    first = Meanwhile(lane, issue, done=False)
    made._read.append(Read(first, []))
    made.close()
    assert first.n_waited == 1
    assert not lane.todo, "the second was waited for, too"
    assert not made._read
    assert target.sum() == 0


def test_an_error_of_the_device_arrives(setup: Setup) -> None:
    given = parts(6)
    feed = setup.feeder(given)
    setup.epoch(feed)
    setup.epoch(feed)
    real, setup.lane = setup.lane, LateLane(most_seconds=0)
    setup.lane.fail_at = 4
    try:
        with pytest.raises(RuntimeError, match="the device is gone"):
            list(feed)
    finally:
        setup.lane.close()
        setup.lane = real
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(setup.epoch(feed), given, strict=True))


@pytest.mark.parametrize("how", ["close", "collected"])
def test_with_the_feeder_nothing_stays_registered(setup: Setup, how: str) -> None:
    given = roots(2)
    feed = setup.feeder(given)
    for _ in range(3):
        setup.epoch(feed)
    assert len(setup.driver.registered) == 2
    if how == "close":
        feed.close()
        feed.close()
        assert not setup.driver.registered
        for n in range(3):
            assert [ends(one)[0] for one in setup.epoch(feed)] == [1, 11]
            assert len(setup.driver.registered) == (0 if n == 0 else 2), "it begins anew"
    del feed
    gc.collect()
    assert not setup.driver.registered


def test_an_iteration_goes_on_without_its_feeder(setup: Setup) -> None:
    given = roots(4)
    feed = setup.feeder(given)
    for _ in range(2):
        setup.epoch(feed)
    found = iter(feed)
    next(found)
    del feed
    gc.collect()
    assert len(setup.driver.registered) == 4
    rest = [next(found), next(found)]
    setup.lane.settle()
    assert [ends(one)[0] for one in rest] == [11, 21]
    del found
    gc.collect()
    assert wait_until(lambda: not setup.driver.registered)


def test_a_feeder_that_is_closed_in_the_middle(setup: Setup) -> None:
    given = roots(4)
    feed = setup.feeder(given)
    setup.epoch(feed)
    setup.epoch(feed)
    reads = []

    def settled(begin: int, end: int) -> None:
        setup.lane.settle()  # as the driver's own `unregister` waits for the GPU
        reads.append(setup.lane.reads(begin, end))

    setup.driver.on_unregister = settled
    found = []
    for i, batch in enumerate(feed):
        found.append(batch)
        if i == 1:
            feed.close()
    setup.lane.settle()
    assert [ends(one)[0] for one in found] == [1, 11, 21, 31]
    assert reads == [False] * 4


def test_two_feeders_share_the_arrays(setup: Setup) -> None:
    given = roots(2)
    one, other = setup.feeder(given), setup.feeder(tuple(given))
    for _ in range(3):
        for a, b in zip(one, other, strict=True):
            setup.lane.settle()
            assert ends(a) == ends(b)
    assert setup.driver.said("register") == 2
    del one, a
    gc.collect()
    assert len(setup.driver.registered) == 2
    assert [ends(one)[0] for one in setup.epoch(other)] == [1, 11]


@pytest.mark.parametrize("seed", range(6))
def test_late_copies_many_epochs_and_random_ends(setup: Setup, seed: int) -> None:
    """A lane that carries out its copies by itself, at times of its own."""
    chance = np.random.default_rng(seed)
    setup.lane = late = LateLane(seed=seed, most_seconds=0.0005)
    given = [[part, np.array([i])] for i, part in enumerate(parts(10))]
    feed = setup.feeder(given, depth=int(chance.integers(1, 4)))
    try:
        for _ in range(6):
            stop = int(chance.integers(1, 12))
            for i, (x, y) in enumerate(feed):
                assert np.array_equal(x.numpy(), given[i][0])
                assert int(y) == i
                if i == stop:
                    break
            for part, _ in given:
                part[:] = chance.integers(0, 255)
    finally:
        late.close()


# ---- on a GPU


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def on_gpu(found: Tensor, array: Any) -> bool:
    return bool(torch.equal(found, torch.from_numpy(np.array(array)).to(found.device)))


@pytest.mark.gpu
def test_four_epochs_on_a_gpu(cuda: torch.device) -> None:
    generator = np.random.default_rng(0)
    given = [
        {"x": generator.integers(0, 99, 40 << 20, np.uint8), "y": generator.normal(size=300)}
        for _ in range(5)
    ]
    feed = Feeder(given, cuda)
    for n in range(4):
        for batch, want in zip(feed, given, strict=True):
            assert batch["x"].device == cuda
            assert on_gpu(batch["x"], want["x"])
            assert on_gpu(batch["y"], want["y"])
        assert all(torch.from_numpy(one["x"]).is_pinned() == (n > 0) for one in given)
    feed.close()
    assert not any(torch.from_numpy(one["x"]).is_pinned() for one in given)
    assert nothing_is_registered()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["whole", "parts", "fortran", "locked"])
def test_kinds_of_arrays_on_a_gpu(cuda: torch.device, kind: str) -> None:
    numbers = np.random.default_rng(1).integers(0, 255, (6, 40 << 20), np.uint8)
    if kind == "parts":
        given = [numbers[i] for i in range(6)] + [numbers.reshape(-1)[: 5 << 20]]
    elif kind == "fortran":
        given = [np.asfortranarray(numbers[i].reshape(1024, -1)) for i in range(3)]
    else:
        given = [numbers[i].copy() for i in range(3)]
    for array in given if kind == "locked" else []:
        array.flags.writeable = False
    feed = Feeder(given, cuda)
    for n in range(4):
        for found, array in zip(feed, given, strict=True):
            assert on_gpu(found, array)
            assert found.stride() == tuple(k // array.itemsize for k in array.strides)
        assert packing.is_pinned(pins.address_of(given[0]), given[0].nbytes) == (n > 0)
    address = pins.address_of(given[1])
    del feed
    gc.collect()
    assert not packing.is_pinned(address, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [False, True])
def test_arrays_are_written_to_on_a_gpu(
    cuda: torch.device, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Feeder, "_at_once", lambda self: at_once)
    given = [own(nbytes=40 << 20) for _ in range(6)]
    feed = Feeder(given, cuda)
    stream = feeder.stream_for(cuda, "batches")
    for n in range(5):
        for i, array in enumerate(given):
            array[:] = 10 * n + i
        sums = []
        for i, batch in enumerate(feed):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(3_000_000)  # copies are late
            if i:
                given[i - 1][:] = 200
            sums.append(torch.stack([batch.min(), batch.max()]))
            del batch
        given[-1][:] = 200
        assert [one.tolist() for one in sums] == [[10 * n + i] * 2 for i in range(6)], n


@pytest.mark.gpu
def test_breaks_and_arrays_that_go_on_a_gpu(cuda: torch.device) -> None:
    given: list[Any] = [own(i + 1) for i in range(6)]
    feed = Feeder(given, cuda)
    for n in range(4):
        for i, batch in enumerate(feed):
            assert int(batch.min()) == int(batch.max()) == i + 1
            if i == n:
                break
    sums = []
    for i, batch in enumerate(feed):
        given[i] = None
        sums.append(batch.sum(dtype=torch.int64))
    assert [int(one) for one in sums] == [(i + 1) * OWN_BYTES for i in range(6)]
    del batch
    gc.collect()
    assert nothing_is_registered()


@pytest.mark.gpu
def test_the_users_own_copies_of_such_arrays(cuda: torch.device) -> None:
    """And of their neighbours in memory: CUDA refuses those that are registered in part."""
    given, neighbours = [], []
    for i in range(6):
        given.append(np.full((2 << 20) + 5000 * i, i, np.uint8))
        neighbours.append(np.full(30_000, i, np.uint8))
    given.append(own(7))
    feed = Feeder(given, cuda)
    for _ in range(3):
        for i, batch in enumerate(feed):
            assert bool((batch == int(given[i][0])).all())
        for array in [*given, *neighbours, given[-1][1000:], given[-1][:-1000]]:
            there = torch.from_numpy(array).to(cuda)
            assert bool((there == int(array[0])).all())
            assert np.array_equal(there.cpu().numpy(), array)


@pytest.mark.gpu
def test_a_reader_of_an_array_that_is_fed(cuda: torch.device) -> None:
    from flatbed.data import RowReader

    table = own(5).view(np.float32).reshape(-1, 128)
    feed = Feeder([table], cuda)
    for _ in range(3):
        list(feed)
    with RowReader(table, device=cuda, copy=False) as reader:
        assert reader.way == "in place", repr(reader)
        feed.close()
        assert on_gpu(reader[[3, 7, 9]], table[[3, 7, 9]])
        for found in Feeder([table], cuda):
            assert on_gpu(found, table)
