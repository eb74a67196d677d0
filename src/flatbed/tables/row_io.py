"""Rows by number, read and written on the computing device: in the cache, in storage, or on other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.distributed.row_shards import Exchanged, Route, RowShards, group_of
from flatbed.kernels import rows as ops
from flatbed.kernels.rows import to_int32_keys
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.cache.host_copy import HostCopyCache
from flatbed.tables.config import Config, part_of
from flatbed.tables.grads import RowGrads
from flatbed.tables.record import WEIGHT
from flatbed.tables.row_store import RowStore
from flatbed.tables.storage.base import Storage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


# ---- tables whose rows are sharded across ranks


READ, WRITE = "a read", "a write"
"""Names of exchanges in errors."""
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
