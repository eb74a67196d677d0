"""Saving a checkpoint, atomically over all of its files and ranks."""

from __future__ import annotations

import json
import math
import shutil
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from flatbed.checkpoint import folder as folders
from flatbed.checkpoint.folder import CURRENT, MANIFEST, OPTIMIZERS
from flatbed.checkpoint.state import Packer, dense_state, optimizer_parts, packed_state, rng_state
from flatbed.distributed.dtensor import Sharding, whole
from flatbed.distributed.ranks import Lockstep, Ranks, communicating, world_size
from flatbed.errors import FlatbedError
from flatbed.tables import saving
from flatbed.tables.embedding import named_tables
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import sync_folder, write_tensors, write_text


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that a checkpoint is made of or loaded into."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: Any
    tables: dict[str, Table]

    @property
    def with_state_dicts(self) -> tuple[Any, ...]:
        """Schedulers and scaler."""
        return (*self.schedulers, *(() if self.scaler is None else (self.scaler,)))

    @staticmethod
    def of(model: nn.Module, optimizer: Any, scheduler: Any = None, scaler: Any = None) -> Training:
        """Check the arguments of `save_checkpoint` and `load_checkpoint`."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}")
        optimizers = _several(optimizer)
        for one in optimizers:
            if not isinstance(one, Optimizer):
                raise TypeError(
                    f"optimizer must be a torch.optim.Optimizer, or several; found {type(one).__name__} "
                    f"(there are scheduler=, scaler= and, for what JSON can hold, extra={{…}})"
                )
        schedulers = _several(scheduler)
        for name, one in (*(("scheduler", s) for s in schedulers), ("scaler", scaler)):
            is_wrong = isinstance(one, Optimizer | nn.Module) or not hasattr(one, "load_state_dict")
            if one is not None and is_wrong:
                raise TypeError(
                    f"{name} must have state_dict and load_state_dict; found {type(one).__name__}"
                )
        tables = dict(named_tables(model))
        known = {id(table) for table in tables.values()}
        for one in optimizers:
            for param in (p for group in one.param_groups for p in group["params"]):
                if isinstance(param, Table) and id(param) not in known:
                    raise FlatbedError(
                        f"{type(one).__name__} has a table that is not in the model ({param!r}): pass a "
                        "module that holds all of them, nn.ModuleList([model, embedding]) for example"
                    )
        return Training(model, optimizers, schedulers, scaler, tables)


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) else (given,)


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    rng: bool = False,
    extra: Mapping[str, Any] | None = None,
    keep: int = 1,
    copy_disk_tables: bool = False,
) -> None:
    """Save model, optimizers and tables as one unit: a crash leaves this checkpoint or the last one.

    `scheduler` (one or several) and `scaler` are saved with their state dicts; ``rng=True`` saves the random
    generators of torch, Python and numpy. `extra` is a dict that JSON does not change (the epoch, say). The
    last `keep` versions stay in the folder. A table on disk keeps its rows in its own file, which then holds
    the checkpoint of this folder and no older one; ``copy_disk_tables=True`` writes them to the folder, like
    those of other tables. Saves of several processes to one folder wait for each other. With
    torch.distributed, all ranks call this, with a folder that all of them see. The first one writes, except
    for tables with ``shard="row"``: all ranks write those together, in files that any number of ranks loads.
    """
    folder, ranks = folders.as_folder(folder), Ranks()
    training = Training.of(model, optimizer, scheduler, scaler)
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep must be at least 1, the version that is being saved; found {keep!r}")
    checked = _checked_extra(extra)
    _warn_of_left_out_optimizers(training)
    in_place = [t for t in training.tables.values() if t.storage == "disk" and not copy_disk_tables]
    if ranks.many:
        _check_replicas([t for t in training.tables.values() if t not in in_place])
    ranks.meet("flatbed.save_checkpoint")
    random = _rng_of_all_ranks(ranks) if rng else []
    token = ranks.token()
    prepared: list[DiskStorage] = []
    version: list[Path] = []

    def undo() -> None:
        with suppress(FlatbedError):
            if folders.has_token(folder, token):
                return  # decided, though perhaps not durably: the next change of a table completes it
        for path in version:
            shutil.rmtree(path, ignore_errors=True)

    with ExitStack() as held, Lockstep(ranks, "saving a checkpoint", undo) as lockstep:
        held.callback(_release, prepared)
        if ranks.first:
            held.enter_context(folders.saving(folder))
            version.append(folders.make_version(folder, token))
        lockstep.meet()
        name = ranks.of_first(version[0].name if version else None)
        model_values, files = _write_dense(folder / name, training, lockstep)
        for table, file in _files(training, in_place).values():
            if file is not None and table._shards is not None:
                files[file] = saving.write_together(table, folder / name / file, lockstep)
        if ranks.first:
            contents = {"token": token, "model": model_values, "extra": checked}
            _write_alone(version[0], training, contents, in_place=in_place, rng=random, files=files)
        for table in in_place:
            storage = table._store.disk_storage()
            prepared.append(storage)
            table._store.prepare_checkpoint(decision=folder / CURRENT, token=token)
        lockstep.meet()
        if ranks.first:
            kept = _write_current(folder, name, token, keep=keep)
        lockstep.meet()
        version.clear()  # nothing to undo
        for storage in prepared:
            storage.commit()
        lockstep.meet()
        if ranks.first:
            folders.remove_others(folder, kept)


def _warn_of_left_out_optimizers(training: Training) -> None:
    for name, table in training.tables.items():
        owner = table._owner
        if owner is not None and all(owner is not one for one in training.optimizers):
            warnings.warn(
                f"{type(owner).__name__}, which trains the table {name}, is not saved, and training cannot "
                "be resumed from this checkpoint: pass it as optimizer",
                stacklevel=3,
            )
            return


def _release(prepared: Iterable[DiskStorage]) -> None:
    for storage in prepared:
        storage.release()


def _checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `extra` as a dict, if JSON does not change it."""
    if not isinstance(extra, Mapping | None):
        raise TypeError(f"extra must be a dict that JSON can hold; found {type(extra).__name__}")
    given = dict(extra or {})
    try:
        read = json.loads(json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"extra must be a dict that JSON can hold: {error}") from error
    _check_unchanged(given, read, "extra")
    return given


