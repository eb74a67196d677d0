"""Loading a checkpoint: everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flatbed.checkpoint.folder import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    Current,
    Training,
    as_folder,
    damaged,
    read_current,
    read_json,
)
from flatbed.checkpoint.state import DAMAGE, check_same, dense_state, load_all, unpack
from flatbed.errors import FlatbedError
from flatbed.tables import saving
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import read_tensors


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of `save_checkpoint` into the same model, optimizers and tables; returns `extra`.

    Everything is checked first, and nothing changes if it does not fit. Without optimizers, state of dense
    parameters is left out; tables are loaded with their state. With torch.distributed, all ranks call this.
    """
    folder, training = as_folder(folder), Training.of(model, optimizer)
    current = read_current(folder)
    path = folder / current.version
    manifest = read_manifest(path, current)
    values = _model_values(path, manifest, training.model)
    states = _optimizer_states(path, manifest, training.optimizers)
    readers = [
        _table_reader(path, name, training.tables[name], file=manifest["tables"][name], token=current.token)
        for name in _same_names(path, "tables", manifest["tables"], training.tables)
    ]
    load_all(training.optimizers, states)
    training.model.load_state_dict(values, strict=False)
    for read in readers:
        read()
    return dict(manifest["extra"])


def read_manifest(path: Path, current: Current) -> dict[str, Any]:
    """Read and check the list of contents of a version."""
    found = read_json(path / MANIFEST)
    try:
        if found["format"] != FORMAT or found["token"] != current.token:
            raise ValueError("it belongs to something else")
        if found["version"] != FORMAT_VERSION:
            raise FlatbedError(
                f"{path} has version {found['version']} of the format, and this flatbed knows version "
                f"{FORMAT_VERSION}: load it with the flatbed that wrote it"
            )
        kinds = {"model": dict, "tables": dict, "extra": dict, "n_optimizers": int}
        for key, kind in kinds.items():
            if not isinstance(found[key], kind):
                raise TypeError(f"{key} is {found[key]!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path / MANIFEST, error) from error
    return dict(found)


def _model_values(path: Path, manifest: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Read the model's state dict, and check that it fits."""
    file = path / "model.safetensors"
    tensors = read_tensors(file)
    try:
        values = {name: unpack(value, tensors) for name, value in manifest["model"].items()}
    except DAMAGE as error:
        raise damaged(file, error) from error
    ours = dense_state(model)
    for name in _same_names(path, "parameters and buffers", values, ours):
        mine, saved = ours[name], values[name]
        if not isinstance(mine, Tensor) or nn.parameter.is_lazy(mine):
            continue
        if not isinstance(saved, Tensor) or saved.shape != mine.shape:
            found = tuple(saved.shape) if isinstance(saved, Tensor) else saved
            raise FlatbedError(f"'{name}' is {found} in {path}, and {tuple(mine.shape)} in the model")
    return values


def _same_names(path: Path, what: str, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return the names, which must be the same in checkpoint and model."""
    missing = [name for name in ours if name not in saved]
    unknown = [name for name in saved if name not in ours]
    if missing or unknown:
        raise FlatbedError(
            f"{path} is of another model: of the {what}, the checkpoint lacks {missing[:4] or 'none'}, and "
            f"the model lacks {unknown[:4] or 'none'}"
        )
    return list(ours)


def _optimizer_states(
    path: Path, manifest: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    if not optimizers:
        return []
    if manifest["n_optimizers"] != len(optimizers):
        raise FlatbedError(
            f"{path} holds the state of {manifest['n_optimizers']} optimizers; found {len(optimizers)} to "
            "load it into. Pass as many, in the same order, or none"
        )
    file, states = path / "optimizer.json", []
    kept = read_json(file)
    for number, optimizer in enumerate(optimizers):
        tensors = read_tensors(path / f"optimizer-{number}.safetensors")
        try:
            about = kept[number]
            state, shapes = unpack(about["state"], tensors), about["shapes"]
        except DAMAGE as error:
            raise damaged(file, error) from error
        check_same(optimizer, state, shapes, where=f"{path} (optimizer {number})")
        states.append(state)
    return states


def _table_reader(path: Path, name: str, table: Table, *, file: Any, token: str) -> Callable[[], None]:
    """Check that a table fits, and return the function that reads it."""
    if file is not None:
        found = saving.inspect(path / str(file))
        saving.check_fit(table, found)
        return partial(saving.read_into, table, found)
    if table.storage != "disk":
        raise FlatbedError(
            f"the rows of {name} are not in {path}, but in the table's own file: build it with "
            f'storage="disk" and that path, or save with copy_disk_tables=True'
        )
    if not table._storage.has_token(token):
        raise FlatbedError(
            f"{table._storage.config.path} (table {name}) is not as it was when {path.parent} was saved: "
            "it is another file, or had a later checkpoint (table.checkpoint(), table.close(), resize, or a "
            "checkpoint in another folder). Load the folder that was saved last, put a copy of the file from "
            "then in its place, or save with copy_disk_tables=True from now on"
        )
    return partial(_revert, table)


def _revert(table: Table) -> None:
    """Let a disk table go back to its file's checkpoint."""
    scalars = table._storage.revert()
    if table._owner is None:
        table._storage.adopt_state(scalars)
    else:
        table._storage.set_scalars(scalars)
