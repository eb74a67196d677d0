"""Files, versions and locks of a checkpoint's folder.

A save holds an exclusive lock on `.lock`. A load holds a shared lock on the mark of the version that it
reads, and a save leaves versions alone that are being read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.tables.files import as_path, lock, open_regular, read_small
from flatbed.tables.tensor_file import check_tensors

FORMAT, FORMAT_VERSION = "flatbed-checkpoint", 1
CURRENT = "CURRENT.json"
MANIFEST = "checkpoint.json"
OPTIMIZERS = "optimizer.json"
MARK = ".flatbed"  # in a subfolder that `save_checkpoint` made
LOCK = ".lock"
DRAFT, OLD = ".new", ".old-"  # name of a new subfolder, and prefix of one that is being removed
VERSION = re.compile(r"v(\d{7,})(-[0-9a-f]{8})?")
FILE = re.compile(r"(model|state|optimizer-\d+|table-\d+)\.safetensors|optimizer\.json")
JSON_LIMIT = 1 << 28  # bytes


@dataclass(frozen=True, slots=True)
class Current:
    """The valid version of a folder, and the versions before it that are kept."""

    token: str
    version: str
    previous: tuple[str, ...] = ()


def as_folder(folder: Any) -> Path:
    """Return the folder as an absolute path."""
    if isinstance(folder, nn.Module):
        raise TypeError(
            f"the folder comes first, and then the model; found {type(folder).__name__} as the folder"
        )
    path = as_path(folder, "folder").absolute()
    if path.is_file():
        raise FlatbedError(
            f"{path} is a file, and a checkpoint is a folder: name that of flatbed.save_checkpoint. "
            "torch.load reads files of torch, and flatbed.load_table those of tables"
        )
    return path


def read_current(folder: Path) -> Current:
    """Read which version of a folder is valid."""
    file = folder / CURRENT
    if not os.path.lexists(file):
        raise FlatbedError(f"{folder} holds no checkpoint (there is no {CURRENT} in it): check the path")
    found = read_json(file)
    try:
        token, version, previous = found["token"], found["version"], tuple(found.get("previous", ()))
        if not isinstance(token, str) or not all(VERSION.fullmatch(name) for name in (version, *previous)):
            raise ValueError(f"found {found}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(file, error) from error
    return Current(token, version, previous)


def has_token(folder: Path, token: str) -> bool:
    """True if the folder's valid version was written with this token."""
    return (folder / CURRENT).exists() and read_current(folder).token == token


# ---- versions


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Make the folder if needed, and keep other saves out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(folder / LOCK, flags, 0o666)
    except OSError as error:
        raise FlatbedError(f"{folder} cannot be written to: {error.strerror or error}") from error
    with open(descriptor, "rb") as file:  # is closed with its last reference, whatever interrupts the block
        lock(file)
        yield


