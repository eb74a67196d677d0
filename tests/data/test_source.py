"""Sources that can be read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import flatbed
from flatbed.errors import FlatbedError

Loop = Callable[[Any], Any]
LOOPS: dict[str, Loop] = {
    "Feeder": lambda given: flatbed.Feeder(given, "cpu"),
    "Prefetcher": lambda given: flatbed.Prefetcher(given, {}, device="cpu"),
}
loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


def generated(n: int = 3) -> Iterator[torch.Tensor]:
    for i in range(n):
        yield torch.tensor([i])


@loops
def test_a_generator_is_not_read_again_after_its_end(loop: Loop) -> None:
    batches = loop(generated())
    assert [int(one) for one in batches] == [0, 1, 2]
    with pytest.raises(
        FlatbedError, match="was read to its end by an earlier loop, and a generator can be read"
    ):
        iter(batches)


@loops
def test_a_generator_without_batches_is_an_epoch_without_batches(loop: Loop) -> None:
    assert list(loop(generated(0))) == []


def test_a_generator_goes_on_after_a_break() -> None:
    batches = flatbed.Feeder(generated(), "cpu")
    for one in batches:
        assert int(one) == 0
        break
    assert [int(one) for one in batches] == [1, 2]
    with pytest.raises(FlatbedError, match="make a new one of both for each epoch"):
        iter(batches)


@loops
@pytest.mark.parametrize(
    "again", [list(generated()), tuple(generated()), DataLoader([0, 1, 2], batch_size=1)]
)
def test_what_can_be_read_again_is(loop: Loop, again: Any) -> None:
    batches = loop(again)
    for _ in range(3):
        assert [int(one) for one in batches] == [0, 1, 2]


@loops
def test_an_iterator_of_a_loader_is_read_once(loop: Loop) -> None:
    batches = loop(iter(DataLoader([0, 1, 2], batch_size=1, num_workers=1)))
    assert [int(one) for one in batches] == [0, 1, 2]
    with pytest.raises(FlatbedError, match="DataLoaderIter can be read once"):
        iter(batches)
