"""Safetensors files written bit by bit, and files that appear whole or not at all.

The library wants all tensors in memory first. The format is simple: the length of a header (8 bytes,
little-endian), the header in JSON, padded to 8 bytes, and the tensors, one after the other without gaps.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.errors import FlatbedError
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
class Entry:
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
        """A part of a tensor: values on the CPU, from a byte of it on."""
        flat = values.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        write_at(self._descriptor, self._starts[name] + offset, data)

    def write_whole(self, name: str, tensor: Tensor) -> None:
        """A tensor of any device, in blocks."""
        flat = tensor.detach().contiguous().reshape(-1)
        step = BLOCK_BYTES // flat.element_size()
        for first in range(0, flat.numel(), step):
            self.write(name, first * flat.element_size(), flat[first : first + step].cpu())


@contextmanager
def writing(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Write a safetensors file. Its name appears when it is complete and on the disk."""
    if sys.byteorder != "little":
        raise FlatbedError(
            "safetensors files are little-endian, and flatbed writes them on such machines only"
        )
    # Wide numbers first, as the library has it: all of them lie at multiples of their size then.
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    ends = list(accumulate(entry.nbytes for entry in ordered))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry, end in zip(ordered, ends, strict=True):
        header[entry.name] = {
            "dtype": kind_of(entry.dtype, entry.name),
            "shape": list(entry.shape),
            "data_offsets": [end - entry.nbytes, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    starts = {entry.name: first + header[entry.name]["data_offsets"][0] for entry in ordered}
    with replacing(path, first + (ends[-1] if ends else 0)) as descriptor:
        write_at(descriptor, 0, memoryview(struct.pack("<Q", len(text)) + text))
        yield Writer(descriptor, starts)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file of tensors that exist, of any device; each is written contiguously."""
    for name, tensor in tensors.items():
        check_plain(tensor, name)
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    total = sum(entry.nbytes for entry in entries)
    with (
        writing(path, entries, metadata) as writer,
        progress(f"saving {path.name}", total, "bytes") as advance,
    ):
        for entry in entries:
            writer.write_whole(entry.name, tensors[entry.name])
            advance(entry.nbytes)


def check_plain(tensor: Tensor, name: str) -> None:
    """Raise unless a tensor is nothing but its numbers."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise FlatbedError(f"'{name}' has no values yet: run the model once, then save it")
    if tensor.layout != torch.strided or tensor.is_quantized or hasattr(tensor, "to_local"):
        raise FlatbedError(
            f"'{name}' is sparse, quantized or sharded ({type(tensor).__name__}): safetensors has no place "
            "for it; save it by other means"
        )


def as_path(path: Any, what: str = "path") -> Path:
    """The path that was given."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{what} must be a string or a pathlib.Path; found {type(path).__name__}")
    return Path(path)


def kind_of(dtype: torch.dtype, name: str) -> str:
    """Safetensors' word for a dtype."""
    if dtype not in KINDS:
        raise FlatbedError(f"'{name}' is of {dtype}, which safetensors has no place for: store it otherwise")
    return KINDS[dtype]


@contextmanager
def opened(path: Path, what: str = "safetensors file") -> Iterator[Any]:
    """The library's reader of a file; wrong files raise `FlatbedError`."""
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
    """All tensors of a file."""
    with opened(path) as reader:
        return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118


def entries_of(reader: Any) -> dict[str, Entry]:
    """What an open file holds. Kinds of numbers that are not known here are left out."""
    found = {}
    for name in reader.keys():  # noqa: SIM118
        part = reader.get_slice(name)
        if part.get_dtype() in DTYPES:
            found[name] = Entry(name, DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return found


# ---- files that appear whole


@contextmanager
def replacing(path: Path, nbytes: int) -> Iterator[int]:
    """A descriptor to write `nbytes` bytes to, under another name; at the end the file takes this one."""
    folder = path.parent
    if not folder.is_dir():
        raise FlatbedError(f"there is no folder {folder} to write {path.name} to: make it first")
    _remove_leftovers(path)
    _check_space(path, nbytes)
    draft = folder / f".{path.name}.{secrets.token_hex(4)}.part"
    try:
        descriptor = _make(draft)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except OSError as error:
        _remove(draft)
        if error.errno in FULL:
            raise _no_space(path, nbytes) from error
        raise FlatbedError(f"writing {path} failed: {error.strerror or error}") from error
    except BaseException:
        _remove(draft)
        raise
    sync_folder(folder)


def write_text(path: Path, text: str) -> None:
    """Replace a small file."""
    data = text.encode()
    with replacing(path, len(data)) as descriptor:
        write_at(descriptor, 0, memoryview(data))


def write_at(descriptor: int, offset: int, data: memoryview) -> None:
    """All of it, however little the system takes at a time."""
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
    """Return when names given and taken in this folder are on the disk."""
    if os.name != "posix":
        return  # no folder can be opened there
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FlatbedError(f"syncing {folder} failed: {error.strerror or error}") from error


def _check_space(path: Path, nbytes: int) -> None:
    if nbytes > shutil.disk_usage(path.parent).free:
        raise _no_space(path, nbytes)


def _no_space(path: Path, nbytes: int) -> FlatbedError:
    free = shutil.disk_usage(path.parent).free
    return FlatbedError(
        f"{path} needs {nbytes:,} bytes, and its disk has {free:,} bytes free, or a quota or limit allows no "
        "more: free some space, or use another disk. Nothing was changed"
    )


def _make(draft: Path) -> int:
    """A new file, locked, so that others can tell it from one whose process was killed."""
    while True:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        with suppress(ImportError, OSError):  # without locks nobody looks for leftovers
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if draft.exists():  # else somebody was faster than the lock
            return descriptor
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Drafts that nobody has locked."""
    for draft in path.parent.glob(f".{escape(path.name)}.????????.part"):
        with suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(draft, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()
            finally:
                os.close(descriptor)


def _remove(draft: Path) -> None:
    with suppress(OSError):
        draft.unlink()
