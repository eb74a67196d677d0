"""The feeder: pass-through on a CPU, the whole way through a lane that is late, and on a GPU."""

from __future__ import annotations

import collections
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import flatbed
from flatbed.data import feeder
from flatbed.data.feeder import Feeder
from flatbed.errors import FlatbedError
from tests.data.fake_streams import LateLane, Reached, fed, lane, ring, threads
from tests.data.fakes import Numbered, wait_until


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Sample:
    ids: Any
    name: str


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert wait_until(lambda: not threads()), "a thread is left"


def batch(i: int, rows: int = 40) -> dict[str, Any]:
    """One of every kind of container, more bytes than the tests' ring has."""
    values = np.random.default_rng(i).normal(size=(rows, 50))
    return {
        "x": values,
        "t": torch.full((rows,), i, dtype=torch.bfloat16),
        "pair": Pair(np.arange(i, i + 5, dtype=np.int32), [values.T[:3], "text"]),
        "sample": Sample(np.array(i), f"n{i}"),
        "words": np.array(["a", "b"]),
        "more": (values[:, ::3], torch.tensor([True, False])),
        "n": i,
    }


def same(found: Any, i: int, rows: int = 40) -> bool:
    want = batch(i, rows)
    pairs = [
        (found["x"], want["x"]),
        (found["t"], want["t"]),
        (found["pair"].left, want["pair"].left),
        (found["pair"].right[0], want["pair"].right[0]),
        (found["sample"].ids, want["sample"].ids),
        (found["more"][0], want["more"][0]),
        (found["more"][1], want["more"][1]),
    ]
    assert (type(found["pair"]), type(found["sample"]), found["n"]) == (Pair, Sample, i)
    assert (found["pair"].right[1], found["sample"].name) == ("text", f"n{i}")
    assert isinstance(found["words"], np.ndarray)
    for tensor, given in pairs:
        wanted = torch.from_numpy(np.ascontiguousarray(given)) if isinstance(given, np.ndarray) else given
        assert isinstance(tensor, Tensor)
        assert tensor.dtype == wanted.dtype
        if tensor.shape != wanted.view(tensor.shape).shape or not torch.equal(
            tensor.cpu(), wanted.view(tensor.shape)
        ):
            return False
    return True


# ---- on a CPU


def test_on_a_cpu_nothing_is_copied_and_no_thread_runs() -> None:
    arrays = [np.arange(6.0) + i for i in range(3)]
    tensor = torch.ones(2)
    seen = 0
    for given, found in zip(arrays, Feeder([{"a": a, "t": tensor} for a in arrays], "cpu"), strict=True):
        assert found["a"].data_ptr() == given.__array_interface__["data"][0]
        assert found["t"] is tensor
        assert not threads()
        seen += 1
    assert seen == 3


def test_a_batch_of_tensors_is_the_same_object() -> None:
    given = [{"a": torch.ones(1)}, [torch.zeros(2)]]
    assert all(a is b for a, b in zip(Feeder(given, device="cpu"), given, strict=True))


def test_length_is_the_sources() -> None:
    assert len(Feeder([1, 2, 3], "cpu")) == 3
    assert len(Feeder(DataLoader(Numbered(10), batch_size=4), "cpu")) == 3
    with pytest.raises(TypeError, match="len"):
        len(Feeder((i for i in range(3)), "cpu"))
    assert list(Feeder((i for i in range(3)), "cpu")) == [0, 1, 2]


def test_it_can_be_iterated_again_if_the_source_can() -> None:
    again = Feeder([1, 2], "cpu")
    assert list(again) == list(again) == [1, 2]
    once = Feeder(iter([1, 2]), "cpu")
    assert list(once) == [1, 2]
    with pytest.raises(FlatbedError, match="can be read once"):
        list(once)


def test_on_a_cpu_errors_and_early_ends_let_the_source_go() -> None:
    gone: list[str] = []

    def source() -> Iterator[int]:
        try:
            yield 1
            raise KeyError("second")
        finally:
            gone.append("closed")

    found = iter(Feeder(source(), "cpu"))
    assert next(found) == 1
    with pytest.raises(KeyError, match="second"):
        next(found)
    assert list(found) == []
    for _ in Feeder(source(), "cpu"):
        break
    assert gone == ["closed", "closed"]


