"""Safetensors files written block by block, and files that appear whole or not at all.

The safetensors library needs all tensors in memory first. The format is simple: the length of a header (8
bytes, little-endian), the header in JSON, padded to 8 bytes, and the tensors without gaps.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.distributed.dtensor import is_dtensor
from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.progress import progress
from flatbed.tables.checksum import Checksum, Checksums, SharedChecksums

BLOCK_BYTES = 1 << 26
SYNC_BYTES = 1 << 28  # written between syncs, so that a long save answers Control-C
MANY_BYTES = 1 << 20  # from which a thread for the checksum pays off
RESERVED = "__metadata__"  # key of the header that is no tensor
HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library
FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


class Writer:
    """A file that is being written: every entry in full, its parts in order, here or by other ranks."""

    def __init__(
        self,
        descriptor: int,
        starts: Mapping[str, int],
        pool: ThreadPoolExecutor,
        sums: Checksums | SharedChecksums,
    ) -> None:
        self._descriptor = descriptor
        self._starts = starts
        self._pool = pool
        self._sums = sums
        self._n_unsynced = 0

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Write a part of a tensor, on any device, from a byte of it on."""
        data = values.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().data
        if len(data) < MANY_BYTES:
            self._sums.add(name, offset, data)
            write_at(self._descriptor, self._starts[name] + offset, data)
        else:
            adding = self._pool.submit(self._sums.add, name, offset, data)
            write_at(self._descriptor, self._starts[name] + offset, data)
            adding.result()
        self._n_unsynced += len(data)
        if self._n_unsynced >= SYNC_BYTES:
            os.fsync(self._descriptor)
            self._n_unsynced = 0

    @property
    def checksums(self) -> dict[str, int]:
        """Return the checksums of the header ("") and of all tensors, for `check_tensors`."""
        return self._sums.values


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The header of a file, and where its tensors are."""

    header: bytes
    starts: dict[str, int]
    nbytes: int

    @staticmethod
    def of(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> FileLayout:
        """Lay out tensors one after the other."""
        if sys.byteorder != "little":
            raise FlatbedError("safetensors files are little-endian, and this machine is not: save elsewhere")
        header: dict[str, Any] = {RESERVED: dict(metadata)}
        end = 0
        # Wide numbers first, as in the library, so that every tensor is aligned to its element size.
        for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
            if entry.name == RESERVED:
                raise FlatbedError(f"a tensor named '{RESERVED}' cannot be saved: rename it")
            if entry.dtype not in KINDS:
                raise FlatbedError(f"'{entry.name}' is of {entry.dtype}, which safetensors cannot hold")
            offsets = [end, end + entry.nbytes]
            header[entry.name] = {
                "dtype": KINDS[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": offsets,
            }
            end += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        first = 8 + len(text)
        starts = {entry.name: first + header[entry.name]["data_offsets"][0] for entry in entries}
        return FileLayout(struct.pack("<Q", len(text)) + text, starts, first + end)


@contextmanager
def writing(path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Write a safetensors file. Its name appears when it is complete and durable."""
    layout = FileLayout.of(entries, metadata)
    sums = Checksums(("", *layout.starts))  # "" is the header
    with replacing(path, layout.nbytes) as descriptor, ThreadPoolExecutor(1) as pool:
        header = memoryview(layout.header)
        sums.add("", 0, header)
        write_at(descriptor, 0, header)
        yield Writer(descriptor, layout.starts, pool, sums)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    whole: Callable[[Tensor], Tensor] = Tensor.detach,
) -> dict[str, int]:
    """Write a safetensors file of tensors on any device; returns its checksums.

    `whole` gives all elements of a tensor, one tensor after the other.
    """
    for name, tensor in tensors.items():
        check_plain(tensor, name)
    entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    total = sum(entry.nbytes for entry in entries)
    with (
        writing(path, entries, metadata) as writer,
        progress(f"saving {path.name}", total, "bytes") as advance,
    ):
        for entry in entries:
            flat, step = whole(tensors[entry.name]).reshape(-1), BLOCK_BYTES // entry.dtype.itemsize
            for first in range(0, flat.numel(), step):
                part = flat[first : first + step]
                writer.write(entry.name, first * entry.dtype.itemsize, part)
                advance(part.nbytes)
    return writer.checksums


def check_plain(tensor: Tensor, name: str) -> None:
    """Raise unless a tensor is dense and initialized, and whole or a DTensor."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise FlatbedError(f"'{name}' has no values yet: run the model once, then save it")
    is_sharded = hasattr(tensor, "to_local") and not is_dtensor(tensor)
    if tensor.layout != torch.strided or tensor.is_quantized or is_sharded:
        raise FlatbedError(
            f"'{name}' is sparse, quantized or sharded ({type(tensor).__name__}), which safetensors cannot "
            "hold: save it by other means"
        )


def as_path(path: Any, what: str = "path") -> Path:
    """Convert an argument to a path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{what} must be a string or a pathlib.Path; found {type(path).__name__}")
    return Path(path)


