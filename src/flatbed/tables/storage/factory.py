"""The factory of storages: the only place that chooses an implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flatbed.errors import FlatbedError
from flatbed.tables import initializers as initial
from flatbed.tables.config import Config
from flatbed.tables.record import Record
from flatbed.tables.storage.base import Fill, Storage
from flatbed.tables.storage.disk import DiskStorage, ReadOnlyStorage
from flatbed.tables.storage.memory import device_storage, host_storage


def create_storage(
    config: Config,
    record: Record,
    device: torch.device,
    *,
    fill: Fill,
    zero: bool = False,
    meta: Mapping[str, Any],
) -> Storage:
    """Allocate and fill a table's records. `zero`: `fill` writes zeros, which memory holds already."""
    if config.path is not None:
        return DiskStorage.create(config.path, record, config.n_rows, fill=fill, meta=meta)
    storage = (host_storage if config.storage == "host" else device_storage)(record, config.n_rows, device)
    if not zero:
        storage.fill_(0, config.n_rows, fill)
    return storage


def open_storage(config: Config) -> tuple[DiskStorage | ReadOnlyStorage, Config]:
    """Open the file of a disk table. Returns a config with the file's initializer, too."""
    assert config.path is not None
    storage = ReadOnlyStorage(config.path) if config.read_only else DiskStorage.open(config.path)
    weight, found = config.weight, storage.record.weight
    if (storage.n_rows, found.count, found.dtype) != (config.n_rows, weight.count, weight.dtype):
        storage.close()
        raise FlatbedError(
            f"{config.path} holds a table of {storage.n_rows} × {found.count} in {found.dtype}; asked "
            f"for {config.n_rows} × {weight.count} in {weight.dtype}. Ask for what it holds "
            f"(flatbed.load_table reads it from the file), or choose another path"
        )
    about = storage.meta.get("table", {})
    if "init" in about:
        config = replace(config, init=initial.described(about["init"]), seed=int(about["seed"]))
    return storage, config
