"""Lookups: from ids to rows, and from gradients of the output to gradients of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing
from flatbed.errors import FlatbedError
from flatbed.kernels import NONE, UniqueRows, check_values_exist, sentinel_of, use_triton
from flatbed.kernels.rows import INT32_ROWS, mask_row, segment_sum, to_int32_keys, unique
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.ids import NO_ERROR, as_ids, check_range, new_error_slot, to_device
from flatbed.tables.sharding import LOOKUP, ShardedRowIO
from flatbed.tables.table import Table

_reshape = torch.ops.aten._unsafe_view.default  # without a view, which users could not change in place


def prepare_lookup(
    table: Table, ids: Any, *, for_bag: bool = False, records_grad: bool = False
) -> LookupBatch:
    """Check ids and find their unique rows. With `records_grad`, the rows are admitted to the table's cache.

    Ids out of range: those on the host raise here, those on a GPU raise later (`DeferredIdChecks`).
    For a bag of a table with a padding row, the first unique row is -1, in place of the padding row.
    """
    check_values_exist("a lookup")
    store, checks = table._store, table._deferred_checks
    n_rows, device, lead = store.config.n_rows, store.device, store.config.padding_idx if for_bag else None
    capturing = is_capturing(device)
    if records_grad and device.type == "cuda" and checks.graph_slot is None and not capturing:
        checks.prepare_capture(device, n_rows)
    if table._prefetched and lead is None and not capturing and isinstance(ids, Tensor):
        for batch in table._prefetched:
            if batch.matches(ids):
                batch = batch if batch.shape == ids.shape else replace(batch, shape=ids.shape)
                if isinstance(table._rows, ShardedRowIO):
                    return table._rows.exchange_again(LOOKUP[records_grad], batch, admits=records_grad)
                if records_grad and batch.cache is not None and batch.cache.protects(batch):
                    return batch
    if isinstance(table._rows, ShardedRowIO):
        return _prepare_sharded(table, table._rows, ids, for_bag=for_bag, records_grad=records_grad)
    given = as_ids(ids)
    if for_bag:
        _check_bags(given)
    on_checked = None
    if capturing:
        _check_capture(table, given)
        keys, error_slot = _keys(given, n_rows, device), checks.graph_error_slot()
    elif given.device.type == "cpu":
        check_range(given, n_rows)
        keys, error_slot = _keys(given, n_rows, device, in_range=True), None
    else:
        keys, error_slot = _keys(given, n_rows, device), new_error_slot(device)
        table._raise_bad_ids(wait=False)
        on_checked = partial(checks.add, given, error_slot, n_rows=n_rows, offset=int(lead is not None))
    cache = store.ensure_cache(keys.numel()) if records_grad else None
    sought = keys if lead is None else _with_lead(keys, lead)
    if cache is not None:  # calls `on_checked` before rows move, so that `step` need not wait for the bus
        found, admission = cache.admit(sought, error_slot, on_checked)
    else:
        found, admission = unique(sought, n_rows, error_slot), None
        if on_checked is not None:
            on_checked()
    return LookupBatch(given.shape, keys, found if lead is None else _without_lead(found), cache, admission)


def _prepare_sharded(
    table: Table, access: ShardedRowIO, ids: Any, *, for_bag: bool, records_grad: bool
) -> LookupBatch:
    """Check ids, find their unique rows, and ask the owners for them. A collective.

    Ids on a GPU raise here, too: the host waits for the number of rows of each owner.
    """
    device, n_rows = table._store.device, table.num_embeddings
    lead = table._store.config.padding_idx if for_bag else None
    doing = LOOKUP[records_grad]
    with access.shards.failing_together(doing):
        if is_capturing(device):
            raise FlatbedError("a lookup in a sharded table cannot be part of a CUDA graph")
        given = as_ids(ids)
        if for_bag:
            _check_bags(given)
        on_host = given.device.type == "cpu"
        if on_host:
            check_range(given, n_rows)
        error_slot = None if on_host else new_error_slot(device)
        keys = _keys(given, n_rows, device, in_range=on_host)
        found = unique(keys if lead is None else _with_lead(keys, lead), n_rows, error_slot)
        route = access.shards.route(found.rows)
        if error_slot is not None and int(error_slot) != NO_ERROR:
            check_range(given, n_rows)
    exchanged = access.exchange(doing, route, admits=records_grad)
    found = found if lead is None else _without_lead(found)
    return LookupBatch(given.shape, keys, found, exchanged=exchanged)


def _check_bags(ids: Tensor) -> None:
    if ids.dim() not in (1, 2):
        raise ValueError(f"bags are (bags, length), or (n,) with offsets; found {tuple(ids.shape)}")


def _keys(ids: Tensor, n_rows: int, device: torch.device, *, in_range: bool = False) -> Tensor:
    """Return ids as keys on the computing device, flat, in the dtype that kernels sort fastest."""
    if in_range:  # copied in that dtype
        is_int32 = n_rows <= INT32_ROWS and use_triton(device)
        return to_device(ids.flatten(), device, torch.int32 if is_int32 else torch.int64)
    return to_int32_keys(ids.flatten().to(device, non_blocking=True), n_rows)


def _with_lead(keys: Tensor, padding_idx: int) -> Tensor:
    """Put the key of no row in front of keys, and in place of the padding row."""
    sentinel = sentinel_of(keys)
    return torch.cat([keys.new_full((1,), sentinel), torch.where(keys == padding_idx, sentinel, keys)])


def _without_lead(found: UniqueRows) -> UniqueRows:
    return UniqueRows(found.rows, found.inverse[1:])


def _check_capture(table: Table, ids: Tensor) -> None:
    store = table._store
    if not store.is_allocated or store.relayout_pending or table._local_rows.location_for() is None:
        raise FlatbedError(
            "a lookup of this table cannot be part of a CUDA graph"
            + (
                ": the host reads rows on disk"
                if store.config.storage == "disk"
                else " yet: take a training step with it before the capture"
            )
        )
    if ids.device.type == "cpu" and not ids.is_pinned():
        raise FlatbedError(
            "ids inside the capture of a CUDA graph must be on the GPU, or in pinned memory as int64, where "
            "every replay reads them again"
        )


class LookupFunction(torch.autograd.Function):
    """ids → (*shape, dim). Backward sums the gradients of equal ids and records them."""

    @staticmethod
    def forward(ctx: Any, table: Table, batch: LookupBatch) -> Tensor:
        ctx.table, ctx.batch = table, batch
        store = table._store
        out = None
        if batch.cache is not None and batch.cache is store.cache and batch.exchanged is None:
            out = batch.cache.lookup(batch)
        if out is None:
            rows = table._rows.batch_weights(batch)
            if use_triton(rows.device) and batch.exchanged is None:
                batch.weights, batch.generation = rows, store.generation
            out = rows.index_select(0, batch.unique.inverse)
        return out if len(batch.shape) == 1 else _reshape(out, (*batch.shape, store.config.dim))

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
        return table._rows.batch_weights(batch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        rows, sums = mask_row(ctx.batch.unique.rows, grads[0].detach().to(wide), NONE)
        ctx.table._record_grads(rows, sums, ctx.batch)
        return None, None


def needs_grad(table: Table, *, training: bool) -> bool:
    """Return True if a lookup records gradients.

    Raises if the lookups before it trained the table, and no optimizer has it. A model that is trained in
    training mode may be evaluated in between, also where gradients are enabled.
    """
    if not (torch.is_grad_enabled() and table._needs_grad):
        return False
    if table._orphaned is not None and (training or not table._orphaned):
        table._check_owner()
    table._last_training = training
    return True
