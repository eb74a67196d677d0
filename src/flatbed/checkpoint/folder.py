"""Files, versions and locks of a checkpoint's folder.

A save holds an exclusive lock on `.lock`. A load holds a shared lock on the mark of the version that it
reads, and a save does not remove versions that are being read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.tables.files import lock, open_regular, read_small, write_text
from flatbed.tables.tensor_file import check_tensors, naming_damage

FORMAT, FORMAT_VERSION = "flatbed-checkpoint", 1
CURRENT = "CURRENT.json"
MANIFEST = "checkpoint.json"
OPTIMIZERS = "optimizer.json"
MARK = ".flatbed"  # a file in each subfolder that `save_checkpoint` has made
LOCK = ".lock"
HIDDEN = ".old-"  # prefix of a version that is being made or removed
VERSION = re.compile(r"v(\d{7,})(-[0-9a-f]{8})?")
FILE = re.compile(r"(model|state|optimizer-\d+|table-\d+)\.safetensors|optimizer\.json")
JSON_LIMIT = 1 << 28  # bytes

known_tokens: set[str] = set()
"""Those of the checkpoints that this process has saved or loaded: a save replaces them without a warning."""


class _InThread(threading.local):
    """The lock that a save or load of this thread holds, and its name."""

    def __init__(self) -> None:
        self.lock, self.doing = threading.Lock(), ""


_in_thread = _InThread()


def not_nested(doing: str) -> AbstractContextManager[bool]:
    """Return a lock to hold during a save or load; raise if this thread holds it already.

    It is a lock of C, since Control-C cannot leave that taken by a `with` block.
    """
    if _in_thread.lock.locked():
        raise FlatbedError(
            f"{doing} was called inside of {_in_thread.doing}, by a signal handler for example: set a flag "
            "in the handler, and save after step()"
        )
    _in_thread.doing = doing
    return _in_thread.lock


class NoCheckpointError(FlatbedError, FileNotFoundError):
    """The error of a folder without a checkpoint. A program that resumes runs starts a new one then."""


def no_checkpoint(folder: Path) -> NoCheckpointError:
    """Return the error of a folder without a checkpoint."""
    versions = sorted(path for path in folder.glob("v*") if (path / MANIFEST).exists())
    remedy = f"load {versions[-1]} itself, if its save was completed" if versions else "check the path"
    return NoCheckpointError(f"{folder} holds no checkpoint (there is no {CURRENT} in it): {remedy}")


def read_current(folder: Path) -> tuple[str, list[str]]:
    """Return the token of a folder's valid version, and the versions that are kept, the valid one first."""
    file = folder / CURRENT
    if not os.path.lexists(file):
        if folder.is_file():  # not a NoCheckpointError: the first save would fail
            raise FlatbedError(f"{folder} is a file, and a checkpoint is a folder: check the path")
        raise no_checkpoint(folder)
    found = read_json(file)
    with naming_damage(file):
        token, versions = found["token"], [found["version"], *found.get("previous", ())]
        # Otherwise a flipped bit in the key "previous" would hide the earlier versions.
        is_known = found.keys() <= {"token", "version", "previous"}
        if not is_known or not isinstance(token, str) or not all(map(VERSION.fullmatch, versions)):
            raise ValueError(f"found {found}")
    return token, versions


def kept_versions(folder: Path) -> list[str]:
    """Return the versions that are kept, the valid one first; none in a new folder."""
    return read_current(folder)[1] if (folder / CURRENT).exists() else []


# ---- versions


def is_version(folder: Path) -> bool:
    """Return whether a folder is itself a version, and has none."""
    return (folder / MANIFEST).exists() and not (folder / CURRENT).exists()


def open_lock(folder: Path) -> BufferedReader:
    """Make the folder if needed, and open the file that a save locks.

    A save locks it inside of a `with` block on the file. If a context manager in Python locked it, Control-C
    in the manager's own lines would leave it locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        return open(os.open(folder / LOCK, flags, 0o666), "rb")
    except OSError as error:
        raise FlatbedError(f"{folder} cannot be written to: {error.strerror or error}") from error


@contextmanager
def reading(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the valid version and its manifest; saves of other processes do not remove it meanwhile.

    `folder` may also be a version that ``save_checkpoint(..., keep=...)`` has kept, or a copy of one.
    """
    if is_version(folder):
        with _kept(folder):
            yield folder, read_manifest(folder)
        return
    while True:
        token, versions = read_current(folder)
        version = folder / versions[0]
        with _kept(version) as is_there:
            if is_there or read_current(folder) == (token, versions):
                yield version, read_manifest(version, token)
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
        yield (version / MARK).exists()  # False if a save removed the version just before the lock


