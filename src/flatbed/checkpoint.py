"""A whole training in a folder: model, optimizers and tables, all of one moment or none of them.

    CURRENT.json            {"token": …, "version": "v0000012"}: replaced atomically, it says what counts
    v0000012/
      checkpoint.json       what there is
      model.safetensors     parameters and buffers by their names, without the tables
      optimizer.json        param groups and numbers of state
      optimizer-0.safetensors
      table-0.safetensors   a table with its state

Tables on disk stay in their own files and take part in two phases: they prepare a checkpoint that holds if
CURRENT.json has its token, and commit it once that is so. Whoever opens one after a crash looks there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flatbed.distributed.ranks import Ranks
from flatbed.errors import FlatbedError
from flatbed.optim import json_codec as portable
from flatbed.optim.json_codec import Packer, unpack
from flatbed.tables import saving
from flatbed.tables.embedding import named_tables
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import as_path, read_tensors, sync_folder, write_tensors, write_text

FORMAT, FORMAT_VERSION = "flatbed-checkpoint", 1
CURRENT = "CURRENT.json"
MANIFEST = "checkpoint.json"
MARK = ".flatbed"  # in a subfolder that was made by a save
DRAFT, OLD = ".new", ".old-"  # what it is called before, and how it begins when it is being removed
NAME = re.compile(r"v\d{7,}")


@dataclass(frozen=True, slots=True)
class Training:
    """What a checkpoint is made of, or read into."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    tables: dict[str, Table]

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> Training:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}")
        given: list[Any] = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        given = [] if optimizer is None else given
        for one in given:
            if not isinstance(one, Optimizer):
                raise TypeError(
                    f"optimizer must be a torch.optim.Optimizer, or several; found {type(one).__name__} "
                    f"(what JSON can hold, such as the epoch, goes into extra={{…}})"
                )
        tables = dict(named_tables(model))
        known = {id(table) for table in tables.values()}
        for one in given:
            for param in (p for group in one.param_groups for p in group["params"]):
                if isinstance(param, Table) and id(param) not in known:
                    raise FlatbedError(
                        f"{type(one).__name__} has a table that is not in the model ({param!r}): pass a "
                        "module that holds all of them, nn.ModuleList([model, embedding]) for example"
                    )
        return Training(model, tuple(given), tables)


def _as_folder(folder: Any) -> Path:
    if isinstance(folder, nn.Module):
        raise TypeError(
            f"the folder comes first, and then the model; found {type(folder).__name__} as the folder"
        )
    return as_path(folder, "folder").absolute()


@dataclass(frozen=True, slots=True)
class Current:
    """Which version of a folder counts."""

    token: str
    version: str


# ---- saving


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    copy_disk_tables: bool = False,
) -> None:
    """Save model, optimizers and tables as one: whenever it crashes, the folder holds this or the last.

    `extra` is anything JSON can hold (the epoch, say). A table on disk keeps its rows in its own file, which
    then holds the checkpoint of this folder and no older one; ``copy_disk_tables=True`` writes them to the
    folder, as those of other tables are. With torch.distributed, all ranks call this, and the first one
    writes, to a folder that all of them see.
    """
    folder, training, ranks = _as_folder(folder), Training.of(model, optimizer), Ranks()
    text = _json(extra)
    in_place = [t for t in training.tables.values() if t.storage_kind == "disk" and not copy_disk_tables]
    if ranks.many:
        _check_replicas([t for t in training.tables.values() if t not in in_place])
    token = ranks.token()
    prepared: list[DiskStorage] = []
    version: list[Path] = []

    def undo() -> None:
        with suppress(FlatbedError):
            if _holds(folder, token):
                return  # decided, though perhaps not durably: whoever opens the tables next looks
        for tier in prepared:
            with suppress(FlatbedError):  # there is an error to tell of already
                tier.abort()
        for path in version:
            shutil.rmtree(path, ignore_errors=True)

    with _together(ranks, undo):
        if ranks.first:
            version.append(_make_version(folder))
            _write(version[0], training, token, in_place=in_place, extra=text)
        for table in in_place:
            prepared.append(_prepare(table, folder / CURRENT, token))
    with _together(ranks, undo):
        if ranks.first:
            write_text(folder / CURRENT, json.dumps({"token": token, "version": version[0].name}))
    with _together(ranks, lambda: None):
        for tier in prepared:
            tier.commit()
    if ranks.first:
        _remove_others(folder, version[0].name)


