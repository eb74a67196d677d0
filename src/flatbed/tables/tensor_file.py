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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.progress import progress

BLOCK_BYTES = 1 << 26
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
    """A file that is being written; every entry must be written in full."""

    def __init__(self, descriptor: int, starts: Mapping[str, int]) -> None:
        self._descriptor = descriptor
        self._starts = starts

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Write a part of a tensor, on any device, from a byte of it on."""
        flat = values.detach().contiguous().reshape(-1)
        step = BLOCK_BYTES // flat.element_size()
        for first in range(0, flat.numel(), step):
            data = flat[first : first + step].cpu().view(torch.uint8).numpy().data
            write_at(self._descriptor, self._starts[name] + offset + first * flat.element_size(), data)


@contextmanager
def writing(path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Write a safetensors file. Its name appears when it is complete and durable."""
    if sys.byteorder != "little":
        raise FlatbedError("safetensors files are little-endian, and this machine is not: save elsewhere")
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    # Wide numbers first, as in the library, so that every tensor is aligned to its element size.
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
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
    with replacing(path, first + end) as descriptor:
        write_at(descriptor, 0, memoryview(struct.pack("<Q", len(text)) + text))
        yield Writer(descriptor, starts)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file of tensors on any device."""
    for name, tensor in tensors.items():
        check_plain(tensor, name)
    entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    total = sum(entry.nbytes for entry in entries)
    with (
        writing(path, entries, metadata) as writer,
        progress(f"saving {path.name}", total, "bytes") as advance,
    ):
        for entry in entries:
            writer.write(entry.name, 0, tensors[entry.name])
            advance(entry.nbytes)


def check_plain(tensor: Tensor, name: str) -> None:
    """Raise unless a tensor is dense, local and initialized."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise FlatbedError(f"'{name}' has no values yet: run the model once, then save it")
    if tensor.layout != torch.strided or tensor.is_quantized or hasattr(tensor, "to_local"):
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
        raise FlatbedError(
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


def entries_of(reader: Any) -> dict[str, TensorEntry]:
    """List the tensors of an open file, without those of dtypes that torch does not have."""
    found = {}
    for name in reader.keys():  # noqa: SIM118
        part = reader.get_slice(name)
        if part.get_dtype() in DTYPES:
            found[name] = TensorEntry(name, DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return found


def read_small(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes: no pipe or device, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise DamagedFileError(
                f"{path} is no regular file of at most {limit:,} bytes: restore it from a copy"
            )
        return file.read(limit)


# ---- files that appear whole


@contextmanager
def replacing(path: Path, nbytes: int) -> Iterator[int]:
    """Yield a descriptor for `nbytes` bytes of a temporary file, which is renamed to `path` at the end."""
    folder = path.parent
    if not folder.is_dir():
        raise FlatbedError(f"there is no folder {folder} to write {path.name} to: make it first")
    _remove_leftovers(path)
    if nbytes > shutil.disk_usage(folder).free:
        raise _no_space(path, nbytes)
    draft = folder / f".{path.name}.{secrets.token_hex(4)}.part"
    try:
        descriptor = _make(draft)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if not isinstance(error, OSError):
            raise
        if error.errno in FULL:
            raise _no_space(path, nbytes) from error
        raise FlatbedError(f"writing {path} failed: {error.strerror or error}") from error
    sync_folder(folder)


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
    while True:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
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

            descriptor = os.open(draft, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()
            finally:
                os.close(descriptor)