@contextmanager
def reading(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the valid version and its token; saves of other processes do not remove it meanwhile.

    `folder` may also be a version that ``save_checkpoint(..., keep=...)`` has kept.
    """
    if VERSION.fullmatch(folder.name) and (folder / MANIFEST).exists():
        with _kept(folder):
            yield folder, read_manifest(folder)["token"]
        return
    while True:
        current = read_current(folder)
        with _kept(folder / current.version) as is_there:
            if is_there or read_current(folder) == current:
                yield folder / current.version, current.token
                return


@contextmanager
def _kept(version: Path) -> Iterator[bool]:
    """Hold a shared lock on a version; yields False if it is gone."""
    try:
        file = open_regular(version / MARK)
    except (OSError, DamagedFileError):
        yield False
        return
    with file:
        lock(file, exclusive=False)
        yield (version / MARK).exists()  # otherwise a save removed it just before it was locked


def make_version(folder: Path, token: str) -> Path:
    """Make a new subfolder, and remove those of interrupted saves."""
    try:
        current = read_current(folder) if (folder / CURRENT).exists() else None
        known = [] if current is None else [current.version, *current.previous]
        remove_others(folder, known)
        numbers = [found[1] for name in (*known, *os.listdir(folder)) if (found := VERSION.fullmatch(name))]
        path = folder / f"v{max(map(int, numbers), default=0) + 1:07d}-{token[:8]}"
        draft = folder / DRAFT  # so that no version without its mark is left behind
        if draft.is_dir() and not draft.is_symlink():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
        draft.mkdir()
        (draft / MARK).touch()
        draft.rename(path)
    except OSError as error:
        raise FlatbedError(f"{folder} cannot be written to: {error.strerror or error}") from error
    return path


def remove_others(folder: Path, kept: Collection[str]) -> None:
    """Remove all other versions that no process reads. Folders without the mark are the user's, and stay."""
    for path in folder.glob(f"{OLD}v*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in list(folder.iterdir()):
        if not VERSION.fullmatch(path.name) or path.name in kept or path.is_symlink():
            continue
        # NFS locks exclusively only what is open for writing.
        with suppress(OSError), open(path / MARK, "r+b") as file:
            if lock(file, wait=False) is not False:
                # Renamed first: half removed, it would look like the user's.
                shutil.rmtree(path.rename(folder / f"{OLD}{path.name}"), ignore_errors=True)


# ---- the list of contents


def write_checksum(manifest: dict[str, Any]) -> str:
    """Return the JSON of a manifest with a checksum of itself."""
    return json.dumps({**manifest, "checksum": zlib.crc32(json.dumps(manifest).encode())})


def read_manifest(path: Path, token: str | None = None) -> dict[str, Any]:
    """Read and check the list of contents of a version."""
    file = path / MANIFEST
    found = read_json(file)
    try:
        if found["format"] != FORMAT or token not in (None, found["token"]):
            raise ValueError("it belongs to something else")
        if found["version"] != FORMAT_VERSION:
            raise FlatbedError(
                f"{path} has version {found['version']} of the format, and this flatbed knows version "
                f"{FORMAT_VERSION}: load it with the flatbed that wrote it"
            )
        checksum = found.pop("checksum", None)  # manifests of earlier versions have none
        if checksum not in (None, zlib.crc32(json.dumps(found).encode())):
            raise ValueError("its checksum is wrong")
        _check_manifest(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(file, error) from error
    return dict(found)


def _check_manifest(found: dict[str, Any]) -> None:
    """Raise unless a manifest has the expected types, and names files of its own folder alone."""
    for key in ("files", "shards", "paths"):  # manifests of earlier versions lack them
        found.setdefault(key, {})
    for key, default in (("schedulers", []), ("scaler", None), ("rng", [])):
        found.setdefault(key, default)
    kinds = {"token": str, "model": dict, "tables": dict, "extra": dict, "n_optimizers": int, "files": dict}
    kinds |= {"shards": dict, "paths": dict, "schedulers": list, "rng": list, "scaler": (dict, type(None))}  # type: ignore[dict-item]
    for key, kind in kinds.items():
        if not isinstance(found[key], kind):
            raise TypeError(f"{key} is {found[key]!r}")
    for name in (*found["files"], *(name for name in found["tables"].values() if name is not None)):
        if not isinstance(name, str) or not FILE.fullmatch(name):
            raise ValueError(f"{name!r} is no file of a checkpoint")


def check_files(path: Path, manifest: Mapping[str, Any], rank: int = 0, n_ranks: int = 1) -> None:
    """Raise unless all files of a version are as they were written. Ranks check tensors in turn."""
    n_tensors = 0
    for name, checksums in manifest["files"].items():
        if name == OPTIMIZERS:
            if zlib.crc32(_read(path / name)) != checksums:
                raise damaged(path / name, ValueError("its checksum is wrong"))
        elif n_ranks == 1 or not isinstance(checksums, dict):
            check_tensors(path / name, checksums)
        else:
            mine = {
                key: value
                for number, (key, value) in enumerate(checksums.items(), start=n_tensors)
                if key == "" or number % n_ranks == rank
            }
            check_tensors(path / name, mine)
            n_tensors += len(checksums)


def read_json(file: Path) -> Any:
    """Read a JSON file of a checkpoint."""
    try:
        return json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise damaged(file, error) from error


def _read(file: Path) -> bytes:
    try:
        return read_small(file, JSON_LIMIT)
    except OSError as error:
        raise damaged(file, error) from error


def damaged(file: Path, error: Exception) -> DamagedFileError:
    """Make the error for a file that cannot be used."""
    return DamagedFileError(
        f"{file} is missing or damaged ({type(error).__name__}: {error}): restore it from a copy"
    )
