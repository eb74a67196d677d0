"""Lookups: from ids to rows, prefetched or not, also in CUDA graphs, and from gradients to those of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing
from flatbed.errors import FlatbedError
from flatbed.kernels import NONE, UniqueRows, check_values_exist, sentinel_of, use_triton
from flatbed.kernels.rows import key_dtype, mask_row, segment_sum, to_int32_keys, unique
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.ids import NO_ERROR, DeferredIdChecks, as_ids, check_range, new_first_error, to_device
from flatbed.tables.row_io import LOOKUP, ShardedRowIO
from flatbed.tables.table import Table

_reshape = torch.ops.aten._unsafe_view.default  # without a view, which users could not change in place


def prepare_lookup(
    table: Table, ids: Any, *, for_bag: bool = False, records_grad: bool = False
) -> LookupBatch:
    """Check ids and find their unique rows. With `records_grad`, the rows are admitted to the table's cache.

    Ids out of range: those on the host raise here, those on a GPU raise later (`DeferredIdChecks`).
    For a bag of a table with a padding row, a key in front of the ids stands for all padding ids. The first
    unique row is then -1.
    """
    check_values_exist("a lookup")
    store, checks = table._store, table._deferred_checks
    n_rows, device, lead = store.config.n_rows, store.device, store.config.padding_idx if for_bag else None
    capturing, capture, leaf = is_capturing(device), _capture, ids
    if capture is not None:
        position = capture.position_of(ids)
        leaf = ids if position is None else capture.leaves[position]
        if not records_grad or lead is not None:
            position = None
        capture.noted.append((table, position))
        captured = capture.lookup(table, ids, position) if capturing else None
        if captured is not None:
            return captured
    may_be_captured = use_triton(device) and (records_grad or capture is not None)
    if may_be_captured and checks.graph_error is None and not capturing:
        checks.prepare_capture(device, n_rows)
    if table._prefetched and not capturing and isinstance(ids, Tensor):
        if for_bag and table._shards is None:  # otherwise all ranks are told
            _check_bags(ids)
        batch = _find_prefetched(table, leaf, lead=lead, records_grad=records_grad)
        if batch is not None:
            return batch if batch.shape == ids.shape else replace(batch, shape=ids.shape)
    if isinstance(table._row_io, ShardedRowIO):
        return _prepare_sharded(table, table._row_io, ids, for_bag=for_bag, records_grad=records_grad)
    given = as_ids(ids)
    if for_bag:
        _check_bags(given)
    keys, first_error, on_checked = _checked_keys(table, given, offset=int(lead is not None))
    cache = store.ensure_cache(keys.numel()) if records_grad else None
    sought = keys if lead is None else _with_lead(keys, lead)
    if cache is not None:  # a `GpuCache` checks ids before rows move: the next step need not wait for the bus
        found, admission = cache.admit(sought, first_error, on_checked)
    else:
        found, admission = unique(sought, n_rows, first_error), None
        if on_checked is not None:
            on_checked()
    return LookupBatch(given.shape, keys, found if lead is None else _without_lead(found), cache, admission)


def _checked_keys(
    table: Table, ids: Tensor, *, offset: int
) -> tuple[Tensor, Tensor | None, Callable[[], None] | None]:
    """Return ids as keys. Raises for ids on the host that are out of range.

    For ids on a GPU, also returns the tensor where kernels record the first bad position, which is `offset`
    too large, and what to call once the kernels are issued.
    """
    checks, n_rows, device = table._deferred_checks, table.num_embeddings, table._store.device
    if is_capturing(device):
        _check_capture(table, ids)
        if _capture is not None and checks not in _capture.checks:
            _capture.checks.append(checks)
        return _keys(ids, n_rows, device), checks.first_error_of_graphs(), None
    if ids.device.type == "cpu":
        check_range(ids, n_rows)
        return _keys(ids, n_rows, device, in_range=True), None, None
    keys, first_error = _keys(ids, n_rows, device), new_first_error(device)
    table._raise_bad_ids(wait=False)
    return keys, first_error, partial(checks.add, ids, first_error, n_rows=n_rows, offset=offset)


def _find_prefetched(
    table: Table, ids: Tensor, *, lead: int | None, records_grad: bool
) -> LookupBatch | None:
    """Return the prefetched batch that was made of these ids, if their memory has not changed since.

    With a `lead`, the unique rows are found again; their records are in the cache.
    """
    version = version_of(ids)
    for batch in table._prefetched:
        own = batch.ids
        if own is None or version != batch.version:
            continue
        if not _is_same_memory(ids, own):
            continue
        if isinstance(table._row_io, ShardedRowIO):
            if lead is not None:
                return None
            return table._row_io.exchange_again(LOOKUP[records_grad], batch, admits=records_grad)
        if records_grad and batch.cache is not None and batch.cache.protects(batch):
            if lead is None:
                return batch
            found = unique(_with_lead(batch.keys, lead), table.num_embeddings)
            return replace(batch, unique=_without_lead(found))
    return None


def _is_same_memory(ids: Tensor, own: Tensor) -> bool:
    """Return True if ids are those of another tensor, in the same order and memory."""
    return ids is own or (
        (ids.data_ptr(), ids.dtype, ids.numel(), ids.device)
        == (own.data_ptr(), own.dtype, own.numel(), own.device)
        and ids.is_contiguous()
        and own.is_contiguous()
    )


def version_of(ids: Tensor) -> int:
    """Return torch's version counter of ids, which counts changes in place; -1 for an inference tensor."""
    return -1 if ids.is_inference() else ids._version


