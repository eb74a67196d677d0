"""Loading a checkpoint: everything is read and checked before anything changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from flatbed.checkpoint.folder import (
    OPTIMIZERS,
    NoCheckpointError,
    check_files,
    known_tokens,
    no_checkpoint,
    not_nested,
    read_current,
    read_json,
    reading,
)
from flatbed.checkpoint.state import (
    NO_OPTIONS,
    check_same,
    dense_state,
    load_plain_state,
    names_by_place,
    names_of,
    options_of,
    plain_state,
    rng_state,
    set_rng_state,
    shard_like,
    shard_state,
    unpack,
)
from flatbed.checkpoint.training import Training
from flatbed.distributed.dense_shards import Sharding, local_of
from flatbed.distributed.ranks import Lockstep, rank, world_size
from flatbed.errors import FlatbedError
from flatbed.optim.optimizer import Optimizer as FlatbedOptimizer
from flatbed.tables import saving
from flatbed.tables.files import as_path
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import naming_damage, read_tensors

Finish = Callable[[], object]
"""Does the rest of a change. It cannot fail for lack of space or because of a wrong file."""


@dataclass(frozen=True, slots=True)
class Part:
    """An object to load state into: a model, optimizer, scheduler, scaler, or the random generators."""

    name: str
    state: Any
    read: Callable[[], Any]
    load: Callable[[Any], object]
    put_back: Callable[[Any], object] | None = None
    """Loads the former state again after an error. If it is None, `load` does."""
    is_large: bool = True
    """Whether former tensors are kept in host memory, so that they take no memory of a GPU."""
    warning: str = ""
    """A warning for the user, or an empty string."""


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
    finds no space. If a `load_state_dict` raises, everything is put back from copies in host memory. After an
    error or Control-C while rows are being replaced, all tables raise until a load succeeds. Gradients are
    dropped, and CUDA graphs that write them have to be captured again.

    Objects that are not passed are left out: without optimizers, tables are loaded without their state. With
    optimizers, a warning names a scheduler, scaler or random generators that are left out. `folder` may be a
    version in the folder that ``keep=`` has kept, or a copy of one.

    With torch.distributed, all ranks call this, and all raise if one of them cannot load. The number of ranks
    may differ from that at the save: of tables with ``shard="row"``, each rank reads the rows that it holds.

    >>> import flatbed, tempfile
    >>> emb, folder = flatbed.Embedding(1000, 8), tempfile.mkdtemp()
    >>> optimizer = flatbed.optim.Adam(emb)
    >>> flatbed.save_checkpoint(folder, emb, optimizer, extra={"epoch": 1})
    >>> flatbed.load_checkpoint(folder, emb, optimizer)
    {'epoch': 1}
    """
    with (
        not_nested("load_checkpoint"),
        Lockstep("loading a checkpoint") as lockstep,
        ExitStack() as undo,
    ):
        folder = as_path(folder, "folder").absolute()
        training = Training.of(model, optimizer, scheduler, scaler)
        try:
            path, manifest = _enter_version(folder, lockstep, undo)
        except NoCheckpointError:
            _refuse_other_rows(folder, training)
            raise
        check_files(path, manifest, rank(), world_size())
        of_model = _model_part(path, manifest, training)
        _check_names(path, "tables", manifest["tables"], training.tables)
        replace_rows = {
            f"table {name}": _begin_table(path, name, training, manifest=manifest, undo=undo)
            for name in training.tables
        }
        parts = [
            *_optimizer_parts(path, manifest, training),
            of_model,
            *_other_parts(path, manifest, training, rng=rng),
            *([_random_part(path, manifest)] if rng else []),
        ]
        for part in parts:
            if part.warning:
                warnings.warn(part.warning, stacklevel=2)
        for name, table in training.tables.items() if lockstep.first else ():
            if manifest["tables"][name] is not None:
                after = f"loading {path}: load it into tables with another path to keep both"
                table._store.warn_of_loss(after, name=name)
        lockstep.meet()
        _load_all(parts, replace_rows, training, path, lockstep)
        model.zero_grad()  # there may be gradients of a step that Control-C has ended
        for one in training.optimizers:
            one.zero_grad()
            if isinstance(one, FlatbedOptimizer):
                one._has_partial_step = False
        for table in training.tables.values():
            table._store.mark_loaded(path.parent)
        known_tokens.add(manifest["token"])
        if path == folder:  # an earlier version, on purpose: a save may replace the valid one
            with suppress(FlatbedError):
                known_tokens.add(read_current(folder.parent)[0])
    return dict(manifest["extra"])


