"""The protocol of caches, the value for a looked-up batch, and statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flatbed.distributed.row_shards import Exchanged
from flatbed.kernels import RecordLocation, UniqueRows
from flatbed.kernels.cache import COUNTS, CacheIndex


class Cache(Protocol):
    """Records of hot rows on the computing device, over storage that holds all rows.

    Content never changes a result: a row's record is in the slot that the index names, otherwise in storage.
    """

    index: CacheIndex
    n_slots: int
    device: torch.device
    """The computing device, where the records are."""
    in_graphs: bool
    """True once a CUDA graph has captured an admission."""

    @property
    def location(self) -> RecordLocation | None:
        """Where kernels find records; without memory if they can be given cached rows only."""

    def admit(
        self, keys: Tensor, first_error: Tensor | None = None, on_checked: Callable[[], None] | None = None
    ) -> tuple[UniqueRows, Any]:
        """Find the unique rows of a batch and admit them to the cache, in the current stream.

        Calls `on_checked` when the kernel that writes `first_error` is issued, before rows move. Also returns
        the admission: `LookupBatch.admission`.
        """

    def prefetch(
        self, keys: Tensor, *, window: int, reservation: Any
    ) -> tuple[UniqueRows, Any, torch.cuda.Event | None] | None:
        """Admit a batch ahead of time, in the current stream. Returns None if its rows cannot be kept.

        The current stream is ordered after the training work on all batches before those of the window.
        `window` is the number of earlier admissions whose rows are kept, too; `reservation` is that of a
        batch whose rows were read from disk. Also returns the admission, and the event after it.
        """

    def begin(self, admission: Any) -> None:
        """Begin the work on the batch with this admission."""

    def protects(self, batch: LookupBatch | None) -> bool:
        """Return True if no prefetch moves the rows of this batch before work that is issued now ends."""

    def oldest(self, batches: list[LookupBatch]) -> LookupBatch | None:
        """Return the batch that is protected only if all of these are; None if there is none."""

    def location_for(self, batch: LookupBatch | None, *, update: bool) -> RecordLocation | None:
        """Return where kernels find the rows of a batch, after prefetches that may move them.

        None if kernels do not reach them: the host moves the records then. `update`: the rows will change.
        """

    def reserve_space(self, rows: Tensor, batch: LookupBatch | None) -> None:
        """Raise if a full disk has no room for changes of rows, before a step begins to change them."""

    def flush(self) -> None:
        """Write changed records to storage, and wait until they are there."""

    def drop(self) -> None:
        """Write changed records to storage, and empty the cache."""

    def retire(self) -> None:
        """Drop the cache for good: the table is about to have another one."""

    def abandon(self) -> None:
        """Empty the cache without writing changed records back."""

    def stats(self) -> CacheStats:
        """Return the counts so far. Waits for the device."""


@dataclass(eq=False, slots=True)
class LookupBatch:
    """Ids of one lookup on the computing device, their unique rows, and where the rows are."""

    shape: torch.Size
    """Of the ids."""
    keys: Tensor
    """The ids, flat, in the dtype that kernels take."""
    unique: UniqueRows
    cache: Cache | None = None
    """The cache that the rows were admitted to; if the table is sharded, the rows of `exchanged`."""
    admission: Any = None
    """Admission of the batch to `cache`: a number for `GpuCache`, a `Reservation` for `HostIndexCache`."""
    ids: Tensor | None = None
    """The ids that a prefetched batch was made of, and their version."""
    version: int = -1
    ready: torch.cuda.Event | None = None
    """Recorded in the stream that prefetched the batch."""
    weights: Tensor | None = None
    """The weights of the unique rows, if the lookup has read them, and the table's generation then."""
    generation: tuple[int, int] = (-1, -1)
    exchanged: Exchanged | None = None
    """Of a sharded table: the rows that ranks have asked each other for. Values are read later."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the tensors, which were allocated in another stream, until this stream has used them."""
        found = self.unique
        for tensor in (self.keys, found.rows, found.inverse, found.order, found.starts, found.rank):
            if tensor is not None:
                tensor.record_stream(stream)


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
