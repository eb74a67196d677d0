"""Replicas of a table on several ranks: gradients are exchanged, so that all take the same step."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.rows.gradient import Packed, Pending, merge

if TYPE_CHECKING:
    from flatbed.rows.table import Table

SAMPLE = 64  # rows that are compared between ranks before the first exchange


def n_ranks(table: Table) -> int:
    """How many ranks hold a replica of this table."""
    if not (table.replicate and dist.is_available() and dist.is_initialized()):
        return 1
    return int(dist.get_world_size())


@torch.no_grad()
def share(table: Table) -> None:
    """Replace what this rank has recorded by the mean over all ranks, which all must call this."""
    n = n_ranks(table)
    if n == 1:
        return
    pending = table.pending
    own = Pending(pending.n_rows, [p for p in pending.parts if not (p.shared or pending.applied)])
    link = _link(table)
    packed = own.compact()
    kind = table.store.version, n
    # Each rank tells how many rows it has, and whether it has yet to compare its replica with the others'.
    told = torch.tensor([0 if packed is None else len(packed.rows), table._compared != kind], device=link)
    sizes, news = torch.stack(_gather(told)).T.tolist()
    if not any(sizes):
        return
    if any(news):
        _compare(table, link)
        table._compared = kind
    mean = _mean(table, packed, sizes, link)
    # What a step has used is over on all ranks, also on one that has looked nothing up since.
    kept = [] if pending.applied else [part for part in pending.parts if part.shared]
    pending.parts, pending.applied = [*kept, mean], False


def _mean(table: Table, packed: Packed | None, sizes: list[int], link: torch.device) -> Packed:
    """The mean of all ranks' gradients, added up in the same order everywhere."""
    dtype, device = torch.promote_types(table.store.config.dtype, torch.float32), table.store.device
    rows = torch.full((max(sizes),), -1, dtype=torch.int64, device=link)
    grads = torch.zeros((max(sizes), table.embedding_dim), dtype=dtype, device=link)
    if packed is not None:
        rows[: len(packed.rows)] = packed.rows.to(link)
        grads[: len(packed.rows)] = packed.grads.to(link, dtype)
    parts = [
        Packed(r[:size].to(device), g[:size].to(device))
        for r, g, size in zip(_gather(rows), _gather(grads), sizes, strict=True)
    ]
    total = merge(parts, table.num_embeddings)
    return Packed(total.rows, total.grads / len(sizes), shared=True)


def any_rank(flag: Tensor | None, table: Table) -> Tensor | None:
    """Whether something was found on any rank: an overflow on one must stop all of them."""
    if n_ranks(table) == 1:
        return flag
    link = _link(table)
    found = torch.zeros(1, device=link) if flag is None else flag.to(link, torch.float32).reshape(1).clone()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.to(table.store.device)


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


def _compare(table: Table, link: torch.device) -> None:
    """Ranks that begin with different tables would go on with different ones."""
    digests = _gather(torch.tensor(list(_digest(table)), dtype=torch.uint8, device=link))
    if any(not torch.equal(one, digests[0]) for one in digests):
        raise FlatbedError(
            "the replicas of this table are not equal on all ranks: build it with the same size, seed and "
            "initial weights everywhere, or load the same checkpoint; or say replicate=False and see to it "
            "yourself"
        )


def sampled(n_rows: int) -> Tensor:
    """Rows from all over a table."""
    return torch.arange(0, n_rows, max(1, n_rows // SAMPLE), device="cpu")


def _digest(table: Table) -> bytes:
    sample = sampled(table.num_embeddings)
    records = table.store.gather(sample.to(table.store.device)).cpu()
    kind = [table.num_embeddings, table.store.record.describe(), sorted(table.scalars().items())]
    return hashlib.sha256(json.dumps(kind).encode() + records.numpy().tobytes()).digest()
