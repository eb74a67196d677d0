"""Memory of arrays that is registered: which, for how long, and what ends it; without a GPU and with one."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatbed.cuda import host_memory
from flatbed.data import batches, packing, pins
from flatbed.data import row_sources as row_ways
from flatbed.data.pins import Pins
from tests.data.fake_driver import (
    GPU,
    OWN_BYTES,
    PINNED_PAGES,
    FakeDriver,
    nothing_is_registered,
    own,
    pins_of,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the C library of Linux")
PAGE = packing.mmap.PAGESIZE


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    yield FakeDriver()
    gc.collect()
    assert nothing_is_registered()


@pytest.fixture
def made(driver: FakeDriver) -> Iterator[Pins]:
    found = pins_of(driver)
    yield found
    found.close()
    assert not driver.registered


# ---- from the first to the last


def test_an_array_is_registered_once_and_let_go_at_the_end(driver: FakeDriver, made: Pins) -> None:
    array = own()
    address = pins.address_of(array)
    assert made.wants(array)
    assert not made.has(array)
    assert made.pin(array)
    ((begin, end),) = driver.registered.items()
    assert begin <= address < begin + PAGE
    assert address + array.nbytes <= end < address + array.nbytes + PAGE
    assert begin % PAGE == end % PAGE == 0
    assert made.pin(array)
    assert made.has(array)
    assert not made.wants(array)
    assert driver.said("register") == 1
    assert pins.registered_bytes() == end - begin
    assert pins.is_ours(address)
    assert not pins.is_ours(end)
    made.close()
    assert driver.log[1:] == [("synchronize", begin), ("unregister", begin)]
    assert not made.has(array)
    made.close()
    assert not made.pin(array), "it is closed"
    assert not made._register(array), "by another thread, just now"
    assert driver.said("unregister") == driver.said("register") == 1


def test_slices_share_the_array_that_they_are_of(driver: FakeDriver, made: Pins) -> None:
    whole = own().view(np.float32).reshape(-1, 1024)
    parts = [whole[i : i + 512] for i in range(0, len(whole), 512)]
    assert all(made.pin(part) for part in parts)
    assert driver.said("register") == 1
    part = parts[3]
    del whole, parts
    assert made.pin(part), "which has all of it"
    assert driver.said("unregister") == 0
    del part
    assert driver.said("unregister") == 1


def test_an_array_that_nobody_has_any_more_is_let_go_before_its_memory(
    driver: FakeDriver, made: Pins
) -> None:
    """And without a wait for the GPU: nothing reads it."""
    array = own(7)
    first = pins.address_of(array)
    seen: list[int] = []
    driver.on_unregister = lambda begin, end: seen.append(ctypes.c_uint8.from_address(first).value)
    made.pin(array)
    del array
    assert seen == [7]
    assert driver.said("synchronize") == 0
    assert nothing_is_registered()


def test_an_array_cannot_be_moved_while_it_is_registered(made: Pins) -> None:
    array = own()
    made.pin(array)
    with pytest.raises(ValueError, match="cannot resize"):
        array.resize(2 * OWN_BYTES, refcheck=False)


def test_whoever_knows_form_and_address_may_say_so(driver: FakeDriver, made: Pins) -> None:
    whole = own()
    for array in (whole, whole[5 : 5 + pins.MIN_BYTES], whole[::2], whole.view(Sub), whole[: 1 << 10]):
        slot = packing.slot_of_array(array)
        assert slot is not None
        want = made.pin(array)
        assert made.pin(array, slot.form, pins.address_of(array)) == want
        over = slot.over()
        assert over is not None
        assert over.data_ptr() == pins.address_of(array)
    assert driver.said("register") == 1
    assert made.pin(whole, None, pins.address_of(whole) + (1 << 30)), "elsewhere, so it is registered anew"
    assert (driver.said("register"), driver.said("unregister")) == (2, 1)


def test_an_array_whose_memory_has_moved_is_not_taken_for_registered() -> None:
    """Nobody who watches an array hears of that."""
    driver = FakeDriver(reads=False)  # what the array had is unmapped by then
    made = pins_of(driver)
    for n in range(1, 9):  # the new memory may be where the old one was
        array = own(3)
        assert made.pin(array)
        before = pins.address_of(array)
        array.__setstate__(np.full(n + (OWN_BYTES + (n << 20)) // 2, 7, ">u2").__reduce__()[2])
        if pins.address_of(array) != before:
            break
    assert pins.address_of(array) != before
    assert id(pins.owner_of(array)) == id(array)
    assert not made.has(array)
    assert before - pins.HEADER not in driver.registered, "it is found out, and ended"
    assert made.wants(array) == pins.has_own_pages(array)
    assert made.pin(array) == pins.has_own_pages(array)
    assert driver.registered == (dict([pins.pages_of(array)]) if pins.has_own_pages(array) else {})
    made.close()
    assert not driver.registered
    assert nothing_is_registered()


def test_pins_share_what_is_registered(driver: FakeDriver) -> None:
    one, other, array = pins_of(driver), pins_of(driver), own()
    assert one.pin(array)
    assert other.wants(array)
    assert other.pin(array)
    assert driver.said("register") == 1
    one.close()
    assert driver.registered
    assert other.has(array)
    del other
    gc.collect()
    assert not driver.registered


@pytest.mark.parametrize("how", ["first", "second", "let go", "all"])
def test_an_end_waits_for_all_gpus_that_an_array_is_copied_to(how: str) -> None:
    driver = FakeDriver(n_gpus=3)
    one, other, third, array = pins_of(driver, 1), pins_of(driver, 0), pins_of(driver, 2), own()
    assert one.pin(array)
    assert other.pin(array)
    assert third.pin(own())
    assert (driver.said("register"), driver.waited) == (2, []), "that of the third is gone"
    seen: list[set[int]] = []
    driver.on_unregister = lambda begin, end: seen.append(set(driver.waited))
    if how == "let go":
        pins.let_go(*pins.pages_of(array))
    elif how == "all":
        pins.close_all()
    else:
        for found in (one, other) if how == "first" else (other, one):
            assert not seen
            found.close()
    assert seen == [{0, 1}]
    assert not driver.registered
    assert nothing_is_registered()


def test_pins_that_go_let_everything_go(driver: FakeDriver) -> None:
    arrays = [own() for _ in range(3)]
    found = pins_of(driver)
    assert all(found.pin(array) for array in arrays)
    assert len(driver.registered) == 3
    del found
    gc.collect()
    assert not driver.registered


def test_while_a_graph_is_captured_nothing_is_waited_for(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, found = own(), pins_of(driver)
    found.pin(array)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    found.close()
    assert driver.said("unregister") == 0, "later"
    monkeypatch.undo()
    pins.memory._when_allowed()
    assert driver.said("unregister") == 1


# ---- what is not


class Sub(np.ndarray[Any, Any]):
    pass


def _locked() -> Any:
    array = own()
    array.flags.writeable = False
    return array


YES = {
    "plain": own,
    "fortran": lambda: own().reshape((33, 1 << 20), order="F"),
    "locked": _locked,
    "transposed": lambda: own().reshape(33, 1 << 20).T,
    "part": lambda: own()[5 : 5 + pins.MIN_BYTES],
    "numbers": lambda: own().view(np.complex64)[3:],
    "channels last": lambda: own().view(np.float32).reshape(11, 3, 512, 512).transpose(0, 2, 3, 1),
}
NO = {
    "small": lambda: own()[: pins.MIN_BYTES - 1],
    "gaps": lambda: own()[::2],
    "backward": lambda: own()[::-1],
    "columns": lambda: own().reshape(33, 1 << 20)[:, 1:],
    "repeated": lambda: np.broadcast_to(own()[: 1 << 20], (3, 1 << 20)),
    "swapped": lambda: np.zeros(OWN_BYTES // 8, ">f8"),
    "texts": lambda: np.zeros(OWN_BYTES // 4, "U1"),
    "subclass": lambda: own().view(Sub),
    "of a subclass": lambda: Sub((OWN_BYTES,), np.uint8).view(np.ndarray),
    "bytes": lambda: np.frombuffer(bytearray(OWN_BYTES), np.uint8),
    "tensor": lambda: torch.zeros(OWN_BYTES, dtype=torch.uint8).numpy(),
    "masked": lambda: np.ma.masked_array(np.zeros(OWN_BYTES)),
}


@pytest.mark.parametrize("kind", YES)
def test_what_is_registered(kind: str, driver: FakeDriver, made: Pins) -> None:
    array = YES[kind]()
    assert made.pin(array)
    assert driver.said("register") == 1


@pytest.mark.parametrize("kind", NO)
def test_what_is_not_registered(kind: str, driver: FakeDriver, made: Pins) -> None:
    array = NO[kind]()
    assert not made.pin(array)
    assert not made.wants(array)
    assert not driver.log


def test_files_are_not_registered(tmp_path: Path, driver: FakeDriver, made: Pins) -> None:
    np.save(tmp_path / "a.npy", np.zeros(1 << 20, np.uint8))
    for mode in ("r", "r+", "c"):
        mapped: Any = np.load(tmp_path / "a.npy", mmap_mode=mode)  # type: ignore[call-overload]
        for array in (mapped, mapped[5:], np.asarray(mapped)):
            assert not made.pin(array)
    assert not driver.log


def test_memory_that_shares_pages_with_a_neighbours_is_not_registered(driver: FakeDriver, made: Pins) -> None:
    """CUDA would refuse to copy the neighbour's, which were registered in part."""
    del_me = np.ones(31 << 20, np.uint8)
    del del_me  # from here on the C library takes smaller blocks from its heap
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(8)]
    shared = [array for array in arrays if pins.address_of(array) % PAGE != pins.HEADER]
    assert shared, "one page in 256 begins so by chance"
    assert not any(made.pin(array) for array in shared)
    assert not driver.log


