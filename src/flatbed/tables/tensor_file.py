"""Safetensors files written block by block, by one rank or by all of them, with checksums of their tensors.

The safetensors library needs all tensors in memory first. The format is simple: the length of a header (8
bytes, little-endian), the header in JSON, padded to 8 bytes, and the tensors without gaps.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.distributed.ranks import Lockstep, rank
from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.progress import progress
from flatbed.tables.files import BLOCK_BYTES, draft_of, file_errors, open_regular, replacing, write_at
from flatbed.tables.storage.disk.checked_records import row_sums
from flatbed.tables.workers import Call, Workers

SUM_BYTES = 4096  # under one sum of a checksum: part of the format of checkpoints
SYNC_BYTES = 1 << 28  # written between syncs, so that a long save answers Control-C
MANY_BYTES = 1 << 20  # from which a thread for the checksum pays off: it takes 40 µs
RESERVED = "__metadata__"  # key of the header that is no tensor
HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library

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


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


def _layout(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Lay out tensors one after the other; returns the header, where tensors begin, and the file's size."""
    if sys.byteorder != "little":
        raise FlatbedError("safetensors files are little-endian, and this machine is not: save elsewhere")
    header: dict[str, Any] = {RESERVED: dict(metadata)}
    end = 0
    # Wide numbers first, as in the library, so that every tensor is aligned to its element size.
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
        if entry.dtype not in KINDS:
            raise FlatbedError(f"'{entry.name}' is of {entry.dtype}, which safetensors cannot hold")
        offsets, shape = [end, end + entry.nbytes], list(entry.shape)
        header[entry.name] = {"dtype": KINDS[entry.dtype], "shape": shape, "data_offsets": offsets}
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    starts = {entry.name: first + header[entry.name]["data_offsets"][0] for entry in entries}
    return struct.pack("<Q", len(text)) + text, {**starts, "": 0}, first + end


# ---- checksums


class Checksum:
    """CRC-32 of the sums of pages, of bytes given in order: 7 GB/s on a core, where zlib.crc32 does 0.9 to 4.

    It finds any changed bit or word, words and pages in another place, and pages that are zero or stale.
    """

    def __init__(self) -> None:
        self._crc = 0
        self._rest = b""

    @staticmethod
    def page_sums(pages: memoryview) -> bytes:
        """Return the sums of whole pages."""
        return row_sums(np.frombuffer(pages, f"V{SUM_BYTES}")).tobytes()

    def shortened(self, offset: int, data: memoryview) -> tuple[bytes, bytes, bytes]:
        """Return the end of a page that was begun before, the sums of whole pages, and the rest."""
        begin = min(-offset % SUM_BYTES, len(data))
        end = begin + (len(data) - begin) // SUM_BYTES * SUM_BYTES
        return bytes(data[:begin]), self.page_sums(data[begin:end]), bytes(data[end:])

    def add(self, begin: bytes, sums: bytes, end: bytes) -> None:
        """Add bytes that `shortened` has shortened."""
        self._rest += begin
        if len(self._rest) == SUM_BYTES:
            self._crc, self._rest = zlib.crc32(self.page_sums(memoryview(self._rest)), self._crc), b""
        self._crc = zlib.crc32(sums, self._crc)
        self._rest += end

    @property
    def value(self) -> str:
        """Return the checksum of all bytes so far."""
        return f"{zlib.crc32(self._rest, self._crc):08x}"


# ---- writing


