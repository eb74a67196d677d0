"""From ids to rows and back to gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels.dispatch import use_triton
from flatbed.kernels.rows import NARROW, NONE, UniqueRows, lead_of, narrow, segment_sum, unique, without
from flatbed.tables.cache import Cache, DeviceCache, Reservation
from flatbed.tables.cache.admission_graph import Lease
from flatbed.tables.deferred_checks import NO_ERROR
from flatbed.tables.grads import CachedWeights
from flatbed.tables.ids import as_ids, check_range, to_device
from flatbed.tables.table import Table

_shaped = torch.ops.aten._unsafe_view.default  # with another shape, and no view


@dataclass(slots=True)
class Batch:
    """Ids of one lookup on the computing device, and their distinct rows."""

    keys: Tensor
    """Flat; not necessarily checked."""
    shape: torch.Size
    found: UniqueRows
    cache: Cache | None = None
    """The one that the rows have come through."""
    ticket: Reservation | None = None
    lease: Lease | None = None
    """Of the memory that `keys` and `found` are in."""
    looked: Tensor | None = None
    """The weights of the keys, (n, dim), if they have come with them."""


def find(table: Table, ids: Any, *, lead: bool = False, training: bool = False) -> Batch:
    """The distinct rows of a batch. In training they come through the table's cache, if it has one.

    With `lead`, the first of the rows is none: it takes the place of the padding row.
    """
    given = as_ids(ids)
    n_rows, device = table.num_embeddings, table.store.device
    ticket = table.ticket(ids) if isinstance(ids, Tensor) and not lead else None
    if ticket is not None and ticket.found is not None and training:
        return Batch(ticket.keys, given.shape, ticket.found, ticket.cache, ticket)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    checked = given.device.type == "cpu" and not capturing
    # A cache that is there looks at ids in passing; before anything is made for them, it is done here.
    in_passing = checked and training and not lead and table.store.has_cache_for(given.numel())
    if capturing:
        _check_capture(table, given)
    elif checked and not in_passing:
        check_range(given, n_rows)
    cache = table.store.cache_for(given.numel()) if training else None
    if isinstance(cache, DeviceCache) and not (lead or capturing):
        passed = cache.pass_through(given)
        if passed is not None:
            lease, looked = passed
            if lease.bad is not None:
                table.suspect(given, lease.bad)
            return Batch(lease.keys, given.shape, lease.found, cache, lease=lease, looked=looked)
    if in_passing:  # but there was no passage for so many
        check_range(given, n_rows)
    keys = _keys(given, n_rows, device, checked=checked).flatten()
    if training and not capturing:
        table.deferred_checks.prepare_capture()
    bad = None if checked else table.deferred_checks.error_slot(capturing=capturing)
    found = _distinct_led(table, keys, bad, cache) if lead else _come(cache, keys, n_rows, bad)
    if bad is not None and not capturing:
        table.suspect(given, bad)
    return Batch(keys, given.shape, found, cache)


def _keys(ids: Tensor, n_rows: int, device: torch.device, *, checked: bool) -> Tensor:
    """Ids as kernels and operations take them, on the computing device."""
    if checked:
        fits = n_rows <= NARROW and use_triton(device)
        return to_device(ids, device, torch.int32 if fits else torch.int64)
    return narrow(ids.to(device, non_blocking=True).flatten(), n_rows)


def _check_capture(table: Table, ids: Tensor) -> None:
    store = table.store
    if not store.is_allocated or store.relayout_pending or table.access.place is None:
        raise FlatbedError(
            "a lookup of this table cannot be part of a CUDA graph"
            + (
                ": rows on disk are read by the host"
                if store.config.storage == "disk"
                else " yet: take a training step with it before the capture"
            )
        )
    if ids.device.type == "cpu" and not ids.is_pinned():
        raise FlatbedError(
            "ids inside the capture of a CUDA graph must be on the GPU, or in pinned memory as int64, where "
            "every replay reads them anew"
        )


def _come(cache: Cache | None, keys: Tensor, n_rows: int, bad: Tensor | None) -> UniqueRows:
    if isinstance(cache, DeviceCache):
        return cache.come(keys, bad)
    found = unique(keys, n_rows, bad)
    if cache is not None:
        rows = found.rows.to("cpu")
        cache.come(rows[rows >= 0])
    return found


def _distinct_led(table: Table, keys: Tensor, bad: Tensor | None, cache: Cache | None) -> UniqueRows:
    none, padding = lead_of(keys), table.store.config.padding_idx
    if padding is not None:
        keys = torch.where(keys == padding, none, keys)
    found = _come(cache, torch.cat([keys.new_full((1,), none), keys]), table.num_embeddings, bad)
    if bad is not None and not table.deferred_checks.of_graphs(bad):
        bad -= (bad != NO_ERROR).to(torch.int64)
    return UniqueRows(found.rows, found.inverse[1:])  # the key that was put in front is not one of the ids


class Lookup(torch.autograd.Function):
    """ids → (*shape, dim). Backward sums the gradients of repeated ids and records them."""

    @staticmethod
    def forward(ctx: Any, table: Table, batch: Batch) -> Tensor:
        access, found = table.access, batch.found
        ctx.table, ctx.found, ctx.fetched, ctx.ticket = table, found, None, batch.ticket
        ctx.lease = batch.lease
        out, batch.looked = batch.looked, None
        if out is None:
            out = access.look(batch.keys, batch.ticket, batch.cache)
        if out is None:
            rows = access.weights(found.rows)
            ctx.fetched = CachedWeights(rows, table.store.generation) if use_triton(rows.device) else None
            out = rows.index_select(0, found.inverse)
        # It may be changed in place, as the output of nn.Embedding; a view that was made here may not.
        return out if len(batch.shape) == 1 else _shaped(out, (*batch.shape, table.embedding_dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        table, found = ctx.table, ctx.found
        grad = grads[0].detach() if grads[0].requires_grad else grads[0]
        flat = grad if grad.dim() == 2 else grad.reshape(-1, table.embedding_dim)
        rows, sums = segment_sum(flat, found, table.store.config.padding_idx)
        table.record(rows, sums, ctx.fetched, ctx.ticket)
        return None, None


class Fetch(torch.autograd.Function):
    """The rows themselves, (n, dim). Backward records their gradients."""

    @staticmethod
    def forward(ctx: Any, table: Table, rows: Tensor) -> Tensor:
        ctx.table, ctx.rows = table, rows
        return table.access.weights(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        ctx.table.record(*without(ctx.rows, grads[0].detach().to(wide), NONE))
        return None, None


def looked_up(table: Table, batch: Batch) -> Tensor:
    """`Lookup`, for gradients."""
    rows: Tensor = Lookup.apply(table, batch)  # type: ignore[no-untyped-call,unused-ignore]
    return rows


def fetched(table: Table, rows: Tensor) -> Tensor:
    """`Fetch`, for gradients."""
    held: Tensor = Fetch.apply(table, rows)  # type: ignore[no-untyped-call,unused-ignore]
    return held


def recording(table: Table, *, training: bool) -> bool:
    """Whether a lookup has to record; and if so, in training, whether anyone will use it."""
    if not (torch.is_grad_enabled() and table.trains):
        return False
    if training:
        table.check_trained()
    return True
