"""Operations with a torch reference and Triton kernels: the choice between the two, and shared values."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from flatbed.errors import FlatbedError

NONE = -1
SENTINEL = -(1 << 63)  # a key that sorts before all ids and stands for no row


def check_values_exist(doing: str) -> None:
    """Raise under FakeTensorMode, where tensors have shapes and no values."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise FlatbedError(
            f"{doing} under FakeTensorMode would read values, and fake tensors have none: call it outside of "
            f"the mode. To estimate memory, use torch.nn.Embedding and torch's optimizer of the same name"
        )


def use_triton(device: torch.device) -> bool:
    """Return True for GPUs with Triton, and for the CPU under Triton's interpreter."""
    if device.type == "cuda":
        return _has_triton()
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _has_triton() -> bool:
    try:
        import flatbed.kernels._triton.launch  # noqa: F401
    except ImportError:
        warnings.warn(
            "Triton is not installed: flatbed runs many small torch operations instead of one kernel",
            stacklevel=3,
        )
        return False
    return True


# ---- rows, and where their records are


@dataclass(frozen=True, eq=False)
class UniqueRows:
    """The unique rows among ids, in ascending order. The torch reference sets `rows` and `inverse` alone.

    Graphs of decisions refer to it weakly: its memory may be written again once it is gone.
    """

    rows: Tensor
    """int64; -1 for a key that is no row. Kernels pad it with -1 to the number of ids."""
    inverse: Tensor
    """For every id, the position of its row in `rows`."""
    order: Tensor | None = None
    """The ids' positions, sorted by row; a stable sort."""
    starts: Tensor | None = None
    """Where each row's segment begins in `order`; one more at the end. There may be unused entries."""
    rank: Tensor | None = None
    """For every element of `order`, the position of its row in `rows`. There may be unused entries."""


class RecordLocation:
    """Where the records of rows are, (n, record) of uint8: in a cache, otherwise in storage.

    - `memory`: the storage, on the computing device or on the host where its kernels reach it. None if they
      do not: then kernels are given cached rows only.
    - `cached`: the records in the cache. `slot_of_row` has the slot of each row; -1 for rows in storage only.
      `dirty` is 1 for each slot whose record has changed since it was read from storage.
    """

    def __init__(
        self,
        memory: Tensor | None,
        cached: Tensor | None = None,
        slot_of_row: Tensor | None = None,
        dirty: Tensor | None = None,
    ) -> None:
        self.memory, self.cached, self.slot_of_row, self.dirty = memory, cached, slot_of_row, dirty
        held = memory if cached is None else cached
        assert held is not None
        self.stride = held.stride(0)
        """The distance between two records in bytes."""
        self.is_near = held.is_cuda
        """True if most accesses are to the computing device's own memory."""
        self.addresses = tuple(0 if part is None else part.data_ptr() for part in (memory, cached))


def sentinel_of(keys: Tensor) -> int:
    """Return the key that stands for no row and sorts first: the least value of the dtype."""
    return torch.iinfo(keys.dtype).min
