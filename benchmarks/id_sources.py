"""Batches of ids: uniform, or by Zipf's law."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

Ids = np.ndarray[Any, np.dtype[np.int64]]
AT_ONCE = 64  # batches per search in the cumulative distribution
DISTRIBUTIONS: dict[str, float | None] = {"uniform": None, "zipf 1.05": 1.05, "zipf 1.2": 1.2}
"""Names, and the exponent of Zipf's law."""


class IdSource:
    """Draws batches over all rows of a table, none of them twice, the same for the same seed.

    Ranks are scattered over the table, so that frequent rows are not neighbours. The law is inverted on the
    device, since a host would take minutes.
    """

    def __init__(
        self, distribution: str, n_rows: int, n_ids: int, *, device: torch.device, seed: int = 21
    ) -> None:
        self.n_rows, self.n_ids, self.device = n_rows, n_ids, device
        self._generator = np.random.default_rng(seed)
        self._factor = scatter_factor(n_rows)
        exponent = DISTRIBUTIONS[distribution]
        self._cumulative = None if exponent is None else cumulative(n_rows, exponent).to(device)

    def draw(self, n_batches: int) -> list[Ids]:
        """Draw the next batches, in host memory."""
        if self._cumulative is None:
            return list(self._generator.integers(self.n_rows, size=(n_batches, self.n_ids)))
        batches = np.empty((n_batches, self.n_ids), np.int64)
        for start in range(0, n_batches, AT_ONCE):
            some = batches[start : start + AT_ONCE]
            numbers = torch.from_numpy(self._generator.random(some.shape)).to(self.device)
            ranks = torch.searchsorted(self._cumulative, numbers, right=True)
            some[...] = ranks.mul_(self._factor).remainder_(self.n_rows).cpu().numpy()
        return list(batches)


@cache
def cumulative(n_rows: int, exponent: float) -> torch.Tensor:
    """Return the cumulative shares of ranks under Zipf's law; the last is 1."""
    shares = np.cumsum(np.arange(1, n_rows + 1, dtype=np.float64) ** -exponent)
    return torch.from_numpy(shares / shares[-1])


def scatter_factor(n_rows: int) -> int:
    """Return a factor that maps ranks, modulo the rows, one to one to rows far from each other."""
    factor = max(1, round(n_rows * (math.sqrt(5) - 1) / 2))
    while math.gcd(factor, n_rows) != 1:
        factor += 1
    return factor
