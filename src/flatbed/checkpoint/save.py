"""Saving a checkpoint, atomically over all of its files and ranks."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatbed.checkpoint import folder as folders
from flatbed.checkpoint.folder import CURRENT, OPTIMIZERS
from flatbed.checkpoint.state import (
    Packer,
    bit_sums,
    dense_state,
    names_by_place,
    names_of,
    options_of,
    plain_state,
    rng_state,
    shapes_of,
)
from flatbed.checkpoint.training import Training
from flatbed.distributed.dense_shards import Sharding, whole
from flatbed.distributed.ranks import Lockstep, communicating, rank, world_size
from flatbed.errors import FlatbedError
from flatbed.flat.buffer import FlatParameter
from flatbed.progress import progress
from flatbed.tables import saving
from flatbed.tables.files import BLOCK_BYTES, as_path, lock, sync_folder, write_text
from flatbed.tables.tensor_file import TensorEntry, writing


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

    - `scheduler` (one or several) and `scaler` are saved with their state dicts.
    - ``rng=True`` saves the random generators of torch, Python and numpy.
    - `extra` is a dict that survives `json.dumps` and `json.loads` unchanged, with the epoch for example.
    - `keep`: the last `keep` versions stay in the folder.
    - ``copy_disk_tables=True`` writes the rows of tables on disk to the folder, as for other tables.

    Without `copy_disk_tables`, a table on disk keeps its rows in its own file. That file has only one
    version: after this save, older checkpoints cannot be loaded. So `keep` must be 1, and a warning names
    another folder that can no longer be loaded.

    Right after a step or `ema_weights()` of flatbed's optimizers that Control-C or an error has interrupted,
    this raises: load the last checkpoint. It raises inside of a step, a save or a load, too, where a signal
    handler may call it: set a flag there, and save after `step()`. A warning names a checkpoint in the folder
    that this process has neither loaded nor saved.

    Saves of several processes to one folder wait for each other. With torch.distributed, all ranks call this,
    with a folder that all of them see. The first rank writes all files but those of tables with
    ``shard="row"``. All ranks write these together, and any number of ranks can load them. A warning names
    parameters of other ranks that differ from those of the first, which are saved.

    >>> import flatbed, tempfile
    >>> emb = flatbed.Embedding(1000, 8)
    >>> optimizer = flatbed.optim.Adam(emb)
    >>> folder = tempfile.mkdtemp()
    >>> flatbed.save_checkpoint(folder, emb, optimizer, extra={"epoch": 1})
    >>> flatbed.load_table(folder)
    Table(1000 × 8, torch.float32, host, state exp_avg, exp_avg_sq)
    """
    with folders.not_nested("save_checkpoint"), Lockstep("saving a checkpoint") as lockstep:
        folder = as_path(folder, "folder").absolute()
        if ".." in folder.parts:  # which may lead elsewhere behind a link than in the text of a path
            folder = folder.resolve()
        if folders.is_version(folder):
            raise FlatbedError(
                f"{folder} is a version of a checkpoint's folder: save to another folder, to {folder.parent} "
                "for example if that has the version"
            )
        training = Training.of(model, optimizer, scheduler, scaler)
        _refuse_partial_steps(training)
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep must be at least 1, the version that is being saved; found {keep!r}")
        manifest = {"format": folders.FORMAT, "version": folders.FORMAT_VERSION}
        manifest |= {"extra": _checked_extra(extra), "files": {}}
        _check_loaded(training, folder)
        in_place = _tables_in_place(training, copy_disk_tables, keep)
        random = lockstep.gather(rng_state()) if rng else []
        token = manifest["token"] = lockstep.of_first(secrets.token_hex(16))
        folders.known_tokens.add(token)
        with ExitStack() as held, folders.open_lock(folder) if lockstep.first else nullcontext() as file:
            lockstep.meet()  # all ranks see the folder
            for table in training.tables.values():  # while the version of a save that has failed is there
                table._store.settle()
            lockstep.meet()
            if file is not None:
                lock(file)
                _warn_of_another_run(folder)
                version = folders.make_version(folder, token)
                lockstep.undo = partial(_undo, version)
                sync_folder(folder)  # a table that is prepared looks for the version's name after a crash
            version = folder / lockstep.of_first(version.name if lockstep.first else "")
            if in_place and not version.is_dir():  # CURRENT.json decides for their files on all ranks
                raise FlatbedError(
                    f"rank {rank()} does not find {version}, which the first rank has made: save to a folder "
                    "that all ranks see"
                )
            Version(version, training, lockstep, manifest).write(in_place, random)
            if in_place and not (folder / CURRENT).exists():
                lockstep.undo = lambda: None  # a table that was prepared looks for this version
            lockstep.meet()  # first: no rank prepares tables for a version that may still be removed
            for name in in_place:
                store = training.tables[name]._store
                held.callback(store.disk_storage().release)
                if lockstep.first:
                    after = f"saving to {folder}: copy_disk_tables=True keeps both"
                    store.warn_of_loss(after, name=name, folder=folder)
                store.prepare_checkpoint(decision=folder / CURRENT, token=token)
            lockstep.meet()
            kept = _write_current(version, token, keep=keep) if lockstep.first else []
            lockstep.meet()
            lockstep.undo = lambda: None
            for name in in_place:
                training.tables[name]._store.disk_storage().commit()
                training.tables[name]._store.mark_loaded(folder)
            lockstep.meet()
            if lockstep.first:
                folders.remove_others(folder, kept)


