"""Statistics of a cache."""

from __future__ import annotations

from dataclasses import dataclass

from flatbed.kernels.cache import COUNTS


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
