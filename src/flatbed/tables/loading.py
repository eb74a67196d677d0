"""Making tables from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatbed.errors import FlatbedError
from flatbed.tables.config import Config
from flatbed.tables.record import Record
from flatbed.tables.saving import TableFile, inspect, is_disk_table, read_into
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.table import Table, make
from flatbed.tables.tensor_file import as_path


def load_table(
    path: str | Path,
    *,
    storage: str | None = None,
    to: str | Path | None = None,
    device: Any = None,
    replicate: bool = True,
) -> Table:
    """A new table from any table file.

    The file of a table with ``storage="disk"`` is opened in place, as its last checkpoint left it. A file of
    `table.save`, or a safetensors file of torch with a tensor "weight" (rows, dim) alone, is copied into a
    table of any storage, "host" by default; with ``storage="disk"``, `to` names its file. The first optimizer
    that keeps the file's state continues with it.
    """
    path, target = as_path(path).absolute(), None if to is None else as_path(to, "to").absolute()
    if is_disk_table(path):
        if storage not in (None, "disk") or target is not None:
            raise ValueError(
                f'{path} is the file of a table with storage="disk" and opens in place; found '
                f"storage={storage!r}, to={to}: leave both out, or load a copy made by table.save"
            )
        return make(_config_of_disk_table(path), device, replicate=replicate)
    storage = storage or "host"
    if (storage == "disk") != (target is not None):
        raise ValueError(f'`to` names the new file of storage="disk"; found storage={storage!r}, to={to}')
    if target is not None and target.exists():
        raise FlatbedError(f"{target} exists already: load it, choose another path, or delete it first")
    found = inspect(path)
    table = make(found.config(storage, target), device, replicate=replicate)
    read_into(table, found)
    return table


def _config_of_disk_table(path: Path) -> Config:
    storage = DiskStorage.open(path)
    storage.close()
    record = Record((storage.record.weight,))
    return TableFile(path, storage.n_rows, record, {}, storage.meta.get("table", {})).config("disk", path)