@contextmanager
def _together(ranks: Ranks, undo: Callable[[], None]) -> Iterator[None]:
    """All ranks succeed, or all of them raise."""
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


def _make_version(folder: Path) -> Path:
    """A new subfolder, and none of interrupted saves beside it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        current = _current(folder) if (folder / CURRENT).exists() else None
        _remove_others(folder, None if current is None else current.version)
        numbers = [int(path.name[1:]) for path in folder.iterdir() if NAME.fullmatch(path.name)]
        if current is not None:
            numbers.append(int(current.version[1:]))
        path = folder / f"v{max(numbers, default=0) + 1:07d}"
        draft = folder / DRAFT  # so that no folder without a mark is left behind
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        elif draft.exists():
            draft.unlink()
        draft.mkdir()
        (draft / MARK).touch()
        draft.rename(path)
    except OSError as error:
        raise FlatbedError(f"{folder} cannot be written to: {error.strerror or error}") from error
    return path


def _versions(folder: Path) -> list[str]:
    """Subfolders that a save has made; others of such names are somebody's own."""
    return [path.name for path in folder.iterdir() if NAME.fullmatch(path.name) and (path / MARK).exists()]


def _remove_others(folder: Path, version: str | None) -> None:
    """What cannot be removed now is left to the next save."""
    for path in folder.glob(f"{OLD}v*"):
        shutil.rmtree(path, ignore_errors=True)
    for name in _versions(folder):
        if name != version:  # by another name first: half removed it could not be told from somebody's own
            with suppress(OSError):
                shutil.rmtree((folder / name).rename(folder / f"{OLD}{name}"), ignore_errors=True)


def _write(path: Path, training: Training, token: str, *, in_place: Sequence[Table], extra: str) -> None:
    """All files of a version."""
    packer = Packer(tied=True)
    model = {name: packer.pack(value, name) for name, value in portable.dense_state(training.model).items()}
    # As safetensors.torch.save_model says which names belong to one tensor.
    write_tensors(path / "model.safetensors", packer.tensors, {"format": "pt", **packer.ties})
    kept = []
    for number, optimizer in enumerate(training.optimizers):
        about, tensors = portable.optimizer_parts(optimizer)
        write_tensors(path / f"optimizer-{number}.safetensors", tensors, {"format": "pt"})
        kept.append(about)
    write_text(path / "optimizer.json", json.dumps(kept))
    tables: dict[str, str | None] = {}
    for number, (name, table) in enumerate(training.tables.items()):
        tables[name] = None
        if not any(table is one for one in in_place):
            tables[name] = f"table-{number}.safetensors"
            table.save(path / f"table-{number}.safetensors")
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "token": token,
        "model": model,
        "n_optimizers": len(training.optimizers),
        "tables": tables,
        "extra": json.loads(extra),
    }
    write_text(path / MANIFEST, json.dumps(manifest))
    sync_folder(path.parent)


def _prepare(table: Table, decision: Path, token: str) -> DiskStorage:
    store = table.store
    tier = store.disk
    store.settle()
    meta = {"table": store.config.describe(), "scalars": table.scalars(), "token": token}
    tier.prepare(meta, decision=decision, token=token)
    return tier


# ---- loading


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> dict[str, Any]:
    """Read what `save_checkpoint` has written into the same model, optimizers and tables; returns `extra`.

    Everything is checked first, and nothing changes if it does not fit. Without optimizers, their state is
    left out. With torch.distributed, all ranks call this.
    """
    folder, training = _as_folder(folder), Training.of(model, optimizer)
    current = _current(folder)
    path = folder / current.version
    manifest = _manifest(path, current)
    values = _model_values(path, manifest, training.model)
    states = _optimizer_states(path, manifest, training.optimizers)
    readers = [
        _table_reader(path, name, training.tables[name], file=manifest["tables"][name], token=current.token)
        for name in _same_names(path, "tables", manifest["tables"], training.tables)
    ]
    portable.load_all(training.optimizers, states)
    training.model.load_state_dict(values, strict=False)
    for read in readers:
        read()
    return dict(manifest["extra"])


