"""Nested batches: numpy arrays become tensors, and tensors go to the device that computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from math import inf
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.streams import stream_for

CPU = torch.device("cpu")
ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})
ARRAYS = frozenset({Tensor, np.ndarray})  # exactly these, which are most of what batches are made of
USUAL = ARRAYS | ATOMS
COMPRESSED = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)  # by row, by column


# ---- any container


def mapped(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """A batch with `leaf` of every tensor, every numpy array and every object that has a `to` of its own.

    Containers are dicts and other mappings, lists, tuples, named tuples and dataclasses. Where nothing in one
    changed it is the same object, else a new one of its type: those of the loader are never written to. What
    occurs twice is mapped once; all else stays as it is.
    """
    return leaf(batch) if type(batch) in ARRAYS else _mapped(batch, leaf, {})


def _mapped(value: Any, leaf: Callable[[Any], Any], seen: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    new = value
    what = "leaf" if kind in ARRAYS else _kind(kind)  # type: ignore[arg-type,unused-ignore]
    if what == "leaf":
        new = leaf(value)
    elif what == "mapping":
        given = dict(value.items())  # once: some make their values when asked for them
        parts = {key: _mapped(part, leaf, seen) for key, part in given.items()}
        changed = {key: part for key, part in parts.items() if part is not given[key]}
        new = _mapping_like(value, parts, changed) if changed else value
    elif what == "sequence":
        items = [_mapped(item, leaf, seen) for item in value]
        if not all(map(is_, items, value)):
            new = _sequence_like(value, items)
    elif what == "dataclass":
        present = [(f.name, getattr(value, f.name)) for f in fields(value) if hasattr(value, f.name)]
        parts = {name: _mapped(part, leaf, seen) for name, part in present}
        if any(parts[name] is not part for name, part in present):
            new = _dataclass_like(value, parts)
    seen[id(value)] = (value, new)  # with the value, which may have been made for this look at it
    return new


@lru_cache(maxsize=256)
def _kind(kind: type) -> str:
    """What values of a type are in a batch."""
    if issubclass(kind, type):
        return "other"
    if issubclass(kind, Tensor | np.ndarray) or callable(getattr(kind, "to", None)):
        return "leaf"  # or an object that knows how to go to a device
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, list | tuple):
        return "sequence"
    return "dataclass" if is_dataclass(kind) else "other"


def flat_values(batch: Any) -> list[Any] | None:
    """Of a list, tuple or dict, exactly these, with nothing but arrays, tensors and atoms in it, none of them
    twice: most batches. None for any other, which takes more care.
    """
    kind = type(batch)
    if kind is dict:
        values = [*batch.values()]
    elif kind is list or kind is tuple:
        values = [*batch]
    else:
        return None
    usual = USUAL.issuperset(map(type, values)) and len({*map(id, values)}) == len(values)
    return values if usual else None


def with_values(batch: Any, values: list[Any]) -> Any:
    """A batch like one that has `flat_values`, with these instead."""
    kind = type(batch)
    if kind is dict:
        return dict(zip(batch, values, strict=True))
    return values if kind is list else tuple(values)


def nbytes_in(batch: Any) -> float:
    """Of its arrays and dense tensors; without end if there is anything else that can be moved."""
    found: list[float] = []

    def count(leaf: Any) -> Any:
        dense = leaf.layout == torch.strided if isinstance(leaf, Tensor) else isinstance(leaf, np.ndarray)
        found.append(leaf.nbytes if dense else inf)
        return leaf

    mapped(batch, count)
    return sum(found)


def _mapping_like(value: Any, parts: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return parts
    if not isinstance(value, MutableMapping):
        return type(value)(parts)
    new = copy.copy(value)  # with whatever else it is, such as the factory of a defaultdict
    for key, part in changed.items():
        new[key] = part
    return new


def _sequence_like(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    if kind is list:
        return items
    if isinstance(value, list):
        new = copy.copy(value)
        new[:] = items
        return new
    return kind._make(items) if hasattr(kind, "_make") else kind(items)  # a named tuple's


def _dataclass_like(value: Any, parts: dict[str, Any]) -> Any:
    """Without its `__init__`, which may compute, and past its `__setattr__`: it may be frozen."""
    new = object.__new__(type(value))
    for name, part in {**getattr(value, "__dict__", {}), **parts}.items():
        object.__setattr__(new, name, part)
    return new


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in something, each once, those in the attributes of objects included."""
    if type(value) is Tensor:
        return [value]
    found: dict[int, Tensor] = {}
    _find(value, found, {})
    return [*found.values()]