def _prepare_sharded(
    table: Table, row_io: ShardedRowIO, ids: Any, *, for_bag: bool, records_grad: bool
) -> LookupBatch:
    """Check ids, find their unique rows, and ask the owners for them. A collective.

    Ids on a GPU raise here, too: the host waits for the number of rows of each owner.
    """
    device, n_rows = table._store.device, table.num_embeddings
    lead = table._store.config.padding_idx if for_bag else None
    doing = LOOKUP[records_grad]
    with row_io.shards.failing_together(doing):
        if is_capturing(device):
            raise FlatbedError("a lookup in a sharded table cannot be part of a CUDA graph")
        given = as_ids(ids)
        if for_bag:
            _check_bags(given)
        on_host = given.device.type == "cpu"
        if on_host:
            check_range(given, n_rows)
        first_error = None if on_host else new_first_error(device)
        keys = _keys(given, n_rows, device, in_range=on_host)
        found = unique(keys if lead is None else _with_lead(keys, lead), n_rows, first_error)
        route = row_io.shards.route(found.rows)
        if first_error is not None and int(first_error) != NO_ERROR:
            check_range(given, n_rows)
    exchanged = row_io.exchange(doing, route, admits=records_grad)
    found = found if lead is None else _without_lead(found)
    return LookupBatch(given.shape, keys, found, exchanged=exchanged)


def _check_bags(ids: Tensor) -> None:
    if ids.dim() not in (1, 2):
        raise ValueError(f"bags are (bags, length), or (n,) with offsets; found {tuple(ids.shape)}")


def _keys(ids: Tensor, n_rows: int, device: torch.device, *, in_range: bool = False) -> Tensor:
    """Return ids as keys on the computing device, flat, in the dtype that kernels sort fastest."""
    if in_range:  # copied in that dtype
        return to_device(ids.flatten(), device, key_dtype(n_rows, device))
    return to_int32_keys(ids.flatten().to(device, non_blocking=device.type == "cuda"), n_rows)


def _with_lead(keys: Tensor, padding_idx: int) -> Tensor:
    """Put the key of no row in front of keys, and in place of the padding row."""
    sentinel = sentinel_of(keys)
    return torch.cat([keys.new_full((1,), sentinel), torch.where(keys == padding_idx, sentinel, keys)])


def _without_lead(found: UniqueRows) -> UniqueRows:
    return UniqueRows(found.rows, found.inverse[1:])


def _check_capture(table: Table, ids: Tensor) -> None:
    store = table._store
    if not store.is_allocated or store.relayout_pending or store.location_for() is None:
        raise FlatbedError(
            "a lookup of this table cannot be part of a CUDA graph"
            + (
                ": the host reads rows on disk"
                if store.config.storage == "disk"
                else " yet: take a training step with it before the capture"
            )
        )
    if ids.device.type != store.device.type and not ids.is_pinned():
        raise FlatbedError(
            "ids inside the capture of a CUDA graph must be on the GPU, or in pinned memory as int64, where "
            "every replay reads them again"
        )


# ---- prefetched rows in CUDA graphs: every replay reads its unique rows from the same memory


