"""Unique rows and the location of their records: the values that operations on rows take and return."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NONE = -1
SENTINEL = -(1 << 63)  # a key that sorts before all ids and stands for no row


@dataclass(frozen=True, slots=True)
class UniqueRows:
    """The unique rows among ids, in ascending order."""

    rows: Tensor
    """int64; -1 for a key that is no row."""
    inverse: Tensor
    """For every id, the position of its row in `rows`."""
    order: Tensor | None = None
    """The ids' positions, sorted by row; a stable sort."""
    starts: Tensor | None = None
    """Where each row's segment begins in `order`; one more at the end."""
    rank: Tensor | None = None
    """For every element of `order`, the position of its row in `rows`."""


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Where the records of rows are, (n, record) of uint8: in a cache, otherwise in storage."""

    memory: Tensor | None
    """The storage: on the computing device, or on the host where its kernels reach it. None if they do not:
    then kernels are given cached rows only."""
    cached: Tensor | None = None
    slot_of_row: Tensor | None = None
    """The slot of each row in the cache; -1 for rows in storage only."""
    dirty: Tensor | None = None
    """For each slot, 1 if its record has changed since it was read from storage."""

    @property
    def stride(self) -> int:
        """The distance between two records in bytes."""
        held = self.memory if self.cached is None else self.cached
        assert held is not None
        return held.stride(0)

    @property
    def near(self) -> bool:
        """True if most accesses are to the computing device's own memory."""
        held = self.memory if self.cached is None else self.cached
        return held is not None and held.is_cuda


def sentinel_of(keys: Tensor) -> int:
    """Return the key that stands for no row and sorts first: the least value of the dtype."""
    return torch.iinfo(keys.dtype).min
