"""First weights of rows: each depends on (seed, row) alone, and has the distribution that was asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatbed.tables import initializers
from flatbed.tables.initializers import Init, describe, fill_, from_json, parse

NORMAL, UNIFORM, CONSTANT = parse("normal"), parse("uniform"), parse(2.5)
RANDOM = [NORMAL, parse(("normal", 0.5, 0.02)), UNIFORM, parse(("uniform", -0.1, 0.3))]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def drawn(n_rows: int, dim: int, init: Init = NORMAL, **more: Any) -> Tensor:
    out = torch.full((n_rows, dim), math.nan)
    fill_(out, **{"first_row": 0, "init": init, "seed": 0, **more})
    return out


# ---- arguments


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("zeros", Init("zeros", ())),
        ("normal", Init("normal", (0.0, 1.0))),
        (np.int64(3), Init("constant", (3.0,))),
        (["uniform", -1, 1], Init("uniform", (-1.0, 1.0))),
    ],
)
def test_parse(said: object, meant: Init) -> None:
    assert parse(said) == meant
    assert from_json(json.loads(json.dumps(describe(meant)))) == meant


@pytest.mark.parametrize(
    ("said", "message"),
    [
        *(
            (said, '"normal", "uniform", "zeros"')
            for said in ("ones", True, ("normal", 1.0), ("zeros", 1, 2))
        ),
        (math.nan, "value=nan"),
        (("normal", 0.0, -1.0), "std=-1.0"),
        (("normal", "0", 1.0), "mean='0'"),
        (("uniform", 1.0, 0.0), "low=1.0, high=0.0"),
    ],
    ids=str,
)
def test_unknown_forms_and_impossible_numbers(said: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(said)


# ---- each row by itself


@pytest.mark.parametrize("init", RANDOM)
@pytest.mark.parametrize("dim", [1, 7, 8, 300])
def test_rows_do_not_depend_on_the_chunks(init: Init, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n_rows = 257
    whole = drawn(n_rows, dim, init, seed=7)
    assert whole.isfinite().all()
    for n_threads, chunk in [(1, 1), (3, 1000), (4, 5 * dim)]:
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n_threads: n)
        monkeypatch.setattr(initializers, "CHUNK", chunk)
        assert torch.equal(drawn(n_rows, dim, init, seed=7), whole)
    for start, stop in [(0, 1), (100, 101), (37, 206), (256, 257)]:
        assert torch.equal(drawn(stop - start, dim, init, first_row=start, seed=7), whole[start:stop])
    far = 2**62
    assert torch.equal(drawn(3, dim, init, first_row=far)[2], drawn(1, dim, init, first_row=far + 2)[0])


@pytest.mark.parametrize("init", [CONSTANT, *RANDOM])
@pytest.mark.parametrize(("dim", "stride"), [(8, 1), (9, 3), (128, 2), (700, 8), (3, 600)])
def test_every_nth_row_and_the_padding_row(init: Init, dim: int, stride: int) -> None:
    """As ranks hold them: each row has the numbers that it has in the whole table, the padding row zeros."""
    n_rows, first = 3 * stride, stride - 1
    expected = drawn(n_rows, dim, init, seed=7)[first::stride]
    expected[1] = 0
    options: dict[str, Any] = {"seed": 7, "first_row": first, "stride": stride}
    assert torch.equal(drawn(3, dim, init, padding_idx=first + stride, **options), expected)
    if stride > 1:  # a row of another rank
        assert drawn(3, dim, init, padding_idx=first + stride + 1, **options)[1].all()


@pytest.mark.parametrize("init", RANDOM)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_hold_the_rounded_values_between_other_bytes(init: Init, dtype: torch.dtype) -> None:
    records = torch.full((50, 256), 99, dtype=torch.uint8)
    out = records[:, 16 : 16 + 9 * dtype.itemsize].view(dtype)
    fill_(out, first_row=2, init=init, seed=1)
    assert torch.equal(out, drawn(50, 9, init, first_row=2, seed=1).to(dtype))
    assert (records[:, :16] == 99).all()
    assert (records[:, 16 + 9 * dtype.itemsize :] == 99).all()


def test_draws_are_the_same_in_every_version() -> None:
    """Tables that grow, or are made again, must get the same rows from later versions."""
    uniform, normal = (drawn(1, 4, init, first_row=3, seed=5)[0] for init in (UNIFORM, NORMAL))
    assert uniform.tolist() == [
        0.04507863521575928,
        0.3552064299583435,
        0.46661150455474854,
        0.43810391426086426,
    ]
    # Logarithms and sines may differ in the last bit from one processor to another.
    expected = torch.tensor([0.9229074120521545, 1.4197442531585693, -0.5134298205375671, 1.2578366994857788])
    torch.testing.assert_close(normal, expected, rtol=1e-5, atol=0)


def test_seeds_differ() -> None:
    seeds = [0, 1, -1, 2**64, 2**64 + 1, -(2**64), 2**200]
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    rows = {tuple(row) for seed in seeds for row in drawn(100, 8, seed=seed).tolist()}
    assert drawn(0, 8).shape == (0, 8)
    assert len(rows) == 100 * len(seeds)  # no seed draws another's rows in another order
    assert torch.equal(drawn(3, 16, seed=np.int64(5)), drawn(3, 16, seed=5))
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpys).all()  # noqa: NPY002


# ---- distributions


def distance(values: Tensor, cumulative: Callable[[Tensor], Tensor]) -> float:
    """Return Kolmogorov and Smirnov's distance between values and a distribution."""
    values = values.double().flatten().sort().values
    expected, n = cumulative(values), len(values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return max((steps[1:] - expected).max().item(), (expected - steps[:-1]).max().item())


@pytest.mark.parametrize(("dim", "seed"), [(1, 0), (6, 1), (128, 2)])
def test_distributions(dim: int, seed: int) -> None:
    n_rows = (1 << 19) // dim
    values = (drawn(n_rows, dim, parse(("normal", 0.5, 2.0)), seed=seed).double() - 0.5) / 2.0
    n = values.numel()
    assert abs(values.mean()) < 5 / math.sqrt(n)
    assert abs(values.std() - 1) < 5 / math.sqrt(2 * n)
    assert abs((values**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert 4 < values.abs().max() < 7
    # 1.95 / sqrt(n) is passed once in a thousand times
    assert distance(values, lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2)))) < 2.2 / math.sqrt(n)
    values = drawn(n_rows, dim, parse(("uniform", -1.0, 3.0)), seed=seed)
    assert -1 <= values.min() < values.max() < 3
    assert abs(values.double().mean() - 1) < 5 * 4 / math.sqrt(12 * n)
    assert distance(values, lambda x: (x + 1) / 4) < 2.2 / math.sqrt(n)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0 + 2**-23), (100.0, 100.1), (-1e-3, 0.0), (2.0, 2.0)])
def test_uniform_never_reaches_its_upper_end(low: float, high: float) -> None:
    values = drawn(4096, 16, parse(("uniform", low, high)))
    assert values.min() >= np.float32(low)
    assert values.max() < np.float32(high) if high > low else (values == np.float32(low)).all()


def test_extreme_words_give_finite_normals() -> None:
    words = np.array([[0, 0, 2**32 - 1, 2**32 - 1, 0, 2**32 - 1, 0, 2**32 - 1]], np.uint32)
    values = initializers._normal(words)
    assert np.isfinite(values).all()
    assert np.abs(values).max() < 7


@pytest.mark.parametrize("init", [NORMAL, parse(("uniform", -1.0, 1.0))])
def test_rows_and_columns_are_not_correlated(init: Init) -> None:
    values = drawn(20_000, 24, init, seed=11).double()
    columns = torch.corrcoef(values.T) - torch.eye(24)
    assert columns.abs().max() < 5 / math.sqrt(20_000)
    flat = values - values.mean()
    for shift in (1, 2, 5):  # rows with later rows, all columns with all
        cross = flat[:-shift].T @ flat[shift:] / (len(flat) - shift) / values.var()
        assert cross.abs().max() < 5 / math.sqrt(20_000)
