"""From ids to rows and back to gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels.choose import by_triton
from flatbed.kernels.rows import NARROW, NONE, Distinct, distinct, lead_of, sum_runs, without
from flatbed.rows.gradient import Fetched
from flatbed.rows.ids import as_ids, check_range, to_device
from flatbed.rows.table import NOWHERE, Table


def find(table: Table, ids: Any, *, lead: bool = False) -> tuple[Distinct, Tensor]:
    """The distinct rows of a batch, and its ids on the computing device.

    With `lead`, the first of the rows is none: it takes the place of the padding row.
    """
    given, n_rows, device = as_ids(ids), table.num_embeddings, table.store.device
    checked = given.device.type == "cpu"
    if checked:
        check_range(given, n_rows)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise FlatbedError("a table's rows cannot be looked up inside the capture of a CUDA graph")
    narrow = checked and n_rows <= NARROW and by_triton(device)
    wanted = to_device(given, device, torch.int32 if narrow else torch.int64)
    keys = wanted.flatten()
    none = lead_of(keys)
    bad = None if checked else torch.full((1,), NOWHERE, dtype=torch.int64, device=device)
    if not lead:
        found = distinct(keys, n_rows, bad)
    else:
        padding = table.store.config.padding_idx
        if padding is not None:
            keys = torch.where(keys == padding, none, keys)
        found = _led(distinct(torch.cat([keys.new_full((1,), none), keys]), n_rows, bad))
        if bad is not None:
            bad -= (bad != NOWHERE).to(torch.int64)
    if bad is not None:
        table.suspect(given, bad)
    return found, wanted


def _led(found: Distinct) -> Distinct:
    """The key that was put in front is not one of the ids."""
    return Distinct(found.rows, found.inverse[1:])


class Lookup(torch.autograd.Function):
    """ids → (*shape, dim). Backward sums the gradients of repeated ids and records them."""

    @staticmethod
    def forward(ctx: Any, table: Table, found: Distinct, shape: torch.Size) -> Tensor:
        rows = table.store.weights(found.rows)
        ctx.table, ctx.found = table, found
        ctx.fetched = Fetched(rows, table.store.edition) if by_triton(rows.device) else None
        return rows.index_select(0, found.inverse).view(*shape, table.embedding_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        table, found = ctx.table, ctx.found
        flat = grads[0].detach().reshape(-1, table.embedding_dim)
        table.record(*sum_runs(flat, found, table.store.config.padding_idx), ctx.fetched)
        return None, None, None


class Fetch(torch.autograd.Function):
    """The rows themselves, (n, dim). Backward records their gradients."""

    @staticmethod
    def forward(ctx: Any, table: Table, rows: Tensor) -> Tensor:
        ctx.table, ctx.rows = table, rows
        return table.store.weights(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        ctx.table.record(*without(ctx.rows, grads[0].detach().to(wide), NONE))
        return None, None


def looked_up(table: Table, found: Distinct, shape: torch.Size) -> Tensor:
    """`Lookup`, for gradients."""
    rows: Tensor = Lookup.apply(table, found, shape)  # type: ignore[no-untyped-call,unused-ignore]
    return rows


def fetched(table: Table, rows: Tensor) -> Tensor:
    """`Fetch`, for gradients."""
    held: Tensor = Fetch.apply(table, rows)  # type: ignore[no-untyped-call,unused-ignore]
    return held


def recording(table: Table, *, training: bool) -> bool:
    """Whether a lookup has to record; and if so, in training, whether anyone will use it."""
    if not (torch.is_grad_enabled() and table.requires_grad):
        return False
    if training:
        table.check_trained()
    return True
