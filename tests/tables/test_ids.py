"""Ids of every kind, and wrong ids, which change nothing."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatbed
from tests.tables.tables import STORAGES, dense_grad

ROWS, DIM = 50, 6
TORCH = [torch.int8, torch.int16, torch.int32, torch.int64]
TORCH += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
NUMPY = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8", ">u2", ">u4", ">u8")


def both() -> tuple[flatbed.Embedding, nn.Embedding]:
    """The same weights, ours and torch's."""
    theirs = nn.Embedding(ROWS, DIM)
    return flatbed.Embedding.from_pretrained(theirs.weight.detach(), freeze=False), theirs


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (0, 3), (3, 0), (2, 3), (2, 3, 4), (1, 1, 1, 2)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    ours, theirs = both()
    ids = torch.randint(ROWS, shape)
    expected = theirs(ids)
    for given in (ids, ids.numpy(), ids.tolist() if 0 not in shape[:-1] else ids):
        found = ours(given)
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
    (found * found).sum().backward()
    (expected * expected).sum().backward()
    assert torch.equal(dense_grad(ours.table), theirs.weight.grad)


@pytest.mark.parametrize(
    ("storage", "cache_rows"), [("device", None), *product(("host", "disk"), (None, 0, 20))]
)
def test_nothing_is_made_for_wrong_ids(storage: str, cache_rows: int | None, tmp_path: Path) -> None:
    """Neither memory nor a file: the table may have been meant to be larger."""
    path = tmp_path / "rows.table" if storage == "disk" else None
    emb = flatbed.Embedding(ROWS, DIM, storage=storage, path=path, cache_rows=cache_rows)
    with pytest.raises(IndexError, match="id 50 at position 2 is out of range for a table of 50 rows"):
        emb([0, 1, ROWS])
    assert not list(tmp_path.iterdir())
    larger = flatbed.Embedding(ROWS + 1, DIM, storage=storage, path=path, cache_rows=cache_rows)
    assert larger([0, 1, ROWS]).shape == (3, DIM)
    larger.table.close(discard=True)


@pytest.mark.parametrize("dtype", TORCH)
def test_any_torch_dtype(dtype: torch.dtype) -> None:
    ours, theirs = both()
    ids = torch.tensor([[3, 1, 49], [0, 3, 3]])
    assert torch.equal(ours(ids.to(dtype)), theirs(ids))
    assert torch.equal(ours(ids.to(dtype).T), theirs(ids.T))


@pytest.mark.parametrize("dtype", NUMPY)
def test_any_numpy_dtype(dtype: str) -> None:
    ours, theirs = both()
    ids = np.array([[3, 1, 49, 7], [0, 3, 3, 8], [1, 1, 2, 2]], dtype)
    expected = theirs(torch.from_numpy(ids.astype(np.int64)))
    assert torch.equal(ours(ids), expected)
    assert torch.equal(ours(ids[::-1, ::2]), expected.flip(0)[:, ::2])
    assert torch.equal(ours(np.asfortranarray(ids)), expected)
    ids.flags.writeable = False
    assert torch.equal(ours(ids), expected)


@pytest.mark.parametrize("given", [7, np.int32(7), np.array(7), torch.tensor(7), np.uint64(7), (7,), [[7]]])
def test_one_id(given: Any) -> None:
    ours, theirs = both()
    assert torch.equal(ours(given), theirs(torch.as_tensor(np.asarray(given, np.int64))))


def test_ids_that_change_after_the_lookup() -> None:
    """A loader may fill the same memory with the next batch before backward."""
    ours, _ = both()
    for ids in (torch.tensor([1, 2]), np.array([1, 2])):
        ours.table.grad = None
        out = ours(ids)
        ids[:] = 9
        out.sum().backward()
        assert ours.table.grad_rows.tolist() == [1, 2]
        flatbed.optim.SGD(ours, lr=0.1)


WRONG_KIND = [
    *(torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1 + 0j])),
    *(np.array([1.0]), np.array([True]), np.array(["1"]), np.array([1, None])),
    *([1.5], [True, False], True, 1.0, "1", None, {1, 2}),
]


@pytest.mark.parametrize("ids", WRONG_KIND, ids=lambda ids: f"{type(ids).__name__}-{ids}")
def test_ids_that_are_not_integers_raise(ids: Any) -> None:
    emb = flatbed.Embedding(ROWS, DIM)
    for use in (emb, flatbed.EmbeddingBag.from_table(emb.table), emb.read_rows):
        with pytest.raises(TypeError, match="integers"):
            use(ids)


WRONG_VALUE = [
    (torch.tensor([3, 50]), "id 50 at position 1 is out of range for a table of 50 rows (0 to 49)"),
    (torch.tensor([[3, 4], [-1, 99]]), "id -1 at position (1, 0) is out of range"),
    (torch.tensor(51), "id 51 at position () is out of range"),
    (np.array([0, 0, 10**12]), "id 1000000000000 at position 2"),
    (np.array([1, 2**64 - 1], np.uint64), "id -1 at position 1"),
    (torch.tensor([0, -1]).view(torch.uint64), "id -1 at position 1"),
    (torch.tensor([200], dtype=torch.uint8), "id 200 at position 0"),
    (torch.tensor([-128], dtype=torch.int8), "id -128 at position 0"),
    ([[[0], [77]]], "id 77 at position (0, 1, 0)"),
]


