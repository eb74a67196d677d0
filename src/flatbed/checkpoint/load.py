"""Loading a checkpoint: everything is read and checked before anything changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

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
    check_rng_state,
    check_same,
    dense_state,
    load_all,
    plain_state,
    set_rng_state,
    shard_like,
    shard_state,
    unpack,
    unpacked_state,
)
from flatbed.distributed.dense_shards import Sharding, local_of
from flatbed.distributed.ranks import Lockstep, rank, world_size
from flatbed.errors import FlatbedError
from flatbed.tables import saving
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import read_tensors

Finish = Callable[[], object]
"""Does the rest of a change, which cannot fail for lack of space or by a wrong file."""

Begun = list[tuple[Table, tuple[int, int]]]
"""Tables whose rows are being replaced, and their generations before."""


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
    finds no space. An error of a `load_state_dict` puts everything back: copies are kept in host memory.
    After an error or Control-C while rows are being replaced, all tables raise until a load succeeds.
    What is not passed is left out: without optimizers, tables are loaded without their state. With
    optimizers, a warning names a scheduler or scaler that is left out.
    `folder` may be a version in the folder that ``keep=`` has kept. With torch.distributed, all ranks call
    this, and all raise if one of them cannot load. Their number may differ from that at the save: each rank
    reads the rows that it holds of tables with ``shard="row"``.
    """
    with Lockstep("loading a checkpoint") as lockstep, ExitStack() as undo:
        folder, training = as_folder(folder), Training.of(model, optimizer, scheduler, scaler)
        path, token = _enter_version(folder, lockstep, undo)
        manifest = read_manifest(path, token)
        check_files(path, manifest, rank(), world_size())
        values = _model_values(path, manifest, training)
        states = _optimizer_states(path, manifest, training.optimizers)
        others = _other_states(path, manifest, training)
        random = _random_state(path, manifest) if rng else None
        _check_names(path, "tables", manifest["tables"], training.tables)
        tables = {
            f"table {name}": _begin_table(path, name, training, manifest=manifest, undo=undo)
            for name in training.tables
        }
        _warn_of_other_classes(path, training.optimizers)
        lockstep.meet()
        begun: Begun = []
        put_back = _copy_state(training)
        try:  # no context manager of a generator: interrupted at its exit, it would end later, at any time
            dense: dict[str, Finish] = {
                "an optimizer": partial(load_all, training.optimizers, states),
                f"model {type(model).__name__}": partial(model.load_state_dict, values, strict=False),
            }
            _finish_all(dense | others, path)
            lockstep.meet()
            begun += ((table, table._store.generation) for table in training.tables.values())
            _finish_all(tables, path)  # last: rows are not copied
            lockstep.meet()
        except BaseException:
            put_back(begun)
            raise
        for table in training.tables.values():
            table._store.mark_half_loaded(False)
        if random is not None:
            set_rng_state(random)
    return dict(manifest["extra"])


def _enter_version(folder: Path, lockstep: Lockstep, undo: ExitStack) -> tuple[Path, str]:
    """Return the version to read and its token, the same on all ranks, and keep it until `undo` closes."""
    name = ""
    if lockstep.first:
        path, token = undo.enter_context(reading(folder))
        name = path.name
    lockstep.meet()
    name = lockstep.of_first(name)
    if not lockstep.first:
        is_version = folder.name == name  # also the first rank was given one
        path, token = undo.enter_context(reading(folder if is_version else folder / name))
    return path, token


def _copy_state(training: Training) -> Callable[[Begun], None]:
    """Copy the present state of model, optimizers, schedulers and scaler; returns what loads it back.

    If a table has changed since it was begun, that function also lets all of them raise from then on.
    """
    model = {
        name: _copied(value, to_host=isinstance(value, Tensor))
        for name, value in dense_state(training.model).items()
    }
    optimizers = [_copied(plain_state(optimizer), to_host=True) for optimizer in training.optimizers]
    others = [(thing, _copied(thing.state_dict())) for thing in training.with_state_dicts]

    def put_back(begun: Begun) -> None:
        if any(table._store.generation != before for table, before in begun):
            for table, _ in begun:
                table._store.mark_half_loaded(True)
        _put_back(training.model, model)
        for optimizer, state in zip(training.optimizers, optimizers, strict=True):
            with suppress(Exception):  # of the part that raised, which may refuse any state
                load_all([optimizer], [state])
        for thing, state in others:
            with suppress(Exception):
                thing.load_state_dict(state)

    return put_back