def make_version(folder: Path, token: str) -> Path:
    """Make a new subfolder, and remove the subfolders of interrupted saves."""
    try:
        known = kept_versions(folder)
        remove_others(folder, known)
        numbers = [found[1] for name in (*known, *os.listdir(folder)) if (found := VERSION.fullmatch(name))]
        path = folder / f"v{max(map(int, numbers), default=0) + 1:07d}-{token[:8]}"
        draft = folder / f"{HIDDEN}{path.name}"  # so that no version without its mark is left behind
        draft.mkdir()
        (draft / MARK).touch()
        draft.rename(path)
    except OSError as error:
        raise FlatbedError(f"{folder} cannot be written to: {error.strerror or error}") from error
    return path


def remove_others(folder: Path, kept: Collection[str]) -> None:
    """Remove all other versions that no process reads. Folders without the mark are the user's, and stay."""
    for path in folder.glob(f"{HIDDEN}v*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in list(folder.iterdir()):
        if not VERSION.fullmatch(path.name) or path.name in kept or path.is_symlink():
            continue
        # On NFS, an exclusive lock needs a file that is open for writing.
        with suppress(OSError), open(path / MARK, "r+b") as file:
            if lock(file, wait=False) is not False:
                # Renamed first: a half removed version without its mark would look like the user's folder.
                shutil.rmtree(path.rename(folder / f"{HIDDEN}{path.name}"), ignore_errors=True)


# ---- the list of contents


def write_manifest(version: Path, manifest: dict[str, Any]) -> None:
    """Write the list of contents of a version, with a checksum of itself."""
    checksum = zlib.crc32(json.dumps(manifest).encode())
    write_text(version / MANIFEST, json.dumps({**manifest, "checksum": checksum}))


def read_manifest(path: Path, token: str | None = None) -> dict[str, Any]:
    """Read and check the list of contents of a version."""
    found = read_json(path / MANIFEST)
    with naming_damage(path / MANIFEST):
        if found["format"] != FORMAT or token not in (None, found["token"]):
            raise ValueError("it belongs to something else")
        if found["version"] != FORMAT_VERSION:
            raise FlatbedError(
                f"{path} has version {found['version']} of the format, and this flatbed knows version "
                f"{FORMAT_VERSION}: load it with the flatbed that wrote it"
            )
        if found.pop("checksum") != zlib.crc32(json.dumps(found).encode()):
            raise ValueError("its checksum is wrong")
        return _checked(found)


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest if it has the expected types, and only names files of its own folder."""
    kinds: dict[str, type] = {"token": str, "model": dict, "tables": dict, "extra": dict, "n_optimizers": int}
    kinds |= {"files": dict, "shards": dict, "paths": dict, "relative_paths": dict}
    kinds |= {"schedulers": list, "scaler": dict, "rng": list}
    for key, kind in kinds.items():
        if not isinstance(found[key], kind):
            raise TypeError(f"{key} is {found[key]!r}")
    for name in (*found["files"], *(name for name in found["tables"].values() if name is not None)):
        if not isinstance(name, str) or not FILE.fullmatch(name):
            raise ValueError(f"{name!r} is no file of a checkpoint")
    return found


def check_files(path: Path, manifest: Mapping[str, Any], rank: int = 0, n_ranks: int = 1) -> None:
    """Raise unless all files of a version are as they were written. Each rank checks some of the tensors."""
    for number, (name, checksums) in enumerate(manifest["files"].items()):
        if name != OPTIMIZERS:
            check_tensors(path / name, checksums, part=slice((rank + number) % n_ranks, None, n_ranks))
            continue
        with naming_damage(path / name):
            if zlib.crc32(read_small(path / name, JSON_LIMIT)) != checksums:
                raise ValueError("its checksum is wrong")


def read_json(file: Path) -> Any:
    """Read a JSON file of a checkpoint."""
    with naming_damage(file):
        return json.loads(read_small(file, JSON_LIMIT))
