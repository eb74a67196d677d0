"""What a cache has done so far."""

from __future__ import annotations

from dataclasses import dataclass

from flatbed.kernels.cache import COUNTS


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of rows, each once a batch, since the cache was made.

    >>> CacheStats.of([90, 10, 4, 3, 0], rows=1000, nbytes=128).hit_rate
    0.9
    """

    rows: int
    """How many records fit."""
    hits: int
    misses: int
    evictions: int
    """Rows that made room for others."""
    written: int
    """Those among them that had changed, and were written home."""
    overflow: int
    """Misses for which there was no room, so that they were used where they are."""
    bytes_read: int
    bytes_written: int

    @property
    def hit_rate(self) -> float:
        """Hits among all."""
        return self.hits / max(1, self.hits + self.misses)

    @staticmethod
    def of(counts: list[int], *, rows: int, nbytes: int) -> CacheStats:
        """From the counts that the operations keep."""
        found = dict(zip(COUNTS, counts, strict=True))
        n_read = found["misses"] - found["overflow"]
        return CacheStats(rows, **found, bytes_read=n_read * nbytes, bytes_written=found["written"] * nbytes)
