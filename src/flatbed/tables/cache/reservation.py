"""A batch whose rows were brought into a cache ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.kernels.rows import UniqueRows


def version_of(ids: Tensor) -> int:
    """Its version; tensors made in inference mode have none."""
    return -1 if ids.is_inference() else ids._version


@dataclass(eq=False)
class Reservation:
    """Ids that a lookup will come with, and what has been found out about them.

    As long as it is live, no other batch's coming may move its rows.
    """

    cache: Any
    ids: Tensor
    """The tensor that the model will look up, on the computing device."""
    version: int
    """Of that tensor: another one means that others were written into it."""
    keys: Tensor
    """The same, flat, as kernels take them."""
    found: UniqueRows | None
    section: int
    """How often tickets of the cache had become void."""
    tick: int
    """Which of all batches that came through the cache it is."""
    done: torch.cuda.Event | None
    rows: Tensor | None = None
    """The distinct rows, on the host, if that has found them."""
    slots: NDArray[np.int64] | None = None
    """And where they are."""
    lease: Any = None
    """Of the memory that all of this is in."""
    live: bool = True

    def end(self) -> None:
        """Its rows may go. No lock is taken: the garbage collector may call this, whoever holds one."""
        self.live = False

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Its tensors were made in another stream, and this one uses them."""
        if self.lease is not None:
            return  # they are not given back to the allocator
        found = self.found
        held: list[Tensor | None] = [self.keys]
        if found is not None:
            held += [found.rows, found.inverse, found.order, found.starts, found.rank]
        for tensor in held:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def matches(self, ids: Tensor) -> bool:
        """Whether these are the ids that it was made for."""
        mine = self.ids
        return ids is mine or (
            ids.data_ptr() == mine.data_ptr()
            and ids.dtype == mine.dtype
            and ids.numel() == mine.numel()
            and ids.device == mine.device
            and ids.is_contiguous()
            and mine.is_contiguous()
        )
