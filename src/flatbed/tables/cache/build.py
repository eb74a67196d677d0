"""Which cache a table gets, and how large."""

from __future__ import annotations

import torch

from flatbed.errors import FlatbedError
from flatbed.kernels.dispatch import use_triton
from flatbed.tables.cache.device import DeviceCache
from flatbed.tables.cache.host import HostCache
from flatbed.tables.config import Config
from flatbed.tables.record import Record
from flatbed.tables.storage.base import Storage

Cache = DeviceCache | HostCache
BATCHES = 4  # that a cache has room for, if nobody says how large it should be
SHARE = 4  # of the GPU's free memory, at most one part in so many


def slots_for(config: Config, record: Record, device: torch.device, n_ids: int) -> int:
    """How many records are to be kept, given a batch of so many ids; 0: no cache."""
    if config.storage == "device":
        return 0
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
    return max(0, min(BATCHES * n_ids, config.n_rows, room // record.nbytes))


def build(home: Storage, n_slots: int, *, policy: str, device: torch.device) -> Cache:
    """A cache over a tier: kernels decide, if they reach its records."""
    home.check()
    try:
        with torch.inference_mode(False):
            if home.reach == device and use_triton(device):
                return DeviceCache(home, n_slots, policy=policy, device=device)
            return HostCache(home, n_slots, policy=policy, device=device)
    except torch.OutOfMemoryError as error:
        raise FlatbedError(
            f"a cache of {n_slots} rows of {home.record.nbytes} bytes, and 4 bytes for each of the "
            f"{home.n_rows} rows of the table, do not fit on {device}: use fewer with cache_rows or "
            f"cache_bytes ({error})"
        ) from error
