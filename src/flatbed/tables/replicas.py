"""Replicas of a table on several ranks: gradients are averaged, so that all ranks take the same step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatbed.distributed.ranks import all_gather, any_rank, communication_device, world_size
from flatbed.errors import FlatbedError
from flatbed.tables.grads import GradAccumulator, RowGrads, merge

if TYPE_CHECKING:
    from flatbed.tables.table import Table

SAMPLE = 4096
"""Rows that are compared between ranks in every exchange."""


def n_replicas(table: Table) -> int:
    """Return the number of ranks that hold a replica of this table."""
    return world_size() if table.replicate else 1


@torch.no_grad()
def average_grads(table: Table) -> None:
    """Replace the recorded gradients by the mean over all ranks. A collective: every rank calls it."""
    if n_replicas(table) == 1:
        return
    pending, device = table._grads, communication_device(table._store.device)
    own = GradAccumulator(pending.n_rows, [part for part in pending.parts if not part.shared])
    packed = own.compact()
    n_rows = 0 if packed is None else len(packed.rows)
    announced = torch.tensor([n_rows, _digest_of_kind(table)], device=device)
    sizes, kinds = torch.stack(all_gather(announced)).T.tolist()
    if any(kind != kinds[0] for kind in kinds):
        raise _unequal()
    if not any(sizes):
        return
    mean = _mean(table, packed, sizes, device)
    _compare_rows(table, mean.rows, device)
    pending.parts = [*(part for part in pending.parts if part.shared), mean]


def any_replica(flag: Tensor | None, tables: Sequence[Table]) -> Tensor | None:
    """Return an overflow flag that is set if any rank has set its own: all ranks must skip together."""
    if world_size() == 1 or not any(table.replicate for table in tables):
        return flag
    found = torch.zeros(1, device=tables[0]._store.device) if flag is None else flag.clone()
    if any(table.replicate and table._shards is None for table in tables):
        found = any_rank(found)
    for channel in dict.fromkeys(table._shards.channel for table in tables if table._shards is not None):
        channel.share_flag_(found)
    return found


def _mean(table: Table, packed: RowGrads | None, sizes: list[int], device: torch.device) -> RowGrads:
    """Return the mean of all ranks' gradients, summed in rank order on every rank."""
    dtype, target = torch.promote_types(table._store.config.dtype, torch.float32), table._store.device
    rows = torch.full((max(sizes),), -1, dtype=torch.int64, device=device)
    grads = torch.zeros((max(sizes), table.embedding_dim), dtype=dtype, device=device)
    if packed is not None:
        rows[: len(packed.rows)] = packed.rows.to(device)
        grads[: len(packed.rows)] = packed.grads.to(device, dtype)
    parts = [
        RowGrads(r[:size].to(target), g[:size].to(target))
        for r, g, size in zip(all_gather(rows), all_gather(grads), sizes, strict=True)
    ]
    total = merge(parts, table.num_embeddings)
    return RowGrads(total.rows, total.grads / len(sizes), shared=True)


def _compare_rows(table: Table, rows: Tensor, device: torch.device) -> None:
    """Raise if a sample of the rows of this step differs between ranks: replicas would drift apart."""
    stride = -(-len(rows) // SAMPLE)
    table._exchanges += 1
    records = table._local_rows.gather(rows[table._exchanges % stride :: stride]).cpu()
    digest = hashlib.sha256(records.contiguous().numpy().tobytes()).digest()
    digests = all_gather(torch.tensor(list(digest), dtype=torch.uint8, device=device))
    if any(not torch.equal(one, digests[0]) for one in digests):
        raise _unequal()


def _unequal() -> FlatbedError:
    return FlatbedError(
        "the replicas of this table are not equal on all ranks: call torch.manual_seed with the same number "
        "on every rank before building it, or pass seed=; train it with the same options, load the same "
        "checkpoint and write the same rows on every rank; or build it with replicate=False"
    )


def _digest_of_kind(table: Table) -> int:
    """Return size, layout and step count as one number."""
    kind = [table.num_embeddings, table._store.record.describe(), sorted(table.scalars().items())]
    return int.from_bytes(hashlib.sha256(json.dumps(kind).encode()).digest()[:7], "little")
