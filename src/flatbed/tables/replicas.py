"""Replicas of a table on several ranks: gradients are exchanged, so that all take the same step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.tables.grads import GradAccumulator, RowGrads, merge

if TYPE_CHECKING:
    from flatbed.tables.table import Table

SAMPLE = 4096  # rows that are compared between ranks in every exchange


def n_processes() -> int:
    """How many ranks there are."""
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def n_ranks(table: Table) -> int:
    """How many ranks hold a replica of this table."""
    return n_processes() if table.replicate else 1


@torch.no_grad()
def share(table: Table) -> None:
    """Replace what this rank has recorded by the mean over all ranks, which all must call this."""
    if n_ranks(table) == 1:
        return
    pending, link = table.pending, _link(table)
    own = GradAccumulator(pending.n_rows, [part for part in pending.parts if not part.shared])
    packed = own.compact()
    # Each rank tells how many rows it has, and what kind of table.
    told = torch.tensor([0 if packed is None else len(packed.rows), _kind(table)], device=link)
    sizes, kinds = torch.stack(_gather(told)).T.tolist()
    if any(kind != kinds[0] for kind in kinds):
        raise _unequal()
    if not any(sizes):
        return
    mean = _mean(table, packed, sizes, link)
    _compare(table, mean.rows, link)
    pending.parts = [*(part for part in pending.parts if part.shared), mean]


def _mean(table: Table, packed: RowGrads | None, sizes: list[int], link: torch.device) -> RowGrads:
    """The mean of all ranks' gradients, added up in the same order everywhere."""
    dtype, device = torch.promote_types(table.store.config.dtype, torch.float32), table.store.device
    rows = torch.full((max(sizes),), -1, dtype=torch.int64, device=link)
    grads = torch.zeros((max(sizes), table.embedding_dim), dtype=dtype, device=link)
    if packed is not None:
        rows[: len(packed.rows)] = packed.rows.to(link)
        grads[: len(packed.rows)] = packed.grads.to(link, dtype)
    parts = [
        RowGrads(r[:size].to(device), g[:size].to(device))
        for r, g, size in zip(_gather(rows), _gather(grads), sizes, strict=True)
    ]
    total = merge(parts, table.num_embeddings)
    return RowGrads(total.rows, total.grads / len(sizes), shared=True)


def any_rank(flag: Tensor | None, tables: Sequence[Table]) -> Tensor | None:
    """Whether something was found on any rank: an overflow on one must stop all that share a table."""
    if n_processes() == 1 or not any(table.replicate for table in tables):
        return flag
    link = _link(tables[0])
    found = torch.zeros(1, device=link) if flag is None else flag.to(link, torch.float32).reshape(1).clone()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.to(tables[0].store.device)


def _link(table: Table) -> torch.device:
    """The device that the process group sends from."""
    backend = str(dist.get_backend())
    device = table.store.device
    if "nccl" in backend:
        if device.type == "cuda":
            return device
        if "gloo" not in backend:
            raise FlatbedError(
                "the process group (nccl) sends from GPUs only, and this table computes on the CPU: move the "
                'model to its GPU, or use dist.init_process_group("cpu:gloo,cuda:nccl")'
            )
    return torch.device("cpu")


def _gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def _compare(table: Table, rows: Tensor, link: torch.device) -> None:
    """Unequal replicas would drift apart: look at the rows of this step, or at every n-th of many."""
    apart = -(-len(rows) // SAMPLE)
    table._exchanges += 1
    records = table.access.gather(rows[table._exchanges % apart :: apart]).cpu()
    digest = hashlib.sha256(records.contiguous().numpy().tobytes()).digest()
    digests = _gather(torch.tensor(list(digest), dtype=torch.uint8, device=link))
    if any(not torch.equal(one, digests[0]) for one in digests):
        raise _unequal()


def _unequal() -> FlatbedError:
    return FlatbedError(
        "the replicas of this table are not equal on all ranks: build it with the same size, seed and "
        "initial weights everywhere, train it with the same options, load the same checkpoint and write the "
        "same rows; or say replicate=False and see to it yourself"
    )


def _kind(table: Table) -> int:
    """Size, layout and step count, as one number."""
    kind = [table.num_embeddings, table.store.record.describe(), sorted(table.scalars().items())]
    return int.from_bytes(hashlib.sha256(json.dumps(kind).encode()).digest()[:7], "little")