def _refuse_partial_steps(training: Training) -> None:
    """Raise if some parameters have made a step that others have not, or hold averages."""
    for one in (*training.optimizers, *(table._owner for table in training.tables.values())):
        if getattr(one, "_has_partial_step", False):
            raise FlatbedError(
                f"a step or ema_weights() of {type(one).__name__}, or a load, was interrupted, or is going "
                "on: some parameters have changed, and others have not. Load the last checkpoint. To save at "
                "a signal, set a flag in its handler, and save after step()"
            )


def _warn_of_another_run(folder: Path) -> None:
    """Warn if this process does not know the folder's checkpoint: this save, or a later one, removes it."""
    if (folder / CURRENT).exists():
        token, (version, *_) = folders.read_current(folder)
        if token not in folders.known_tokens:
            warnings.warn(
                f"this save replaces the checkpoint {folder / version}, which this process has neither "
                "loaded nor saved. To go on with a run, call flatbed.load_checkpoint first; to keep both, "
                "save to another folder",
                stacklevel=3,
            )


def _undo(version: Path) -> None:
    """Remove the version of a save that has failed."""
    with suppress(FlatbedError):  # if CURRENT.json cannot be read, the next save removes the version
        if version.name not in folders.kept_versions(version.parent):
            shutil.rmtree(version, ignore_errors=True)
        # Otherwise disk tables commit this version at their next change.


def _check_loaded(training: Training, folder: Path) -> None:
    """Raise for disk tables whose rows are of the folder's checkpoint, if the rest of it was not loaded."""
    on_disk = {name: table for name, table in training.tables.items() if table.storage == "disk"}
    known = {id(table) for table in on_disk.values()}
    if any(id(one) not in known for one in (*training.model.parameters(), *training.model.buffers())):
        for name, table in on_disk.items():
            table._store.check_loaded(name, folder)


def _tables_in_place(training: Training, copy_disk_tables: bool, keep: int) -> list[str]:
    """Return the names of tables whose rows stay in their own files; raise if a table cannot be saved."""
    in_place, saved = [], [id(optimizer) for optimizer in training.optimizers]
    for name, table in training.tables.items():
        if table.storage == "disk" and not copy_disk_tables:
            in_place.append(name)
        elif world_size() > 1 and not table.replicate:
            raise FlatbedError(
                "a table with replicate=False may differ from rank to rank, and a checkpoint is written by "
                "the first rank alone: save it on every rank with table.save(path), and the rest without it"
            )
    for name, table in training.tables.items():
        if table._owner is not None and id(table._owner) not in saved:
            warnings.warn(
                f"{type(table._owner).__name__}, which trains the table {name}, is not saved, and training "
                "cannot be resumed from this checkpoint: pass it as optimizer",
                stacklevel=3,
            )
            break
    if keep > 1 and in_place:
        path = training.tables[in_place[0]]._store.config.path
        raise ValueError(
            f"keep={keep} would keep versions that cannot be loaded: {path} (table {in_place[0]}) has "
            "the rows of the last one alone. Pass copy_disk_tables=True, too, or leave keep out"
        )
    return in_place