def _find(value: Any, found: dict[int, Tensor], seen: dict[int, Any]) -> None:
    kind = type(value)
    if kind is Tensor:
        found[id(value)] = value
        return
    if kind in ATOMS or id(value) in seen:
        return
    seen[id(value)] = value  # which may have been made for this look at it
    inside: Iterable[Any]
    if kind is list or kind is tuple:
        inside = value
    elif kind is dict:
        inside = value.values()
    elif isinstance(value, Tensor):
        found[id(value)] = value
        return
    else:
        inside = _inside(value)
    for part in inside:
        _find(part, found, seen)


def _inside(value: Any) -> list[Any]:
    """Items and attributes of any object."""
    if isinstance(value, (type, np.ndarray)):
        return []
    inside: list[Any] = []
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple)):
        inside += value
    inside += getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            inside.append(getattr(value, name, None))
    return inside


# ---- arrays


def from_numpy(array: np.ndarray[Any, Any], *, pinned: bool = False) -> Any:
    """Numbers as a tensor, without a copy where there can be one; any other array as it is."""
    dtype = torch_dtype(array.dtype)
    if dtype is None or isinstance(array, np.ma.MaskedArray):
        return array
    if pinned:
        made = torch.empty(array.shape, dtype=dtype, device=CPU, pin_memory=True)
        np.copyto(made.numpy(), array)
        return made
    native = array.dtype.isnative and array.flags.writeable and all(s >= 0 for s in array.strides)
    try:
        return torch.from_numpy(array if native else _own(array))
    except TypeError:  # torch knows one of those that are alike to numpy
        return from_numpy(array.view(native_dtype(array.dtype)))
    except ValueError:  # strides that are no multiple of the item: a field of a structured array
        return torch.from_numpy(_own(array))


