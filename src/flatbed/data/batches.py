"""Nested batches: their leaves, and the ids that each table is asked for in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import is_
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

from flatbed.tables.config import device_of
from flatbed.tables.embedding import TableModule
from flatbed.tables.ids import INTEGERS, as_ids
from flatbed.tables.prefetch import RowPrefetch
from flatbed.tables.table import Table

Array = np.ndarray[Any, Any]
Selector: TypeAlias = str | int | Callable[[Any], Any]
"""A key of the batch, or a function of it."""

ID_DTYPES = frozenset({*INTEGERS, torch.uint64})
MAX_KEYS = 8  # keys of a batch that an error names

# ---- leaves


def moves_itself(value: Any) -> bool:
    """Check for an object with a method `to(device)` that is neither a tensor nor a mapping."""
    return callable(getattr(type(value), "to", None)) and not isinstance(value, (Tensor, Mapping))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Replace every tensor, every numpy array and every object that moves itself by `function(leaf)`.

    Containers are mappings, lists, tuples, dataclasses, and those of `torch.utils._pytree`. They are never
    written to: where a leaf changed, its containers are new objects of the same type; otherwise they are the
    same objects.
    """
    given: dict[Any, Any]
    structure = None
    if isinstance(value, (Tensor, np.ndarray)):
        return function(value)
    if isinstance(value, Mapping):
        given = dict(value.items())
    elif moves_itself(value):
        return function(value)
    elif isinstance(value, (list, tuple)):
        given = dict(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    elif tree_is_leaf(value):
        return value
    else:
        leaves, structure = tree_flatten(value, is_leaf=moves_itself)
        given = dict(enumerate(leaves))
    parts = {key: map_leaves(function, part) for key, part in given.items()}
    if all(map(is_, parts.values(), given.values())):
        return value
    return _rebuilt(value, parts) if structure is None else tree_unflatten(parts.values(), structure)


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    """Build a container like `value` with other parts."""
    kind: Any = type(value)
    if isinstance(value, tuple):
        return kind._make(parts.values()) if hasattr(kind, "_make") else kind(parts.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return kind(parts)
    made: Any = copy.copy(value)  # with all attributes, and not by `__init__`, which may compute
    if isinstance(value, list):
        made[:] = parts.values()
    elif isinstance(value, MutableMapping):
        made.update(parts)
    else:
        for name, part in parts.items():
            object.__setattr__(made, name, part)  # the dataclass may be frozen
    return made


def without_rows(batch: Any) -> Any:
    """Return a batch whose tensors and arrays have no rows; those without a dimension stay as they are."""

    def clear(leaf: Any) -> Any:
        if moves_itself(leaf):
            raise TypeError(
                f'uneven="empty" hands out batches of tensors and arrays without their rows; found '
                f'{type(leaf).__name__}: use uneven="stop"'
            )
        return leaf[:0].clone() if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return map_leaves(clear, batch)


def as_tensor(array: Array) -> Any:
    """Return numbers as a CPU tensor, without a copy where that is possible; other arrays as they are.

    Arrays are copied if they are read-only, in another byte order, or have strides that torch does not know.
    """
    if array.dtype.kind not in "biufc" or isinstance(array, np.ma.MaskedArray):
        return array
    native = np.dtype(array.dtype.newbyteorder("=").str)  # one name for equal types, as long and int64
    itemsize = array.dtype.itemsize
    is_plain = array.dtype.isnative and array.flags.writeable
    if not is_plain or any(stride < 0 or stride % itemsize for stride in array.strides):
        array = np.array(array, native, order="C")
    try:
        return torch.from_numpy(array.view(native))
    except TypeError:  # long double
        return array


# ---- ids


@dataclass(frozen=True, slots=True)
class TableLookups:
    """The lookups of one table in each batch of one iteration."""

    table: Table
    selectors: Sequence[Selector]
    prefetch: RowPrefetch

    def ids(self, batch: Any) -> list[Tensor]:
        """Select the ids of a batch: tensors of the batch itself where the selector returns them."""
        ids: list[Tensor] = []
        for selector in self.selectors:
            try:
                if callable(selector):
                    found = selector(batch)
                elif isinstance(selector, str) and not hasattr(batch, "keys"):
                    found = getattr(batch, selector)
                else:
                    found = batch[selector]
            except (KeyError, IndexError, AttributeError, TypeError) as error:
                if callable(selector):
                    raise
                raise type(error)(
                    f"lookups[{self.table!r}] is the key {selector!r}, which was not found in a batch of "
                    f"type {_described(batch)}: give a key of the batch, or a function of it"
                ) from error
            are_several = isinstance(found, (list, tuple)) and any(
                isinstance(one, (Tensor, np.ndarray)) for one in found
            )
            for one in found if are_several else [found]:
                is_tensor = isinstance(one, Tensor) and one.dtype in ID_DTYPES
                ids.append(one if is_tensor else self._converted(one))
        return ids

    def _converted(self, found: Any) -> Tensor:
        try:
            return as_ids(found)
        except (TypeError, ValueError) as error:
            what = found.dtype if isinstance(found, (Tensor, np.ndarray)) else type(found).__name__
            raise TypeError(
                f"lookups[{self.table!r}] must select integers in a tensor, a numpy array or a list, or a "
                f"list of tensors or arrays; found {what} ({error})"
            ) from error


def _described(batch: Any) -> str:
    kind = type(batch).__name__
    if hasattr(batch, "keys"):
        return f"{kind} with the keys {', '.join(map(repr, list(batch.keys())[:MAX_KEYS]))}"
    return f"{kind} of length {len(batch)}" if isinstance(batch, Sequence) else kind


def selectors_by_table(lookups: Any) -> dict[Table, list[Selector]]:
    """Check the argument `lookups` of a `Prefetcher`. Two modules may share a table."""
    if lookups is None:
        return {}
    if not isinstance(lookups, Mapping):
        raise TypeError(
            "lookups must map each module to a key of the batch or to a function of it, {emb: 'items'} for "
            f"example; found {type(lookups).__name__}"
        )
    selectors: dict[Table, list[Selector]] = {}
    for module, selector in lookups.items():
        table = module.table if isinstance(module, TableModule) else module
        if not isinstance(table, Table):
            found, inside = type(module).__name__, ""
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                inside = ", whose rows are not prefetched: leave it out"
            elif isinstance(module, nn.Module):
                inside = ": give each embedding in it"
            if type(module).__module__.startswith("torch.nn."):
                found = f"torch.nn.{found}"
            raise TypeError(
                "a key of lookups must be a flatbed.Embedding, a flatbed.EmbeddingBag or a flatbed.Table; "
                f"found {found}{inside}"
            )
        if not callable(selector) and not isinstance(selector, (str, int)):
            raise TypeError(
                f"lookups[{table!r}] must be a key of the batch or a function of it; found "
                f"{type(selector).__name__}"
            )
        selectors.setdefault(table, []).append(selector)
    return selectors


def common_device(tables: Sequence[Table], wanted: Any) -> torch.device:
    """Return the device of the batches: `wanted`, that of the tables, or the current GPU if there is one."""
    if wanted is not None:
        device = device_of(wanted)
    elif tables:
        device = tables[0]._store.device
    else:
        device = device_of("cuda" if torch.cuda.is_available() else "cpu")
    for table in tables:
        if table._store.device != device:
            raise ValueError(
                f"{table!r} computes on {table._store.device}, and batches are to be moved to {device}: "
                "move the module with .to(), or use a Prefetcher for each device"
            )
    return device
