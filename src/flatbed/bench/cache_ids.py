"""Ids as they are drawn: uniform, by Zipf's law, or half of them always the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Batch: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""Ids on the host."""
AT_ONCE = 64  # batches on the way through the inverse of a distribution
SEED = 21


@dataclass(frozen=True, slots=True)
class Distribution:
    """A law that ids follow; `exponent` is Zipf's."""

    name: str
    exponent: float | None = None


UNIFORM = Distribution("uniform")
ZIPF_105, ZIPF_120 = (Distribution(f"zipf {s:g}", s) for s in (1.05, 1.2))
HALF_HITS = Distribution("half hits")


class Source:
    """Batches of one law over all rows of a table, none of them twice; what is drawn depends on the seed.

    Ranks are scattered over the table, so that rows that are used together are not neighbours. The law is
    inverted exactly, on the device, since a host would take minutes for as many ids.
    """

    def __init__(
        self, law: Distribution, n_rows: int, n_ids: int, *, device: torch.device, seed: int = SEED
    ) -> None:
        self.law, self.n_rows, self.n_ids, self.device = law, n_rows, n_ids, device
        self._seed = seed
        self._factor = scatterer(n_rows)
        self.begin_anew()
        self._cumulated = None if law.exponent is None else cumulated(n_rows, law.exponent).to(device)

    @property
    def nbytes(self) -> int:
        """Memory of the device that the law takes."""
        return 0 if self._cumulated is None else self._cumulated.nbytes

    def begin_anew(self) -> None:
        """Draw what was drawn from the beginning."""
        self._generator = np.random.default_rng(self._seed)
        self._walked = self.n_ids // 2  # rows before it are the hot ones

    def draw(self, n_batches: int) -> list[Batch]:
        """The next batches, in memory of the host."""
        drawn = np.empty((n_batches, self.n_ids), np.int64)
        for first in range(0, n_batches, AT_ONCE):
            some = drawn[first : first + AT_ONCE]
            some[...] = self._some(*some.shape)
        return list(drawn)

    def _some(self, n_batches: int, n_ids: int) -> Batch:
        if self._cumulated is not None:
            numbers = torch.from_numpy(self._generator.random((n_batches, n_ids))).to(self.device)
            ranks = torch.searchsorted(self._cumulated, numbers, right=True)
            return np.asarray(ranks.mul_(self._factor).remainder_(self.n_rows).cpu().numpy())
        if self.law is HALF_HITS:
            return np.stack([self._half() for _ in range(n_batches)])
        return self._generator.integers(self.n_rows, size=(n_batches, n_ids))

    def _half(self) -> Batch:
        """The hot rows, each once, and as many that come round again only after all others."""
        n_hot = self.n_ids // 2
        cold = np.arange(self._walked, self._walked + self.n_ids - n_hot)
        self._walked += len(cold)
        ranks = np.concatenate([np.arange(n_hot), n_hot + (cold - n_hot) % (self.n_rows - n_hot)])
        self._generator.shuffle(ranks)
        return ranks * self._factor % self.n_rows


def cumulated(n_rows: int, exponent: float) -> Tensor:
    """Shares of the first rows under Zipf's law, cut off at the table's end; the last is 1."""
    shares = np.cumsum(np.arange(1, n_rows + 1, dtype=np.float64) ** -exponent)
    return torch.from_numpy(shares / shares[-1])


def scatterer(n_rows: int) -> int:
    """A factor that, modulo the rows, takes each rank to a row of its own, far from its neighbours'."""
    factor = max(1, round(n_rows * (math.sqrt(5) - 1) / 2))
    while math.gcd(factor, n_rows) != 1:
        factor += 1
    return factor
