"""Storage of all rows: the memory of a device, host memory that kernels address, or a table's file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatbed import Embedding
from flatbed.compat.speedtorch.variants import StorageSpec, computing_device
from flatbed.cuda.host_memory import HostMemory, allocate
from flatbed.kernels import rows as ops
from flatbed.kernels.dispatch import use_triton
from flatbed.kernels.records import RecordLocation, UniqueRows
from flatbed.tables.initializers import fill_, parse

CPU = torch.device("cpu")
ALIGNMENT = 16  # bytes: kernels move rows in words of this size
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # torch copies bytes as slowly as int64
BLOCK_BYTES = 1 << 26  # copied at once
Shape = tuple[int, ...]


class MemoryRows:
    """Rows in the memory of the computing device or of the host: an array that begins with their number."""

    path: Path | None = None

    def __init__(
        self, shape: Shape, dtype: torch.dtype, kind: str, device: torch.device, memory: Tensor | None = None
    ) -> None:
        self.shape, self.dtype, self.kind = shape, dtype, kind
        self._nbytes = math.prod(shape[1:]) * dtype.itemsize
        self._allocate(device, memory)

    def _allocate(self, device: torch.device, memory: Tensor | None = None) -> None:
        self.device = device
        n_rows, stride = self.shape[0], -(-self._nbytes // ALIGNMENT) * ALIGNMENT
        self._memory: HostMemory | None = None
        if memory is not None:
            self._bytes = memory.view(n_rows, -1).view(torch.uint8)
        elif self.kind == "host":
            self._memory = allocate(n_rows * stride, device=device)
            self._bytes = self._memory.tensor.view(n_rows, stride)
        else:
            self._bytes = torch.zeros((n_rows, stride), dtype=torch.uint8, device=device)
        self._is_reachable = self._bytes.device == device or (
            self._memory is not None and self._memory.addressable and use_triton(device)
        )
        self._location = RecordLocation(self._bytes)
        word = next(dtype for dtype in WORDS if self._nbytes % dtype.itemsize == 0)
        self._words = self._bytes[:, : self._nbytes].view(word)
        self._view = self._bytes[:, : self._nbytes].view(self.dtype).view(self.shape)

    @property
    def tensor(self) -> Tensor:
        """All rows, without a copy."""
        self._check()
        if self.device.type == "cuda":  # kernels may still write to memory that the host is about to read
            torch.cuda.synchronize(self.device)
        return self._view

    def _check(self) -> None:
        """Raise in a forked process, which cannot use the memory."""
        if self._memory is not None:
            self._memory.check()

    def gather(self, rows: Tensor, unique: UniqueRows | None = None) -> Tensor:
        """Copy rows to the device; `unique` lets each of them cross the bus once."""
        self._check()
        if self.device == CPU or not self._is_reachable:
            found = self._words.index_select(0, rows.to(CPU)).to(self.device)
        elif unique is not None and self._memory is not None:
            return self.gather(unique.rows).index_select(0, unique.inverse)
        else:
            found = ops.gather(self._location, rows, self._nbytes)
        return found.view(self.dtype).view(len(rows), *self.shape[1:])

    def scatter_(self, rows: Tensor, values: Tensor) -> None:
        """Replace distinct rows; values of the row -1 are ignored."""
        self._check()
        values, device = values.reshape(len(rows), math.prod(self.shape[1:])).contiguous(), self._bytes.device
        if not use_triton(self.device):  # only kernels use the row -1
            self._words.index_copy_(0, rows.to(device), values.to(device).view(self._words.dtype))
            return
        records = values.view(torch.uint8)
        if self._nbytes < self._bytes.shape[1]:
            records = torch.nn.functional.pad(records, (0, self._bytes.shape[1] - self._nbytes))
        if self._is_reachable:
            ops.scatter_(self._location, rows, records)
        else:
            ops.scatter_(self._location, rows.to(CPU), records.to(CPU))

    def read(self, start: int, stop: int) -> Tensor:
        """Copy consecutive rows to the CPU."""
        return self.tensor[start:stop].to(CPU, copy=True).contiguous()

    def write_(self, start: int, values: Tensor) -> None:
        """Replace consecutive rows."""
        self.tensor[start : start + len(values)].copy_(values)

    def move(self, device: torch.device) -> None:
        """Let another device compute with the rows."""
        if device == self.device:
            return
        old = self.tensor
        self._allocate(device)
        self._view.copy_(old)

    def close(self, *, discard: bool = False) -> None:
        """Wait for kernels. Views that the user holds keep the memory."""
        _ = self.tensor


class FileRows:
    """Rows in the file of a table, with the methods of `MemoryRows`."""

    tensor: Tensor | None = None

    def __init__(
        self, shape: Shape, dtype: torch.dtype, path: Path, device: torch.device, **options: Any
    ) -> None:
        self.shape, self.dtype, self.path = shape, dtype, path
        self.device = device
        count = math.prod(shape[1:])
        self._module = Embedding(
            shape[0], count, storage="disk", path=path, dtype=dtype, device=device, cache_rows=0, **options
        )
        self.table = self._module.table
        self.table.checkpoint()  # creates the file

    def gather(self, rows: Tensor, unique: UniqueRows | None = None) -> Tensor:
        return self.table.read_rows(rows).view(-1, *self.shape[1:])

    def scatter_(self, rows: Tensor, values: Tensor) -> None:
        is_row = rows >= 0
        self.table.write_rows(rows[is_row], values[is_row].flatten(1))

    def read(self, start: int, stop: int) -> Tensor:
        return self.gather(torch.arange(start, stop)).to(CPU)

    def write_(self, start: int, values: Tensor) -> None:
        self.scatter_(torch.arange(start, start + len(values)), values)

    def move(self, device: torch.device) -> None:
        if device != self.device:
            self._module.to(device)
            self.device = device

    def close(self, *, discard: bool = False) -> None:
        """Save changes and close the file, or delete it."""
        if not discard:
            self.table.checkpoint()
        self.table.close(discard=discard)
        if discard:
            self.path.unlink(missing_ok=True)


RowStorage = MemoryRows | FileRows


def create(
    spec: StorageSpec, shape: Shape, dtype: torch.dtype, device: torch.device, init: Any = "zeros"
) -> RowStorage:
    """Create rows with first values such as "zeros" or ("uniform", -1, 1), by a seed of torch's generator."""
    parsed = parse(init)
    seed = 0 if init == "zeros" else int(torch.randint(1 << 62, (), device="cpu"))
    if spec.kind == "disk":
        return FileRows(shape, dtype, spec.next_path(".bed"), device, init=init, seed=seed)
    rows = MemoryRows(shape, dtype, spec.kind, device)
    if init != "zeros":
        for start, stop in blocks(rows):
            values = torch.empty((stop - start, math.prod(shape[1:])), dtype=dtype)
            fill_(values, first_row=start, init=parsed, seed=seed)
            rows.write_(start, values.view(-1, *shape[1:]))
    return rows


def blocks(rows: RowStorage) -> Iterator[tuple[int, int]]:
    """Ranges of rows to copy at once."""
    step = max(1, BLOCK_BYTES // max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize))
    for start in range(0, rows.shape[0], step):
        yield start, min(start + step, rows.shape[0])


def copied(rows: RowStorage) -> Tensor:
    """Copy all rows to the CPU."""
    out = torch.empty(rows.shape, dtype=rows.dtype)
    for start, stop in blocks(rows):
        out[start:stop] = rows.read(start, stop)
    return out


class PMemory:
    """Host memory that the current GPU addresses; the name is SpeedTorch's."""

    def __init__(self, size: int) -> None:
        self.size, device = size, computing_device()
        self.device_id = device.index or 0
        self._memory = allocate(size, device=device)
        self.ptr = self._memory.tensor.data_ptr() if size else 0


def my_pinned_allocator(bsize: int) -> Any:
    """Allocate host memory for CuPy: `cupy.cuda.set_allocator(my_pinned_allocator)`."""
    import cupy  # type: ignore[import-not-found,unused-ignore]

    memory = PMemory(bsize)
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.ptr, bsize, memory), 0)
