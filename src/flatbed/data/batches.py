"""Leaves of nested batches: how they are found, replaced and turned into tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Array = np.ndarray[Any, Any]


def moves_itself(value: Any) -> bool:
    """Check for an object with a method `to(device)` that is neither a tensor nor a mapping."""
    return callable(getattr(type(value), "to", None)) and not isinstance(value, (Tensor, Mapping))


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Replace every tensor, every numpy array and every object that moves itself by `function(leaf)`.

    Containers are those of `torch.utils._pytree`, subclasses of dict, list and tuple, other mappings, and
    dataclasses. They are never written to: where a leaf changed, its containers are new objects of the same
    type; otherwise they are the same objects. A leaf that occurs twice is replaced once.
    """
    return _walk(function, batch, {})


Seen = dict[int, tuple[Any, Any]]
"""Leaves and what they became, by id. Functions that refer to each other would keep it until a collection."""


def _walk(function: Callable[[Any], Any], value: Any, seen: Seen) -> Any:
    leaves, spec = tree_flatten(value, is_leaf=moves_itself)
    mapped = [_visit(function, leaf, seen) for leaf in leaves]
    return value if all(map(is_, leaves, mapped)) else tree_unflatten(mapped, spec)


def _visit(function: Callable[[Any], Any], value: Any, seen: Seen) -> Any:
    if isinstance(value, (Tensor, np.ndarray)) or moves_itself(value):
        if id(value) not in seen:
            seen[id(value)] = (value, function(value))  # with the leaf, so that its id stays its own
        return seen[id(value)][1]
    given: Any
    if isinstance(value, Mapping):
        given = dict(value.items())
    elif isinstance(value, (list, tuple)):
        given = [*value]
    elif is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    else:
        return value
    return _rebuilt(value, given, _walk(function, given, seen))


def _rebuilt(value: Any, given: Any, parts: Any) -> Any:
    """Build a container like `value` with other parts, unless they are the parts that it has."""
    if parts is given:
        return value
    kind: Any = type(value)
    if isinstance(value, tuple) or (isinstance(value, Mapping) and not isinstance(value, MutableMapping)):
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    made: Any = copy.copy(value)  # with all attributes, and not by `__init__`, which may compute
    if isinstance(value, list):
        made[:] = parts
    elif isinstance(value, MutableMapping):
        made.update(parts)
    else:
        for name, part in parts.items():
            object.__setattr__(made, name, part)  # the dataclass may be frozen
    return made


def as_tensor(array: Array) -> Any:
    """Return numbers as a CPU tensor, without a copy where that is possible; other arrays as they are.

    Arrays are copied if they are read-only, in another byte order, or have strides that torch does not know.
    """
    if array.dtype.kind not in "biufc" or isinstance(array, np.ma.MaskedArray):
        return array
    native = np.dtype(
        array.dtype.newbyteorder("=").str
    )  # one name for types that are equal, as long and int64
    itemsize = array.dtype.itemsize
    is_plain = array.dtype.isnative and array.flags.writeable
    if not is_plain or any(stride < 0 or stride % itemsize for stride in array.strides):
        array = np.array(array, native, order="C")
    try:
        return torch.from_numpy(array.view(native))
    except TypeError:  # long double
        return array


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's name for a numpy dtype; None if torch does not know it."""
    found = as_tensor(np.empty(0, dtype))
    return found.dtype if isinstance(found, Tensor) else None


def record_stream(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a stream uses this memory: it is reused after that stream's work."""
    parts = [tensor]
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    for part in parts:
        if part.is_cuda:
            part.record_stream(stream)  # type: ignore[arg-type,unused-ignore]
