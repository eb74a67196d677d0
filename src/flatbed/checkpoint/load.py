"""Loading a checkpoint: everything is read and checked before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from flatbed.checkpoint.folder import (
    OPTIMIZERS,
    as_folder,
    check_files,
    damaged,
    read_json,
    read_manifest,
    reading,
)
from flatbed.checkpoint.save import Training
from flatbed.checkpoint.state import (
    DAMAGE,
    check_rng_state,
    check_same,
    dense_state,
    load_all,
    set_rng_state,
    unpack,
    unpacked_state,
)
from flatbed.distributed.ranks import world_size
from flatbed.errors import FlatbedError
from flatbed.tables import saving
from flatbed.tables.storage.disk import ReadOnlyStorage
from flatbed.tables.storage.disk.format import is_disk_table
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import read_tensors

Finish = Callable[[], None]
"""Does the rest of a change, which cannot fail for lack of space or by a wrong file."""


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    rng: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint of `save_checkpoint` into the same model, optimizers and tables; returns `extra`.

    All files are read and checked first, and nothing changes if one of them does not fit, is damaged, or
    finds no space. (Control-C while rows in memory are being replaced leaves them half loaded: load again.)
    What is not passed is left out: without optimizers, tables are loaded without their state. With
    optimizers, a warning names a scheduler or scaler that is left out.
    `folder` may be a version in the folder that ``keep=`` has kept. With torch.distributed, all ranks call
    this.
    """
    folder, training = as_folder(folder), Training.of(model, optimizer, scheduler, scaler)
    with reading(folder) as (path, token), ExitStack() as undo:
        manifest = read_manifest(path, token)
        check_files(path, manifest)
        values = _model_values(path, manifest, training.model)
        states = _optimizer_states(path, manifest, training.optimizers)
        others = _other_states(path, manifest, training, rng=rng)
        names = _same_names(path, "tables", manifest["tables"], training.tables)
        finishes = [
            _begin_table(path, name, training, file=manifest["tables"][name], token=token, undo=undo)
            for name in names
        ]
        _warn_of_other_classes(path, training.optimizers)
        load_all(training.optimizers, states)
        training.model.load_state_dict(values, strict=False)
        for finish in (*finishes, *others):
            finish()
    return dict(manifest["extra"])


def check_path(path: Path) -> str:
    """Check a checkpoint's folder or a table's file, and return what was found; damage raises."""
    if path.is_dir():
        with reading(path) as (version, token):
            manifest = read_manifest(version, token)
            check_files(version, manifest)
            for file in filter(None, manifest["tables"].values()):
                saving.inspect(version / file)
            n_files = len(manifest["files"])
            if not n_files:
                return f"{version}: complete, without checksums (an earlier version of flatbed wrote it)"
            return f"{version}: all {n_files} files are as they were written"
    if is_disk_table(path):
        storage = ReadOnlyStorage(path)
        storage.close()
        n_rows = storage.n_rows
    else:
        n_rows = saving.inspect(path).n_rows
    return f"only header and size were checked, and are right: {path}, {n_rows:,} rows without checksums"


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
    file, states = path / OPTIMIZERS, []
    kept = read_json(file)
    for number, optimizer in enumerate(optimizers):
        tensors = read_tensors(path / f"optimizer-{number}.safetensors")
        try:
            about = kept[number]
            state = unpack(about["state"], tensors)
            check_same(optimizer, state, about["shapes"], where=f"{path} (optimizer {number})")
        except FlatbedError:
            raise
        except DAMAGE as error:
            raise damaged(file, error) from error
        states.append(state)
    return states


def _warn_of_other_classes(path: Path, optimizers: Sequence[Optimizer]) -> None:
    for about, optimizer in zip(read_json(path / OPTIMIZERS) if optimizers else (), optimizers, strict=True):
        given = type(optimizer).__name__
        saved = about.get("class", given)
        if isinstance(saved, str) and saved != given:
            warnings.warn(
                f"{path} holds the state of {saved}, and {given} goes on with it: build {saved} if that is "
                f"not meant",
                stacklevel=4,
            )


def _other_states(path: Path, manifest: Mapping[str, Any], training: Training, *, rng: bool) -> list[Finish]:
    """Read the state of schedulers, scaler and random generators; returns the functions that load it."""
    file = path / "state.safetensors"
    asked = [("schedulers", len(training.schedulers)), ("scaler", int(training.scaler is not None))]
    found = {"schedulers": len(manifest["schedulers"]), "scaler": int(manifest["scaler"] is not None)}
    for name, n_asked in asked:
        if n_asked and n_asked != found[name]:
            raise FlatbedError(
                f"{path} holds the state of {found[name]} {name}; found {n_asked} to load it into. Pass as "
                "many, in the same order, or none"
            )
    left_out = [name.removesuffix("s") for name, n_asked in asked if found[name] and not n_asked]
    if left_out and training.optimizers:
        given = " and ".join(f"{name}=" for name in left_out)
        warnings.warn(
            f"{path} holds the state of a {' and a '.join(left_out)}, which is not loaded: pass {given}",
            stacklevel=3,
        )
    tensors = read_tensors(file) if file.exists() else {}
    finishes: list[Finish] = []
    pairs = [*zip(training.schedulers, manifest["schedulers"], strict=False)]
    pairs += [] if training.scaler is None else [(training.scaler, manifest["scaler"])]
    try:
        for thing, packed in pairs:
            state = unpacked_state(thing, packed, tensors, where=str(path))
            finishes.append(partial(thing.load_state_dict, state))
        if rng:
            finishes.append(partial(set_rng_state, _rng_of_this_rank(path, manifest["rng"], tensors)))
    except FlatbedError:
        raise
    except DAMAGE as error:
        raise damaged(file, error) from error
    return finishes


def _rng_of_this_rank(path: Path, saved: list[Any], tensors: Mapping[str, Tensor]) -> Any:
    if len(saved) != world_size():
        raise FlatbedError(
            f"{path} holds the random states of {len(saved)} ranks; found {world_size()}: save with "
            "rng=True, on as many ranks, or load without it"
        )
    state = unpack(saved[dist.get_rank() if world_size() > 1 else 0], tensors)
    check_rng_state(state)
    return state


def _begin_table(
    path: Path, name: str, training: Training, *, file: Any, token: str, undo: ExitStack
) -> Finish:
    """Check that a table fits, do what can fail, and return the function that does the rest."""
    table = training.tables[name]
    if file is not None:
        found = saving.inspect(path / file)
        with_state = bool(training.optimizers)
        saving.check_fit(table, found, with_state=with_state)
        return saving.begin_read(table, found, undo=undo, with_state=with_state)
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
