"""Ids follow the law they should."""

import numpy as np
import pytest

from flatbed.bench.cache_ids import HALF_HITS, UNIFORM, ZIPF_105, ZIPF_120, Source, cumulated, scatterer
from tests.bench.samples import CPU


@pytest.mark.parametrize("law", [UNIFORM, ZIPF_105, ZIPF_120, HALF_HITS])
def test_ids_are_rows_and_fresh(law: object) -> None:
    source = Source(law, 1000, 50, device=CPU)  # type: ignore[arg-type]
    first, second = source.draw(70), source.draw(70)
    for batch in (*first, *second):
        assert batch.dtype == np.int64
        assert batch.shape == (50,)
        assert 0 <= batch.min() <= batch.max() < 1000
    assert len({batch.tobytes() for batch in (*first, *second)}) == 140
    source.begin_anew()
    assert np.array_equal(np.stack(source.draw(70)), np.stack(first))


@pytest.mark.parametrize("law", [ZIPF_105, ZIPF_120])
def test_ranks_are_as_frequent_as_the_law_says(law: object) -> None:
    source = Source(law, 500, 1000, device=CPU)  # type: ignore[arg-type]
    counts = np.bincount(np.concatenate(source.draw(200)), minlength=500) / 200_000
    row_of_rank = np.arange(500) * scatterer(500) % 500
    expected = np.arange(1, 501) ** -source.law.exponent  # type: ignore[operator]
    expected /= expected.sum()
    np.testing.assert_allclose(counts[row_of_rank][:5], expected[:5], rtol=0.05)
    np.testing.assert_allclose(counts[row_of_rank].cumsum(), expected.cumsum(), atol=0.005)


def test_uniform_ids_are_uniform() -> None:
    counts = np.bincount(np.concatenate(Source(UNIFORM, 50, 1000, device=CPU).draw(50)), minlength=50)
    assert 0.8 < counts.min() / 1000 < counts.max() / 1000 < 1.2


def test_half_of_the_ids_stay_and_the_others_come_round_late() -> None:
    batches = Source(HALF_HITS, 100, 20, device=CPU).draw(20)
    for batch in batches:
        assert len(np.unique(batch)) == 20
    hot = np.intersect1d(batches[0], batches[1])
    assert len(hot) == 10
    for batch in batches:
        assert np.isin(hot, batch).all()
    others = [set(batch) - set(hot) for batch in batches]
    assert len(set.union(*others[:9])) == 90  # all other rows, each once
    assert others[9] == others[0]


@pytest.mark.parametrize("n_rows", [1, 2, 3, 10, 500, 4096, 20_000])
def test_every_rank_has_a_row_of_its_own(n_rows: int) -> None:
    rows = np.arange(n_rows) * scatterer(n_rows) % n_rows
    assert len(np.unique(rows)) == n_rows


def test_products_of_ranks_are_within_64_bits() -> None:
    assert 60_000_000 * scatterer(60_000_000) < 2**62


def test_the_last_share_is_one() -> None:
    assert float(cumulated(1000, 1.05)[-1]) == 1.0