def _copied(value: Any, *, to_host: bool = False) -> Any:
    """Copy a state dict; tensors also to the host, where they take no memory of a GPU."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            sharding = Sharding.of(leaf)
            if sharding is not None:  # stays on the device of its mesh
                return sharding.wrap(local_of(leaf).detach().clone())
            is_empty = leaf.is_meta or nn.parameter.is_lazy(leaf)
            return leaf if is_empty else leaf.detach().to("cpu" if to_host else leaf.device, copy=True)
        try:
            return copy.deepcopy(leaf)
        except Exception:  # an object of the user's that cannot be copied
            return leaf

    return tree_map(copied, value)


def _put_back(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Copy a model's state back, without `load_state_dict`, which stops at the first error."""
    for name, value in dense_state(model).items():
        old, (prefix, _, last) = before.get(name), name.rpartition(".")
        if last == "_extra_state":
            with suppress(Exception):
                model.get_submodule(prefix).set_extra_state(old)
        elif isinstance(value, Tensor) and isinstance(old, Tensor) and value.shape == old.shape:
            with torch.no_grad():
                value.copy_(old)


def _finish_all(parts: Mapping[str, Finish], path: Path) -> None:
    """Call functions that load; an error becomes a `FlatbedError` that names what could not be loaded."""
    for what, finish in parts.items():
        try:
            finish()
        except FlatbedError:
            raise
        except Exception as error:
            raise FlatbedError(
                f"{what} cannot load its state from {path} ({type(error).__name__}: {error}): pass what was "
                "saved there, or restore the checkpoint from a copy"
            ) from error


