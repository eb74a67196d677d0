"""What caches have in common: their methods, the value for a looked-up batch, and statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.distributed.row_shards import Exchanged
from flatbed.kernels import RecordLocation, UniqueRows
from flatbed.kernels.cache import COUNTS, CacheIndex


class Cache(ABC):
    """Records of hot rows on `device`, and their index. A cache never changes a result.

    A row's record is in the slot that the index names, otherwise in storage.
    """

    index: CacheIndex
    records: Tensor
    location: RecordLocation | None
    """Where kernels find records; None without kernels."""
    n_slots: int
    device: torch.device
    in_graphs = False
    """True once a CUDA graph has captured a lookup: it uses this memory."""
    has_unseen_replays = False
    """True once a CUDA graph has captured an admission, or work on rows that were not admitted before.

    Nothing is prefetched any more, since the host does not see what replays do.
    """
    has_warned = False
    """True once the user was told so."""

    @abstractmethod
    def admit(
        self,
        keys: Tensor,
        first_error: Tensor | None = None,
        on_checked: Callable[[], None] | None = None,
    ) -> tuple[UniqueRows, Any]:
        """Find the unique rows of a batch, and admit them in the current stream. Also returns the admission.

        Calls `on_checked` when the kernel that writes `first_error` is issued.
        """

    @abstractmethod
    def prefetch(
        self, ids: Tensor, *, window: int, reservation: Any
    ) -> tuple[Tensor, UniqueRows, Any] | None:
        """Admit the rows of a batch ahead of time; None if they cannot be kept until its step.

        Returns the keys of the ids, their unique rows, and the admission. `window` is the number of earlier
        prefetches whose rows are kept, too. `reservation` is that of a table on disk, whose rows have been
        read. The caller may prefetch further lookups, and then calls `issue_moves`.
        """

    def issue_moves(self) -> None:  # noqa: B027
        """Move the records of prefetches, if `prefetch` has not."""

    def end_prefetch(self, batch: LookupBatch) -> None:  # noqa: B027
        """Let later admissions evict the rows of a prefetched batch. Idempotent. Any thread."""

    @abstractmethod
    def protects(self, batch: LookupBatch | None) -> bool:
        """Return True if the rows of this batch are in slots, and stay there while work issued now runs."""

    @abstractmethod
    def covering(self, batches: list[LookupBatch]) -> LookupBatch | None:
        """Return a batch that is protected only if all of these are; None if there is none."""

    def prefetch_after(self, stream: torch.cuda.Stream) -> None:  # noqa: B027
        """Order the next prefetch after a stream that may use the memory of earlier ones. Any thread."""

    @abstractmethod
    def location_for(self, batch: LookupBatch | None) -> RecordLocation | None:
        """Return where kernels find the rows of a batch; None if they do not reach them."""

    @abstractmethod
    def flush(self) -> None:
        """Write changed records to storage, and wait until they are there."""

    @abstractmethod
    def drop(self) -> None:
        """Write changed records to storage, and empty the cache."""

    @abstractmethod
    def abandon(self) -> None:
        """Empty the cache without writing changed records back, also after an interrupted admission."""

    def retire(self) -> None:  # noqa: B027
        """End the use of an empty cache: the table has another one, or none."""


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
    """Admission of the batch to `cache`: a number for `GpuCache`, `Reservation`s for `HostCopyCache`."""
    ids: Tensor | None = None
    """The ids that a prefetched batch was made of."""
    version: int = -1
    """The version of `ids` then."""
    weights: Tensor | None = None
    """The weights of the unique rows, if the lookup has read them."""
    generation: tuple[int, int] = (-1, -1)
    """The table's generation when they were read."""
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
