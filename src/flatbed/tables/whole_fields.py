"""Weights or state of all rows as one tensor, read and written."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from flatbed.cuda.host_memory import available_bytes
from flatbed.errors import FlatbedError
from flatbed.tables.grad_exchange import compare_given
from flatbed.tables.storage.base import row_blocks
from flatbed.tables.table import Table


def whole_field(table: Table, name: str, *, collective: bool = False) -> Tensor:
    """Return a field of all rows as one tensor; on the GPU for tables that live there.

    With `collective`, all ranks of a sharded table call this for its weights.
    """
    if not collective:
        table._check_whole("all rows as one tensor")
    store, n_rows = table._store, table.num_embeddings
    field = store.record[name]
    on_gpu = store.config.storage == "device" and store.device.type == "cuda"
    if not on_gpu and n_rows * field.nbytes > available_bytes():
        raise FlatbedError(
            f"{name} of this table takes {n_rows * field.nbytes / 1e9:.1f} GB, and "
            f"{available_bytes() / 1e9:.1f} GB are free: write it to a file with table.save(path) or "
            f"flatbed.save_checkpoint instead"
        )
    device = store.device if on_gpu else torch.device("cpu")
    whole = torch.empty((n_rows, field.count), dtype=field.dtype, device=device)
    for start, stop in row_blocks(0, n_rows, store.record.nbytes):
        if table._shards is None:
            whole[start:stop] = store.read_field(name, start, stop)
        else:
            whole[start:stop] = table.read_rows(torch.arange(start, stop, device="cpu"))
    return whole


@torch.no_grad()
def write_field(table: Table, name: str, values: Tensor) -> None:
    """Replace a field of all rows; each rank of a sharded table writes its own, in a collective."""
    compare_given(table, name, values)
    store, config = table._store, table._store.config
    own = values[config.shard_rank :: config.n_shards].detach()
    record = store.ensure_layout().record if store.is_allocated else store.record

    def fill(first: int, last: int, records: Tensor) -> None:
        record.view(records, name).copy_(own[first:last])

    if store.is_allocated:
        store.overwrite(fill)
        return
    with ExitStack() as undo:
        doing = "filling the table"
        store.begin_replace(record, fill, fields=[name], scalars=store.scalars, doing=doing, undo=undo)()