class Writer:
    """A file that is being written: every entry in full, its parts in order, here or by other ranks.

    Parts of a tensor that ranks write between two calls of `meet` are in rank order.
    """

    def __init__(self, descriptor: int, starts: dict[str, int], workers: Workers, lockstep: Lockstep) -> None:
        self._descriptor, self._starts, self._workers = descriptor, starts, workers
        self._lockstep = lockstep
        self._sums = {name: Checksum() for name in starts}
        self._unshared: list[tuple[str, bytes, bytes, bytes]] = []
        self._n_unsynced = 0

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Write a part of a tensor, on any device, or of the header (""), from a byte of it on."""
        data = values.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().data
        adding = Call(self._add, name, offset, data) if len(data) >= MANY_BYTES else None
        try:
            if adding is not None:
                self._workers.submit(adding)
            write_at(self._descriptor, self._starts[name] + offset, data)
            if adding is None:
                self._add(name, offset, data)
            else:
                adding.result()
        finally:
            if adding is not None:
                adding.cancel()
        self._n_unsynced += len(data)
        if self._n_unsynced >= SYNC_BYTES:
            os.fsync(self._descriptor)
            self._n_unsynced = 0

    def _add(self, name: str, offset: int, data: memoryview) -> None:
        sums = self._sums[name].shortened(offset, data)
        if self._lockstep.many:
            self._unshared.append((name, *sums))
        else:
            self._sums[name].add(*sums)

    def meet(self) -> None:
        """Wait for the other ranks, and exchange the sums of what was written."""
        parts, self._unshared = self._unshared, []
        for of_rank in self._lockstep.gather(parts):
            for name, *sums in of_rank:
                self._sums[name].add(*sums)

    @property
    def checksums(self) -> dict[str, str]:
        """The checksums of the header ("") and of all tensors, for `check_tensors`."""
        return {name: checksum.value for name, checksum in self._sums.items()}


@contextmanager
def writing(
    path: Path,
    entries: Sequence[TensorEntry],
    metadata: Mapping[str, str],
    lockstep: Lockstep | None = None,
) -> Iterator[Writer]:
    """Write a safetensors file. Its name appears when it is complete and durable.

    All ranks of a lockstep call this. Within the block they call `Writer.meet` in place of `Lockstep.meet`.
    """
    lockstep = lockstep or Lockstep("", alone=True)
    header, starts, nbytes = _layout(entries, metadata)
    with file_errors(path, nbytes), ExitStack() as undo:
        word = lockstep.of_first(secrets.token_hex(4))
        if lockstep.first:
            descriptor = undo.enter_context(replacing(path, nbytes, word))
            # The whole length first: network file systems fill pages beyond the end with zeros.
            os.ftruncate(descriptor, nbytes)
        lockstep.meet()
        if not lockstep.first:
            try:
                # Without read access: network file systems then write those bytes alone, and no page around.
                descriptor = os.open(draft_of(path, word), os.O_WRONLY)
            except FileNotFoundError as error:
                raise FlatbedError(
                    f"rank {rank()} does not find the file that the first rank has made in {path.parent}: "
                    "save to a folder that all ranks see"
                ) from error
            undo.callback(os.close, descriptor)
        lockstep.meet()  # from here on the first rank may fail, and remove the file
        with closing(Workers(1)) as workers:
            writer = Writer(descriptor, starts, workers, lockstep)
            if lockstep.first:
                writer.write("", 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))
            yield writer
        if lockstep.many:
            os.fsync(descriptor)
            writer.meet()


# ---- reading


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Turn any error of reading a file into a `DamagedFileError`."""
    try:
        yield
    except (FlatbedError, MemoryError):
        raise
    except Exception as error:
        found = "is damaged or of another kind" if os.path.lexists(path) else "is missing"
        raise DamagedFileError(
            f"{path} {found} ({type(error).__name__}: {error}): check the path, or restore it from a copy"
        ) from error


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file with the library's reader."""
    import safetensors

    if path.is_dir():
        raise FlatbedError(f"{path} is a folder without a checkpoint: give a file in it")
    if not path.is_file():
        raise FlatbedError(f"{path} is missing, or no file: check the path")
    with ExitStack() as stack:
        with naming_damage(path):
            with open_regular(path) as file:
                if file.read(9)[8:] != b"{":  # the library says "header too large", or too small
                    raise ValueError(
                        "it is no safetensors file; weights of a .npy or torch file, once loaded, become a "
                        "table by flatbed.Embedding.from_pretrained(weights)"
                    )
            reader = stack.enter_context(safetensors.safe_open(str(path), framework="pt", device="cpu"))
        yield reader


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file."""
    with opened(path) as reader:
        return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118


def check_tensors(path: Path, checksums: Any, part: slice = slice(None)) -> None:
    """Read the header and a part of the tensors of a file, and raise unless they are as they were written."""
    with (
        naming_damage(path),
        open_regular(path) as file,
        progress(f"checking {path.name}", path.stat().st_size, "bytes") as advance,
    ):
        head = file.read(8)
        text = file.read(min(int.from_bytes(head, "little"), HEADER_LIMIT))
        checksum = Checksum()
        checksum.add(*checksum.shortened(0, memoryview(head + text)))
        if checksum.value != checksums[""]:
            raise ValueError("the checksum of its header is wrong")
        header = json.loads(text)
        ends = [header[name]["data_offsets"][1] for name in header.keys() - {RESERVED}]
        if os.fstat(file.fileno()).st_size > 8 + len(text) + max(ends, default=0):
            raise ValueError("it goes on after its tensors")
        buffer = bytearray(min(BLOCK_BYTES, path.stat().st_size))
        names = sorted(checksums.keys() - {""}, key=lambda name: header[name]["data_offsets"])
        for name in names[part]:
            checksum, (start, stop) = Checksum(), header[name]["data_offsets"]
            file.seek(8 + len(text) + start)
            for at in range(start, stop, BLOCK_BYTES):
                block = memoryview(buffer)[: stop - at]
                if file.readinto(block) < len(block):
                    raise ValueError(f"it ends within '{name}'")
                checksum.add(*checksum.shortened(at - start, block))
                advance(len(block))
            if checksum.value != checksums[name]:
                raise ValueError(f"the checksum of '{name}' is wrong")