def _load_all(
    parts: Sequence[Part],
    replace_rows: Mapping[str, Finish],
    training: Training,
    path: Path,
    lockstep: Lockstep,
) -> None:
    """Load all parts, and then the rows of tables. After an error, put the parts back."""
    begun: list[tuple[Table, tuple[int, int]]] = []  # tables with their former generations
    before = [(part, _copied(part.read(), to_host=part.is_large)) for part in parts]
    optimizers = [one for one in training.optimizers if isinstance(one, FlatbedOptimizer)]
    had_partial_steps = [one._has_partial_step for one in optimizers]
    try:  # not a generator's context manager: interrupted at its exit, it could end at any later time
        for one in optimizers:
            one._has_partial_step = True
        _finish_all({part.name: partial(part.load, part.state) for part in parts}, path)
        lockstep.meet()
        begun += ((table, table._store.generation) for table in training.tables.values())
        _finish_all(replace_rows, path)  # last, since there is no copy of the rows
        lockstep.meet()
    except BaseException:
        if any(table._store.generation != generation for table, generation in begun):
            for table, _ in begun:
                table._store.mark_half_loaded()
        for part, state in reversed(before):
            with suppress(Exception):  # the part that raised may refuse any state
                (part.put_back or part.load)(state)
        for one, had_partial_step in zip(optimizers, had_partial_steps, strict=True):
            one._has_partial_step = had_partial_step
        raise


def _enter_version(folder: Path, lockstep: Lockstep, undo: ExitStack) -> tuple[Path, dict[str, Any]]:
    """Return the version to read and its manifest, the same on all ranks, and keep it until `undo` closes."""
    name = ""
    if lockstep.first:
        with suppress(NoCheckpointError):  # all ranks raise it below
            path, manifest = undo.enter_context(reading(folder))
            name = path.name
    name = lockstep.of_first(name)
    if not name:
        raise no_checkpoint(folder)
    if not lockstep.first:
        is_version = folder.name == name  # the first rank was given a version, too
        path, manifest = undo.enter_context(reading(folder if is_version else folder / name))
    return path, manifest


def _refuse_other_rows(folder: Path, training: Training) -> None:
    """Raise for disk tables with rows of another folder.

    Not `NoCheckpointError`: a program that catches it would train these rows with other weights.
    """
    for name, table in training.tables.items():
        if table._store.belongs_to_folder:
            path, own = table._store.config.path, table._store.folder()
            raise FlatbedError(
                f"{folder} holds no checkpoint, but {path} (table {name}) has the rows of one"
                f"{'' if own is None else f', in {own}'}: load the folder that was saved with it. To start "
                "again, delete the file; to use its rows with another folder, call table.checkpoint() first"
            )


def _copied(value: Any, *, to_host: bool) -> Any:
    """Copy a state dict."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            sharding = Sharding.of(leaf)
            if sharding is not None:  # stays on the device of its mesh
                return sharding.wrap(local_of(leaf).detach().clone())
            is_empty = leaf.is_meta or nn.parameter.is_lazy(leaf)
            return leaf if is_empty else leaf.detach().to("cpu" if to_host else leaf.device, copy=True)
        return copy.deepcopy(leaf)

    return tree_map(copied, value)


def _put_back(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Copy a model's state back. Not by `load_state_dict`, which stops at the first error."""
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
    """Yield the tensors of a file, none if it is missing. Errors in the body are reported as its damage."""
    with naming_damage(file):
        yield read_tensors(file) if file.exists() else {}


def _model_part(path: Path, manifest: Mapping[str, Any], training: Training) -> Part:
    """Read the model's state dict, and check that it fits."""
    model = training.model
    with _reading(path / "model.safetensors") as tensors:
        values = {name: unpack(value, tensors) for name, value in manifest["model"].items()}
    ours = dense_state(model)
    for name in (manifest["tables"].keys() & ours.keys()) | (training.tables.keys() & values.keys()):
        raise FlatbedError(
            f"'{name}' is {'a' if name in manifest['tables'] else 'no'} table in {path}, other than in the "
            "model: load it into a model with the same module, flatbed.Embedding or nn.Embedding, and then "
            "use to_torch() or flatbed.Embedding.from_pretrained(weight, freeze=False)"
        )
    _check_names(path, "parameters and buffers", values, ours)
    for name, mine in ours.items():
        saved = values[name]
        if not isinstance(mine, Tensor) or nn.parameter.is_lazy(mine):
            continue
        if not isinstance(saved, Tensor) or saved.shape != mine.shape:
            found = tuple(saved.shape) if isinstance(saved, Tensor) else saved
            raise FlatbedError(
                f"'{name}' is {found} in {path}, and {tuple(mine.shape)} in the model: build the one that "
                "was saved"
            )
        values[name] = shard_like(saved, mine)
    load = partial(model.load_state_dict, strict=False)
    read, put_back = partial(dense_state, model), partial(_put_back, model)
    return Part(f"model {type(model).__name__}", values, read, load, put_back)


