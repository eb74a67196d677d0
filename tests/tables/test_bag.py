"""EmbeddingBag in the place of nn.EmbeddingBag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from tests.tables.tables import (
    BY_NAME,
    N_ROWS,
    PADDING,
    Setup,
    assert_close,
    assert_gradients,
    assert_same,
    dense_grad,
    reference,
    weights,
)

ROWS, DIM = 20, 4


def both(**options: Any) -> tuple[flatbed.EmbeddingBag, nn.EmbeddingBag]:
    theirs = nn.EmbeddingBag(ROWS, DIM, **options)
    ours = flatbed.EmbeddingBag.from_pretrained(theirs.weight.detach(), freeze=False, **options)
    return ours, theirs


OFFSETS = torch.tensor([0, 0, 3, 7, 7])
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "one bag": lambda: {"input": torch.tensor([3, 1, 1, 11]), "offsets": torch.tensor([0])},
    "empty bags": lambda: {"input": torch.randint(N_ROWS, (11,)), "offsets": OFFSETS},
    "last bag is empty": lambda: {"input": torch.tensor([3, 1, 7]), "offsets": torch.tensor([0, 3])},
    "nothing": lambda: {"input": torch.tensor([]).long(), "offsets": torch.zeros(3).long()},
    "two-dimensional": lambda: {"input": torch.randint(N_ROWS, (4, 3))},
    "weighted": lambda: {
        "input": torch.randint(N_ROWS, (11,)),
        "offsets": OFFSETS,
        "per_sample_weights": torch.randn(11),
    },
}
BAGS = [
    (mode, call, padding, last)
    for mode in ("sum", "mean", "max")
    for call in CALLS
    for padding in (None, PADDING)
    for last in (False, True)
    if (mode == "sum" or call != "weighted") and (call != "two-dimensional" or not last)
]


def check(mode: str, call: str, padding: int | None, last: bool, where: str) -> None:
    """Outputs, gradients and steps are those of nn.EmbeddingBag."""
    weight = weights()
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding, "include_last_offset": last}
    bag = Setup("host", where).bag(weight, **options)
    theirs = nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, **options)
    expected = reference(BY_NAME["adagrad"], weight, padding_idx=padding)
    optimizer = BY_NAME["adagrad"].ours(bag)
    for _ in range(3):
        theirs.weight.data.copy_(expected.weight)
        theirs.weight.grad = None
        given = CALLS[call]()
        if last:
            given["offsets"] = torch.cat([given["offsets"], torch.tensor([len(given["input"])])])
        samples = given.pop("per_sample_weights", None)
        pair = [None, None] if samples is None else [samples.clone().requires_grad_() for _ in range(2)]
        ours_out = bag(**given, per_sample_weights=pair[0])
        theirs_out = theirs(**given, per_sample_weights=pair[1])
        assert_close(ours_out.detach().cpu(), theirs_out.detach(), where, "output")
        grad = torch.randn(theirs_out.shape)
        ours_out.backward(grad.to(ours_out.device))
        theirs_out.backward(grad)
        if pair[0] is not None and pair[1] is not None:
            ours_grad, theirs_grad = (each.grad for each in pair)
            assert_close(ours_grad, theirs_grad, where, "per_sample_weights")
        rows = expected.rows([given["input"]])
        assert_gradients(bag, theirs.weight.grad, rows, where)
        optimizer.step()
        optimizer.zero_grad()
        expected.apply(rows, theirs.weight.grad)
    assert_same(bag, expected, where)


@pytest.mark.parametrize(("mode", "call", "padding", "last"), BAGS)
def test_bags(mode: str, call: str, padding: int | None, last: bool) -> None:
    check(mode, call, padding, last, "cpu")


@pytest.mark.parametrize(("mode", "call", "padding", "last"), BAGS[::7])
def test_bags_by_kernels(mode: str, call: str, padding: int | None, last: bool, kernel_device: str) -> None:
    check(mode, call, padding, last, kernel_device)


def test_wrong_arguments_raise() -> None:
    ours, theirs = both(mode="sum")
    ids, zero = torch.tensor([1, 2]), torch.tensor([0])
    wrong: list[tuple[Any, type[Exception], str, Any]] = [
        ([ours], ValueError, "found", (1,)),
        ([ours], TypeError, "integers", (ids, torch.tensor([0.0, 1.9]))),
        ([ours], IndexError, "id 20 at position 1 is out of range", ([1, 20], [0])),
        ([ours], ValueError, r"ids of shape \(2,\) without offsets", (ids,)),
        ([ours, theirs], ValueError, "offsets has to be None", (ids[None], zero)),
        ([ours, theirs], RuntimeError, r"offsets\[0\] has to be 0", (ids, zero + 1)),
        ([ours, theirs], ValueError, "per_sample_weights", (ids[None], None, torch.ones(3))),
        (both(mode="mean"), NotImplementedError, "per_sample", (ids[None], None, torch.ones(1, 2))),
    ]
    for bags, error, message, arguments in wrong:
        for bag in bags:
            with pytest.raises(error, match=message):
                bag(*arguments)
    assert ours.table.grad is None


def test_freezing_leaves_the_sample_weights_their_gradient() -> None:
    bag = flatbed.EmbeddingBag(ROWS, DIM, mode="sum").requires_grad_(False)
    weights = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        bag([[1, 2]], None, weights).sum().backward()
    assert weights.grad is not None
    assert bag.table.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    ours, theirs = both(mode="sum", dtype=dtype)
    ids = torch.tensor([[1, 2, 2], [2, 5, 7]])
    found = ours(ids)
    assert found.dtype == dtype
    assert torch.equal(found, theirs(ids))
    found.sum().backward()
    assert ours.table.grad.dtype == torch.promote_types(dtype, torch.float32)
    assert ours.table.grad[1].tolist() == [3.0] * DIM


def test_bag_and_an_embedding_over_one_table() -> None:
    emb = flatbed.Embedding(ROWS, DIM)
    bag = flatbed.EmbeddingBag.from_table(emb.table, mode="sum", include_last_offset=True)
    assert torch.equal(bag([1, 2], [0, 2])[0], emb([1, 2]).sum(0))
    (bag([1, 2], [0, 2]).sum() + emb([2]).sum()).backward()
    assert dense_grad(emb.table)[:4, 0].tolist() == [0, 1, 2, 0]
    with pytest.raises(TypeError, match="colour"):
        flatbed.EmbeddingBag.from_table(emb.table, colour="red")


def test_offsets_that_decrease_raise() -> None:
    """torch reads memory beyond its ids then."""
    bag = flatbed.EmbeddingBag(5, 3)
    with pytest.raises(ValueError, match=r"offsets must not decrease; found \[0, 2, 1\]"):
        bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 1]))