@pytest.mark.parametrize("workers", [0, 2])
def test_over_a_data_loader_on_a_cpu(workers: int) -> None:
    loader = DataLoader(Numbered(10), batch_size=4, num_workers=workers)
    assert [b["items"].tolist() for b in Feeder(loader, "cpu")] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "batches must be something to iterate over; found int"),
        (
            (np.zeros((5, 2)), "cpu"),
            TypeError,
            r"each item of a ndarray would be taken for one: give \[batch\]",
        ),
        ((torch.zeros(5), "cpu"), TypeError, "each item of a Tensor"),
        (([1], "cpu", {"depth": 0}), ValueError, "1 to 1024; found 0"),
        (([1], "cpu", {"depth": 1.5}), TypeError, "depth must be an integer; found 1.5"),
        (([1], "cpu", {"depth": True}), TypeError, "depth must be an integer; found True"),
        (([1], "meta"), ValueError, 'device must be "cpu" or "cuda"; found "meta"'),
    ],
)
def test_mistakes(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    options = arguments[2] if len(arguments) > 2 else {}
    with pytest.raises(error, match=message):
        Feeder(*arguments[:2], **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r'no CUDA GPU.*give device="cpu"'):
        Feeder([1], "cuda")
    assert Feeder([1]).device.type == "cpu"


def test_not_for_copies() -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled: make another one"):
        pickle.dumps(Feeder([1], "cpu"))
    assert repr(Feeder([1], "cpu")) == "Feeder(list, 'cpu', depth=2)"


# ---- the whole way, through a lane that is late


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_all_batches_arrive_in_order_and_whole(depth: int, at_once: bool) -> None:
    with lane() as through:
        found = list(fed((batch(i) for i in range(12)), through, depth=depth, at_once=at_once))
        assert len(found) == 12
        assert all(same(one, i) for i, one in enumerate(found)), "though they are held until the end"


@pytest.mark.parametrize("at_once", [False, True])
def test_a_source_that_writes_into_its_batches_again(at_once: bool) -> None:
    own = np.zeros(5000)

    def source() -> Iterator[Any]:
        for i in range(20):
            own[:] = i
            yield own

    with lane(most_seconds=0.001) as through:
        for i, found in enumerate(fed(source(), through, of=ring(20), at_once=at_once)):
            assert bool((found == i).all())


def test_never_further_ahead_than_asked() -> None:
    made: list[int] = []

    def source() -> Iterator[Any]:
        for i in range(20):
            made.append(i)
            yield np.array([i])

    with lane(most_seconds=0) as through:
        found = fed(source(), through, depth=3)
        for i in range(10):
            assert int(next(found)) == i
            assert wait_until(lambda i=i: len(made) == i + 4)  # type: ignore[misc]
            time.sleep(0.002)
            assert len(made) == i + 4
        found.close()


class Stepped(LateLane):
    """The steps of the loop are reached when told."""

    def __init__(self) -> None:
        super().__init__(most_seconds=0)
        self.steps: list[Reached] = []

    def reached(self, current: Any, event: Any = None) -> Any:
        self.steps.append(Reached())
        self.steps[-1].flag.clear()
        return self.steps[-1]

    def close(self) -> None:
        for step in self.steps:
            step.flag.set()
        super().close()


def test_memory_waits_for_the_steps_of_earlier_batches() -> None:
    """The loop may issue steps far ahead of the device; batches may not go there as far ahead."""
    through = Stepped()
    try:
        found = fed((np.array([i]) for i in range(20)), through, depth=2)
        next(found)  # 0; the device has not even begun
        assert int(next(found)) == 1  # what was issued at first has room
        time.sleep(0.05)
        assert through.n_sent == 2
        through.steps[0].flag.set()
        assert wait_until(lambda: through.n_sent == 3)
        assert int(next(found)) == 2
        time.sleep(0.05)
        assert through.n_sent == 3
        for step in through.steps:
            step.flag.set()
        assert wait_until(lambda: through.n_sent == 5)
        found.close()
    finally:
        through.close()


def test_without_a_thread_batches_are_ahead_as_far_as_there_is_room() -> None:
    through = Stepped()
    try:
        found = fed((np.array([i]) for i in range(20)), through, depth=3, at_once=True)
        assert (int(next(found)), through.n_sent) == (0, 3)
        assert (int(next(found)), through.n_sent) == (1, 3), "the step of 0 is not reached, and 2 is there"
        assert (int(next(found)), through.n_sent) == (2, 3)
        for step in through.steps[:2]:
            step.flag.set()
        assert (int(next(found)), through.n_sent) == (3, 5), "so many as room is known of"
        assert (int(next(found)), through.n_sent) == (4, 5)
        threading.Timer(0.05, through.steps[2].flag.set).start()
        assert (int(next(found)), through.n_sent) == (5, 6), "nothing was there: it waits"
        assert not threads()
        found.close()
        assert list(found) == []
    finally:
        through.close()


def test_small_batches_of_a_list_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(batches: Any) -> bool:
        return Feeder(batches, "cpu")._at_once()

    small, large = (
        {"a": [np.zeros(100), torch.zeros(3)], "b": "x"},
        np.zeros(feeder.AT_ONCE_BYTES + 1, np.uint8),
    )
    assert at_once([small, large])
    assert at_once((large[1:],))
    assert not at_once([large, small])
    assert not at_once([])
    assert not at_once(iter([small]))
    assert not at_once(DataLoader([small], batch_size=None))
    assert not at_once([{"a": Known(torch.zeros(1))}]), "who knows what it does"


@pytest.mark.parametrize("at_once", [False, True])
def test_an_error_comes_in_its_turn_with_its_traceback(at_once: bool) -> None:
    def failing() -> Iterator[Any]:
        yield np.ones(3)
        raise KeyError("here")

    with lane() as through:
        found = fed(failing(), through, at_once=at_once)
        assert next(found).tolist() == [1, 1, 1]
        with pytest.raises(KeyError, match="here") as caught:
            next(found)
        assert caught.traceback[-1].name == "failing"
        assert list(found) == []


@pytest.mark.parametrize("at_once", [False, True])
def test_errors_on_the_way_arrive(at_once: bool) -> None:
    with lane() as through:
        through.fail_at = 5
        with pytest.raises(RuntimeError, match="the device is gone"):
            list(fed((np.ones(3) for _ in range(20)), through, at_once=at_once))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("how", ["break", "error", "close", "with", "collected", "not begun"])
def test_every_early_end_leaves_nothing(how: str, at_once: bool) -> None:
    gone: list[bool] = []

    class Source:
        def __iter__(self) -> Source:
            return self

        def __next__(self) -> Any:
            return np.ones(20_000)

        def __del__(self) -> None:
            gone.append(True)

    of = ring(4)
    with lane() as through:
        found = fed(Source(), through, of=of, at_once=at_once)
        if how == "break":
            for _ in found:
                break
        elif how == "error":
            with suppress(ZeroDivisionError):
                for _ in found:
                    raise ZeroDivisionError
        elif how == "close":
            next(found)
            found.close()
            assert list(found) == []
        elif how == "with":
            with found:
                next(found)
        elif how == "collected":
            next(found)
        del found
        gc.collect()
        assert wait_until(lambda: not threads() and bool(gone))
        through.settle()
    assert of._free.qsize() == 4


def test_the_ring_goes_with_feeder_and_iterations() -> None:
    of = ring(4)
    gone = weakref.ref(of)
    with lane() as through:
        found = fed((np.ones(5000) for _ in range(5)), through, of=of)
        del of
        next(found)
        assert gone() is not None
        del found
        gc.collect()
        assert wait_until(lambda: gone() is None)


def test_ten_thousand_steps_do_not_grow() -> None:
    given = {"a": np.zeros(16), "b": [torch.zeros(2), "x"]}

    def source(n: int) -> Iterator[Any]:
        for _ in range(n):
            yield given

    with lane(most_seconds=0) as through:
        steps = iter(fed(source(10_500), through))
        for _ in range(500):
            next(steps)
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in steps:
            pass
        gc.collect()
        assert through.n_arrived == 10_500
        assert sys.getallocatedblocks() - before < 1000


def test_random_ends_and_delays() -> None:
    chance = random.Random(1)
    for seed in range(40):
        with lane(seed=seed, most_seconds=0.0003) as through:
            n = chance.randrange(12)
            found = fed(
                (batch(i, 20) for i in range(n)),
                through,
                of=ring(chance.randint(1, 4)),
                depth=chance.randint(1, 4),
                at_once=chance.random() < 0.5,
            )
            for i in range(chance.randrange(14)):
                one = next(found, None)
                if one is None:
                    assert i == n
                    break
                assert same(one, i, 20)
                time.sleep(chance.random() * 0.002)
            found.close()
    assert not threads()


def test_in_a_forked_child() -> None:
    with lane() as through:
        found = fed((np.ones(3) for _ in range(9)), through)
        next(found)
        process = found.iteration._process
        found.iteration._process = -1
        with pytest.raises(FlatbedError, match="another process"):
            next(found)
        found.iteration._process = process
        found.close()


class Known:
    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def to(self, device: Any) -> Known:
        return Known(self.ids + 1)


def test_objects_move_themselves_and_what_is_shared_stays_shared() -> None:
    array = np.arange(3)
    given = {"k": Known(torch.zeros(2)), "p": torch.ones(2, requires_grad=True), "a": array, "b": [array]}
    with lane() as through:
        (found,) = list(fed([given], through))
    assert found["k"].ids.tolist() == [1, 1]
    assert found["p"].requires_grad
    assert found["a"] is found["b"][0]
    assert isinstance(given["a"], np.ndarray)


def test_odd_containers() -> None:
    given = [
        collections.OrderedDict(b=np.ones(2)),
        collections.defaultdict(list, a=np.ones(1)),
        [],
        None,
        "x",
    ]
    with lane() as through:
        (found,) = list(fed([given], through))
    assert [type(one) for one in found] == [type(one) for one in given]
    assert found[1]["new"] == []


class Own(np.ndarray[Any, Any]):
    pass


class Named(dict[str, Any]):
    kind = "own"


@pytest.mark.parametrize(
    "make",
    [
        lambda a, t: [a, t],
        lambda a, t: (a, t, "x"),
        lambda a, t: {"a": a, "n": 3, "t": t},
        lambda a, t: Pair(a, t),
        lambda a, t: Named(a=a, t=t),
        lambda a, t: [a, (t, a)],
        lambda a, t: [a, a, t],
        lambda a, t: {"a": a.view(Own), "t": t},
        lambda a, t: {"a": np.asfortranarray(a.reshape(20, -1)), "t": t.t()},
        lambda a, t: [a[:0], t[:0], a[3], t],
        lambda a, t: [a[::-2], t],
        lambda a, t: {"a": a, "t": t.to(torch.bfloat16)},
        lambda a, t: {"words": np.array(["a"]), "a": a, "t": t},
        lambda a, t: a,
        lambda a, t: t,
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_flat_batches_and_others_arrive_alike(make: Any, at_once: bool) -> None:
    """Those of exactly the usual types have a way of their own."""

    def leaves(batch: Any) -> list[Any]:
        inside = batch.values() if isinstance(batch, dict) else batch
        plain = isinstance(batch, list | tuple | dict)
        return [leaf for part in inside for leaf in leaves(part)] if plain else [batch]

    array, tensor = np.arange(600.0) + 0.5, torch.arange(900).view(30, 30)
    given = make(array, tensor)
    with lane() as through:
        found, again = list(fed([given, given], through, of=ring(4, 16384), at_once=at_once))
    assert type(found) is (Tensor if isinstance(given, np.ndarray) else type(given))
    assert not isinstance(given, dict) or [*found] == [*given]
    assert len(leaves(found)) == len(leaves(given))
    for new, later, old in zip(leaves(found), leaves(again), leaves(given), strict=True):
        if isinstance(old, str) or (isinstance(old, np.ndarray) and old.dtype.kind == "U"):
            assert new is old
            continue
        if isinstance(old, int | float):
            assert new == old
            continue
        want = torch.from_numpy(np.array(old, order="K")) if isinstance(old, np.ndarray) else old
        assert (type(new), new.dtype, new.shape, new._base) == (Tensor, want.dtype, want.shape, None)
        assert torch.equal(new, want)
        assert torch.equal(later, want)
        assert want.numel() == 0 or new.data_ptr() not in (later.data_ptr(), want.data_ptr())
    assert isinstance(given, Tensor | np.ndarray) or found is not given


def test_a_batch_without_leaves_is_the_same_and_any_other_is_new() -> None:
    """Even if all that is in it stays where it is: the loop may put more into its own."""
    plain: Any = {"n": 1, "words": np.array(["a"])}
    there: Any = {"p": torch.ones(2, requires_grad=True)}
    with lane() as through:
        found = list(fed([plain, [], there], through))
    assert found[0] is plain
    assert found[1] == []
    assert found[2] is not there
    assert found[2]["p"] is there["p"]


def test_in_inference_mode_and_out_of_it() -> None:
    """Chunks remember what they have been, for as long as there are."""
    of, given = ring(2, 1 << 20), [np.full(100_000, i, np.float32) for i in range(4)]
    with lane(most_seconds=0) as through:
        for inference in (True, False, True, False):
            with torch.inference_mode(inference):
                found = list(fed(given, through, of=of, at_once=True))
            assert [float(one[-1]) for one in found] == [0, 1, 2, 3]
            assert all(one.is_inference() == inference for one in found)
            two = [[array[:9], array[9:30]] for array in given]
            with torch.inference_mode(inference):
                found = list(fed(two, through, of=of, at_once=True))
            assert [float(b[-1]) for _, b in found] == [0, 1, 2, 3]


def test_a_step_is_asked_for_once() -> None:
    asked: list[Any] = []

    class Asked(Reached):
        def query(self) -> bool:
            asked.append(self)
            return super().query()

    class Asking(LateLane):
        def reached(self, current: Any, event: Any = None) -> Any:
            return Asked()

    through = Asking(most_seconds=0)
    try:
        list(fed((np.array([i]) for i in range(20)), through, depth=3, at_once=True))
    finally:
        through.close()
    assert len(asked) == len({*map(id, asked)}) <= 20 - 3 + 1, "the last one for the end"


# ---- the end of the interpreter


def test_exit_in_the_middle() -> None:
    program = """
import numpy as np
from tests.data.fake_streams import LateLane, fed
def endless():
    while True:
        yield np.ones(100_000)
found = fed(endless(), LateLane(most_seconds=0))
next(found)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, timeout=60, cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# ---- on a GPU


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_every_kind_arrives_on_a_gpu(
    cuda: torch.device, depth: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    monkeypatch.setattr(Feeder, "_at_once", lambda self: at_once)
    for i, found in enumerate(Feeder((batch(i, 4000) for i in range(12)), depth=depth)):
        assert found["x"].device == cuda
        assert same(found, i, 4000)
        held.append(found)
    assert len(held) == 12
    assert all(same(found, i, 4000) for i, found in enumerate(held))


@pytest.mark.gpu
def test_awkward_leaves_on_a_gpu(cuda: torch.device) -> None:
    from tests.data.test_batches import flattened, kinds_of_input

    kinds = {**kinds_of_input(3), "grad": torch.ones(3, requires_grad=True), "large": torch.arange(9_000_001)}
    kinds["pinned array"] = torch.arange(1 << 16).pin_memory().numpy()
    (found,) = Feeder([kinds])
    assert (found["text"], found["list"]) == ("x", [1, 2])
    for name, want in kinds.items():
        if name in ("text", "list"):
            continue
        want = torch.from_numpy(want.copy()) if isinstance(want, np.ndarray) else want
        for one, other in zip(flattened(found[name]), flattened(want), strict=True):
            assert one.device == cuda or name == "packed", name
            assert one.dtype == other.dtype
            assert torch.equal(one.cpu(), other.cpu()), name
    assert found["strided"].stride() == kinds["strided"].stride()


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [False, True])
def test_slow_consumers_and_slow_copies(
    cuda: torch.device, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of batches that were let go at once, computed late, with late copies."""
    monkeypatch.setattr(Feeder, "_at_once", lambda self: at_once)
    chance = random.Random(0)
    stream = feeder.stream_for(cuda, "batches")
    sums = []
    for found in Feeder(
        ({"a": np.full(3_000_000, i, np.float32), "b": np.full(9, i)} for i in range(40)), depth=2
    ):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(chance.randrange(4_000_000))
        torch.cuda._sleep(chance.randrange(8_000_000))
        sums.append(found["a"].double().mean() + found["b"].double().mean())
        del found
    assert [float(one) for one in sums] == [2.0 * i for i in range(40)]


@pytest.mark.gpu
def test_another_stream_of_the_loop() -> None:
    stream = torch.cuda.Stream()
    sums = []
    with torch.cuda.stream(stream):
        for found in Feeder(np.full(1_000_000, i, np.float32) for i in range(30)):
            torch.cuda._sleep(2_000_000)
            sums.append(found.max())
            del found
    stream.synchronize()  # they are read on another one
    assert [float(one) for one in sums] == list(range(30))


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["break", "error", "source"])
def test_ends_on_a_gpu(how: str) -> None:
    def source() -> Iterator[Any]:
        for i in range(100):
            if how == "source" and i == 5:
                raise KeyError("five")
            yield np.ones(1_000_000)

    def loop() -> None:
        for i, found in enumerate(Feeder(source())):
            if how == "break" and i == 3:
                break
            if how == "error" and i == 3:
                raise KeyError(str(float(found[0])))

    if how == "break":
        loop()
    else:
        with pytest.raises(KeyError):
            loop()
    gc.collect()
    assert wait_until(lambda: not threads())
    from flatbed.data.staging import _rings

    assert not _rings, "pinned memory is left"


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [False, True])
def test_memory_of_the_gpu_is_bounded_by_the_depth(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far ahead the loop issues its steps."""
    monkeypatch.setattr(Feeder, "_at_once", lambda self: at_once)
    n = 8 << 20
    given = np.ones(n, np.uint8)
    list(Feeder([given] * 3))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    for found in Feeder((given for _ in range(100)), depth=2):
        torch.cuda._sleep(3_000_000)
        del found
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before <= 5 * n


@pytest.mark.gpu
def test_thousands_of_steps_do_not_grow_on_a_gpu() -> None:
    def resident() -> int:
        return next(
            int(line.split()[1])
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmRSS")
        )

    given = {"a": np.zeros(1000, np.float32), "b": torch.zeros(10)}
    source = Feeder([given] * 2000)
    list(source)
    torch.cuda.synchronize()
    before, gpu = resident(), torch.cuda.memory_allocated()
    for _ in range(3):
        for _ in source:
            pass
    torch.cuda.synchronize()
    assert resident() - before < 20_000
    assert torch.cuda.memory_allocated() - gpu < 1 << 20


@pytest.mark.gpu
@pytest.mark.parametrize(("workers", "pin"), [(0, False), (0, True), (2, True)])
def test_over_a_data_loader_on_a_gpu(cuda: torch.device, workers: int, pin: bool) -> None:
    loader = DataLoader(Numbered(200), batch_size=20, num_workers=workers, pin_memory=pin)
    found = [b["items"] for b in Feeder(loader, cuda)]
    assert all(items.device == cuda for items in found)
    assert torch.cat(found).tolist() == list(range(200))


@pytest.mark.gpu
def test_a_graph_is_captured_while_batches_come(cuda: torch.device) -> None:
    x, graph = torch.zeros(1000, device=cuda), torch.cuda.CUDAGraph()
    (x + 1).sum()
    ends = []
    for i, found in enumerate(Feeder(np.full(3_000_000 + 1000 * i, i, np.float32) for i in range(30))):
        if i == 3:
            with torch.cuda.graph(graph):
                for _ in range(200):
                    x += 1
        found = found.int()
        ends.append(torch.stack([found.min(), found.max()]))
    graph.replay()
    assert float(x[0]) == 200
    assert [one.tolist() for one in ends] == [[i, i] for i in range(30)]


@pytest.mark.gpu
def test_an_array_that_shares_a_page_with_pinned_memory_is_not_taken_for_pinned() -> None:
    memory = np.arange(3 << 20, dtype=np.float32)
    with flatbed.data.RowReader(memory[:300_000].reshape(-1, 10), copy=False) as reader:
        assert reader.way == "in place", repr(reader)
        (found,) = Feeder([memory[300_000:]])
        assert np.array_equal(found.cpu().numpy(), memory[300_000:])


@pytest.mark.gpu
def test_two_feeders_at_once_share_the_ring(cuda: torch.device) -> None:
    one = Feeder([np.full(5_000_000, i, np.uint8) for i in range(10)])
    other = Feeder([np.full(7_000_000, 100 + i, np.uint8) for i in range(10)])
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert int(a.max()) == int(a.min()) == i
        assert int(b.max()) == int(b.min()) == 100 + i
    assert one._ring is other._ring


@pytest.mark.gpu
def test_exit_in_the_middle_on_a_gpu() -> None:
    program = """
import numpy as np
from flatbed.data.feeder import Feeder
def endless():
    while True:
        yield np.ones(10_000_000)
found = iter(Feeder(endless()))
next(found)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(flatbed.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_thread_copies_with_as_many_threads_as_the_loop_less_one() -> None:
    """A DataLoader's thread that pins memory sets 1 for itself, and so for all that begin later."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def in_a_thread(work: Any) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    try:
        in_a_thread(lambda: torch.set_num_threads(1))
        with lane() as through:
            assert list(fed((torch.get_num_threads() for _ in range(3)), through)) == [3, 2, 2]
        later: list[int] = []
        in_a_thread(lambda: later.append(torch.get_num_threads()))
        assert (torch.get_num_threads(), later) == (3, [3])
    finally:
        torch.set_num_threads(before)


def test_threads_are_named() -> None:
    with lane() as through:
        found = fed((np.ones(5000) for _ in range(3)), through)
        next(found)
        assert {t.name for t in threading.enumerate()} >= {"flatbed-feed"}
        found.close()
