"""Lookups of steps that `flatbed.capture` runs: every replay reads its unique rows from the same memory.

A warm-up notes all lookups (`CaptureContext.noted`). If all are of prefetched tensors of the batch, the
graph reads their unique rows from memory of `allocate_lookups`, which `prepare_replay` writes before each
replay. Otherwise the graph admits the rows of all tables itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels import UniqueRows
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.ids import DeferredIdChecks, as_ids, as_keys
from flatbed.tables.prefetch import find_prefetched, is_same_memory, version_of
from flatbed.tables.table import Table


class NotedLookup(NamedTuple):
    """A lookup of a step."""

    table: Table
    position: int | None
    """Which input of the step its ids are; None for other ids, which cannot be prefetched."""


@dataclass(slots=True, eq=False)
class CapturedLookup:
    """A lookup of a captured step. The host finds its unique rows before each replay."""

    table: Table
    position: int
    """Of the ids among the leaves of a batch."""
    unique: UniqueRows
    """What `prepare_replay` writes and the graph reads.

    Allocated before the capture: kernels of the graph may write to any memory that it allocates.
    """
    batch: LookupBatch | None = None
    """What the graph looks up; None before the capture."""


@dataclass(slots=True, eq=False)
class CaptureContext:
    """One warm-up or capture of a step: the inputs of the graph, and the leaves that were copied to them."""

    inputs: list[Tensor]
    leaves: list[Tensor]
    versions: list[int]
    """Those of the inputs at the start: an input that the step has changed no longer stands for its leaf."""
    lookups: list[CapturedLookup]
    """Those of prefetched rows. Without any, the graph admits the rows of all tables."""
    noted: list[NotedLookup] = field(default_factory=list)
    """All lookups of the step."""
    checks: list[DeferredIdChecks] = field(default_factory=list)
    """Of the tables whose ids kernels of the graph check."""

    def position_of(self, ids: Any) -> int | None:
        """Return which input these ids are, as a whole and unchanged."""
        for position, (own, version) in enumerate(zip(self.inputs, self.versions, strict=True)):
            if isinstance(ids, Tensor) and is_same_memory(ids, own):
                return position if version_of(own) == version else None
        return None

    def lookup(self, table: Table, ids: Tensor, position: int | None) -> LookupBatch | None:
        """Return the batch of a lookup whose rows are admitted before each replay; None for other lookups.

        The ids are the input at `position`, and the leaf that it stands for was prefetched.
        """
        store = table._store
        if not self.lookups or store.cache is None:
            return None
        lookup = next((one for one in self.lookups if one.table is table and one.position == position), None)
        found = None if lookup is None else _prefetched_batch(table, self.leaves[lookup.position])
        if lookup is None or found is None:
            raise FlatbedError(f"it looks up other ids in {table!r} than in the call before")
        if lookup.batch is None:
            keys = as_keys(as_ids(ids), store.config.n_rows, store.device)
            lookup.batch = LookupBatch(ids.shape, keys, lookup.unique, found.cache, found.admission)
            store.cache.in_graphs = True
        return replace(lookup.batch, shape=ids.shape)


_capture: CaptureContext | None = None


def current_capture() -> CaptureContext | None:
    """Return the context of the step that runs now. Backward passes may look up in threads of their own."""
    return _capture


@contextmanager
def capture_context(
    inputs: list[Tensor], leaves: list[Tensor], lookups: list[CapturedLookup] | None = None
) -> Iterator[CaptureContext]:
    """In the body, lookups of inputs use the rows that were prefetched for leaves.

    In a capture, those are the `lookups` of `allocate_lookups`.
    """
    global _capture
    before, _capture = _capture, CaptureContext(inputs, leaves, [*map(version_of, inputs)], lookups or [])
    try:
        yield _capture
    finally:
        _capture = before


def _prefetched_batch(table: Table, leaf: Tensor) -> LookupBatch | None:
    """Return the prefetched batch of a leaf, if a graph can use the cache that it was admitted to."""
    store = table._store
    if table._shards is not None or not store.in_memory or store.relayout_pending:
        return None
    found = find_prefetched(table, leaf, records_grad=True)
    return None if found is None or found.cache is None or found.cache is not store.cache else found


def not_prefetched(noted: list[NotedLookup], leaves: list[Tensor]) -> list[Table]:
    """Return the tables in which a step was seen to look up other rows than those of prefetched leaves.

    Tables without a cache have nothing to prefetch, and are left out.
    """
    return [
        table
        for table, position in noted
        if table._store.cache is not None
        and (position is None or _prefetched_batch(table, leaves[position]) is None)
    ]


def allocate_lookups(noted: list[NotedLookup], leaves: list[Tensor]) -> list[CapturedLookup]:
    """Return a lookup for each table with a cache and each leaf that a step was seen to look up in it."""
    from flatbed.kernels._triton.rows import empty_results

    found = {}
    for table, position in noted:
        if position is not None and table._store.cache is not None:
            unique_rows = empty_results(leaves[position].numel(), table._store.device)
            found[id(table), position] = CapturedLookup(table, position, unique_rows)
    return [*found.values()]