def _check_unchanged(given: Any, read: Any, name: str) -> None:
    if isinstance(given, float) and math.isnan(given):
        raise TypeError(f"{name} is nan, which JSON does not have: save None, or leave it out")
    if isinstance(given, dict) and all(type(key) is str for key in given):
        for key, value in given.items():
            _check_unchanged(value, read[key], f"{name}[{key!r}]")
    elif isinstance(given, list):
        for number, value in enumerate(given):
            _check_unchanged(value, read[number], f"{name}[{number}]")
    elif given != read or isinstance(given, dict | tuple):
        raise TypeError(
            f"{name} is {_shortened(given)}; JSON would turn it into {_shortened(read)}: save schedulers "
            "with scheduler=, and use lists and string keys in extra"
        )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:60] + "…"


def _rng_of_all_ranks(ranks: Ranks) -> list[Any]:
    states: list[Any] = [rng_state()] * world_size()
    if ranks.many:
        dist.all_gather_object(states, states[0])
    return states


def _check_replicas(tables: Sequence[Table]) -> None:
    if any(not table.replicate for table in tables):
        raise FlatbedError(
            "a table with replicate=False may differ from rank to rank, and a checkpoint is written by the "
            "first rank alone: save it on every rank with table.save(path), and the rest without it"
        )


def _files(training: Training, in_place: Sequence[Table]) -> dict[str, tuple[Table, str | None]]:
    """Return the file of each table in a version's folder; None for tables whose rows stay in their own."""
    return {
        key: (table, None if any(table is one for one in in_place) else f"table-{number}.safetensors")
        for number, (key, table) in enumerate(training.tables.items())
    }


