"""Nested batches: every kind of leaf and container."""

from __future__ import annotations

import collections
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from flatbed import Prefetcher
from flatbed.data.batches import map_leaves, without_rows

CPU = torch.device("cpu")


def on_cpu(batch: Any) -> Any:
    (found,) = Prefetcher([batch], device="cpu")
    return found


def tensors_of(batch: Any) -> list[list[int]]:
    found: list[list[int]] = []
    map_leaves(lambda leaf: found.append(leaf.tolist()) if isinstance(leaf, Tensor) else None, batch)
    return found


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    ids: Any
    length: int = field(init=False, default=3)
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made.append("by init")


@dataclass(frozen=True, slots=True)
class Slotted:
    ids: Any
    rest: Any = None


class Ids(list[Any]):
    kind = "own"


class Attributes(dict[str, Any]):
    kind = "own"


class Known:
    """An object that moves itself."""

    def __init__(self, ids: Tensor, moved: Any = None) -> None:
        self.ids, self.moved = ids, moved

    def to(self, device: Any) -> Known:
        return Known(self.ids.to(device), device)


class Encoding(collections.UserDict[str, Any]):
    """Like that of tokenizers: a mapping that moves itself in place."""

    def to(self, device: Any) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


@pytest.mark.parametrize("dtype", [*"?bBhHiIlLqQefdFD"])
def test_arrays_become_tensors_without_a_copy(dtype: str) -> None:
    array = np.array([0, 1, 1], dtype)
    found = on_cpu({"a": [array, "text", None]})["a"][0]
    assert found.numpy().dtype == array.dtype
    assert found.tolist() == array.tolist()
    assert found.data_ptr() == array.__array_interface__["data"][0]


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


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"a": x, "b": {"c": [x, (x, "s")]}},
        lambda x: Pair(x, [x]),
        lambda x: collections.OrderedDict(b=x, a=x),
        lambda x: collections.defaultdict(list, a=x),
        lambda x: types.MappingProxyType({"a": x}),
        lambda x: collections.UserDict({"a": x}),
        lambda x: Encoding({"a": x}),
        lambda x: Attributes(a=x),
        lambda x: Ids([x, x]),
        lambda x: collections.deque([x, {"a": x}]),
        lambda x: Sample(x),
        lambda x: Slotted(x, rest=[Slotted({"a": x})]),
        lambda x: (x, torch.Size([3])),
        lambda x: [],
        lambda x: {},
        lambda x: None,
        lambda x: "text",
    ],
)
def test_containers_keep_their_type(make: Any) -> None:
    tensor, array = torch.arange(3), np.arange(3)
    with_tensor, given = make(tensor), make(array)
    assert on_cpu(with_tensor) is with_tensor, "there is nothing to do"
    found = on_cpu(given)
    assert type(found) is type(given)
    assert tensors_of(found) == tensors_of(with_tensor)
    assert not tensors_of(given), "the containers of the loader do not change"
    if isinstance(given, collections.defaultdict):
        assert found["new"] == []
    if isinstance(given, Sample):
        assert (found.length, found.made) == (3, ["by init"]), "initialised once"


def test_a_leaf_that_occurs_twice_is_converted_once() -> None:
    array = np.arange(3)[::-1]
    found = on_cpu({"a": array, "b": [array, Slotted(array)]})
    assert found["a"] is found["b"][0] is found["b"][1].ids


def test_objects_move_themselves() -> None:
    found = on_cpu([Known(torch.arange(2)), Known])
    assert found[0].moved == CPU
    assert found[1] is Known, "a class is no object that moves itself"
    packed = pack_sequence([torch.arange(3), torch.arange(2)])
    assert isinstance(on_cpu({"p": packed})["p"], PackedSequence)


def test_batches_without_rows() -> None:
    """Tensors keep their other axes, their dtype and their container; what has no rows stays."""
    batch = {"x": torch.ones(4, 3, dtype=torch.int32), "more": (torch.ones(2), "text"), "n": torch.tensor(7)}
    empty = without_rows(batch)
    assert empty["x"].shape == (0, 3)
    assert empty["x"].dtype == torch.int32
    assert empty["more"][0].shape == (0,)
    assert (empty["more"][1], int(empty["n"])) == ("text", 7)
    assert len(batch["x"]) == 4
    with pytest.raises(TypeError, match="uneven"):
        without_rows([pack_sequence([torch.ones(2)])])
