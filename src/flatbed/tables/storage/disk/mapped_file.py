"""Files of tables and journals: reserved before they are written, mapped, synced on request.

Every change of a file or a folder goes through `MappedFile`, so that a test can record it.
"""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatbed.errors import FlatbedError
from flatbed.tables.files import check_space, file_errors, lock, opened, sync, sync_folder, write_at

Records = NDArray[np.void]
"""One element per record."""

Sums = NDArray[np.uint32]
"""One checksum per record."""

RESERVED_AT_ONCE = 1 << 30  # bytes: some file systems write zeros, and Control-C has no effect meanwhile


class MappedFile:
    """A file. Its records are mapped into memory; its other parts are read and written."""

    def __init__(
        self, path: Path, *, create: bool = False, mode: int | None = None, read_only: bool = False
    ) -> None:
        """Open a regular file, or create one with a mode; symbolic links are refused."""
        self.path = path
        self._access = mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE
        self.rows: Records | None = None
        self.offset = 0  # of the first record
        self.is_cold = True  # whether the last reads waited for the disk
        self.sums: Sums | None = None
        self.checked: NDArray[np.bool_] | None = None
        """Marks records that were compared with their checksums since they were mapped; None: no need."""
        self.sums_offset = 0  # of the first checksum
        self._mapping: mmap.mmap | None = None
        self._is_solid = False  # whether `fill_holes` has filled holes
        self._descriptor = -1
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | (os.O_CREAT | os.O_EXCL if create else 0)
        with file_errors(path, doing="opening"):
            self._descriptor = opened(path, flags | os.O_NOFOLLOW)
        if mode is not None:
            os.fchmod(self._descriptor, mode)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def mode(self) -> int:
        return stat.S_IMODE(os.fstat(self._descriptor).st_mode)

    def check_name(self) -> None:
        """Raise unless the path still names this file."""
        try:
            is_same = os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except OSError:
            is_same = False
        if not is_same:
            raise FlatbedError(
                f"{self.path} was removed or replaced while it was open, and nothing was written: put it "
                "back (the file itself, not a copy), or save the rows elsewhere (table.save)"
            )

    def map(
        self,
        offset: int,
        nbytes: int,
        *,
        count: int,
        random: bool = False,
        large_pages: bool = False,
        sums_at: int | None = None,
    ) -> Records:
        """Map `count` records of `nbytes` bytes, and their checksums. This replaces an earlier mapping."""
        with file_errors(self.path, doing="mapping"):
            mapping = mmap.mmap(self._descriptor, self.size, access=self._access)
        if random and hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)
        if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the kernel may not support large pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._unmap()
        self._mapping, self.offset = mapping, offset
        # Not np.ndarray(buffer=mapping): its memory could be unmapped while a thread reads it.
        self.rows = np.frombuffer(mapping, f"V{nbytes}", count, offset)
        if sums_at is not None:
            self.checked = anonymous(-(-count // 4)).view(np.bool_)
            self.sums, self.sums_offset = np.frombuffer(mapping, np.uint32, count, sums_at), sums_at
        return self.rows

    def read(self, offset: int, into: NDArray[Any]) -> int:
        """Fill an array from the file; returns the number of bytes read."""
        view, done = memoryview(into.reshape(-1).view(np.uint8).data), 0
        with file_errors(self.path, doing="reading"):
            while done < len(view):
                got = os.preadv(self._descriptor, [view[done:]], offset + done)
                if not got:
                    break
                done += got
        return done

    def write(self, offset: int, data: bytes | NDArray[Any]) -> None:
        """Replace bytes of the file by the bytes of a contiguous array."""
        view = memoryview(data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data)
        with file_errors(self.path, len(view)):
            write_at(self._descriptor, offset, view)

    def scatter(self, at: NDArray[np.int64], records: Records) -> None:
        """Replace mapped records at positions in range."""
        assert self.rows is not None
        self.rows[at] = records

    def scatter_sums(self, at: NDArray[np.int64], sums: Sums) -> None:
        """Replace mapped checksums at positions in range."""
        assert self.sums is not None
        self.sums[at] = sums

    def reserve(self, size: int) -> None:
        """Extend the file to `size` with disk space for every byte; after an error it is as before."""
        before = self.size
        if size > before:
            try:
                self._allocate(before, size, needed=size - before)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, before)  # free what was reserved before the disk was full
                raise

    def fill_holes(self) -> None:
        """Reserve space for holes of a sparse copy: on a full disk, writing to a hole kills the process."""
        found = os.fstat(self._descriptor)
        needed = found.st_size - found.st_blocks * 512
        if needed > 0 and not self._is_solid:
            self._allocate(0, found.st_size, needed=needed)
            # Not again: a compressed file always has fewer blocks, and reserving them is slow.
            self._is_solid = True

    def _allocate(self, start: int, stop: int, *, needed: int) -> None:
        """Reserve disk space for a part of the file, which takes `needed` more bytes."""
        check_space(self.path, needed)
        with file_errors(self.path, needed):
            for at in range(start, stop, RESERVED_AT_ONCE):
                os.posix_fallocate(self._descriptor, at, min(RESERVED_AT_ONCE, stop - at))

    def truncate(self, size: int) -> None:
        with file_errors(self.path, doing="truncating"):
            os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Make everything written durable, also through the mapping."""
        sync(self._descriptor, self.path)

    def close(self) -> None:
        self._unmap()
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    __del__ = close

    def _unmap(self) -> None:
        mapping, self._mapping, self.rows, self.sums, self.checked = self._mapping, None, None, None, None
        if mapping is not None:
            with suppress(BufferError):  # another thread still reads: its last reference unmaps the memory
                mapping.close()

    @staticmethod
    def rename(source: Path, target: Path) -> None:
        with file_errors(target, doing="replacing"):
            os.replace(source, target)

    @staticmethod
    def remove(path: Path) -> None:
        with file_errors(path, doing="removing"):
            path.unlink(missing_ok=True)

    sync_folder = staticmethod(sync_folder)


def anonymous(count: int) -> NDArray[np.int32]:
    """Allocate zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, max(4 * count, 1), flags=flags), np.int32, count)


def open_for_lock(path: Path) -> FileIO:
    """Open a file only to lock it. A mapping copies its file's descriptor, and would keep the lock."""
    with file_errors(path, doing="opening"):
        return FileIO(opened(path, os.O_RDWR | os.O_NOFOLLOW), "r+")


def lock_table(file: FileIO, path: Path) -> None:
    """Lock a table's file for one storage of one process, until `file` is closed."""
    is_locked = lock(file, wait=False)
    if is_locked is None:
        raise FlatbedError(f"tables on disk need file locks, which {path} has not: use storage='host'")
    if not is_locked:
        raise FlatbedError(
            f"{path} is open already, in this process or in another one; a table on disk has one user at a "
            "time: close it there first (table.close()), or read it beside that one by "
            "load_table(path, read_only=True)"
        )
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        raise FlatbedError(f"{path} was replaced while it was being opened; try again")
