"""The value that describes a looked-up batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.kernels.records import UniqueRows


@dataclass(eq=False, slots=True)
class LookupBatch:
    """Ids of one lookup on the computing device, their unique rows, and where the rows are."""

    shape: torch.Size
    """Of the ids."""
    keys: Tensor
    """The ids, flat, in the dtype that kernels take."""
    unique: UniqueRows
    cache: Any = None
    """The cache that the rows were admitted to."""
    admission: Any = None
    """Admission of the batch to `cache`: a number for `GpuCache`, a `Reservation` for `DiskCache`."""
    ids: Tensor | None = None
    """The ids that a prefetched batch was made of, and their version: see `matches`."""
    version: int = -1
    ready: torch.cuda.Event | None = None
    """Recorded in the stream that prefetched the batch."""
    weights: Tensor | None = None
    """The weights of the unique rows, if the lookup has read them, and the table's generation then."""
    generation: tuple[int, int] = (-1, -1)

    def matches(self, ids: Tensor) -> bool:
        """Return True if the batch was made of these ids, and their memory has not changed since."""
        own = self.ids
        if own is None or version_of(ids) != self.version:
            return False
        return ids is own or (
            (ids.data_ptr(), ids.dtype, ids.numel(), ids.device)
            == (own.data_ptr(), own.dtype, own.numel(), own.device)
            and ids.is_contiguous()
            and own.is_contiguous()
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the tensors, which were allocated in another stream, until this stream has used them."""
        found = self.unique
        for tensor in (self.keys, found.rows, found.inverse, found.order, found.starts, found.rank):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)


def version_of(ids: Tensor) -> int:
    """Return the version counter of a tensor; tensors made in inference mode have none."""
    return -1 if ids.is_inference() else ids._version
