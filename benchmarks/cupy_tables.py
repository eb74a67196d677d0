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
    """Tell whether CuPy is installed."""
    return find_spec("cupy") is not None


class PinnedTable:
    """A CuPy array of fp32 over pinned memory, (rows, dim), zeros at first."""

    def __init__(self, n_rows: int, dim: int) -> None:
        cupy = import_module("cupy")
        nbytes = 4 * n_rows * dim
        # Not alloc_pinned_memory, whose pool takes the next power of two and keeps it.
        memory = cupy.cuda.PinnedMemory(nbytes)
        known = cupy.cuda.UnownedMemory(memory.ptr, nbytes, memory, cupy.cuda.Device().id)
        pointer = cupy.cuda.MemoryPointer(known, 0)
        self.array: Any = cupy.ndarray((n_rows, dim), dtype=cupy.float32, memptr=pointer)
        buffer = (ctypes.c_uint8 * nbytes).from_address(memory.ptr)
        self.memory = torch.frombuffer(buffer, dtype=torch.float32).view(n_rows, dim)
        """The same memory for the CPU, valid as long as the table."""
        self.memory.zero_()
        self._from_dlpack: Any = cupy.from_dlpack

    def read(self, ids: Any) -> Tensor:
        """Read rows to the GPU; ids are numpy's or CuPy's."""
        return from_dlpack(self.array[ids])

    def write(self, ids: Any, rows: Tensor) -> None:
        """Replace rows by rows on the GPU."""
        self.array[ids] = self._from_dlpack(rows.detach())


def pool_bytes() -> int:
    """Return GPU memory that CuPy holds, which torch does not count."""
    return int(import_module("cupy").get_default_memory_pool().total_bytes())


def free_pool() -> None:
    """Return CuPy's unused GPU memory."""
    import_module("cupy").get_default_memory_pool().free_all_blocks()
