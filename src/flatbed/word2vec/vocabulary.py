"""The distributions that words are kept and drawn by."""

from __future__ import annotations

import numpy as np

POWER = 0.75


def keep_probabilities(counts: np.ndarray, subsample: float) -> np.ndarray:
    """With what probability each occurrence stays in the text: sqrt(t / f) + t / f, as word2vec has it."""
    if subsample <= 0:
        return np.ones(len(counts), np.float32)
    ratio = subsample * counts.sum() / counts
    kept: np.ndarray = np.minimum(np.sqrt(ratio) + ratio, 1).astype(np.float32)
    return kept


class Unigrams:
    """Draws words with probability ∝ count**0.75."""

    def __init__(self, counts: np.ndarray) -> None:
        weights = np.asarray(counts, np.float64) ** POWER
        self._cumulative = np.cumsum(weights / weights.sum())
        self._cumulative[-1] = 1.0

    def draw(self, n: int, random: np.random.Generator) -> np.ndarray:
        """So many words, (n,) int64, in random order.

        One from each of n equal parts of the distribution: each of them is distributed as it should be, and
        together they lie closer to it than independent ones would.
        """
        points = (np.arange(n) + random.random(n)) / max(n, 1)
        # Ascending points walk through memory in order. The greatest may round to 1.
        words = np.searchsorted(self._cumulative, points, side="right")
        return random.permutation(np.minimum(words, len(self._cumulative) - 1))
