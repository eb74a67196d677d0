from __future__ import annotations

import numpy as np
import pytest

from flatbed.word2vec.vocabulary import Unigrams, keep_probabilities


@pytest.mark.parametrize("t", [1e-1, 1e-2, 1e-3])
def test_subsampling_is_word2vecs_formula(t: float) -> None:
    counts = np.array([900, 90, 9, 1])
    kept = keep_probabilities(counts, t)
    for count, found in zip(counts / counts.sum(), kept, strict=True):
        assert found == pytest.approx(min((t / count) ** 0.5 + t / count, 1), rel=1e-6)


def test_no_subsampling() -> None:
    assert keep_probabilities(np.array([5, 1]), 0).tolist() == [1, 1]


def test_negatives_follow_counts_to_three_quarters() -> None:
    counts = np.array([10_000, 1000, 100, 10, 1])
    drawn = Unigrams(counts).draw(200_000, np.random.default_rng(0))
    found = np.bincount(drawn, minlength=5) / len(drawn)
    wanted = counts**0.75 / (counts**0.75).sum()
    # Stratified: closer than independent draws, whose error would be sqrt(p / n).
    assert np.abs(found - wanted).max() < 2 / 200_000


def test_each_place_of_a_draw_has_the_distribution() -> None:
    counts = np.array([50, 30, 20])
    unigrams, wanted = Unigrams(counts), counts**0.75 / (counts**0.75).sum()
    drawn = np.array([unigrams.draw(4, np.random.default_rng(i)) for i in range(4000)])
    for place in range(4):
        found = np.bincount(drawn[:, place], minlength=3) / len(drawn)
        assert np.abs(found - wanted).max() < 4 * np.sqrt(0.25 / len(drawn))


def test_the_last_word_is_drawn_and_none_beyond() -> None:
    class Greatest:
        def random(self, n: int) -> np.ndarray:
            return np.full(n, np.nextafter(1.0, 0.0))

        def permutation(self, words: np.ndarray) -> np.ndarray:
            return words

    drawn = Unigrams(np.array([3, 2, 1])).draw(7, Greatest())  # type: ignore[arg-type]
    assert drawn.max() == 2
