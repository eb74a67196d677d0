"""The ids that each table is asked for in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from flatbed.tables.config import device_of
from flatbed.tables.embedding import TableModule
from flatbed.tables.ids import INTEGERS, as_ids
from flatbed.tables.prefetch import RowPrefetch
from flatbed.tables.table import Table

Selector: TypeAlias = str | int | Callable[[Any], Any]
"""A key of the batch, or a function of it."""

ID_DTYPES = frozenset({*INTEGERS, torch.uint64})
MAX_KEYS = 8  # keys of a batch that an error names


@dataclass(frozen=True, slots=True)
class TableLookups:
    """The lookups of one table in each batch of one iteration."""

    table: Table
    selectors: Sequence[Selector]
    prefetch: RowPrefetch

    def ids(self, batch: Any) -> list[Tensor]:
        """Select the ids of a batch: tensors of the batch itself where the selector returns them."""
        return [ids for selector in self.selectors for ids in self._selected(selector, batch)]

    def _selected(self, selector: Selector, batch: Any) -> list[Tensor]:
        found = selector(batch) if callable(selector) else self._at(selector, batch)
        are_several = isinstance(found, (list, tuple)) and any(
            isinstance(one, (Tensor, np.ndarray)) for one in found
        )
        return [self._checked(one) for one in (found if are_several else [found])]

    def _at(self, key: str | int, batch: Any) -> Any:
        try:
            if isinstance(key, str) and not hasattr(batch, "keys"):
                return getattr(batch, key)
            return batch[key]
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise type(error)(
                f"lookups[{self.table!r}] is the key {key!r}, which was not found in a batch of type "
                f"{_described(batch)}: give a key of the batch, or a function of it"
            ) from error

    def _checked(self, found: Any) -> Tensor:
        if isinstance(found, Tensor) and found.dtype in ID_DTYPES:
            return found
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
            inside = ": give each embedding in it" if isinstance(module, nn.Module) else ""
            raise TypeError(
                "a key of lookups must be an Embedding, an EmbeddingBag or a Table; found "
                f"{type(module).__name__}{inside}"
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
        device = tables[0]._storage.device
    else:
        device = device_of("cuda" if torch.cuda.is_available() else "cpu")
    for table in tables:
        if table._storage.device != device:
            raise ValueError(
                f"{table!r} computes on {table._storage.device}, and batches are to be moved to {device}: "
                "move the module with .to(), or use a Prefetcher for each device"
            )
    return device
