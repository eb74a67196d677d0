"""Names and versions of a checkpoint's folder, and the training run that it is made of or read into."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flatbed.errors import FlatbedError
from flatbed.tables.embedding import named_tables
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import as_path

FORMAT, FORMAT_VERSION = "flatbed-checkpoint", 1
CURRENT = "CURRENT.json"
MANIFEST = "checkpoint.json"
MARK = ".flatbed"  # in a subfolder that `save_checkpoint` made
DRAFT, OLD = ".new", ".old-"  # name of a new subfolder, and prefix of one that is being removed
NAME = re.compile(r"v\d{7,}")


@dataclass(frozen=True, slots=True)
class Training:
    """Model, optimizers and tables of a checkpoint."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    tables: dict[str, Table]

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> Training:
        """Check the arguments of `save_checkpoint` and `load_checkpoint`."""
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


@dataclass(frozen=True, slots=True)
class Current:
    """The valid version of a folder."""

    token: str
    version: str


def as_folder(folder: Any) -> Path:
    """Return the folder as an absolute path."""
    if isinstance(folder, nn.Module):
        raise TypeError(
            f"the folder comes first, and then the model; found {type(folder).__name__} as the folder"
        )
    return as_path(folder, "folder").absolute()


def read_current(folder: Path) -> Current:
    """Read which version of a folder is valid."""
    file = folder / CURRENT
    if not file.exists():
        raise FlatbedError(f"{folder} holds no checkpoint (there is no {CURRENT} in it): check the path")
    found = read_json(file)
    try:
        token, version = found["token"], found["version"]
        if not isinstance(token, str) or not NAME.fullmatch(version):
            raise ValueError(f"found {found}")
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(file, error) from error
    return Current(token, version)


def has_token(folder: Path, token: str) -> bool:
    """True if the folder's valid version was written with this token."""
    return (folder / CURRENT).exists() and read_current(folder).token == token


def make_version(folder: Path) -> Path:
    """Make a new subfolder, and remove those of interrupted saves."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        current = read_current(folder) if (folder / CURRENT).exists() else None
        remove_others(folder, None if current is None else current.version)
        names = [path.name for path in folder.iterdir() if NAME.fullmatch(path.name)]
        names += [] if current is None else [current.version]
        path = folder / f"v{max((int(name[1:]) for name in names), default=0) + 1:07d}"
        draft = folder / DRAFT  # so that no version without its mark is left behind
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


def remove_others(folder: Path, version: str | None) -> None:
    """Remove all versions but one. Folders without the mark are the user's, and stay."""
    for path in folder.glob(f"{OLD}v*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in list(folder.iterdir()):
        if NAME.fullmatch(path.name) and (path / MARK).exists() and path.name != version:
            with suppress(OSError):  # renamed first: half removed, it would look like the user's
                shutil.rmtree(path.rename(folder / f"{OLD}{path.name}"), ignore_errors=True)


def read_json(file: Path) -> Any:
    """Read a JSON file of a checkpoint."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(file, error) from error


def damaged(file: Path, error: Exception) -> FlatbedError:
    """Make the error for a file that cannot be used."""
    return FlatbedError(f"{file} is missing or damaged ({error}): restore it from a copy")
