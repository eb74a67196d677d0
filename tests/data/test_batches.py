"""Nested batches: what becomes of every kind of leaf and container."""

from __future__ import annotations

import collections
import types
import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from flatbed.data.batches import (
    Mover,
    flat_values,
    from_numpy,
    mapped,
    record_stream,
    tensors_in,
    with_values,
)

CPU = torch.device("cpu")


def on_cpu(batch: Any) -> Any:
    mover = Mover(CPU)
    return mover.arrive(mover.move(mover.load(batch)))


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    ids: Any
    name: str
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made.append("by init")


@dataclass(frozen=True)
class Frozen:
    ids: Any
    length: int = field(init=False, default=3)


@dataclass(frozen=True, slots=True)
class Slotted:
    ids: Any
    rest: Any = None


class Ids(list[Any]):
    kind = "own"


class Known:
    """Knows how to go to a device."""

    def __init__(self, ids: Tensor, moved: Any = None) -> None:
        self.ids, self.moved = ids, moved

    def to(self, device: Any) -> Known:
        return Known(self.ids.to(device), device)


class Encoding(collections.UserDict[str, Any]):
    """Like that of tokenizers: moves itself in place."""

    def to(self, device: Any) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def test_arrays_become_tensors_without_a_copy() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    batch = on_cpu({"ids": array, "rest": [array, "text", 3, None]})
    assert torch.equal(batch["ids"], torch.arange(6, dtype=torch.int32).view(2, 3))
    array[0, 0] = 7
    assert batch["ids"][0, 0] == 7
    assert batch["rest"][0] is batch["ids"]
    assert batch["rest"][1:] == ["text", 3, None]


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "l", "q", "L", "Q"]
)
def test_dtypes_of_arrays(dtype: str) -> None:
    array = np.array([0, 1, 1], dtype)
    found = from_numpy(array)
    assert found.numpy().dtype == array.dtype
    assert found.tolist() == array.tolist()
    assert found.data_ptr() == array.__array_interface__["data"][0]
    assert from_numpy(array[::-1]).tolist() == array[::-1].tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]),
        np.array([None, 3], object),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, np.longdouble),
        np.ma.masked_array([1, 2], [True, False]),
        np.float32(3),
    ],
    ids=lambda a: f"{type(a).__name__}-{a.dtype}",
)
def test_other_arrays_stay(array: Any) -> None:
    assert on_cpu([array])[0] is array


def test_awkward_arrays() -> None:
    plain = np.arange(12.0).reshape(3, 4)
    locked = plain.copy()
    locked.flags.writeable = False
    structured = np.zeros(3, [("a", "i1"), ("b", "i4")])
    structured["b"] = [1, 2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(from_numpy(locked), torch.from_numpy(plain))
    assert from_numpy(plain[::-1]).tolist() == plain[::-1].tolist()
    assert from_numpy(plain.T).tolist() == plain.T.tolist()
    assert from_numpy(plain.astype(">f8")).tolist() == plain.tolist()
    assert from_numpy(structured["b"]).tolist() == [1, 2, 3]
    assert from_numpy(np.array(5)).item() == 5
    assert from_numpy(np.zeros((0, 3))).shape == (0, 3)
    from_numpy(locked).fill_(0)
    assert locked.sum() == plain.sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"a": x, "b": {"c": [x, (x, "s")]}},
        lambda x: Pair(x, [x]),
        lambda x: collections.OrderedDict(b=x, a=x),
        lambda x: collections.defaultdict(list, a=x),
        lambda x: types.MappingProxyType({"a": x}),
        lambda x: collections.UserDict({"a": x}),
        lambda x: Ids([x, x]),
        lambda x: Frozen(x),
        lambda x: Slotted(x, rest=[Slotted({"a": x})]),
        lambda x: (x,),
        lambda x: [],
        lambda x: {},
        lambda x: None,
        lambda x: "text",
    ],
)
def test_containers_keep_their_type(make: Any) -> None:
    tensor, array = torch.arange(3), np.arange(3)
    with_tensor = make(tensor)
    assert on_cpu(with_tensor) is with_tensor, "nothing to do"
    given = make(array)
    found = on_cpu(given)
    assert type(found) is type(given)
    assert [t.tolist() for t in tensors_in(found)] == [t.tolist() for t in tensors_in(with_tensor)]
    assert not list(tensors_in(given)), "the loader's own must not change"
    if isinstance(given, collections.defaultdict):
        assert found["new"] == []


