"""Files of tables and folders of checkpoints: making a table from them, and checking them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flatbed.checkpoint.folder import CURRENT, MANIFEST, check_files, reading
from flatbed.errors import FlatbedError
from flatbed.tables.config import Config
from flatbed.tables.files import as_path
from flatbed.tables.record import WEIGHT
from flatbed.tables.saving import config_of, inspect, load
from flatbed.tables.storage.disk import DiskStorage, ReadOnlyStorage
from flatbed.tables.storage.disk.format import is_disk_table
from flatbed.tables.storage.disk.open_files import forget_sums
from flatbed.tables.storage.disk.recovery import is_prepared
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import check_tensors


def load_table(
    path: str | Path,
    *,
    name: str | None = None,
    storage: str | None = None,
    to: str | Path | None = None,
    device: Any = None,
    replicate: bool = True,
    read_only: bool = False,
) -> Table:
    """Make a new table from any table file, or from a folder of `save_checkpoint`.

    The file of a table with ``storage="disk"`` is opened in place, as its last checkpoint left it. Other
    files are copied into a table of any storage, "host" by default: files of `table.save`, and safetensors
    files of torch whose only tensor is "weight" (rows, dim). With ``storage="disk"``, `to` names the new
    file. The first optimizer that keeps the file's state continues with it.

    In a folder, `name` says which table to load, "items" or "items.weight" for example. It is needed if there
    are several tables. The new table has all rows, whatever the number of ranks that saved it.

    ``read_only=True`` opens the file of a disk table for serving, without lock or write access. Several
    processes can do so at once, also while another process trains the table. Its rows are from the last
    completed checkpoint, and follow later checkpoints.

    >>> import flatbed, tempfile
    >>> path = tempfile.mkdtemp() + "/items.safetensors"
    >>> flatbed.Embedding(1000, 8).table.save(path)
    >>> flatbed.load_table(path)
    Table(1000 × 8, torch.float32, host)
    """
    path, target = as_path(path).absolute(), None if to is None else as_path(to, "to").absolute()
    if name is not None and not path.is_dir():
        raise ValueError(f"name is for folders of flatbed.save_checkpoint, and {path} is none: leave it out")
    if is_disk_table(path):
        if storage not in (None, "disk") or target is not None:
            raise ValueError(
                f'{path} is the file of a table with storage="disk" and opens in place; found '
                f"storage={storage!r}, to={to}: leave both out, or load a copy made by table.save"
            )
        table = Table(_config_of_disk_table(path, read_only=read_only), device=device, replicate=replicate)
        table.requires_grad_(not read_only)
        return table
    if read_only:
        if not path.is_dir():
            inspect(path)  # raises for the damaged file of a disk table
        raise ValueError(
            f'read_only=True is for the file of a table with storage="disk", which {path} is not: give that '
            "file, or leave read_only out to load a copy"
        )
    storage = storage or "host"
    if (storage == "disk") != (target is not None):
        raise ValueError(f'`to` names the new file of storage="disk"; found storage={storage!r}, to={to}')
    if target is not None and target.exists():
        raise FlatbedError(f"{target} exists already: load it, choose another path, or delete it first")
    is_checkpoint = (path / CURRENT).exists() or (path / MANIFEST).exists()
    with _in_checkpoint(path, name) if is_checkpoint else nullcontext(path) as file:
        found = inspect(file)
        config = config_of(found.about, found.n_rows, found.record.weight, storage=storage, path=target)
        table = Table(config, device=device, replicate=replicate)
        load(table, file)
    return table


@contextmanager
def _in_checkpoint(folder: Path, name: str | None) -> Iterator[Path]:
    """Yield the file of a table in a checkpoint, checked; saves of other processes do not remove it."""
    with reading(folder) as (version, manifest):
        tables = manifest["tables"]
        wanted = [key for key in tables if name in (None, key, key.removesuffix(f".{WEIGHT}"))]
        if len(wanted) != 1:
            found = ", ".join(key.removesuffix(f".{WEIGHT}") for key in tables) or "none"
            raise FlatbedError(f"{version} holds the tables {found}; found name={name!r}: give one of these")
        file = tables[wanted[0]]
        if file is None:
            own = manifest["paths"].get(wanted[0], "PATH")
            raise FlatbedError(
                f"the rows of {wanted[0]} are not in {version}, but in the table's own file, {own}: "
                f"flatbed.load_table({own!r}), or save with copy_disk_tables=True"
            )
        if file in manifest["files"]:
            check_tensors(version / file, manifest["files"][file])
        yield version / file


def _config_of_disk_table(path: Path, *, read_only: bool) -> Config:
    storage = ReadOnlyStorage(path) if read_only else DiskStorage.open(path)
    storage.close()
    about, weight = storage.meta.get("table", {}), storage.record.weight
    found = config_of(about, storage.n_rows, weight, storage="disk", path=path)
    # A cache would keep rows of earlier checkpoints.
    return replace(found, read_only=True, cache_rows=0) if read_only else found


def check_path(path: Path, *, forget: bool = False) -> str:
    """Check a checkpoint's folder or a table's file, and return what was found; raise for damage.

    With `forget`, remove the checksums of a table on disk instead.
    """
    if forget:
        if path.is_dir():
            raise FlatbedError(f"--forget takes the file of a table on disk (.bed); found the folder {path}")
        forget_sums(path)
        return f"{path}: its rows are taken as they are, and get checksums when they change"
    if path.is_dir():
        with reading(path) as (version, manifest):
            check_files(version, manifest)
            for file in filter(None, manifest["tables"].values()):
                inspect(version / file)
            others = [_check_own_file(name, version, manifest) for name in manifest["paths"]]
            found = f"{version}: all {len(manifest['files'])} files are as they were written"
            return "\n".join((found, *others))
    return _check_file(path)


def _check_own_file(name: str, version: Path, manifest: dict[str, Any]) -> str:
    """Check the file of a table on disk that a checkpoint refers to.

    The path relative to the folder is tried first, so that a copy of the folder finds the copied file. The
    saved path is tried next.
    """
    saved, n_ranks = Path(manifest["paths"][name]), manifest["shards"].get(name, 1)
    if n_ranks > 1:
        return f"the rows of {name} are in files of {n_ranks} ranks, {saved.name}.*: check them, too"
    places = (Path(os.path.normpath(version.parent / manifest["relative_paths"][name])), saved)
    found = [path for path in places if path.exists()]
    if not found:
        raise FlatbedError(
            f"the rows of {name} were in {saved} when {version} was saved, which is missing: put the file "
            "back, or, if it was moved, check it where it is now"
        )
    path = next((path for path in found if _has_checkpoint(path, manifest["token"])), None)
    if path is None:
        raise FlatbedError(
            f"{found[0]} (table {name}) is not as it was when {version} was saved: it is another file, or "
            "had a later checkpoint, in another folder for example. Put a copy of the file from then in its "
            "place"
        )
    return _check_file(path)


def _has_checkpoint(path: Path, token: str) -> bool:
    """Return whether a table's file has the rows of a checkpoint, or gets them when it is opened."""
    with closing(ReadOnlyStorage(path)) as storage:
        # `meta_of` is asked twice, since another process may complete the checkpoint meanwhile.
        return any(test(token) for test in (storage.meta_of, partial(is_prepared, path), storage.meta_of))


def _check_file(path: Path) -> str:
    if is_disk_table(path):
        with closing(ReadOnlyStorage(path)) as storage:
            n_rows, n_checked = storage.n_rows, storage.check_rows()
        if n_checked:
            unknown = f"; {n_rows - n_checked:,} have no checksum" if n_checked < n_rows else ""
            return f"{path}: {n_checked:,} of {n_rows:,} rows are as they were written{unknown}"
    else:
        n_rows = inspect(path).n_rows
    return f"only header and size were checked, and are right: {path}, {n_rows:,} rows without checksums"