def _check_names(path: Path, what: str, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise unless checkpoint and model have the same names."""
    missing = [name for name in ours if name not in saved]
    unknown = [name for name in saved if name not in ours]
    if missing or unknown:
        names = (*missing, *unknown)
        is_wrapped = any(name.startswith("module.") or "_orig_mod." in name for name in names)
        remedy = "the model itself, not the wrapper of DDP or torch.compile (model.module, model._orig_mod)"
        raise FlatbedError(
            f"{path} is of another model: of the {what}, the checkpoint lacks {missing[:4] or 'none'}, and "
            f"the model lacks {unknown[:4] or 'none'}: "
            f"save and load {remedy if is_wrapped else 'the same model'}"
        )


def _check_count(path: Path, what: str, n_saved: int, n_given: int) -> None:
    if n_saved != n_given:
        raise FlatbedError(
            f"{path} holds the state of {n_saved} {what}; found {n_given} to load it into. Pass as many, in "
            "the same order, or none"
        )


def _optimizer_parts(path: Path, manifest: Mapping[str, Any], training: Training) -> Iterator[Part]:
    optimizers = training.optimizers
    if not optimizers:
        return
    _check_count(path, "optimizers", manifest["n_optimizers"], len(optimizers))
    kept = read_json(path / OPTIMIZERS)
    known = names_by_place({**dense_state(training.model), **training.tables})
    for number, optimizer in enumerate(optimizers):
        given = type(optimizer).__name__
        with _reading(path / f"optimizer-{number}.safetensors") as tensors:
            about = kept[number]
            state = unpack(about["state"], tensors)
            where = f"{path} (optimizer {number})"
            check_same(optimizer, about, names_of(optimizer, known), where=where)
            state, saved = shard_state(optimizer, state), about["class"]
            options, ours = unpack(about["options"], tensors), {**NO_OPTIONS, **options_of(optimizer)}
            differing = [name for name in ours if options.get(name, ours[name]) != ours[name]]
        if differing:
            saved += f"({', '.join(f'{name}={options[name]}' for name in differing)})"
            given += f"({', '.join(f'{name}={ours[name]}' for name in differing)})"
        warning = (
            f"{path} holds the state of {saved}, and {given} goes on with it: build {saved}, or ignore this"
        )
        yield Part(
            f"optimizer {number} ({type(optimizer).__name__})",
            state,
            read=partial(plain_state, optimizer),
            load=partial(load_plain_state, optimizer),
            warning=warning if saved != given else "",
        )


def _other_parts(path: Path, manifest: Mapping[str, Any], training: Training, *, rng: bool) -> Iterator[Part]:
    """Read the state of schedulers and scaler. Warns of state that is left out."""
    kinds = (
        ("scheduler", training.schedulers, manifest["schedulers"]),
        ("scaler", training.scalers, [manifest["scaler"]] if manifest["scaler"] else []),
    )
    left_out = {f"a {kind}": f"{kind}=" for kind, given, saved in kinds if saved and not given}
    if len(manifest["rng"]) == world_size() and not rng:
        left_out["random generators"] = "rng=True"
    if left_out and training.optimizers:
        warnings.warn(
            f"{path} holds the state of {' and '.join(left_out)}, which is not loaded: pass "
            f"{' and '.join(left_out.values())}",
            stacklevel=3,
        )
    for kind, things, states in kinds:
        if not things:
            continue
        _check_count(path, f"{kind}s", len(states), len(things))
        for number, (thing, packed) in enumerate(zip(things, states, strict=True)):
            given = type(thing).__name__
            with _reading(path / "state.safetensors") as tensors:
                if packed["class"] != given:
                    raise FlatbedError(f"{path} is of a {packed['class']}; found {given} to load it into")
                state = unpack(packed["state"], tensors)
            name, load = f"{kind} {number} ({given})", thing.load_state_dict
            yield Part(name, state, thing.state_dict, load, is_large=False)


def _random_part(path: Path, manifest: Mapping[str, Any]) -> Part:
    """Read the state of this rank's random generators."""
    saved = manifest["rng"]
    if len(saved) != world_size():
        raise FlatbedError(
            f"{path} holds the random states of {len(saved)} ranks; found {world_size()}: save with "
            "rng=True, on as many ranks, or load without it"
        )
    with _reading(path / "state.safetensors") as tensors:
        return Part("rng=True", unpack(saved[rank()], tensors), rng_state, set_rng_state)


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
    config, n_ranks = table._store.config, manifest["shards"].get(name, 1)
    own_path = manifest["paths"].get(name, "PATH")
    if table.storage != "disk" or config.n_shards != n_ranks:
        on_ranks = f", on {n_ranks} ranks" if n_ranks > 1 else ""
        raise FlatbedError(
            f"the rows of {name} are not in {path}, but in the table's own file, {own_path}: load it with "
            f'storage="disk" and that path{on_ranks}, save with copy_disk_tables=True, and load that copy'
        )
    state = table._store.state_at(token)
    if state is None and table._store.phase == "unallocated":
        raise FlatbedError(
            f"{config.path} is missing. The rows of table {name} were in {own_path} when {path} was saved: "
            "build the table there, put a copy of the file from then in its place, or save with "
            "copy_disk_tables=True from now on"
        )
    if state is None:
        raise FlatbedError(
            f"{config.path} (table {name}) is not as it was when {path} was saved: "
            "it is another file, or had a later checkpoint (table.checkpoint(), table.close(), resize, or a "
            "checkpoint in another folder). Load the folder that was saved last, put a copy of the file from "
            "then in its place, or save with copy_disk_tables=True from now on"
        )
    if config.read_only:
        return lambda: None
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
