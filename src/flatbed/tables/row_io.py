"""Rows by number, read and written on the computing device: in the cache, in storage, or on other ranks.

Gradients of replicas are averaged, so that all ranks take the same step.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatbed.distributed.ranks import all_gather, any_rank, communication_device, world_size
from flatbed.distributed.row_shards import Exchanged, Route, RowShards, group_of
from flatbed.errors import FlatbedError
from flatbed.kernels import rows as ops
from flatbed.kernels.rows import segment_sum, to_int32_keys, unique
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.cache.host_copy import HostCopyCache
from flatbed.tables.config import Config, part_of
from flatbed.tables.grads import RowGrads, merge_grads
from flatbed.tables.record import WEIGHT
from flatbed.tables.row_store import RowStore
from flatbed.tables.storage.base import Storage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flatbed.tables.table import Table


class RowIO:
    """Access of lookups and steps to the rows of a `RowStore`.

    It refers to the store, but the store does not refer to it. Without a cycle of references, a deleted table
    frees its memory at once.
    """

    def __init__(self, store: RowStore) -> None:
        self.store = store

    def _host_access(self) -> Storage | HostCopyCache:
        """Return the object that reads and writes records out of the reach of kernels."""
        cache = self.store.cache
        return self.store.ensure_layout() if cache is None else cast(HostCopyCache, cache)

    # ---- reading

    def weights(self, rows: Tensor, batch: LookupBatch | None = None) -> Tensor:
        """Read the weights of rows, (n,) → (n, dim), on the computing device. `batch`: the rows' lookup."""
        field = self.store.config.weight
        return self.gather(rows, field.nbytes, batch=batch).view(field.dtype)

    def gather(self, rows: Tensor, nbytes: int | None = None, *, batch: LookupBatch | None = None) -> Tensor:
        """Read records, or their first bytes, to the computing device; zeros for the row -1."""
        store = self.store
        nbytes = store.record.nbytes if nbytes is None else nbytes
        location = store.location_for(batch)
        if location is not None:
            return ops.gather(location, rows, nbytes)
        if not len(rows):
            return torch.empty((0, nbytes), dtype=torch.uint8, device=store.device)
        source, wanted = self._host_access(), rows.to("cpu")
        present = wanted >= 0
        records = source.gather(wanted if bool(present.all()) else wanted[present], nbytes)
        if len(records) < len(rows):
            whole = torch.zeros((len(rows), nbytes), dtype=torch.uint8, device=records.device)
            records = whole.index_copy_(0, present.nonzero().flatten().to(records.device), records)
        if records.device == store.device:
            return records
        return records.pin_memory().to(store.device, non_blocking=True)

    def read_fields(self, rows: Tensor) -> dict[str, Tensor]:
        """Read all fields of rows, which must be in range, to new tensors on the computing device."""
        record, memory = self.store.record, self._torch_memory()
        if memory is not None:
            views = {f.name: record.view(memory, f.name) for f in record.fields}
            return {name: view.index_select(0, rows) for name, view in views.items()}
        records = self.gather(rows)
        return {f.name: record.view(records, f.name).contiguous() for f in record.fields}

    def _torch_memory(self) -> Tensor | None:
        """Return the storage's memory if it is on the computing device and no cache is in front of it."""
        location = None if self.store.cache is not None else self.store.location_for()
        memory = None if location is None else location.memory
        return memory if memory is not None and memory.device == self.store.device else None

    # ---- writing

    def reserve_space(self, grads: RowGrads) -> None:
        """Reserve disk space for changes of these rows before a step begins; raise if there is none."""
        if self.store.cache is not None:
            cast(HostCopyCache, self.store.cache).reserve_space(grads.rows)
            return
        rows = grads.rows.cpu()
        self.store.disk_storage().make_room(rows[rows >= 0])

    def scatter_(self, rows: Tensor, records: Tensor) -> None:
        """Replace the records of unique rows; the row -1 is skipped."""
        self.store.writes += 1
        location = self.store.location_for()
        if location is not None:
            ops.scatter_(location, rows, records)
            return
        wanted = rows.to("cpu")
        present = wanted >= 0
        if not bool(present.all()):
            wanted, records = wanted[present], records[present.to(records.device)]
        self._host_access().scatter_(wanted, records)

    def write_fields_(self, rows: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Replace fields of unique rows: the inverse of `read_fields`."""
        store, memory = self.store, self._torch_memory()
        store.writes += 1
        if memory is not None:
            for name, values in fields.items():
                store.record.view(memory, name).index_copy_(0, rows, values)
            return
        records = torch.zeros((len(rows), store.record.nbytes), dtype=torch.uint8, device=store.device)
        for name, values in fields.items():
            store.record.view(records, name).copy_(values)
        self.scatter_(rows, records)

    def write_weights_(self, rows: Tensor, values: Tensor) -> None:
        """Replace the weights of unique rows; their state stays."""
        store = self.store
        store.writes += 1
        location, field = store.location_for(), store.config.weight
        if location is None:
            self.write_fields_(rows, self.read_fields(rows) | {WEIGHT: values})
            return
        # The bytes between the weight and the next field are padding.
        beginnings = torch.zeros((len(rows), store.record.padded), dtype=torch.uint8, device=store.device)
        beginnings[:, : field.nbytes].view(field.dtype).copy_(values)
        ops.scatter_(location, rows, beginnings)


def last_of_each(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return unique rows and their values; of several values for a row, the last one."""
    unique, inverse = torch.unique(rows, return_inverse=True)
    if len(unique) == len(rows):
        return rows, values
    positions = torch.arange(len(rows), device=rows.device)
    last = torch.zeros_like(unique).scatter_reduce_(0, inverse, positions, "amax")
    return unique, values[last.to(values.device)]


# ---- tables on several ranks: sharded rows; gradients of shards and replicas


READ, WRITE, GRADIENTS = "a read", "a write", "the gradients"
"""Names of exchanges in errors."""
SAMPLE = 4096  # rows that ranks compare: of replicas in every exchange, and of given weights
DENSE_SAMPLE = 64  # dense parameters that ranks compare, and elements of each
LAST_COMPARED = 1024  # the step after which ranks no longer compare dense parameters
UNEQUAL = (
    "the replicas of this table are not equal on all ranks: call torch.manual_seed with the same number "
    "on every rank before building it, or pass seed=; train it with the same options, load the same "
    "checkpoint and write the same rows on every rank; or build it with replicate=False"
)
LOOKUP = {True: "a lookup", False: "a lookup without gradients"}
"""Names of lookups, by whether they record gradients. Ranks raise if some train while others evaluate."""


def shard_config(
    config: Config,
    shard: str | None,
    *,
    replicate: bool,
    mesh: DeviceMesh | None = None,
    process_group: Any = None,
) -> tuple[Config, RowShards | None]:
    """Return the config of this rank's rows, and the `RowShards`, or None if this rank holds all rows.

    With several ranks, all of them call this, with the same options. Without a seed, they use the first
    rank's.
    """
    if shard not in (None, "row"):
        raise ValueError(f'shard must be "row" or None; found {shard!r}')
    if shard is None:
        if mesh is not None or process_group is not None:
            raise ValueError('mesh and process_group are for shard="row"; found shard=None')
        return config, None
    group = group_of(mesh, process_group)
    n_ranks, n_all = (1, 1) if group is None else (dist.get_world_size(group), dist.get_world_size())
    if replicate and n_ranks < n_all:
        raise ValueError(
            f"the rows are sharded across {n_ranks} of {n_all} ranks, and gradients would not be averaged "
            f"with the other ranks: shard them across all ranks, or pass replicate=False if the tables differ"
        )
    if not replicate and n_ranks == n_all:
        raise ValueError('shard="row" shards one table, and replicate=False asks for several: leave it out')
    if n_ranks == 1:
        return part_of(config, 0, 1, config.n_rows), None
    shards = RowShards(config.n_rows, group)
    with shards.failing_together("building"):
        part = part_of(config, shards.rank, shards.n_ranks, shards.n_local(config.n_rows))
    given = {**config.describe(), "dim": config.dim, "dtype": config.dtype, "storage": config.storage}
    given["a file to continue from"] = part.path is not None and part.path.exists()
    if "seed" not in config.given:
        given["seed"] = "drawn"
    shards.agree("building", {"num_embeddings": config.n_rows, **given})
    return replace(part, seed=shards.channel.first(part.seed, doing=shards.describe("building"))), shards


class ShardedRowIO:
    """Access to the rows of all ranks, by the methods that `RowIO` has for the rows of one rank.

    All ranks call every method. Their rows may differ, and a rank may have none.
    """

    def __init__(self, local: RowIO, shards: RowShards) -> None:
        self.local, self.shards, self.store = local, shards, local.store

    def exchange(self, doing: str, route: Route, *, admits: bool = False) -> Exchanged:
        """Tell owners which rows are needed. With `admits`, the owners admit them to their caches."""
        self._lay_out(doing)
        exchanged = self.shards.exchange(doing, route)
        if admits:
            self._admit(exchanged.rows)
        return exchanged

    def exchange_again(self, doing: str, batch: LookupBatch, *, admits: bool) -> LookupBatch:
        """Use the exchange of a prefetched batch if all ranks do; otherwise exchange its rows now."""
        assert batch.exchanged is not None
        self._lay_out(doing)
        exchanged = self.shards.exchange_again(doing, batch.exchanged)
        cache = self.store.cache
        if exchanged is batch.exchanged and cache is not None and cache.protects(batch):
            return batch
        if admits:
            self._admit(exchanged.rows)
        return replace(batch, exchanged=exchanged, cache=None, admission=None)

    def _lay_out(self, doing: str) -> None:
        """Make this rank's rows readable, or raise on all ranks, before other ranks wait for them."""
        with self.shards.failing_together(doing):
            self.store.ensure_layout()

    def _admit(self, rows: Tensor) -> None:
        with self.shards.channel.posting_failures():
            cache = self.store.ensure_cache(len(rows))
            if cache is not None:
                cache.admit(to_int32_keys(rows, self.store.config.n_rows))

    def weights(self, rows: Tensor, batch: LookupBatch | None = None) -> Tensor:
        """Read the weights of rows, (n,) → (n, dim), on the computing device. `batch`: the rows' lookup."""
        exchanged = None if batch is None else batch.exchanged
        if exchanged is None:
            exchanged = self.exchange(READ, self.shards.route(rows))
        with self.shards.channel.posting_failures():
            held = self.local.weights(exchanged.rows, batch)
        return self.shards.to_askers(exchanged, held)

    def read_fields(self, rows: Tensor) -> dict[str, Tensor]:
        """Read all fields of rows, which must be in range, to new tensors on the computing device."""
        record, exchanged = self.store.record, self.exchange(READ, self.shards.route(rows))
        with self.shards.channel.posting_failures():
            held = self.local.gather(exchanged.rows)
        records = self.shards.to_askers(exchanged, held)
        return {f.name: record.view(records, f.name).contiguous() for f in record.fields}

    def write_weights_(self, rows: Tensor, values: Tensor) -> None:
        """Replace the weights of unique rows. Of several ranks that write a row, the last one counts."""
        exchanged = self.exchange(WRITE, self.shards.route(rows))
        received = self.shards.to_owners(exchanged, values)
        self.local.write_weights_(*last_of_each(exchanged.rows, received))


# ---- gradients


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
