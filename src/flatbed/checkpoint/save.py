"""Saving a checkpoint, atomically over all of its files and ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flatbed.checkpoint import folder as folders
from flatbed.checkpoint.folder import CURRENT, MANIFEST, Training
from flatbed.checkpoint.state import Packer, dense_state, optimizer_parts
from flatbed.distributed.ranks import Ranks
from flatbed.errors import FlatbedError
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import sync_folder, write_tensors, write_text


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    copy_disk_tables: bool = False,
) -> None:
    """Save model, optimizers and tables as one unit: a crash leaves this checkpoint or the last one.

    `extra` is anything JSON can hold (the epoch, say). A table on disk keeps its rows in its own file, which
    then holds the checkpoint of this folder and no older one; ``copy_disk_tables=True`` writes them to the
    folder, like those of other tables. With torch.distributed, all ranks call this, and the first one
    writes, to a folder that all of them see.
    """
    folder, training, ranks = folders.as_folder(folder), Training.of(model, optimizer), Ranks()
    text = _json(extra)
    in_place = [t for t in training.tables.values() if t.storage == "disk" and not copy_disk_tables]
    if ranks.many:
        _check_replicas([t for t in training.tables.values() if t not in in_place])
    token = ranks.token()
    prepared: list[DiskStorage] = []
    version: list[Path] = []

    def undo() -> None:
        with suppress(FlatbedError):
            if folders.has_token(folder, token):
                return  # decided, though perhaps not durably: opening the tables will tell
        for storage in prepared:
            with suppress(FlatbedError):  # the first error is about to be raised
                storage.abort()
        for path in version:
            shutil.rmtree(path, ignore_errors=True)

    with _on_all_ranks(ranks, undo):
        if ranks.first:
            version.append(folders.make_version(folder))
            _write(version[0], training, token, in_place=in_place, extra=text)
        for table in in_place:
            prepared.append(table._storage.prepare_checkpoint(decision=folder / CURRENT, token=token))
    with _on_all_ranks(ranks, undo):
        if ranks.first:
            write_text(folder / CURRENT, json.dumps({"token": token, "version": version[0].name}))
    with _on_all_ranks(ranks, lambda: None):
        for storage in prepared:
            storage.commit()
    if ranks.first:
        folders.remove_others(folder, version[0].name)


@contextmanager
def _on_all_ranks(ranks: Ranks, undo: Callable[[], None]) -> Iterator[None]:
    """Let all ranks succeed, or all of them undo and raise."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    try:
        ranks.agree(failure, "saving a checkpoint")
    except BaseException:
        undo()
        raise


def _json(extra: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(dict(extra or {}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra must be a dict that JSON can hold: {error}") from error


def _check_replicas(tables: Sequence[Table]) -> None:
    if any(not table.replicate for table in tables):
        raise FlatbedError(
            "a table with replicate=False may differ from rank to rank, and a checkpoint is written by the "
            "first rank alone: save it on every rank with table.save(path), and the rest without it"
        )


def _write(path: Path, training: Training, token: str, *, in_place: Sequence[Table], extra: str) -> None:
    """Write all files of a version."""
    packer = Packer(tied=True)
    model = {name: packer.pack(value, name) for name, value in dense_state(training.model).items()}
    # Ties are named in the metadata, as safetensors.torch.save_model does.
    write_tensors(path / "model.safetensors", packer.tensors, {"format": "pt", **packer.ties})
    optimizers = []
    for number, optimizer in enumerate(training.optimizers):
        about, tensors = optimizer_parts(optimizer)
        write_tensors(path / f"optimizer-{number}.safetensors", tensors, {"format": "pt"})
        optimizers.append(about)
    write_text(path / "optimizer.json", json.dumps(optimizers))
    tables: dict[str, str | None] = {}
    for number, (name, table) in enumerate(training.tables.items()):
        tables[name] = None
        if not any(table is one for one in in_place):
            tables[name] = f"table-{number}.safetensors"
            table.save(path / f"table-{number}.safetensors")
    manifest = {
        "format": folders.FORMAT,
        "version": folders.FORMAT_VERSION,
        "token": token,
        "model": model,
        "n_optimizers": len(training.optimizers),
        "tables": tables,
        "extra": json.loads(extra),
    }
    write_text(path / MANIFEST, json.dumps(manifest))
    sync_folder(path.parent)