@contextmanager
def _reading(file: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a file, none without the file; what does not fit them is damage."""
    try:
        yield read_tensors(file) if file.exists() else {}
    except FlatbedError:
        raise
    except saving.DAMAGE as error:
        raise damaged(file, error) from error


def _model_values(path: Path, manifest: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """Read the model's state dict, and check that it fits."""
    with _reading(path / "model.safetensors") as tensors:
        values = {name: unpack(value, tensors) for name, value in manifest["model"].items()}
    ours = dense_state(training.model)
    for name in (name for name in ours if name in manifest["tables"]):
        raise FlatbedError(
            f"'{name}' is a table in {path}, and none in the model: load it into a model with "
            "flatbed.Embedding there, and put the module's to_torch() in its place"
        )
    for name in (name for name in values if name in training.tables):
        raise FlatbedError(
            f"'{name}' is no table in {path}, and one in the model: load it into a model with nn.Embedding "
            "there, and put flatbed.Embedding.from_pretrained(weight, freeze=False) in its place"
        )
    _check_names(path, "parameters and buffers", values, ours)
    for name, mine in ours.items():
        saved = values[name]
        if not isinstance(mine, Tensor) or nn.parameter.is_lazy(mine):
            continue
        if not isinstance(saved, Tensor) or saved.shape != mine.shape:
            found = tuple(saved.shape) if isinstance(saved, Tensor) else saved
            raise FlatbedError(f"'{name}' is {found} in {path}, and {tuple(mine.shape)} in the model")
        values[name] = shard_like(saved, mine)
    return values


def _check_names(path: Path, what: str, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise unless checkpoint and model have the same names."""
    missing = [name for name in ours if name not in saved]
    unknown = [name for name in saved if name not in ours]
    if missing or unknown:
        wrapped = any(name.startswith("module.") for name in (*missing, *unknown))
        raise FlatbedError(
            f"{path} is of another model: of the {what}, the checkpoint lacks {missing[:4] or 'none'}, and "
            f"the model lacks {unknown[:4] or 'none'}"
            f"{': save and load ddp.module, and not the wrapper of DDP' if wrapped else ''}"
        )


def _check_count(path: Path, what: str, n_saved: int, n_given: int) -> None:
    if n_saved != n_given:
        raise FlatbedError(
            f"{path} holds the state of {n_saved} {what}; found {n_given} to load it into. Pass as many, in "
            "the same order, or none"
        )


def _optimizer_states(
    path: Path, manifest: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    if not optimizers:
        return []
    _check_count(path, "optimizers", manifest["n_optimizers"], len(optimizers))
    states, kept = [], read_json(path / OPTIMIZERS)
    for number, optimizer in enumerate(optimizers):
        with _reading(path / f"optimizer-{number}.safetensors") as tensors:
            about = kept[number]
            state = unpack(about["state"], tensors)
            check_same(optimizer, state, about["shapes"], where=f"{path} (optimizer {number})")
            states.append(shard_state(optimizer, state))
    return states


def _warn_of_other_classes(path: Path, optimizers: Sequence[Optimizer]) -> None:
    for about, optimizer in zip(read_json(path / OPTIMIZERS) if optimizers else (), optimizers, strict=True):
        given = type(optimizer).__name__
        saved = about.get("class", given)
        if saved != given:
            warnings.warn(
                f"{path} holds the state of {saved}, and {given} goes on with it: build {saved} if that is "
                f"not meant",
                stacklevel=3,
            )


def _other_states(path: Path, manifest: Mapping[str, Any], training: Training) -> dict[str, Finish]:
    """Read the state of schedulers and scaler; returns their names, and the functions that load it."""
    scalers = [] if training.scaler is None else [training.scaler]
    saved_scalers = [] if manifest["scaler"] is None else [manifest["scaler"]]
    kinds = (
        ("scheduler", training.schedulers, manifest["schedulers"]),
        ("scaler", scalers, saved_scalers),
    )
    finishes: dict[str, Finish] = {}
    left_out = [kind for kind, given, saved in kinds if saved and not given]
    if left_out and training.optimizers:
        warnings.warn(
            f"{path} holds the state of a {' and a '.join(left_out)}, which is not loaded: pass "
            f"{' and '.join(f'{kind}=' for kind in left_out)}",
            stacklevel=3,
        )
    for kind, given, saved in kinds:
        if given:
            _check_count(path, f"{kind}s", len(saved), len(given))
            for number, (thing, packed) in enumerate(zip(given, saved, strict=True)):
                with _reading(path / "state.safetensors") as tensors:
                    state = unpacked_state(thing, packed, tensors, where=str(path))
                name = f"{kind} {number} ({type(thing).__name__})"
                finishes[name] = partial(thing.load_state_dict, state)
    return finishes


def _random_state(path: Path, manifest: Mapping[str, Any]) -> Any:
    """Read and check the state of this rank's random generators."""
    saved = manifest["rng"]
    if len(saved) != world_size():
        raise FlatbedError(
            f"{path} holds the random states of {len(saved)} ranks; found {world_size()}: save with "
            "rng=True, on as many ranks, or load without it"
        )
    with _reading(path / "state.safetensors") as tensors:
        state = unpack(saved[rank()], tensors)
        check_rng_state(state)
    return state


def _begin_table(
    path: Path, name: str, training: Training, *, manifest: Mapping[str, Any], undo: ExitStack
) -> Finish:
    """Check that a table fits, do what can fail, and return the function that does the rest."""
    table, file, token = training.tables[name], manifest["tables"][name], manifest["token"]
    if file is not None:
        found = saving.inspect(path / file)
        with_state = bool(training.optimizers)
        saving.check_fit(table, found, with_state=with_state)
        return saving.begin_read(table, found, undo=undo, with_state=with_state)
    if table.storage != "disk":
        raise FlatbedError(
            f"the rows of {name} are not in {path}, but in the table's own file, "
            f"{manifest['paths'].get(name, 'PATH')}: build it with "
            f'storage="disk" and that path, or save with copy_disk_tables=True'
        )
    config, n_ranks = table._store.config, manifest["shards"].get(name, 1)
    if config.n_shards != n_ranks:
        raise FlatbedError(
            f"the rows of {name} are in the table's own files, of {n_ranks} ranks, and not in {path}; there "
            f"are {config.n_shards} ranks: load on {n_ranks} and save with copy_disk_tables=True, for any "
            "number"
        )
    assert config.path is not None
    state = table._store.state_at(token)
    if config.read_only:
        if state is None:
            raise FlatbedError(
                f"{config.path} (table {name}) was loaded with read_only=True and cannot be loaded into: its "
                f"file is not as it was when {path.parent} was saved. Load the folder that was saved last"
            )
        return lambda: None
    if state is None:
        raise FlatbedError(
            f"{config.path} (table {name}) is not as it was when {path.parent} was saved: "
            "it is another file, or had a later checkpoint (table.checkpoint(), table.close(), resize, or a "
            "checkpoint in another folder). Load the folder that was saved last, put a copy of the file from "
            "then in its place, or save with copy_disk_tables=True from now on"
        )
    table._store.check_name()
    saving.check_state(table, config.path, *state)
    return partial(_revert, table, token)


def _revert(table: Table, token: str) -> None:
    """Let a disk table go back to its file's checkpoint."""
    scalars = table._store.revert(token)
    if table._owner is None:
        table._store.adopt_state(scalars)
    else:
        table._store.set_scalars(scalars)
