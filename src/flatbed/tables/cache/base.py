"""The value for a looked-up batch, and statistics of caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.distributed.row_shards import Exchanged
from flatbed.kernels import UniqueRows
from flatbed.kernels.cache import COUNTS

if TYPE_CHECKING:
    from flatbed.tables.cache.gpu import GpuCache
    from flatbed.tables.cache.host_copy import HostCopyCache


@dataclass(eq=False, slots=True)
class LookupBatch:
    """Ids of one lookup on the computing device, their unique rows, and where the rows are."""

    shape: torch.Size
    """Of the ids."""
    keys: Tensor
    """The ids, flat, in the dtype that kernels take."""
    unique: UniqueRows
    cache: GpuCache | HostCopyCache | None = None
    """The cache that the rows were admitted to; if the table is sharded, the rows of `exchanged`."""
    admission: Any = None
    """Admission of the batch to `cache`: a number for `GpuCache`, `Reservation`s for `HostCopyCache`."""
    ids: Tensor | None = None
    """The ids that a prefetched batch was made of, and their version."""
    version: int = -1
    weights: Tensor | None = None
    """The weights of the unique rows, if the lookup has read them, and the table's generation then."""
    generation: tuple[int, int] = (-1, -1)
    exchanged: Exchanged | None = None
    """Of a sharded table: the rows that ranks have asked each other for. Values are read later."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the keys and of their unique rows until this stream has used it."""
        found = self.unique
        for tensor in (self.keys, found.rows, found.inverse, found.order, found.starts, found.rank):
            if tensor is not None:
                tensor.record_stream(stream)  # type: ignore[arg-type,unused-ignore]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of rows since the cache was made. A row counts once per batch.

    >>> CacheStats.of([90, 10, 4, 3, 0], rows=1000, nbytes=128).hit_rate
    0.9
    """

    rows: int
    """Slots."""
    hits: int
    misses: int
    evictions: int
    """Rows that were replaced by others."""
    written: int
    """Evicted rows that had changed, and were written back."""
    overflow: int
    """Misses without a free slot: the rows were used in storage."""
    bytes_read: int
    bytes_written: int

    @property
    def hit_rate(self) -> float:
        """The share of hits."""
        return self.hits / max(1, self.hits + self.misses)

    @staticmethod
    def of(counts: list[int], *, rows: int, nbytes: int) -> CacheStats:
        """Build from the counts of a `CacheIndex`."""
        found = dict(zip(COUNTS, counts, strict=True))
        n_read = found["misses"] - found["overflow"]
        return CacheStats(rows, **found, bytes_read=n_read * nbytes, bytes_written=found["written"] * nbytes)
