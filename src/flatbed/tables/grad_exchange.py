"""Gradients of tables on several ranks, and comparison of replicas: all ranks take the same step."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatbed.distributed.ranks import all_gather, any_rank, communication_device, world_size
from flatbed.distributed.row_shards import RowShards
from flatbed.errors import FlatbedError
from flatbed.kernels.rows import segment_sum, to_int32_keys, unique
from flatbed.tables.grads import RowGrads, merge_grads

if TYPE_CHECKING:
    from flatbed.tables.table import Table

GRADIENTS = "the gradients"
"""The name of the exchange in errors."""
SAMPLE = 4096  # rows that ranks compare: of replicas in every exchange, and of given weights
DENSE_SAMPLE = 64  # dense parameters that ranks compare, and elements of each
LAST_COMPARED = 1024  # the step after which ranks no longer compare dense parameters
UNEQUAL = (
    "the replicas of this table are not equal on all ranks: call torch.manual_seed with the same number "
    "on every rank before building it, or pass seed=; train it with the same options, load the same "
    "checkpoint and write the same rows on every rank; or build it with replicate=False"
)


@torch.no_grad()
def exchange_grads(table: Table) -> None:
    """Replace recorded gradients by the mean over all ranks. Every rank calls this.

    Ranks of a sharded table keep the gradients of their own rows. If any rank has a gradient, all ranks have
    one afterwards, possibly without rows: a step counts on all ranks, or on none.
    """
    if table._shards is not None:
        _exchange_sharded(table, table._shards)
    elif table._n_ranks > 1:
        _average_replicas(table)


def _exchange_sharded(table: Table, shards: RowShards) -> None:
    own = table._grads.total_of_rank()  # it may have the row -1, which a route leaves out
    empty = RowGrads.empty(table._store)
    sent = empty if own is None else RowGrads(own.rows, own.grads.to(empty.grads.dtype))
    route = shards.route(sent.rows)
    if table._agreed is not table._owner_ref:
        table._exchanges = 0
    exchanged = shards.exchange(GRADIENTS, route, facts=_facts(table), idle=own is None)
    table._agreed = table._owner_ref
    _compare_dense(table, shards)
    if exchanged.is_idle:
        return
    rows, grads = exchanged.rows, shards.to_owners(exchanged, sent.grads)
    if max(exchanged.counts) < len(rows):  # several ranks have sent rows: add up repeated ones, in rank order
        n_rows = table._store.config.n_rows
        rows, grads = segment_sum(grads, unique(to_int32_keys(rows, n_rows), n_rows), None)
    table._grads.set_mean(RowGrads(rows, grads / shards.n_ranks))


def _facts(table: Table) -> dict[str, Any]:
    """Return the facts that ranks compare.

    At the first step of an optimizer, they include its class, its options and its state.
    """
    owner, facts = table._owner, dict[str, Any](requires_grad=table._needs_grad)
    if owner is not None:
        # A scheduler may change lr on one rank only. Tensors are skipped: reading them waits for the GPU.
        rates = [group.get("lr") for group in owner.param_groups]
        facts["lr"] = [rate for rate in rates if not isinstance(rate, Tensor)]
    if owner is None or (table._agreed is not None and table._agreed() is owner):
        return facts
    groups = (group for group in owner.param_groups if any(p is table for p in group["params"]))
    group = next(groups, {})
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    return {
        **facts,
        "optimizer": type(owner).__name__,
        "options of the step": getattr(owner, "_options", None),
        **{f"the option {name}": float(v) if isinstance(v, Tensor) else v for name, v in options.items()},
        "state": table._store.record.describe(),
        "scalars": sorted(table.scalars().items()),
    }


def _compare_dense(table: Table, shards: RowShards) -> None:
    """Warn if dense parameters of the optimizer were equal on all ranks at first, and differ now.

    Their gradients are not averaged then. Parameters that differ at the first step may differ on purpose, as
    stages of a pipeline and shards do. Samples are compared before the steps 1, 2, 3, 5, 9 and so on.
    """
    n_before, owner, channel = table._exchanges, table._owner, shards.channel
    table._exchanges += 1
    if owner is None or n_before & (n_before - 1) or n_before > LAST_COMPARED:
        return
    params = [param for group in owner.param_groups for param in group["params"]]
    tables = [p for p in params if getattr(p, "_shards", None) is not None and p._shards.channel is channel]
    if tables[0] is not table:
        return
    dense = [p.detach() for p in params if type(p) is nn.Parameter and p.requires_grad]
    shapes = repr([(p.shape, p.dtype) for p in dense])
    digest = _digest(*(_sample(p.reshape(-1)) for p in _sample(dense)), seed=shapes)
    held = channel.gather(torch.tensor(digest, device="cpu"), doing=shards.describe(GRADIENTS)).tolist()
    others = [rank for rank, found in zip(channel.ranks, held, strict=True) if found != held[0]]
    if others:
        table._exchanges = LAST_COMPARED + 2  # neither compared nor warned of again
    if others and n_before:
        warnings.warn(
            f"dense parameters of this {type(owner).__name__} were equal on all ranks, and those of rank "
            f"{others[0]} differ from those of rank {channel.ranks[0]} now: ranks average gradients of "
            "tables, and nothing averages those of dense parameters. Wrap the model in "
            "DistributedDataParallel, or use fully_shard; filter this warning if ranks are to differ",
            stacklevel=2,
        )


def _sample(values: Any) -> Any:
    """Return at most DENSE_SAMPLE of a list or of a tensor, evenly spaced."""
    return values[:: -(-len(values) // DENSE_SAMPLE) or 1]


def _digest(*tensors: Tensor, seed: str = "") -> list[int]:
    """Return a digest of shapes and bits."""
    found = hashlib.sha256(seed.encode())
    for one in tensors:
        found.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return [*found.digest()]


def compare_given(table: Table, name: str, values: Tensor) -> None:
    """Raise on all ranks of a sharded table if they were given different weights or state.

    Ranks exchange a digest of a sample. Each rank was given all rows, and writes its own.
    """
    if table._shards is not None:
        stride = -(-len(values) // SAMPLE)
        shown = bytes(_digest(values[::stride])).hex()[:16]
        table._shards.agree("loading", {f"a sample of {name}": shown})


def _average_replicas(table: Table) -> None:
    """Average the gradients of replicas, and raise if the replicas differ."""
    store, device = table._store, communication_device(table._store.device)
    recorded = table._grads.total_of_rank(compact=True)
    own = recorded or RowGrads.empty(store)
    kind = [table.num_embeddings, store.record.describe(), sorted(table.scalars().items())]
    digest = int.from_bytes(hashlib.sha256(json.dumps(kind).encode()).digest()[:7], "little")
    announced = torch.tensor([-1 if recorded is None else len(own.rows), digest], device=device)
    sizes, digests = torch.stack(all_gather(announced)).T.tolist()
    if len(set(digests)) > 1:
        raise FlatbedError(UNEQUAL)
    if max(sizes) < 0:
        return
    sizes = [max(size, 0) for size in sizes]
    dtype = torch.promote_types(store.config.dtype, torch.float32)
    n_sent = max(*sizes, 1)  # older versions of gloo abort over empty tensors
    rows = torch.full((n_sent,), -1, dtype=torch.int64, device=device)
    grads = torch.zeros((n_sent, table.embedding_dim), dtype=dtype, device=device)
    rows[: len(own.rows)] = own.rows.to(device)
    grads[: len(own.rows)] = own.grads.to(device, dtype)
    parts = [
        RowGrads(r[:size].to(store.device), g[:size].to(store.device))
        for r, g, size in zip(all_gather(rows), all_gather(grads), sizes, strict=True)
    ]
    total = merge_grads(parts, table.num_embeddings)  # in the order of ranks, on every rank
    _compare_rows(table, total.rows, device)
    table._grads.set_mean(RowGrads(total.rows, total.grads / len(sizes)))


def _compare_rows(table: Table, rows: Tensor, device: torch.device) -> None:
    """Raise if a sample of the rows of this step differs between ranks: replicas would drift apart."""
    stride = -(-len(rows) // SAMPLE)
    table._exchanges += 1
    if not stride:
        return
    records = table._local_io.gather(rows[table._exchanges % stride :: stride]).cpu()
    digests = all_gather(torch.tensor(_digest(records), dtype=torch.uint8, device=device))
    if any(not torch.equal(one, digests[0]) for one in digests):
        raise FlatbedError(UNEQUAL)


def any_replica(flag: Tensor | None, tables: Sequence[Table]) -> Tensor | None:
    """Return an overflow flag that is set if any rank has set its own: all ranks must skip together."""
    if world_size() == 1 or not any(table.replicate for table in tables):
        return flag
    device = tables[0]._store.device
    found = torch.zeros(1, dtype=torch.float32, device=device) if flag is None else flag.clone()
    if any(table.replicate and table._shards is None for table in tables):
        found = any_rank(found)
    for channel in dict.fromkeys(table._shards.channel for table in tables if table._shards is not None):
        channel.share_flag_(found)
    return found
