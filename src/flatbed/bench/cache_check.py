"""Is a way right? It trains a small table, whose bits must be those without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from flatbed.bench.cache_ids import ZIPF_105, Batch, Source
from flatbed.bench.cache_ways import EAGER, SPARSE, CachedTable, Shape, SparseTable, Trainee, Way
from flatbed.bench.tables_measure import same_bits

N_STEPS = 12
N_SAMPLE = 1024  # rows of the large table that are looked at
TOLERANCE = 1e-5  # steps are of 1e-3


@dataclass(frozen=True, slots=True)
class Change:
    """What came out of the small table."""

    ok: bool
    max_abs_error: float


class Checker:
    """Small tables with records as large as those of the case, trained with the same ids in every way."""

    def __init__(self, dim: int, device: torch.device, *, n_rows: int = 20_000, n_ids: int = 2048) -> None:
        self._shape = Shape(n_rows, dim, n_ids)
        self._device = device
        self._cache_rows = 4 * n_ids  # room for what a prefetcher has under way, and not for all
        self._batches = Source(ZIPF_105, n_rows, n_ids, device=device).draw(N_STEPS)
        self._rows = np.unique(np.concatenate(self._batches))
        self._exact = self._trained(self._made(), EAGER, cache_rows=0, policy="lru")
        self._torchs = self._trained(
            SparseTable(self._shape, device=device), SPARSE, cache_rows=0, policy="lru"
        )
        self._known: dict[tuple[Way, bool, str, str], Change] = {}

    def check(self, way: Way, *, cached: bool, policy: str, storage: str = "host") -> Change:
        """Train in this way; each is tried once."""
        key = (way, cached, policy, storage)
        if key not in self._known:
            self._known[key] = self._tried(way, cached=cached, policy=policy, storage=storage)
        return self._known[key]

    def _tried(self, way: Way, *, cached: bool, policy: str, storage: str) -> Change:
        if way == SPARSE:
            return self._verdict(self._torchs, exact=False)
        cache_rows = self._cache_rows if cached else 0
        with TemporaryDirectory() as folder:
            made = self._made(Path(folder) / "small.table" if storage == "disk" else None)
            return self._verdict(self._trained(made, way, cache_rows=cache_rows, policy=policy), exact=True)

    def _made(self, path: Path | None = None) -> CachedTable:
        storage = "host" if path is None else "disk"
        shape = Shape(self._shape.n_rows, self._shape.dim, self._shape.n_ids, storage, path)
        return CachedTable(shape, device=self._device)

    def _trained(self, trainee: Trainee, way: Way, *, cache_rows: int, policy: str) -> Tensor:
        trainee.use(cache_rows, policy)
        for _ in trainee.steps(way, self._batches):
            pass
        found = trainee.read(self._rows).cpu()
        trainee.close()
        return found

    def _verdict(self, found: Tensor, *, exact: bool) -> Change:
        error = float((found - self._torchs).abs().max()) if exact else self._error_of_exact
        bits = same_bits(found, self._exact) if exact else True
        return Change(bits and error <= TOLERANCE, error)  # nan is wrong

    @property
    def _error_of_exact(self) -> float:
        return float((self._exact - self._torchs).abs().max())


def sample(ids: Batch) -> Batch:
    """Some rows of a batch."""
    return np.unique(ids)[:N_SAMPLE]