def _write_dense(path: Path, training: Training, lockstep: Lockstep) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write model and optimizers without tables; returns the model's encoded values, and checksums.

    The first rank writes. All ranks call this, since they exchange their parts of DTensors.
    """
    files: dict[str, Any] = {}

    def write(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        if lockstep.ranks.first:
            files[name] = write_tensors(path / name, tensors, metadata, whole=partial(_whole, lockstep))
        else:
            for tensor in tensors.values():
                _whole(lockstep, tensor)

    packer = Packer(tied=True)
    model = {name: packer.pack(value, name) for name, value in dense_state(training.model).items()}
    # Ties are named in the metadata, as safetensors.torch.save_model does.
    write("model.safetensors", packer.tensors, {"format": "pt", **packer.ties})
    optimizers = []
    for number, optimizer in enumerate(training.optimizers):
        about, tensors = optimizer_parts(optimizer)
        write(f"optimizer-{number}.safetensors", tensors, {"format": "pt"})
        optimizers.append(about)
    if lockstep.ranks.first:
        text = json.dumps(optimizers)
        write_text(path / OPTIMIZERS, text)
        files[OPTIMIZERS] = zlib.crc32(text.encode())
    return model, files


def _whole(lockstep: Lockstep, tensor: Tensor) -> Tensor:
    """Return all elements of a tensor. All ranks call this for a DTensor."""
    sharding = Sharding.of(tensor)
    if sharding is None:
        return tensor.detach()
    if sharding.mesh.size() != world_size():
        raise FlatbedError(
            f"a parameter is sharded across {sharding.mesh.size()} of {world_size()} ranks, and a checkpoint "
            "holds what all ranks share: save it with torch.distributed.checkpoint"
        )
    lockstep.meet()
    with communicating(lockstep.doing):
        return whole(tensor.detach())


def _write_alone(
    path: Path,
    training: Training,
    contents: Mapping[str, Any],
    *,
    in_place: Sequence[Table],
    rng: Any,
    files: dict[str, Any],
) -> None:
    """Write what the first rank writes alone: whole tables, other state, and the list of contents."""
    tables = _files(training, in_place)
    for table, file in tables.values():
        if file is not None and table._shards is None:
            files[file] = saving.write(table, path / file)
    packer = Packer()
    schedulers = [packed_state(s, packer, f"scheduler {n}") for n, s in enumerate(training.schedulers)]
    scaler = None if training.scaler is None else packed_state(training.scaler, packer, "scaler")
    packed_rng = packer.pack(rng, "rng")
    if packer.tensors:
        name = "state.safetensors"
        files[name] = write_tensors(path / name, packer.tensors, {"format": "pt"})
    shards = {
        key: table._shards.n_ranks
        for key, (table, file) in tables.items()
        if file is None and table._shards is not None
    }
    manifest = {
        "format": folders.FORMAT,
        "version": folders.FORMAT_VERSION,
        **contents,
        "n_optimizers": len(training.optimizers),
        "tables": {key: file for key, (_, file) in tables.items()},
        **({"shards": shards} if shards else {}),  # sharded tables, in a file of each rank
        "schedulers": schedulers,
        "scaler": scaler,
        "rng": packed_rng,
        "files": files,
    }
    write_text(path / MANIFEST, folders.write_checksum(manifest))
    sync_folder(path.parent)


def _write_current(folder: Path, version: str, token: str, *, keep: int) -> list[str]:
    """Make a version the valid one; returns the names of those that stay."""
    known = folders.read_current(folder) if (folder / CURRENT).exists() else None
    previous = [] if known is None else [known.version, *known.previous][: keep - 1]
    write_text(folder / CURRENT, json.dumps({"token": token, "version": version, "previous": previous}))
    return [version, *previous]
