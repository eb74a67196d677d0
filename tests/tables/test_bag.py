"""EmbeddingBag in the place of nn.EmbeddingBag."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatbed

ROWS, DIM = 20, 4
STORAGES = ("host", "device", "disk")
MODES = ("sum", "mean", "max")


def both(**options: Any) -> tuple[flatbed.EmbeddingBag, nn.EmbeddingBag]:
    theirs = nn.EmbeddingBag(ROWS, DIM, **options)
    ours = flatbed.EmbeddingBag.from_pretrained(theirs.weight.detach(), freeze=False, **options)
    return ours, theirs


def dense_grad(table: flatbed.Table) -> Tensor:
    dense = torch.zeros(table.num_embeddings, table.embedding_dim)
    return dense if table.grad is None else dense.index_copy(0, table.grad_rows, table.grad)


def assert_alike(ours: Any, theirs: Any, *arguments: Any, **options: Any) -> None:
    """The same output, bitwise, and the same gradient."""
    ours.table.grad = theirs.weight.grad = None
    found, expected = ours(*arguments, **options), theirs(*arguments, **options)
    assert torch.equal(found, expected)
    weight = torch.randn(expected.shape)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(dense_grad(ours.table), theirs.weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("starts", [[0], [0, 2, 2, 5], [0, 0, 0], [0, 6], [0, 3, 6]], ids=str)
def test_offsets(mode: str, padding: int | None, last: bool, starts: list[int]) -> None:
    """Bags of any length, none among them."""
    ours, theirs = both(mode=mode, padding_idx=padding, include_last_offset=last)
    ids = torch.tensor([3, 1, 1, 19, 3, 7])
    if last and starts[-1] != 6:
        starts = [*starts, 6]
    assert_alike(ours, theirs, ids, torch.tensor(starts))


def test_ids_and_offsets_of_any_kind() -> None:
    ours, theirs = both(mode="sum")
    ids, offsets = torch.tensor([3, 1, 1, 19]), torch.tensor([0, 2])
    expected = theirs(ids, offsets)
    kinds: list[Any] = [ids.numpy(), ids.tolist(), ids.int(), ids.to(torch.uint8), ids.numpy().astype(">u4")]
    for given in kinds:
        for starts in (
            offsets,
            offsets.int(),
            offsets.numpy(),
            offsets.tolist(),
            np.array([0, 2], np.uint16),
        ):
            assert torch.equal(ours(given, starts), expected)


def test_wrong_arguments_raise() -> None:
    ours, theirs = both(mode="sum")
    with pytest.raises(ValueError, match=r"\(bags, length\), or \(n,\) with offsets; found \(1, 1, 1\)"):
        ours([[[1]]])
    with pytest.raises(ValueError, match="found"):
        ours(1)
    with pytest.raises(TypeError, match="integers"):
        ours([1, 2], torch.tensor([0.0, 1.9]))
    with pytest.raises(IndexError, match="id 20 at position 1 is out of range"):
        ours([1, 20], [0])
    for bag in (ours, theirs):
        with pytest.raises(ValueError, match="offsets has to be a 1D Tensor"):
            bag(torch.tensor([1, 2]))
        with pytest.raises(ValueError, match="offsets has to be None"):
            bag(torch.tensor([[1, 2]]), torch.tensor([0]))
        with pytest.raises(RuntimeError, match=r"offsets\[0\] has to be 0"):
            bag(torch.tensor([1, 2]), torch.tensor([1]))
        with pytest.raises(ValueError, match="per_sample_weights"):
            bag(torch.tensor([[1, 2]]), None, torch.ones(3))
    for other in both(mode="mean"):
        with pytest.raises(NotImplementedError, match="per_sample_weights"):
            other(torch.tensor([[1, 2]]), None, torch.ones(1, 2))
    with pytest.raises(ValueError, match="mode must be 'sum', 'mean' or 'max'; found 'median'"):
        flatbed.EmbeddingBag(3, 2, mode="median")
    assert ours.table.grad is None


def test_repr_and_attributes() -> None:
    bag = flatbed.EmbeddingBag(3, 2, padding_idx=-1, mode="max", include_last_offset=True)
    assert repr(bag) == "EmbeddingBag(3, 2, padding_idx=2, storage='host', mode='max')"
    assert bag.include_last_offset


def test_freezing_leaves_the_sample_weights_their_gradient() -> None:
    bag = flatbed.EmbeddingBag(ROWS, DIM, mode="sum").requires_grad_(False)
    weights = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        bag([[1, 2]], None, weights).sum().backward()
    assert weights.grad is not None
    assert bag.table.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=dtype)
    ours = flatbed.EmbeddingBag.from_pretrained(theirs.weight.detach(), freeze=False, mode="sum")
    ids = torch.tensor([[1, 2, 2], [2, 5, 7]])
    assert torch.equal(ours(ids), theirs(ids))
    assert ours(ids).dtype == dtype
    ours(ids).sum().backward()
    wide = torch.promote_types(dtype, torch.float32)
    assert ours.table.grad.dtype == wide  # type: ignore[union-attr]
    assert ours.table.grad[1].tolist() == [3.0] * DIM  # type: ignore[index]


def test_bag_and_an_embedding_over_one_table() -> None:
    emb = flatbed.Embedding(ROWS, DIM)
    bag = flatbed.EmbeddingBag.from_table(emb.table, mode="sum", include_last_offset=True)
    assert torch.equal(bag([1, 2], [0, 2])[0], emb([1, 2]).sum(0))
    (bag([1, 2], [0, 2]).sum() + emb([2]).sum()).backward()
    assert dense_grad(emb.table)[:4, 0].tolist() == [0, 1, 2, 0]
    with pytest.raises(TypeError, match="colour"):
        flatbed.EmbeddingBag.from_table(emb.table, colour="red")