def _warn_of_other_params(training: Training) -> None:
    """Warn of parameters of optimizers that are not in the model: their values are not saved."""
    known = {id(param) for param in training.model.parameters()}
    for one in training.optimizers:
        others = [
            list(part.shape)
            for param in chain.from_iterable(group["params"] for group in one.param_groups)
            for part in (param.buffer.originals if isinstance(param, FlatParameter) else [param])
            if id(part) not in known
        ]
        if others:
            warnings.warn(
                f"{type(one).__name__} has parameters that are not in the model, of the shapes "
                f"{str(others[:3])[:-1]}{', …' if len(others) > 3 else ''}]: the checkpoint holds the "
                "optimizer's state of them, and not their values. Pass a module that holds all of them, "
                "nn.ModuleList([model, loss]) for example",
                stacklevel=5,
            )


def _warn_of_other_optimizers(training: Training) -> None:
    """Warn of parameters that none of the optimizers has: the state of theirs would not be saved."""
    held = {
        id(part)
        for one in training.optimizers
        for param in chain.from_iterable(group["params"] for group in one.param_groups)
        for part in (param, *(param.buffer.originals if isinstance(param, FlatParameter) else ()))
    }
    dense = [(name, p) for name, p in training.model.named_parameters() if name not in training.tables]
    names = [name for name, p in dense if p.requires_grad and id(p) not in held]
    if training.optimizers and names:
        warnings.warn(
            f"{', '.join(map(repr, names[:3]))}{', …' if len(names) > 3 else ''} require gradients, and none "
            "of the optimizers of this save has them: pass the one that trains them, too, or freeze them "
            "(requires_grad_(False)) if there is none",
            stacklevel=5,
        )


