"""The factory of storages and caches: the only file that chooses an implementation, and a cache's size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels import RecordLocation, use_triton
from flatbed.kernels.cache import CacheIndex
from flatbed.tables import initializers
from flatbed.tables.cache.base import Cache
from flatbed.tables.cache.gpu import GpuCache
from flatbed.tables.cache.host_copy import HostCopyCache
from flatbed.tables.cache.write_behind import MemoryWriter, WriteBehind
from flatbed.tables.config import Config
from flatbed.tables.record import Record
from flatbed.tables.storage.base import CPU, Fill, MemoryStorage, Storage, device_storage, host_storage
from flatbed.tables.storage.disk import DiskStorage, ReadOnlyStorage

DEFAULT_BATCHES = 4  # batches that a cache of the default size holds
WARM_ROWS = 1 << 16  # rows that `warm` admits at once
SHARE = 4  # a cache of the default size takes at most this fraction of the GPU's free memory


def create_storage(
    config: Config,
    record: Record,
    device: torch.device,
    *,
    fill: Fill,
    zero: bool = False,
    meta: Mapping[str, Any],
) -> Storage:
    """Allocate and fill a table's records.

    `zero`: `fill` writes zeros. It is skipped for memory, since new memory is zero.
    """
    if config.path is not None:
        return DiskStorage.create(config.path, record, config.n_rows, fill=fill, meta=meta)
    storage = (host_storage if config.storage == "host" else device_storage)(record, config.n_rows, device)
    if not zero:
        storage.fill_(0, config.n_rows, fill)
    return storage


def open_storage(config: Config) -> tuple[DiskStorage | ReadOnlyStorage, Config]:
    """Open the file of a disk table; raise if it differs from the table that was asked for.

    Returns the config with the file's initializer and seed, too.
    """
    assert config.path is not None
    storage = ReadOnlyStorage(config.path) if config.read_only else DiskStorage.open(config.path)
    weight, about = storage.record.weight, storage.meta.get("table", {})
    rank, n_ranks = about.get("shard", [0, 1])
    if (rank, n_ranks) != (config.shard_rank, config.n_shards):
        storage.close()
        raise FlatbedError(
            f"{config.path} holds the rows of rank {rank} of {n_ranks}, and was opened by rank "
            f'{config.shard_rank} of {config.n_shards}: open it by flatbed.Embedding(…, shard="row") with '
            f"the path that it was made with, on as many ranks"
        )
    given = {name: value for name, value in config.describe().items() if name in config.given & about.keys()}
    asked = {"size": f"{config.n_rows} × {config.dim}", "dtype": config.dtype, **given}
    found = {**about, "size": f"{storage.n_rows} × {weight.count}", "dtype": weight.dtype}
    for name, wanted in asked.items():
        if found[name] != wanted:
            storage.close()
            raise FlatbedError(
                f"{config.path} holds a table with {name}={found[name]}; asked for {wanted}. Ask for what it "
                f"has (flatbed.load_table reads it from the file), or choose another path"
            )
    if "init" in about:
        config = replace(config, init=initializers.from_json(about["init"]), seed=int(about["seed"]))
    return storage, config


def slots_for(config: Config, record: Record, device: torch.device, n_wanted: int) -> int:
    """Return the size of the cache in rows: the configured one, or else `n_wanted`.

    `n_wanted` is limited by the free memory of the GPU. On a CPU it counts as 0.
    """
    if config.cache_rows is not None:
        return min(config.cache_rows, config.n_rows)
    if config.cache_bytes is not None:
        if 0 < config.cache_bytes < record.nbytes:
            raise FlatbedError(
                f"cache_bytes={config.cache_bytes} has no room for a single record, which takes "
                f"{record.nbytes} bytes: give more, or 0 for no cache"
            )
        return min(config.cache_bytes // record.nbytes, config.n_rows)
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = free // SHARE - 4 * config.n_rows
    return max(0, min(n_wanted, config.n_rows, room // record.nbytes))


def build_cache(storage: Storage, n_slots: int, *, policy: str, device: torch.device) -> Cache:
    """Build a cache. Kernels move its records if they reach the storage; otherwise the host copies them."""
    try:
        with torch.inference_mode(False):
            if isinstance(storage, MemoryStorage):
                storage.check()
                if storage.reach == device and use_triton(device):
                    return GpuCache(storage, n_slots, policy=policy, device=device)
            index_device = device if use_triton(device) else CPU
            index = CacheIndex(storage.n_rows, n_slots, policy=policy, device=index_device)
            writer: WriteBehind | MemoryWriter
            if isinstance(storage, DiskStorage):
                writer = WriteBehind(storage, index)
            else:
                writer = MemoryWriter(storage)
            return HostCopyCache(storage, index, device=device, writer=writer)
    except torch.OutOfMemoryError as error:
        raise FlatbedError(
            f"a cache of {n_slots} rows of {storage.record.nbytes} bytes, and 4 bytes for each of the "
            f"{storage.n_rows} rows of the table, do not fit on {device}: use fewer with cache_rows or "
            f"cache_bytes ({error})"
        ) from error


def warm(cache: Cache, rows: Tensor, counts: Tensor) -> None:
    """Admit unique rows in the order given; `counts` says how often each is used.

    Pass them in ascending order of use, so that the most used rows are admitted last.
    """
    index = cache.index
    for some, times in zip(torch.split(rows, WARM_ROWS), torch.split(counts, WARM_ROWS), strict=True):
        cache.admit(some.to(cache.device))
        if index.policy == "lfu":
            slots = index.slot_of_row[some.to(index.clock.device)].long()
            is_cached = slots >= 0
            index.frequency[slots[is_cached]] += times.to(index.clock.device).float().log2()[is_cached]


def location_of(storage: Storage, device: torch.device) -> RecordLocation | None:
    """Return where a device's kernels and torch operations find the records; None if they cannot."""
    if storage.memory is None:
        return None
    storage.check()
    is_reached = storage.device == device or (storage.reach == device and use_triton(device))
    return RecordLocation(storage.memory) if is_reached else None