def _own(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array(array, native_dtype(array.dtype), order="C")


def native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same numbers in this machine's byte order; of those that are alike, the one that torch knows."""
    known: np.dtype[Any] = np.dtype(dtype.newbyteorder("=").str)
    return known


@lru_cache(maxsize=64)
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """What torch calls these numbers; None if it does not know them."""
    if dtype.kind not in "biufc":
        return None
    try:
        return torch.from_numpy(np.empty(0, native_dtype(dtype))).dtype
    except TypeError:  # long double
        return None


# ---- to a device


@dataclass(slots=True)
class Loaded:
    """A batch on the host whose arrays are tensors, in pinned memory if a GPU is to read it."""

    batch: Any
    made: list[torch.cuda.Event] = field(default_factory=list)
    """After them, what the loader itself made on a GPU is there."""


@dataclass(slots=True)
class Moved:
    """A batch that is on its way to the device, and what was derived from it there."""

    batch: Any
    derived: Any
    arrived: torch.cuda.Event | None = None
    tensors: list[Tensor] = field(default_factory=list)
    """Whatever has memory that the stream of the copies, or of the loader, owns."""


class Mover:
    """Takes batches to a device, on a stream of its own that waits for nothing but the loader.

    For a CPU there is no stream, and tensors stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = stream_for(device, "batches") if device.type == "cuda" else None
        self._spare: list[torch.cuda.Event] = []

    def load(self, batch: Any) -> Loaded:
        """The part that takes the host's time: in any thread."""
        if self.stream is None:
            return Loaded(mapped(batch, to_host))
        origins: set[torch.device] = set()

        def pinned(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                return from_numpy(leaf, pinned=True)
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                return _pinned(leaf)
            origins.update(tensor.device for tensor in tensors_in(leaf) if tensor.device.type == "cuda")
            pin = None if isinstance(leaf, Tensor) else getattr(leaf, "pin_memory", None)
            return pin() if callable(pin) else leaf

        with torch.cuda.device(self.device.index):  # a number, which torch need not look at
            loaded = Loaded(mapped(batch, pinned))
            for origin in origins:
                loaded.made.append(recorded(torch.cuda.current_stream(origin)))
        return loaded

    def move(self, loaded: Loaded, derive: Callable[[Any], Any] = lambda _: None) -> Moved:
        """Issue the copies, and what `derive` makes of the moved batch. Nothing waits for the GPU."""
        if self.stream is None:
            return Moved(loaded.batch, derive(loaded.batch))
        tensors: dict[int, Tensor] = {}

        def there(leaf: Any) -> Any:
            new = to_device(leaf, self.device)
            for tensor in tensors_in(new):
                if tensor.is_cuda:
                    tensors[id(tensor)] = tensor
            return new

        with torch.cuda.stream(self.stream):
            for made in loaded.made:
                self.stream.wait_event(made)
            batch = mapped(loaded.batch, there)
            derived = derive(batch)
        for tensor in tensors_in(derived):
            if tensor.is_cuda:
                tensors[id(tensor)] = tensor
        if loaded.made:  # the loader's own have other owners
            for tensor in tensors.values():
                record_stream(tensor, self.stream)
        arrived = recorded(self.stream, self._spare.pop() if self._spare else None)
        return Moved(batch, derived, arrived, [*tensors.values()])

    def arrive(self, moved: Moved, current: torch.cuda.Stream | None = None) -> Any:
        """The batch, for the stream that is current: it waits for the copies, and shares their memory."""
        if moved.arrived is not None:
            current = torch.cuda.current_stream(self.device) if current is None else current
            current.wait_event(moved.arrived)
            for tensor in moved.tensors:
                record_stream(tensor, current)
        return moved.batch

    def give_back(self, moved: Moved) -> None:
        """Nobody will wait for a batch any more: its event is used again. In the thread that moves batches.

        Who has waited did so for what was recorded then.
        """
        if moved.arrived is not None:
            self._spare.append(moved.arrived)
            moved.arrived = None


def to_host(leaf: Any) -> Any:
    """A leaf of a batch as a tensor on the CPU, without a copy where there can be one."""
    if isinstance(leaf, Tensor):
        return leaf if leaf.device.type == "cpu" else leaf.to(CPU)
    return from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf.to(CPU)


def to_device(leaf: Any, device: torch.device) -> Any:
    """Issue the copies of a leaf, on the stream that is current."""
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    if isinstance(leaf, np.ndarray):
        return leaf
    # Some change themselves and some are the loader's own: those that are mappings can well be copied.
    moving: Any = copy.copy(leaf) if isinstance(leaf, Mapping) else leaf
    return moving.to(device)


def _lent(tensor: Tensor) -> bool:
    """Whether its memory is pinned for a feeder alone, which ends that when it likes."""
    from flatbed.data import pins  # which needs this module

    return pins.is_ours(tensor.data_ptr())


def _pinned(tensor: Tensor) -> Tensor:
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.requires_grad
    if not plain or (tensor.is_pinned() and not _lent(tensor)):
        return tensor
    return torch.empty_like(tensor, device=CPU, pin_memory=True).copy_(tensor)


def recorded(stream: torch.cuda.Stream, event: torch.cuda.Event | None = None) -> torch.cuda.Event:
    """An event behind all that was issued on a stream; the same one again, if given."""
    event = torch.cuda.Event() if event is None else event  # type: ignore[no-untyped-call,unused-ignore]
    event.record(stream)
    return event


def record_stream(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a stream uses this memory: freed, it is reused only after that."""
    if tensor.layout == torch.strided:
        tensor.record_stream(stream)  # type: ignore[arg-type,unused-ignore]
        return
    by_row, by_column = COMPRESSED
    parts = [tensor]
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in by_row:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in by_column:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    for part in parts:
        part.record_stream(stream)  # type: ignore[arg-type,unused-ignore]