def _checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `extra` as a dict; raise if JSON would change it."""
    try:
        given = dict(extra or {})
        read = json.loads(json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"extra must be a dict that JSON can hold: {error}. Tensors and arrays have .item() and .tolist()"
        ) from error
    for key, value in given.items():
        if key not in read or read[key] != value:  # nan differs from itself
            raise TypeError(
                f"JSON would change extra[{key!r}]: use lists, string keys and None in extra, and save "
                "schedulers with scheduler="
            )
    return given


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a folder that is being written. All ranks call its methods."""

    path: Path
    training: Training
    lockstep: Lockstep
    manifest: dict[str, Any]

    def write(self, in_place: Collection[str], rng: list[Any]) -> None:
        """Write all files, except for the rows of tables that stay in their own files."""
        self._write_dense()
        self._write_tables(in_place)
        if self.lockstep.first:
            self._write_others(rng)
            folders.write_manifest(self.path, self.manifest)

    def _write_dense(self) -> None:
        """Write model and optimizers without tables."""
        packer = Packer(tied=True)
        values = dense_state(self.training.model)
        if self.lockstep.first:  # after `dense_state`, in which FSDP2 shards parameters again
            _warn_of_other_params(self.training)
            _warn_of_other_optimizers(self.training)
        known = names_by_place({**values, **self.training.tables})
        self.manifest["model"] = {name: packer.pack(value, name) for name, value in values.items()}
        self._compare_ranks(packer.tensors, known)
        self._write_tensors("model.safetensors", packer)
        optimizers, self.manifest["n_optimizers"] = [], len(self.training.optimizers)
        for number, optimizer in enumerate(self.training.optimizers):
            packer, name = Packer(), f"optimizer-{number}"
            about = {"class": type(optimizer).__name__, "shapes": shapes_of(optimizer)}
            about["names"] = names_of(optimizer, known)
            about["options"] = packer.pack(options_of(optimizer), name)
            optimizers.append({**about, "state": packer.pack(plain_state(optimizer), name)})
            self._write_tensors(f"{name}.safetensors", packer)
        if self.lockstep.first:
            text = json.dumps(optimizers)
            write_text(self.path / OPTIMIZERS, text)
            self.manifest["files"][OPTIMIZERS] = zlib.crc32(text.encode())

    def _compare_ranks(self, tensors: Mapping[str, Tensor], known: Mapping[Any, str]) -> None:
        """Raise if the tensors of a rank are not those of the first one, which saves; warn of other values.

        A rank may have no tensors: FSDP1 with `rank0_only` only gives them to the first rank. Other values
        are no error: replicas may differ on purpose between two averages (local SGD), or in their last bits.
        """
        if not self.lockstep.many:
            return
        own_shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        own_sums = bit_sums(self.training.model, self.training.optimizers, known)
        (saved, first), *others = self.lockstep.gather((own_shapes, own_sums))
        for number, (shapes, _) in enumerate(others, 1):
            for name in {**shapes, **saved} if shapes and shapes != saved else ():
                found, expected = (f"shape {one[name]}" if name in one else "none" for one in (shapes, saved))
                if found != expected:
                    raise FlatbedError(
                        f"'{name}' of rank {number} has {found}, and is not that of the first rank, which "
                        f"has {expected} and saves what all ranks share: save models that differ, as "
                        "pipeline stages do, with torch.distributed.checkpoint"
                    )
        for number, (_, sums) in enumerate(others if self.lockstep.first else (), 1):
            names = [name for name, value in sums.items() if first.get(name, value) != value]
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                warnings.warn(
                    f"{', '.join(map(repr, names[:3]))}{more} of rank {number} differ from those of the "
                    "first rank, whose values are saved for all ranks. Parts of a model, as those of tensor "
                    "parallelism and pipelines, need DTensors or torch.distributed.checkpoint; replicas need "
                    "DistributedDataParallel, or a broadcast before the save. If ranks are to differ, filter "
                    "this warning",
                    stacklevel=5,
                )
                return

    def _write_tensors(self, name: str, packer: Packer) -> None:
        """Write a file on the first rank. The other ranks send it their parts of DTensors."""
        if not self.lockstep.first:
            for tensor in packer.tensors.values():
                self._whole(tensor)
            return
        entries = [TensorEntry(key, value.dtype, tuple(value.shape)) for key, value in packer.tensors.items()]
        metadata = {"format": "pt", **packer.ties}  # ties as in safetensors.torch.save_model
        n_bytes = sum(entry.nbytes for entry in entries)
        with (
            writing(self.path / name, entries, metadata) as writer,
            progress(f"saving {name}", n_bytes, "bytes") as advance,
        ):
            for key, tensor in packer.tensors.items():
                offset, flat = 0, self._whole(tensor).reshape(-1)
                for part in torch.split(flat, BLOCK_BYTES // tensor.dtype.itemsize):
                    writer.write(key, offset, part)
                    offset += part.nbytes
                    advance(part.nbytes)
        self.manifest["files"][name] = writer.checksums

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return all elements of a tensor. All ranks call this for a DTensor."""
        sharding = Sharding.of(tensor)
        if sharding is None:
            return tensor.detach()
        if sharding.mesh.size() != world_size():
            raise FlatbedError(
                f"a parameter is sharded across {sharding.mesh.size()} of {world_size()} ranks, and a "
                "checkpoint holds what all ranks share: save it with torch.distributed.checkpoint"
            )
        self.lockstep.meet()
        with communicating(self.lockstep.doing):
            return whole(tensor.detach())

    def _write_tables(self, in_place: Collection[str]) -> None:
        """Write tables, and add the paths of tables on disk to the manifest.

        All ranks write a sharded table together.
        """
        configs = {name: self.training.tables[name]._store.config for name in in_place}
        self.manifest["paths"] = {name: str(config.path) for name, config in configs.items()}
        # Relative to the folder, so that copies of the folder and of the tables find each other.
        self.manifest["relative_paths"] = {
            name: os.path.relpath(path, self.path.parent) for name, path in self.manifest["paths"].items()
        }
        self.manifest["shards"] = {
            name: config.n_shards for name, config in configs.items() if config.n_shards > 1
        }
        tables = self.manifest["tables"] = {}
        for number, (name, table) in enumerate(self.training.tables.items()):
            file = tables[name] = None if name in in_place else f"table-{number}.safetensors"
            if file is not None and (self.lockstep.first or table._shards is not None):
                checksums = saving.write(table, self.path / file, self.lockstep, name=name)
                self.manifest["files"][file] = checksums

    def _write_others(self, rng: list[Any]) -> None:
        """Write schedulers, scaler and random generators."""
        packer, manifest = Packer(), self.manifest
        for kind, things in (("schedulers", self.training.schedulers), ("scaler", self.training.scalers)):
            manifest[kind] = [
                {"class": type(one).__name__, "state": packer.pack(one.state_dict(), f"{kind} {number}")}
                for number, one in enumerate(things)
            ]
        manifest["scaler"] = next(iter(manifest["scaler"]), {})
        manifest["rng"] = packer.pack(rng, "rng")
        if packer.tensors:
            self._write_tensors("state.safetensors", packer)


def _write_current(version: Path, token: str, *, keep: int) -> list[str]:
    """Make a version the valid one; returns the names of the versions that stay."""
    previous = folders.kept_versions(version.parent)[: keep - 1]
    current = {"token": token, "version": version.name, "previous": previous}
    write_text(version.parent / CURRENT, json.dumps(current))
    return [version.name, *previous]
