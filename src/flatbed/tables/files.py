"""Regular files: small ones that are read whole, and new ones that appear whole or not at all."""

from __future__ import annotations

import errno
import os
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
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def as_path(path: Any, what: str = "path") -> Path:
    """Convert an argument to a path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{what} must be a string or a pathlib.Path; found {type(path).__name__}")
    return Path(path)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading: no pipe or device, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFileError(f"{path} is no regular file: restore it from a copy")
    return open(descriptor, "rb")


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


@contextmanager
def replacing(path: Path, nbytes: int, word: str | None = None) -> Iterator[int]:
    """Yield a descriptor for `nbytes` bytes of a temporary file, which is renamed to `path` at the end.

    Its name is `draft_of(path, word)`, with a random word by default.
    """
    folder = path.parent
    check_folder(path)
    _remove_leftovers(path)
    if nbytes > shutil.disk_usage(folder).free:
        raise _no_space(path, nbytes)
    draft = draft_of(path, secrets.token_hex(4) if word is None else word)
    with file_errors(path, nbytes):
        try:
            descriptor = _make(draft)
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
    sync_folder(folder)


def check_folder(path: Path) -> None:
    """Raise unless there is a folder for a new file or folder."""
    if not path.parent.is_dir():
        raise FlatbedError(f"there is no folder {path.parent} to write {path.name} to: make it first")


@contextmanager
def file_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Turn errors of the system while a file is written into a `FlatbedError`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _no_space(path, nbytes) from error
        raise FlatbedError(f"writing {path} failed: {error.strerror or error}") from error


def _no_space(path: Path, nbytes: int) -> FlatbedError:
    free = shutil.disk_usage(path.parent).free
    return FlatbedError(
        f"{path} needs {nbytes:,} bytes, and its disk has {free:,} bytes free, or a quota or limit allows no "
        "more: free some space, or use another disk. Nothing was changed"
    )


def draft_of(path: Path, word: str) -> Path:
    """Return the temporary name of a file that is being written; `word` has eight letters."""
    return path.with_name(f".{path.name}.{word}.part")


def _make(draft: Path) -> int:
    """Make a locked file, so that other processes can tell it from the draft of a killed one."""
    while True:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lock(descriptor)
        if draft.exists():  # otherwise another process removed it before it was locked
            return descriptor
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Remove drafts that no process has locked."""
    for draft in path.parent.glob(f".{escape(path.name)}.????????.part"):
        with suppress(OSError):
            descriptor = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if lock(descriptor, wait=False):
                    draft.unlink()
            finally:
                os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a small file."""
    data = text.encode()
    with replacing(path, len(data)) as descriptor:
        write_at(descriptor, 0, memoryview(data))


def write_at(descriptor: int, offset: int, data: memoryview) -> None:
    """Write all of `data`, however little the system accepts at a time."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + BLOCK_BYTES], offset + done)


def sync_folder(folder: Path) -> None:
    """Make names that were added or removed in a folder durable."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FlatbedError(f"syncing {folder} failed: {error.strerror or error}") from error