@pytest.mark.parametrize(("ids", "message"), WRONG_VALUE, ids=lambda value: str(value)[:24])
def test_out_of_range_names_the_id_its_place_and_the_bound(ids: Any, message: str) -> None:
    emb = flatbed.Embedding(ROWS, DIM, padding_idx=0)
    uses = [emb, emb.read_rows, lambda bad: emb.write_rows(bad, torch.zeros(*np.shape(bad), DIM))]
    for use in uses:
        with pytest.raises(IndexError, match=re.escape(message)):
            use(ids)


@pytest.mark.parametrize("storage", STORAGES)
def test_bad_batch_changes_nothing(storage: str, tmp_path: Any) -> None:
    path = tmp_path / "table" if storage == "disk" else None
    emb = flatbed.Embedding(ROWS, DIM, storage=storage, path=path)
    bag = flatbed.EmbeddingBag.from_table(emb.table)
    head = nn.Linear(DIM, 1)
    optimizer = flatbed.optim.Adam([*head.parameters(), emb.table], lr=0.1)
    head(emb([1, 2])).sum().backward()
    optimizer.step()
    head(emb([2, 3])).sum().backward()
    every = list(range(ROWS))
    before = emb.read_rows(every), emb.table.read_state("exp_avg", every)
    grad, rows = emb.table.grad.clone(), emb.table.grad_rows.clone()
    for use in (emb, bag, emb.read_rows):
        with pytest.raises(IndexError):
            use(torch.tensor([[4, 50]]))
    with pytest.raises(IndexError):
        emb.write_rows([4, 50], torch.zeros(2, DIM))
    assert torch.equal(emb.table.grad, grad)
    assert torch.equal(emb.table.grad_rows, rows)
    assert torch.equal(emb.read_rows(every), before[0])
    assert torch.equal(emb.table.read_state("exp_avg", every), before[1])
    optimizer.step()
    assert float(optimizer.state[emb.table]["step"]) == 2


# ---- ids on a GPU: their range is checked without waiting


@pytest.mark.gpu
def test_evaluation_with_bad_ids_on_a_gpu() -> None:
    """A later lookup raises, since no step is taken; checks of good batches do not accumulate."""
    emb = flatbed.Embedding(ROWS, DIM, device="cuda").eval()
    with torch.no_grad():
        for _ in range(10):
            emb(torch.tensor([1], device="cuda"))
            torch.cuda.synchronize()
        assert len(emb.table._deferred_checks.pending) <= 1
        emb(torch.tensor([1, ROWS], device="cuda"))
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match="id 50 at position 1"):
            emb(torch.tensor([1], device="cuda"))
        emb(torch.tensor([1], device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["embedding", "bag"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint64])
def test_bad_ids_on_a_gpu_are_raised_at_the_step(
    storage: str, kind: str, dtype: torch.dtype, tmp_path: Any
) -> None:
    path = tmp_path / "table" if storage == "disk" else None
    made = flatbed.Embedding if kind == "embedding" else flatbed.EmbeddingBag
    emb: Any = made(ROWS, DIM, storage=storage, path=path, device="cuda")
    model = nn.Sequential(emb, nn.Linear(DIM, 1)).cuda()
    optimizer = flatbed.optim.Adam(model, lr=0.1)
    good = torch.tensor([[1, 2], [3, 1]], device="cuda").to(dtype)
    model(good).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    rows = list(range(ROWS))
    weights, dense = emb.read_rows(rows), model[1].weight.detach().clone()
    model(torch.tensor([[4, 5], [ROWS + 3, 1]], device="cuda").to(dtype)).sum().backward()
    with pytest.raises(
        IndexError, match=r"id 53 at position \(1, 0\) is out of range for a table of 50 rows"
    ):
        optimizer.step()
    assert torch.equal(emb.read_rows(rows), weights)
    assert torch.equal(model[1].weight, dense)
    optimizer.zero_grad()
    model(good).sum().backward()
    optimizer.step()
    assert not torch.equal(emb.read_rows([1]), weights[[1]])
    assert torch.equal(emb.read_rows([4, 5]), weights[[4, 5]])


@pytest.mark.gpu
@pytest.mark.parametrize("drop", [True, False])
def test_zero_grad_between_lookup_and_backward_hides_no_bad_ids(drop: bool) -> None:
    emb = flatbed.Embedding(ROWS, DIM, device="cuda")
    optimizer = flatbed.optim.Adam(emb)
    before = emb.read_rows(torch.arange(ROWS)).clone()
    loss = emb(torch.tensor([1, ROWS], device="cuda")).sum()
    optimizer.zero_grad()
    if not drop:
        loss.backward()
    with pytest.raises(IndexError, match=f"id {ROWS} at position 1"):
        optimizer.step()
    assert torch.equal(emb.read_rows(torch.arange(ROWS)), before)
    emb(torch.tensor([1], device="cuda")).sum().backward()
    optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TORCH)
def test_any_dtype_on_a_gpu(dtype: torch.dtype) -> None:
    ours, theirs = both()
    ours.cuda()
    ids = torch.tensor([[3, 1, 49], [0, 3, 3]])
    assert torch.equal(ours(ids.to(dtype).cuda()).cpu(), theirs(ids))
    assert torch.equal(ours(ids.to(dtype)).cpu(), theirs(ids))
    assert torch.equal(ours(ids.to(dtype).numpy()).cpu(), theirs(ids))
