"""Timing in turns on fresh inputs, and what the cases share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.harness import Options, Plan, each, time_in_turns
from benchmarks.models import MODELS
from benchmarks.trained_tables import IdSource, cumulative, scatter_factor

CPU = torch.device("cpu")
PLAN = Plan(turns=2, warm_up=2, settle=1, synchronized=3, blocks=2, block_steps=4)


def options(**more: object) -> Options:
    return replace(Options(CPU, report=lambda line: None), **more)  # type: ignore[arg-type]


def test_variants_take_turns_on_fresh_inputs() -> None:
    log: list[tuple[str, int]] = []
    drawn = iter(range(1000))

    def draw(n: int) -> list[int]:
        return [next(drawn) for _ in range(n)]

    variants = {name: each(lambda value, name=name: log.append((name, value))) for name in "ab"}
    found = time_in_turns(variants, draw, PLAN, options())
    assert [value for _, value in log] == sorted({value for _, value in log})  # each once, in order
    order = [name for (name, _), (before, _) in zip(log[1:], log, strict=False) if name != before]
    assert order == ["b", "a", "b", "a", "b"]
    for readings in found.values():
        assert len(readings.synchronized) == PLAN.turns * PLAN.synchronized
        assert len(readings.back_to_back) == PLAN.turns * PLAN.blocks
        assert min(readings.synchronized + readings.back_to_back) > 0


def test_inputs_are_prepared_and_results_checked() -> None:
    prepared: list[int] = []
    found = time_in_turns(
        {"double": each(lambda value: 2 * value), "wrong at 2": each(lambda value: 2 * value % 4)},
        lambda n: list(range(n)),
        Plan(turns=1, synchronized=3),
        options(),
        before=lambda name, value: prepared.append(value),
        check=lambda result, value: result == 2 * value,
    )
    assert prepared == [0, 0, 0, 1, 2, 0, 1, 2]
    assert {name: readings.ok for name, readings in found.items()} == {"double": True, "wrong at 2": False}


def test_a_variant_of_others_that_fails_is_skipped_and_named() -> None:
    def fails(inputs: Sequence[int]) -> Iterator[None]:
        raise RuntimeError("no GPU")
        yield

    said: list[str] = []
    chosen = options(report=said.append)
    found = time_in_turns({"CuPy": fails, "torch": each(lambda value: None)}, range, PLAN, chosen)
    assert list(found) == ["torch"]
    assert said == ["skipped CuPy: RuntimeError: no GPU"]
    with pytest.raises(RuntimeError, match="no GPU"):
        time_in_turns({"flatbed": fails}, range, PLAN, chosen)


def test_options_choose_variants_and_cases() -> None:
    chosen = options(variants=("a",), cases=("step",))
    assert chosen.choose({"a": 1, "b": 2}) == {"a": 1}
    assert chosen.wants("step")
    assert not chosen.wants("disk")
    said: list[str] = []
    assert options(variants=("c",), report=said.append).choose({"a": 1}) == {}
    assert "there are: a" in said[0]


def test_skewed_ids_follow_zipfs_law() -> None:
    n_rows = 1000
    batches = IdSource("zipf 1.2", n_rows, 2000, device=CPU).draw(70)
    counts = np.sort(np.bincount(np.concatenate(batches), minlength=n_rows))[::-1]
    expected = np.arange(1, n_rows + 1) ** -1.2
    np.testing.assert_allclose(counts[:5] / counts.sum(), (expected / expected.sum())[:5], rtol=0.05)
    assert float(cumulative(n_rows, 1.2)[-1]) == 1.0
    again = IdSource("zipf 1.2", n_rows, 2000, device=CPU).draw(70)
    np.testing.assert_array_equal(batches, again)


@pytest.mark.parametrize("n_rows", [1, 2, 30, 1000, 20_000_000])
def test_ranks_are_scattered_one_to_one(n_rows: int) -> None:
    factor = scatter_factor(n_rows)
    ranks = np.arange(min(n_rows, 1000), dtype=np.int64)
    assert len(np.unique(ranks * factor % n_rows)) == len(ranks)


@pytest.mark.parametrize(
    ("name", "n_params", "n_elements"),
    [
        ("linear100", 200, 1_651_200),
        ("resnet-like", 161, 23_520_842),
        ("gpt-like", 580, 1_557_611_200),
        ("vit-b16", 152, 86_567_656),
        ("many-small", 2000, 128_000),
    ],
)
def test_models_have_the_stated_sizes_and_train(name: str, n_params: int, n_elements: int) -> None:
    with torch.device("meta"):
        large = MODELS[name]("cuda").build()
    sizes = [param.numel() for param in large.parameters()]
    assert (len(sizes), sum(sizes)) == (n_params, n_elements)
    model = MODELS[name]("cpu")
    built = model.build()
    loss: Tensor = model.loss(built, model.make_batch(torch.Generator().manual_seed(0)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(param.grad is not None for param in built.parameters())
    assert bool(torch.isfinite(loss))