def test_dataclasses_are_not_initialised_again() -> None:
    sample = Sample(np.arange(2), "x")
    found = on_cpu(sample)
    assert isinstance(found.ids, Tensor)
    assert (found.name, found.made, type(sample.ids)) == ("x", ["by init"], np.ndarray)
    assert on_cpu(Frozen(np.arange(2))).length == 3


def test_what_is_shared_stays_shared() -> None:
    array, inner = np.arange(3), [np.zeros(1)]
    found = on_cpu({"a": array, "b": [array], "c": inner, "d": inner})
    assert found["a"] is found["b"][0]
    assert found["c"] is found["d"]


def test_objects_move_themselves() -> None:
    found = on_cpu([Known(torch.arange(2)), Encoding(ids=torch.arange(2)), Known])
    assert found[0].moved == CPU
    assert isinstance(found[1], Encoding)
    assert found[2] is Known
    packed = pack_sequence([torch.arange(3), torch.arange(2)])
    assert isinstance(on_cpu({"p": packed})["p"], PackedSequence)


def test_tensors_are_found_in_objects() -> None:
    class Slots:
        __slots__ = ("a", "b")

    slots = Slots()
    slots.a = torch.ones(1)
    loop: list[Any] = [Known(torch.zeros(1), slots), Encoding(ids=torch.full((1,), 2.0)), np.zeros(1), "x"]
    loop.append(loop)
    assert sorted(float(t) for t in tensors_in(loop)) == [0, 1, 2]


class Sub(np.ndarray[Any, Any]):
    pass


A, T = np.arange(3), torch.arange(3)


@pytest.mark.parametrize("batch", [[A], (A, T), {"a": A, "b": T, "n": 3, "s": "x"}, [], {}, [1, None]])
def test_flat_batches_are_known_by_their_values(batch: Any) -> None:
    values = flat_values(batch)
    assert values == [*(batch.values() if isinstance(batch, dict) else batch)]
    assert values is not batch
    new = [object() for _ in values]
    found = with_values(batch, new)
    assert type(found) is type(batch)
    assert [*(found.values() if isinstance(found, dict) else found)] == new
    if isinstance(batch, dict):
        assert [*found] == [*batch]