@contextmanager
def opened(path: Path, what: str = "safetensors file") -> Iterator[Any]:
    """Open a file with the library's reader; wrong files raise `FlatbedError`."""
    import safetensors

    if not path.is_file():
        raise FlatbedError(f"there is no {what} at {path}: check the path")
    try:
        reader: Any = safetensors.safe_open(str(path), framework="pt", device="cpu")
        reader.__enter__()
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DamagedFileError(
            f"{path} is no {what}, or it is damaged ({error}): check the path, or restore it from a copy"
        ) from error
    try:
        yield reader
    finally:
        reader.__exit__(None, None, None)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file."""
    with opened(path) as reader:
        return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118


def check_tensors(path: Path, checksums: Any) -> None:
    """Read a whole file of `writing`, and raise unless it is as it was written."""
    try:
        with (
            open_regular(path) as file,
            progress(f"checking {path.name}", path.stat().st_size, "bytes") as advance,
        ):
            head = file.read(8)
            text = file.read(min(int.from_bytes(head, "little"), HEADER_LIMIT))
            found = {name: Checksum() for name in checksums}
            found[""].update(memoryview(head + text))
            if found[""].value != checksums[""]:
                raise ValueError("the checksum of its header is wrong")
            header = json.loads(text)
            buffer = bytearray(min(BLOCK_BYTES, path.stat().st_size))
            for name in sorted(checksums.keys() - {""}, key=lambda name: header[name]["data_offsets"]):
                start, stop = header[name]["data_offsets"]
                file.seek(8 + len(text) + start)
                for at in range(start, stop, BLOCK_BYTES):
                    part = memoryview(buffer)[: stop - at]
                    if file.readinto(part) < len(part):
                        raise ValueError(f"it ends within '{name}'")
                    found[name].update(part)
                    advance(len(part))
                if found[name].value != checksums[name]:
                    raise ValueError(f"the checksum of '{name}' is wrong")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"{path} is missing or damaged ({error}): restore it from a copy") from error


def entries_of(reader: Any) -> dict[str, TensorEntry]:
    """List the tensors of an open file, without those of dtypes that torch does not have."""
    found = {}
    for name in reader.keys():  # noqa: SIM118
        part = reader.get_slice(name)
        if part.get_dtype() in DTYPES:
            found[name] = TensorEntry(name, DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return found


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading: no pipe or device, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
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


# ---- files that appear whole


@contextmanager
def replacing(path: Path, nbytes: int, word: str | None = None) -> Iterator[int]:
    """Yield a descriptor for `nbytes` bytes of a temporary file, which is renamed to `path` at the end.

    Its name is `draft_of(path, word)`, with a random word by default.
    """
    folder = path.parent
    if not folder.is_dir():
        raise FlatbedError(f"there is no folder {folder} to write {path.name} to: make it first")
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


@contextmanager
def file_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Turn errors of the system while a file is written into a `FlatbedError`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _no_space(path, nbytes) from error
        raise FlatbedError(f"writing {path} failed: {error.strerror or error}") from error


def draft_of(path: Path, word: str) -> Path:
    """Return the temporary name of a file that is being written; `word` has eight letters."""
    return path.with_name(f".{path.name}.{word}.part")


def write_text(path: Path, text: str) -> None:
    """Replace a small file."""
    data = text.encode()
    with replacing(path, len(data)) as descriptor:
        write_at(descriptor, 0, memoryview(data))


def write_at(descriptor: int, offset: int, data: memoryview) -> None:
    """Write all of `data`, however little the system accepts at a time."""
    if not hasattr(os, "pwrite"):
        os.lseek(descriptor, offset, os.SEEK_SET)
    done = 0
    while done < len(data):
        part = data[done : done + BLOCK_BYTES]
        done += (
            os.pwrite(descriptor, part, offset + done)
            if hasattr(os, "pwrite")
            else os.write(descriptor, part)
        )


def sync_folder(folder: Path) -> None:
    """Make names that were added or removed in a folder durable."""
    if os.name != "posix":
        return  # folders cannot be opened there
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FlatbedError(f"syncing {folder} failed: {error.strerror or error}") from error


def _no_space(path: Path, nbytes: int) -> FlatbedError:
    free = shutil.disk_usage(path.parent).free
    return FlatbedError(
        f"{path} needs {nbytes:,} bytes, and its disk has {free:,} bytes free, or a quota or limit allows no "
        "more: free some space, or use another disk. Nothing was changed"
    )


def _make(draft: Path) -> int:
    """Make a locked file, so that other processes can tell it from the draft of a killed one."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        descriptor = os.open(draft, flags, 0o666)
        with suppress(ImportError, OSError):  # without locks, leftovers are never removed
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if draft.exists():  # otherwise another process removed it before it was locked
            return descriptor
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Remove drafts that no process has locked."""
    for draft in path.parent.glob(f".{escape(path.name)}.????????.part"):
        with suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()
            finally:
                os.close(descriptor)
