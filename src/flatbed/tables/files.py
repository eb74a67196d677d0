"""Regular files: opened, locked, synced, read; new ones that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from io import BufferedReader
from pathlib import Path
from typing import Any

from flatbed.errors import DamagedFileError, FlatbedError

BLOCK_BYTES = 1 << 26
URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class NoSpace(FlatbedError):
    """The disk is full, or a quota or limit is reached."""


class NotSynced(FlatbedError):
    """A sync failed: the content of the disk is not known."""


@contextmanager
def file_errors(path: Path, nbytes: int = 0, *, doing: str = "writing") -> Iterator[None]:
    """Turn errors of the system into a `FlatbedError` that names the file, which needs so many bytes more."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _no_space(path, nbytes) from error
        raise FlatbedError(f"{doing} {path} failed: {error.strerror or error}") from error


def _no_space(path: Path, nbytes: int) -> NoSpace:
    free = shutil.disk_usage(path.parent).free
    return NoSpace(
        f"{path} needs {nbytes:,} bytes, and its disk has {free:,} bytes free, or a quota or limit allows no "
        "more: free some space, or use another disk. Nothing was changed"
    )


def check_space(path: Path, nbytes: int) -> None:
    """Raise if the disk of a file has fewer bytes free."""
    if nbytes > shutil.disk_usage(path.parent).free:
        raise _no_space(path, nbytes)


def as_path(path: Any, what: str = "path") -> Path:
    """Convert an argument to a path. Those that begin with ~ or s3:// would make folders of that name."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{what} must be a string or a pathlib.Path; found {type(path).__name__}")
    name = os.fspath(path)
    if not name or os.path.expanduser(name) != name or URL.match(name):
        raise ValueError(
            f"{what} must be a path of this machine, with ~ expanded (os.path.expanduser); found {name!r}"
        )
    return Path(path)


def opened(path: Path, flags: int) -> int:
    """Open a regular file, and return its descriptor: no pipe or device, which might never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFileError(f"{path} is no regular file: restore it from a copy, or name another one")
    return descriptor


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading."""
    return open(opened(path, os.O_RDONLY), "rb")


def read_small(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise DamagedFileError(f"{path} has more than {limit:,} bytes: restore it from a copy")
        return file.read(limit)


def lock(file: Any, *, exclusive: bool = True, wait: bool = True) -> bool | None:
    """Lock a file or descriptor until it is closed.

    Returns False if another process has locked it, and None if the file system has no locks.
    """
    with suppress(ImportError, OSError):
        import fcntl

        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(file, kind | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True
    return None


# ---- writing


def write_at(descriptor: int, offset: int, data: memoryview) -> None:
    """Write all of `data`, however little the system accepts at a time."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + BLOCK_BYTES], offset + done)


def sync(descriptor: int, path: Path) -> None:
    """Make everything written durable."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise NotSynced(f"syncing {path} failed: {error.strerror}; check its disk") from error


def sync_folder(folder: Path) -> None:
    """Make names that were added or removed in a folder durable."""
    with file_errors(folder, doing="opening"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor, folder)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a small file."""
    data = text.encode()
    with replacing(path, len(data)) as descriptor:
        write_at(descriptor, 0, memoryview(data))


@contextmanager
def replacing(path: Path, nbytes: int, word: str | None = None) -> Iterator[int]:
    """Yield a descriptor for `nbytes` bytes of a temporary file, which is renamed to `path` at the end.

    Its name is `draft_of(path, word)`, with a random word by default.
    """
    check_folder(path)
    check_space(path, nbytes)
    with file_errors(path, nbytes):
        draft, descriptor = new_draft(path, word)
        try:
            try:
                with suppress(FileNotFoundError):
                    os.chmod(draft, stat.S_IMODE(path.stat().st_mode))
                yield descriptor
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(draft, path)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
    sync_folder(path.parent)


def check_folder(path: Path) -> None:
    """Raise unless there is a folder for a new file or folder."""
    if not path.parent.is_dir():
        raise FlatbedError(f"there is no folder {path.parent} to write {path.name} to: make it first")


def draft_of(path: Path, word: str) -> Path:
    """Return the temporary name of a file that is being written; `word` has eight letters."""
    return path.with_name(f".{path.name}.{word}.part")


def new_draft(path: Path, word: str | None = None) -> tuple[Path, int]:
    """Make a temporary file, locked, and remove those of killed processes, which are not."""
    for leftover in path.parent.glob(f".{escape(path.name)}.????????.part"):
        with suppress(OSError):
            descriptor = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if lock(descriptor, wait=False):
                    leftover.unlink()
            finally:
                os.close(descriptor)
    draft = draft_of(path, secrets.token_hex(4) if word is None else word)
    while True:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        lock(descriptor)
        if draft.exists():  # otherwise another process removed it before it was locked
            return draft, descriptor
        os.close(descriptor)
