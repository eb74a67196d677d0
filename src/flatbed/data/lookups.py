"""Which ids of a batch each table is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from flatbed.tables.config import check_device, present
from flatbed.tables.embedding import TableModule
from flatbed.tables.ids import INTEGERS, as_ids, to_device
from flatbed.tables.prefetch import RowPrefetch
from flatbed.tables.table import Table

IdsFunction: TypeAlias = Callable[[Any], Any]

IDS = frozenset({*INTEGERS, torch.uint64})
NAMED = 8  # keys of a batch that an error names


def ahead_of(table: Table, depth: int) -> RowPrefetch:
    """What fetches the rows of a table for one iteration."""
    return RowPrefetch(table, depth)


@dataclass(slots=True)
class Lookups:
    """What one table is asked for in each batch."""

    table: Table
    functions: list[IdsFunction]
    ahead: RowPrefetch

    def ids(self, batch: Any) -> list[Tensor]:
        """Of the batch as it is, wherever it is."""
        return [ids for function in self.functions for ids in self._ids(function, batch)]

    def _ids(self, function: IdsFunction, batch: Any) -> list[Tensor]:
        try:
            found = function(batch)
        except StopIteration as error:  # it would end the loop in silence
            raise RuntimeError(f"the ids function for {self.table!r} raised StopIteration") from error
        except Exception as error:
            raise self._failed(error, batch) from error
        if type(found) is Tensor and found.dtype in IDS:
            return [found]
        several = isinstance(found, (list, tuple)) and any(
            isinstance(one, (Tensor, np.ndarray)) for one in found
        )
        return [self._checked(one) for one in found] if several else [self._checked(found)]

    def _failed(self, error: Exception, batch: Any) -> Exception:
        """The same error, but with what it is about; another one if its kind cannot be made."""
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        message = (
            f"the ids function for {self.table!r} failed on a batch of type {_described(batch)} ({reason}): "
            f"it must return the ids in such a batch that the table will be asked for"
        )
        try:
            made = type(error)(message)
        except Exception:  # whatever else it is made of
            return RuntimeError(message)
        return made

    def _checked(self, found: Any) -> Tensor:
        if isinstance(found, Tensor) and found.dtype in IDS:
            return found
        try:
            return as_ids(found)
        except (TypeError, ValueError) as error:
            what = found.dtype if isinstance(found, (Tensor, np.ndarray)) else type(found).__name__
            raise TypeError(
                f"the ids function for {self.table!r} must return integers in a tensor, a numpy array or a "
                f"list, or a list of tensors or arrays; found {what} ({error})"
            ) from error


def _described(batch: Any) -> str:
    """What a batch looks like from outside."""
    kind = type(batch).__name__
    if isinstance(batch, (Tensor, np.ndarray)):
        return f"{kind} of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        keys = [repr(key) if isinstance(key, (str, int)) else type(key).__name__ for key in batch]
        more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
        return f"{kind} with the keys {', '.join(keys[:NAMED])}{more}" if keys else f"{kind} without any keys"
    return f"{kind} of length {len(batch)}" if isinstance(batch, Sequence) else kind


def on_host(ids: Tensor) -> Tensor:
    """Ids of a loader that makes them on a GPU: the background can wait for them."""
    return ids if ids.device.type == "cpu" else ids.cpu()


def to_there(ids: Tensor, device: torch.device) -> Tensor:
    """Ids that a function left, or made, on the host."""
    return ids if ids.device == device else to_device(ids, device)


# ---- checked at the door


def functions_of(ids: Any) -> dict[Table, list[IdsFunction]]:
    """The functions by table: two modules may share one."""
    if not isinstance(ids, Mapping):
        raise TypeError(
            f"ids must say for each table which ids a batch has, {{emb: lambda batch: batch['items']}}, for "
            f"example; found {type(ids).__name__}"
        )
    functions: dict[Table, list[IdsFunction]] = {}
    for key, function in ids.items():
        table = key.table if isinstance(key, TableModule) else key
        if not isinstance(table, Table):
            inside = " (give the embeddings in it one by one)" if isinstance(key, nn.Module) else ""
            raise TypeError(
                f"ids must be given for a Embedding, a EmbeddingBag or a Table; found "
                f"{type(key).__name__}{inside}"
            )
        if not callable(function):
            raise TypeError(
                f"the ids of {table!r} must be given as a function of the batch, lambda batch: "
                f"batch['items'], for example; found {type(function).__name__}"
            )
        functions.setdefault(table, []).append(function)
    return functions


def common_device(tables: list[Table], wanted: torch.device | None) -> torch.device:
    """Where the batches go."""
    device = wanted
    if device is None:
        if not tables:
            raise ValueError('without tables, nothing says where batches go: give device="cuda", for example')
        device = tables[0].store.device
    check_device(device)
    index: int | None = device.index
    if index is None:
        device = present(device)
    for table in tables:
        if table.store.device != device:
            other = f"{tables[0]!r}" if wanted is None else "batches are to go"
            raise ValueError(
                f"{table!r} computes on {table.store.device}, and {other} on {device}: move the module "
                f"with .to(), or use a prefetcher for each device"
            )
    return present(device)