def _current(folder: Path) -> Current:
    file = folder / CURRENT
    if not file.exists():
        raise FlatbedError(f"{folder} holds no checkpoint (there is no {CURRENT} in it): check the path")
    found = _read_json(file)
    try:
        token, version = found["token"], found["version"]
        if not isinstance(token, str) or not NAME.fullmatch(version):
            raise ValueError(f"found {found}")
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(file, error) from error
    return Current(token, version)


def _holds(folder: Path, token: str) -> bool:
    return (folder / CURRENT).exists() and _current(folder).token == token


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> FlatbedError:
    return FlatbedError(f"{file} is missing or damaged ({error}): restore it from a copy")


def _manifest(path: Path, current: Current) -> dict[str, Any]:
    found = _read_json(path / MANIFEST)
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
        raise _damaged(path / MANIFEST, error) from error
    return dict(found)


def _model_values(path: Path, manifest: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The model's state dict, which fits."""
    file = path / "model.safetensors"
    tensors = read_tensors(file)
    try:
        values = {name: unpack(value, tensors) for name, value in manifest["model"].items()}
    except portable.DAMAGE as error:
        raise _damaged(file, error) from error
    ours = portable.dense_state(model)
    for name in _same_names(path, "parameters and buffers", values, ours):
        mine, saved = ours[name], values[name]
        if not isinstance(mine, Tensor) or nn.parameter.is_lazy(mine):
            continue
        if not isinstance(saved, Tensor) or saved.shape != mine.shape:
            found = tuple(saved.shape) if isinstance(saved, Tensor) else saved
            raise FlatbedError(f"'{name}' is {found} in {path}, and {tuple(mine.shape)} in the model")
    return values


def _same_names(path: Path, what: str, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """The names, if there are the same on both sides."""
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
    kept = _read_json(file)
    for number, optimizer in enumerate(optimizers):
        tensors = read_tensors(path / f"optimizer-{number}.safetensors")
        try:
            about = kept[number]
            state, shapes = unpack(about["state"], tensors), about["shapes"]
        except portable.DAMAGE as error:
            raise _damaged(file, error) from error
        portable.check_same(optimizer, state, shapes, where=f"{path} (optimizer {number})")
        states.append(state)
    return states


def _table_reader(path: Path, name: str, table: Table, *, file: Any, token: str) -> Callable[[], None]:
    """What will read a table, which fits."""
    if file is not None:
        found = saving.look(path / str(file))
        saving.fit_in(table, found)
        return partial(saving.read_in, table, found)
    tier = table.store._tier  # not `tier`: that might lay rows out anew, and so be another checkpoint
    if table.storage_kind != "disk":
        raise FlatbedError(
            f"the rows of {name} are not in {path}, but in the table's own file: build it with "
            f'storage="disk" and that path, or save with copy_disk_tables=True'
        )
    if not isinstance(tier, DiskStorage) or token not in _tokens(tier):
        raise FlatbedError(
            f"{table.store.config.path} (table {name}) is not as it was when {path.parent} was saved: it is "
            "another file, or had a later checkpoint (table.checkpoint(), resize, or a checkpoint in another "
            "folder). Load the folder that was saved last, put a copy of the file from then in its place, or "
            "save with copy_disk_tables=True from now on"
        )
    return partial(_go_back, table, tier)


def _tokens(tier: DiskStorage) -> list[Any]:
    """Of the file's checkpoint, and of one that was prepared and decided, but not completed."""
    states = [tier._state] if tier._sealed is None else [tier._state, tier._sealed]
    return [state.meta.get("token") for state in states]


def _go_back(table: Table, tier: DiskStorage) -> None:
    """A disk table as its file has it."""
    store, owner = table.store, table.owner
    with store._laying_out:  # no thread may make a cache for what is about to go
        store.abandon_cache()
        tier.close()  # rows that changed since are dropped
        store._tier = tier = DiskStorage.open(tier.path)
        store.version += 1
    scalars = dict(tier.meta.get("scalars", {}))
    store.set_scalars(scalars)
    if owner is None:
        store.claimed = not store.record.state