@dataclass(slots=True, eq=False)
class CapturedLookup:
    """A lookup of a captured step. The host finds its unique rows before each replay."""

    table: Table
    position: int
    """Of the ids among the leaves of a batch."""
    unique: UniqueRows
    """What `load_captured` writes and the graph reads.

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
    noted: list[tuple[Table, int | None]] = field(default_factory=list)
    """All lookups: the table, and which input the ids are; None for others, which cannot be prefetched."""
    checks: list[DeferredIdChecks] = field(default_factory=list)
    """Of the tables whose ids kernels of the graph check."""

    def position_of(self, ids: Any) -> int | None:
        """Return which input these ids are, as a whole and unchanged."""
        for position, (own, version) in enumerate(zip(self.inputs, self.versions, strict=True)):
            if isinstance(ids, Tensor) and _is_same_memory(ids, own):
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
            keys = _keys(as_ids(ids), store.config.n_rows, store.device)
            lookup.batch = LookupBatch(ids.shape, keys, lookup.unique, found.cache, found.admission)
            store.cache.in_graphs = True
        return replace(lookup.batch, shape=ids.shape)


_capture: CaptureContext | None = None


@contextmanager
def lookups_in_capture(
    inputs: list[Tensor], leaves: list[Tensor], lookups: list[CapturedLookup] | None = None
) -> Iterator[CaptureContext]:
    """In the body, lookups of inputs use the rows that were prefetched for leaves.

    In a capture, those are the `lookups` of `captured_lookups`.
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
    found = _find_prefetched(table, leaf, lead=None, records_grad=True)
    return None if found is None or found.cache is None or found.cache is not store.cache else found


def not_prefetched(noted: list[tuple[Table, int | None]], leaves: list[Tensor]) -> list[Table]:
    """Return the tables in which a step was seen to look up other rows than those of prefetched leaves.

    Tables without a cache have nothing to prefetch, and are left out.
    """
    return [
        table
        for table, position in noted
        if table._store.cache is not None
        and (position is None or _prefetched_batch(table, leaves[position]) is None)
    ]


def captured_lookups(noted: list[tuple[Table, int | None]], leaves: list[Tensor]) -> list[CapturedLookup]:
    """Return a lookup for each table with a cache and each leaf that a step was seen to look up in it."""
    from flatbed.kernels._triton.rows import empty_results

    found = {}
    for table, position in noted:
        if position is not None and table._store.cache is not None:
            unique_rows = empty_results(leaves[position].numel(), table._store.device)
            found[id(table), position] = CapturedLookup(table, position, unique_rows)
    return [*found.values()]


def load_captured(lookups: list[CapturedLookup], leaves: list[Tensor]) -> bool:
    """Admit the rows of a batch that were not prefetched, and write what the next replay reads.

    Returns False if the graph should be captured again: a table has another cache than it uses, or its rows
    are no longer prefetched. Bad ids raise here.
    """
    from flatbed.kernels._triton.rows import copy_results_

    batches = []
    for lookup in lookups:
        assert lookup.batch is not None
        own = lookup.batch.cache
        assert own is not None
        if own.has_unseen_replays:
            return False
        batch = prepare_lookup(lookup.table, leaves[lookup.position], records_grad=True)
        if batch.cache is not own:
            return False
        copy_results_(lookup.unique, batch.unique)
        batches.append(batch)
    for lookup in lookups:
        if lookup.table._deferred_checks.pending:  # of ids on a GPU that were not prefetched
            lookup.table._raise_bad_ids()
    for batch in batches:  # after all admissions: one may have ended the protection of another batch
        assert batch.cache is not None
        batch.cache.location_for(batch)
    return True


class LookupFunction(torch.autograd.Function):
    """ids → (*shape, dim). Backward sums the gradients of equal ids and records them."""

    @staticmethod
    def forward(ctx: Any, table: Table, batch: LookupBatch) -> Tensor:
        ctx.table, ctx.batch = table, batch
        store, config, location = table._store, table._store.config, None
        if batch.cache is not None and batch.cache is store.cache and batch.exchanged is None:
            location = batch.cache.location_for(batch)
        if location is not None:  # one kernel reads the weights of all ids
            from flatbed.kernels._triton import cache

            out = cache.lookup(location, batch.keys, config.dim, config.dtype, config.n_rows)
        else:
            rows = table._row_io.weights(batch.unique.rows, batch)
            if use_triton(rows.device) and batch.exchanged is None:
                batch.weights, batch.generation = rows, store.generation
            out = rows.index_select(0, batch.unique.inverse)
        return out if len(batch.shape) == 1 else _reshape(out, (*batch.shape, config.dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        table, batch, config = ctx.table, ctx.batch, ctx.table._store.config
        grad = grads[0].detach().reshape(-1, config.dim)
        rows, sums = segment_sum(grad, batch.unique, config.padding_idx)
        table._record_grads(rows, sums, batch)
        return None, None


class GatherFunction(torch.autograd.Function):
    """Unique rows → their weights, (n, dim). Backward records their gradients."""

    @staticmethod
    def forward(ctx: Any, table: Table, batch: LookupBatch) -> Tensor:
        ctx.table, ctx.batch = table, batch
        return table._row_io.weights(batch.unique.rows, batch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        rows, sums = mask_row(ctx.batch.unique.rows, grads[0].detach().to(wide), NONE)
        ctx.table._record_grads(rows, sums, ctx.batch)
        return None, None
