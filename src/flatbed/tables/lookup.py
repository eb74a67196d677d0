"""Lookups: from ids to rows, prefetched or not, and from gradients of ids to those of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing
from flatbed.errors import FlatbedError
from flatbed.kernels import NONE, UniqueRows, check_values_exist, sentinel_of, use_triton
from flatbed.kernels.rows import mask_row, segment_sum, unique
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.captured_lookups import CapturedLookup, NotedLookup, current_capture
from flatbed.tables.ids import NO_ERROR, as_ids, as_keys, check_range, new_first_error
from flatbed.tables.prefetch import find_prefetched
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
    n_rows, device, padding = store.config.n_rows, store.device, store.config.padding_idx if for_bag else None
    capturing, capture, leaf = is_capturing(device), current_capture(), ids
    if capture is not None:
        position = capture.position_of(ids)
        leaf = ids if position is None else capture.leaves[position]
        if not records_grad or padding is not None:
            position = None
        capture.noted.append(NotedLookup(table, position))
        captured = capture.lookup(table, ids, position) if capturing else None
        if captured is not None:
            return captured
    may_be_captured = use_triton(device) and (records_grad or capture is not None)
    if may_be_captured and checks.graph_error is None and not capturing:
        checks.prepare_capture(device, n_rows)
    if table._prefetched and not capturing and isinstance(ids, Tensor):
        if for_bag and table._shards is None:  # otherwise all ranks are told
            _check_bags(ids)
        batch = find_prefetched(table, leaf, records_grad=records_grad, is_padded=padding is not None)
        if batch is not None:
            if padding is not None:  # unique rows are found again; their records are in the cache
                again = unique(_with_padding(batch.keys, padding), n_rows)
                batch = replace(batch, unique=_without_padding(again, padding))
            return batch if batch.shape == ids.shape else replace(batch, shape=ids.shape)
    if isinstance(table._row_io, ShardedRowIO):
        return _prepare_sharded(table, table._row_io, ids, for_bag=for_bag, records_grad=records_grad)
    given = as_ids(ids)
    if for_bag:
        _check_bags(given)
    keys, first_error, on_checked = _checked_keys(table, given, offset=int(padding is not None))
    cache = store.ensure_cache(keys.numel()) if records_grad else None
    sought = _with_padding(keys, padding)
    if cache is not None:  # a `GpuCache` checks ids before rows move: the next step need not wait for the bus
        found, admission = cache.admit(sought, first_error, on_checked)
    else:
        found, admission = unique(sought, n_rows, first_error), None
        if on_checked is not None:
            on_checked()
    return LookupBatch(given.shape, keys, _without_padding(found, padding), cache, admission)


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
        capture = current_capture()
        if capture is not None and checks not in capture.checks:
            capture.checks.append(checks)
        return as_keys(ids, n_rows, device), checks.first_error_of_graphs(n_rows), None
    if ids.device.type == "cpu":
        check_range(ids, n_rows)
        return as_keys(ids, n_rows, device, in_range=True), None, None
    keys, first_error = as_keys(ids, n_rows, device), new_first_error(device)
    table._raise_bad_ids(wait=False)
    return keys, first_error, partial(checks.add, ids, first_error, n_rows=n_rows, offset=offset)


def _prepare_sharded(
    table: Table, row_io: ShardedRowIO, ids: Any, *, for_bag: bool, records_grad: bool
) -> LookupBatch:
    """Check ids, find their unique rows, and ask the owners for them. A collective.

    Ids on a GPU raise here, too: the host waits for the number of rows of each owner.
    """
    device, n_rows = table._store.device, table.num_embeddings
    padding = table._store.config.padding_idx if for_bag else None
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
        keys = as_keys(given, n_rows, device, in_range=on_host)
        found = unique(_with_padding(keys, padding), n_rows, first_error)
        route = row_io.shards.route(found.rows)
        if first_error is not None and int(first_error) != NO_ERROR:
            check_range(given, n_rows)
    exchanged = row_io.exchange(doing, route, admits=records_grad)
    return LookupBatch(given.shape, keys, _without_padding(found, padding), exchanged=exchanged)


def _check_bags(ids: Tensor) -> None:
    if ids.dim() not in (1, 2):
        raise ValueError(f"bags are (bags, length), or (n,) with offsets; found {tuple(ids.shape)}")


def _with_padding(keys: Tensor, padding_idx: int | None) -> Tensor:
    """Put the key of no row in front of keys, and in place of the padding row, if there is one."""
    if padding_idx is None:
        return keys
    sentinel = sentinel_of(keys)
    return torch.cat([keys.new_full((1,), sentinel), torch.where(keys == padding_idx, sentinel, keys)])


def _without_padding(found: UniqueRows, padding_idx: int | None) -> UniqueRows:
    """Leave out the key that `_with_padding` has put in front."""
    return found if padding_idx is None else UniqueRows(found.rows, found.inverse[1:])


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


def prepare_replay(lookups: list[CapturedLookup], leaves: list[Tensor]) -> bool:
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