def test_what_the_driver_refuses_is_not_asked_for_again(driver: FakeDriver, made: Pins) -> None:
    array, other = own(), own()
    driver.refuses = True
    assert not made.pin(array)
    driver.refuses = False
    assert not made.pin(array)
    assert not made.wants(array)
    assert not pins_of(driver).pin(array[5:])
    assert driver.said("register") == 1
    assert made.pin(other)
    assert pins.registered_bytes() == OWN_BYTES + PAGE
    refused = len(pins._refused)
    del array
    assert len(pins._refused) == refused - 1


def test_no_more_than_a_part_of_the_memory(
    driver: FakeDriver, made: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < pins.limit_bytes() <= os.sysconf("SC_PHYS_PAGES") * PAGE // 4
    monkeypatch.setattr(pins, "limit_bytes", lambda: 2 * OWN_BYTES + 2 * PAGE)
    a, b, c = own(), own(), own()
    assert made.pin(a)
    assert made.wants(b)
    assert pins_of(driver).wants(b)
    assert made.pin(b)
    assert not made.wants(c)
    assert not made.pin(c)
    del a
    assert made.pin(c), "now there is room"
    assert driver.said("register") == 3


def test_no_more_than_half_of_what_is_left(
    driver: FakeDriver, made: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an array that was never written to, registering would make real memory."""
    array, left = own(), 2 * (OWN_BYTES + PAGE) - 2
    monkeypatch.setattr(host_memory, "available_bytes", lambda: left)
    assert not made.wants(array)
    assert not made.pin(array[: 1 << 20]), "all of it would be registered"
    assert not driver.log
    left += 2
    assert made.wants(array)
    assert made.pin(array), "not refused for good"


def test_without_a_driver_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins.cuda_host, "driver", lambda: None)
    found = Pins(GPU)
    assert not found.pin(own())
    assert not found.wants(own())
    found.close()


# ---- at odd times


def test_arrays_that_go_while_another_one_is_registered(driver: FakeDriver, made: Pins) -> None:
    held = [own() for _ in range(3)]
    for array in held:
        made.pin(array)
    del array
    driver.on_register = held.clear
    last = own()
    assert made.pin(last)
    assert len(driver.registered) == 1
    assert made.has(last)


def test_pins_that_go_while_others_register(driver: FakeDriver, made: Pins) -> None:
    array, others = own(), [pins_of(driver)]
    others[0].pin(array)

    def drop() -> None:
        others.clear()
        gc.collect()

    driver.on_register = drop
    last = own()
    assert made.pin(last)
    assert (made.has(last), len(driver.registered)) == (True, 1)


class Moments(dict[int, Any]):
    """Something happens right after the n-th time that somebody has looked something up."""

    def __init__(self, happens: Any) -> None:
        super().__init__()
        self.happens = happens
        self.n: int | None = None

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, default)
        if self.n is not None:
            self.n -= 1
            if self.n == 0:
                self.n = None
                self.happens()
        return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_only_other_pins_go_while_an_array_is_looked_up(
    driver: FakeDriver, made: Pins, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a collection of garbage has it, in the same thread."""
    assert nothing_is_registered()
    other, array = pins_of(driver), own()
    looked_up = Moments(other.close)
    with monkeypatch.context() as patch:
        patch.setattr(pins, "_roots", looked_up)
        assert other.pin(array)
        looked_up.n = n
        assert made.pin(array)
        looked_up.n = None
        assert driver.registered == dict([pins.pages_of(array)])
        assert made.has(array)
        assert pins.is_ours(pins.address_of(array))
        other.close()
        assert made.has(array)
        made.close()
        assert not looked_up
    assert not driver.registered


class Circle:
    """Garbage with an array."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.circle = self


@pytest.mark.parametrize("how", ["let go", "close", "is ours"])
def test_garbage_is_collected_while_registered_arrays_are_walked(driver: FakeDriver, how: str) -> None:
    """At each moment that the collector may come; from Python 3.12 on it does not come in between."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # all else is looked through much longer than this takes
    try:
        for n in range(60):
            one, other, kept = pins_of(driver), pins_of(driver), [own() for _ in range(3)]
            garbage = Circle(own())
            assert other.pin(garbage.array)
            assert all(one.pin(array) for array in kept)
            gc.disable()
            filler = [[] for _ in range(1000)]  # type: ignore[var-annotated]  # more than what is freed in between
            del garbage
            gc.set_threshold(gc.get_count()[0] + n, 10**6, 10**6)
            gc.enable()
            if how == "let go":
                pins.let_go(0, 1)
            elif how == "close":
                one.close()
            else:
                assert not pins.is_ours(1)
            gc.disable()
            del filler
            gc.collect()
            assert len(driver.registered) == (0 if how == "close" else 3)
            one.close()
            other.close()
            assert not driver.registered
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        gc.enable()


def test_an_interrupt_while_an_array_is_registered(driver: FakeDriver, made: Pins) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    array = own()
    driver.on_register = interrupt
    with pytest.raises(KeyboardInterrupt):
        made.pin(array)
    assert driver.registered
    del array
    assert not driver.registered


def test_many_threads_that_pin_and_forget(driver: FakeDriver) -> None:
    shared = [own() for _ in range(4)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(30):
                mine, array = pins_of(driver), own()
                assert mine.pin(array)
                assert mine.pin(shared[chance.randrange(4)])
                if chance.random() < 0.5:
                    del array
                if chance.random() < 0.5:
                    mine.close()
                del mine
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not driver.registered


def test_whoever_registers_an_array_for_good_has_it_alone(driver: FakeDriver, made: Pins) -> None:
    a, b = own(), own()
    made.pin(a)
    made.pin(b)
    begin, end = pins.pages_of(a)
    pins.let_go(begin + 5 * PAGE, begin + 6 * PAGE)
    assert not made.has(a)
    assert not made.pin(a), "not again"
    assert made.has(b)
    assert [what for what, address in driver.log if address == begin][1:] == ["synchronize", "unregister"]
    pins.let_go(end, end)
    assert row_ways.let_go is pins.let_go


# ---- others that find it pinned


def test_what_is_pinned_for_a_feeder_alone_is_copied(
    driver: FakeDriver, made: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever takes tensors to a GPU: the feeder may end it while they are on their way."""
    real = torch.empty_like
    asked: list[Any] = []

    def empty_like(like: torch.Tensor, *, pin_memory: bool, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return real(like, **options)

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    array = own(5)
    tensor = torch.from_numpy(array)[1000:]
    assert batches._pinned(tensor) is tensor, "somebody else has pinned it"
    assert made.pin(array)
    found = batches._pinned(tensor)
    assert found.data_ptr() != tensor.data_ptr()
    assert not pins.is_ours(found.data_ptr())
    assert torch.equal(found, tensor)
    assert asked == [True]
    made.close()
    assert batches._pinned(tensor) is tensor


# ---- forks and exits

BEGIN = """
import gc, os, sys
from flatbed.data import feeder
from flatbed.data import pins
from tests.data.fake_driver import FakeDriver, nothing_is_registered, own, pins_of
driver = FakeDriver()
made, array = pins_of(driver), own()
assert made.pin(array)
"""
ENDS = {
    "fork": """
n = len(driver.log)
child = os.fork()
if child == 0:
    try:
        assert driver.log[n:] == [("synchronize", driver.log[0][1]), ("unregister", driver.log[0][1])]
        assert nothing_is_registered() and array[0] == 0
        made.close()
        del array, made
        gc.collect()
        feeder._close_all()
        assert len(driver.log) == n + 2
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert not made.has(array) and made.wants(array) and made.pin(array)
assert driver.said("register") == 2
""",
    "a copy that the parent has": """
other = own()
assert made.pin(other)
for root in pins._roots.values():
    root.process = -1  # as if it had been registered by another one
n = len(driver.log)
del array
made.close()
assert len(driver.log) == n
driver.registered.clear()
""",
    "exit": """
import atexit
atexit.register(lambda: os._exit(0 if not driver.registered else 4))
feeder._close_at_exit()
""",
    "exit of a feeder's script": """
feeder._close_at_exit()
""",
    "subprocess": """
import subprocess
assert subprocess.run(["true"]).returncode == 0
assert made.has(array) and driver.said("unregister") == 0
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_forks_and_exits(end: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + ENDS[end]],
        capture_output=True, text=True, check=False, timeout=120, cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# ---- whether memory is pinned, asked of the driver


def test_the_driver_is_asked_at_four_points(monkeypatch: pytest.MonkeyPatch) -> None:
    base, pages, asked = 1 << 40, set[int](), list[int]()
    kinds: dict[int, tuple[int, int]] = {}

    def ask(n: int, attributes: Any, places: Any, address: int) -> int:
        assert (n, list(attributes)) == (2, [2, 8])
        asked.append(address)
        number = (address - base) // PAGE
        kind = kinds.get(number, (1, 0)) if number in pages else (0, 0)
        for place, value in zip(places, kind, strict=True):
            ctypes.c_uint32.from_address(place).value = value
        return 0

    monkeypatch.setattr(packing, "_pointer_attributes", lambda: ask)
    begin, nbytes = base + PAGE // 2, 5 * PAGE
    for some, want in PINNED_PAGES:
        pages = some
        assert packing.is_pinned(begin, nbytes) == want
    asked.clear()
    assert packing.is_pinned(begin, nbytes)
    assert sorted(asked) == [begin, base + PAGE, base + 5 * PAGE - 1, begin + nbytes - 1]
    kinds[0] = (1, 1)
    assert not packing.is_pinned(begin, 1), "managed"
    kinds[0] = (2, 0)
    assert not packing.is_pinned(begin, 1), "of a GPU"


def test_each_thread_has_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4)

    def ask(n: int, attributes: Any, places: Any, address: int) -> int:
        ctypes.c_uint32.from_address(places[0]).value = address % 2
        together.wait(20)  # all have written, and none has read
        return 0

    monkeypatch.setattr(packing, "_pointer_attributes", lambda: ask)
    found: dict[int, list[bool]] = {i: [] for i in range(4)}

    def work(i: int) -> None:
        for k in range(50):
            found[i].append(packing._is_pinned_at(i + k))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: [(i + k) % 2 == 1 for k in range(50)] for i in range(4)}


def test_an_answer_is_not_that_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(n: int, attributes: Any, places: Any, address: int) -> int:
        if address:  # of memory that it does not know, it may say nothing
            ctypes.c_uint32.from_address(places[0]).value = 1
        return 0

    monkeypatch.setattr(packing, "_pointer_attributes", lambda: ask)
    assert [packing._is_pinned_at(one) for one in (1, 0, 1, 0)] == [True, False, True, False]


def test_if_the_driver_cannot_say_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    monkeypatch.setattr(packing, "_pointer_attributes", lambda: lambda *_: 201)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    assert packing.is_pinned(memory.data_ptr(), 100)


# ---- on a GPU


@pytest.mark.gpu
def test_the_driver_and_torch_agree() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    managed = pins.memory.allocate(1 << 20, device=device, kind="managed").tensor
    for memory in (
        torch.zeros(1 << 20),
        torch.zeros(1 << 20).pin_memory(),
        torch.zeros(1 << 20).pin_memory()[100:],
        torch.zeros(1 << 20, device=device),
        managed,
        pins.memory.allocate(1 << 20, device=device, kind="registered").tensor,
    ):
        want = memory.is_cpu and memory.is_pinned()
        assert packing.is_pinned(memory.data_ptr(), memory.nbytes) == want
    assert packing._pointer_attributes() is not None


@pytest.mark.gpu
def test_arrays_are_pinned_on_a_gpu_and_let_go() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    found = Pins(device)
    a, b = own(3), own(4)
    assert found.pin(a)
    assert found.pin(b)
    for array in (a, b):
        assert torch.from_numpy(array).is_pinned()
        assert packing.is_pinned(pins.address_of(array), array.nbytes)
        there = torch.from_numpy(array).to(device, non_blocking=True)
        assert int(there.min()) == int(there.max()) == int(array[0])
    address = pins.address_of(a)
    del a, array, there
    assert not packing.is_pinned(address, 1), "before its memory was freed"
    found.close()
    assert not torch.from_numpy(b).is_pinned()
    assert nothing_is_registered()


@pytest.mark.gpu
def test_a_graph_is_captured_while_arrays_go() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x, graph, found = torch.zeros(9, device=device), torch.cuda.CUDAGraph(), Pins(device)
    array = own()
    found.pin(array)
    with torch.cuda.graph(graph):
        x += 1
        del array
        assert nothing_is_registered()
    graph.replay()
    assert float(x[0]) == 1
    found.close()


def test_pages_of_its_own_whatever_the_size() -> None:
    sizes = [(40 << 20) - less for less in range(64)]
    assert all(pins.has_own_pages(own(nbytes=nbytes)) for nbytes in sizes)


def test_one_gpu_that_fails_does_not_keep_an_array_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    driver.n_gpus = 2
    one, other = pins_of(driver), pins_of(driver, 1)
    array = own()
    assert one.pin(array)
    assert other.pin(array)

    def lost() -> int:
        raise RuntimeError("this GPU is lost")

    monkeypatch.setitem(driver.calls, "cuCtxSynchronize", lost)
    one.close()
    other.close()
    assert not driver.registered
