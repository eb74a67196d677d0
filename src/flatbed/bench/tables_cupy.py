"""Tables as SpeedTorch has them: CuPy arrays over pinned host memory, which CuPy's kernels read in place."""

from __future__ import annotations

import ctypes
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack


def have_cupy() -> bool:
    """Whether CuPy is installed."""
    return find_spec("cupy") is not None


class PinnedTable:
    """A CuPy array of fp32 over memory of cudaHostAlloc, (rows, dim), zeros at first."""

    def __init__(self, n_rows: int, dim: int) -> None:
        cupy = import_module("cupy")
        nbytes = 4 * n_rows * dim
        # Not alloc_pinned_memory, whose pool takes the next power of two and keeps it.
        memory = cupy.cuda.PinnedMemory(nbytes)
        known = cupy.cuda.UnownedMemory(memory.ptr, nbytes, memory, cupy.cuda.Device().id)
        pointer = cupy.cuda.MemoryPointer(known, 0)
        self.array: Any = cupy.ndarray((n_rows, dim), dtype=cupy.float32, memptr=pointer)
        buffer = (ctypes.c_uint8 * nbytes).from_address(memory.ptr)
        self.memory = torch.frombuffer(buffer, dtype=torch.uint8)
        """The same memory for the CPU. It must not be used longer than the table."""
        self.memory.zero_()
        self._from_dlpack: Any = cupy.from_dlpack

    def read(self, ids: Any) -> Tensor:
        """Rows, on the GPU; ids of numpy or CuPy."""
        return from_dlpack(self.array[ids])

    def write(self, ids: Any, rows: Tensor) -> None:
        """Replace rows by those on the GPU."""
        self.array[ids] = self._from_dlpack(rows.detach())


def to_cupy(ids: Tensor) -> Any:
    """Ids on the GPU as CuPy knows them."""
    return import_module("cupy").from_dlpack(ids)


def pool_bytes() -> int:
    """Memory of the GPU that CuPy holds, which torch does not count."""
    return int(import_module("cupy").get_default_memory_pool().total_bytes())


def free_pool() -> None:
    """Give it back."""
    import_module("cupy").get_default_memory_pool().free_all_blocks()