@pytest.mark.parametrize(
    "batch",
    [
        A,
        T,
        "ab",
        None,
        {A.tobytes(): A}.items(),
        [[A]],
        {"a": {"b": A}},
        Pair(A, T),
        Ids([A]),
        collections.OrderedDict(a=A),
        collections.defaultdict(list, a=A),
        types.MappingProxyType({"a": A}),
        Frozen(A),
        [A, A],
        {"a": T, "b": T},
        [A.view(Sub)],
        [torch.nn.Parameter(torch.ones(1))],
        [np.ma.masked_array([1])],
        [np.float32(3)],
        [Known(T)],
        [Known],
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_all_other_batches_are_not_flat(batch: Any) -> None:
    assert flat_values(batch) is None


def test_mapped_calls_its_function_once_per_leaf() -> None:
    seen = []
    tensor = torch.zeros(1)
    mapped([tensor, {"a": tensor}, np.zeros(1), 3], lambda leaf: seen.append(leaf))
    assert len(seen) == 2


# ---- on a GPU


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def kinds_of_input(i: int) -> dict[str, Any]:
    base = torch.arange(1 << 16).view(256, 256) + i
    locked = base.numpy().copy()
    locked.flags.writeable = False
    return {
        "plain": base.clone(),
        "pinned": base.pin_memory(),
        "strided": base.clone().t(),
        "expanded": base[:1].clone().expand(256, 256),
        "array": base.numpy().copy(),
        "locked": locked,
        "backward": base.numpy().copy()[::-1],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(i),
        "half": torch.full((1000,), i, dtype=torch.bfloat16),
        "packed": pack_sequence([torch.arange(3) + i, torch.arange(2)]),
        "known": Known(base.clone()),
        "encoding": Encoding(ids=base.clone()),
        "frozen": Frozen(base.clone()),
        "sparse": torch.eye(4).mul(i).to_sparse(),
        "there": base.to("cuda"),
        "text": "x",
        "list": [1, 2],
    }


def flattened(value: Any) -> list[Tensor]:
    found = []
    for tensor in tensors_in(value):
        found.append(tensor.to_dense() if tensor.is_sparse else tensor)
    return found


@pytest.mark.gpu
def test_everything_arrives(cuda: torch.device) -> None:
    """The values are right when the copies are late, and when what they came from is gone."""
    mover = Mover(cuda)
    for i in range(3):
        with torch.cuda.stream(mover.stream):
            torch.cuda._sleep(20_000_000)
        moved = mover.move(mover.load(kinds_of_input(i)))
        arrived = mover.arrive(moved)
        expected = kinds_of_input(i)
        assert arrived.keys() == expected.keys()
        assert (arrived["text"], arrived["list"]) == ("x", [1, 2])
        for name in expected:
            if name in ("text", "list"):
                continue
            want = expected[name]
            want = torch.from_numpy(want.copy()) if isinstance(want, np.ndarray) else want
            for one, other in zip(flattened(arrived[name]), flattened(want), strict=True):
                if not (name == "packed" and one.device.type == "cpu"):  # batch_sizes are the host's
                    assert one.device == cuda, name
                assert one.dtype == other.dtype
                assert torch.equal(one.cpu(), other.cpu()), name
        assert arrived["strided"].stride() == expected["strided"].stride()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_copies_wait_for_no_step(cuda: torch.device, pinned: bool) -> None:
    """While a long kernel runs on the training stream, batches arrive."""
    mover = Mover(cuda)
    batch = {
        "a": torch.arange(1000).pin_memory() if pinned else torch.arange(1000),
        "k": Known(torch.ones(5)),
    }
    mover.arrive(mover.move(mover.load(batch)))  # allocations, the first time, may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    moved = mover.move(mover.load(batch))
    assert moved.arrived is not None
    moved.arrived.synchronize()
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_memory_is_not_reused_while_it_is_read(cuda: torch.device) -> None:
    """A batch that is freed at once, while a late kernel still reads it, is not written over by the next."""
    mover = Mover(cuda)
    sums = []
    for i in range(20):
        values = torch.full((1 << 18,), float(i))
        arrived = mover.arrive(
            mover.move(mover.load({"a": values, "k": Known(values), "e": Encoding(ids=values)}))
        )
        torch.cuda._sleep(5_000_000)
        sums.append(arrived["a"].mean() + arrived["k"].ids.mean() + arrived["e"]["ids"].mean())
        del arrived
    assert [float(s) for s in sums] == [3.0 * i for i in range(20)]


@pytest.mark.gpu
def test_what_the_loader_makes_on_the_gpu_is_waited_for(cuda: torch.device) -> None:
    mover, loaders = Mover(cuda), torch.cuda.Stream()
    for i in range(5):
        with torch.cuda.stream(loaders):
            torch.cuda._sleep(20_000_000)
            loaded = mover.load([torch.full((1000,), i, device=cuda)])
        moved = mover.move(loaded, lambda batch: batch[0] + 1)
        arrived = mover.arrive(moved)
        assert int(arrived[0].sum()) == 1000 * i
        assert int(moved.derived.sum()) == 1000 * (i + 1)


@pytest.mark.gpu
def test_objects_of_others_are_not_changed(cuda: torch.device) -> None:
    mover = Mover(cuda)
    encoding = Encoding(ids=torch.arange(3))
    found = mover.arrive(mover.move(mover.load(encoding)))
    assert encoding["ids"].device.type == "cpu"
    assert found["ids"].device == cuda


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_layouts_whose_memory_is_in_parts(cuda: torch.device) -> None:
    dense = torch.eye(4, device=cuda)
    for tensor in (dense, dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        record_stream(tensor, torch.cuda.current_stream())
        assert torch.equal(tensor.to_dense(), dense)
