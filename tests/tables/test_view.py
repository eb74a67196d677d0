"""All weights as one tensor, and rows by their ids."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatbed
from tests.tables.tables import STORAGES, storage_options

ROWS, DIM = 12, 3
IN_MEMORY = ("host", "device")
EVERY = torch.arange(ROWS)


def made(storage: str = "host", folder: Path | None = None, **options: Any) -> flatbed.Embedding:
    return flatbed.Embedding(ROWS, DIM, **storage_options(storage, folder), **options)


def test_sizes_are_torchs() -> None:
    emb = made()
    for weight in (emb.weight, emb.weight.detach(), emb.weight[2:], emb.state_dict()["weight"], emb.table):
        for size in (weight.shape, weight.size()):
            assert type(size) is torch.Size
            assert size.numel() == weight.numel()


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda w: w.fill_(2),
    "init": lambda w: nn.init.constant_(w, 2.0),
    "item": lambda w: w.__setitem__(slice(None), 2.0),
    "rows": lambda w: [row.fill_(2) for row in w],
    "data": lambda w: w.data.fill_(2),
    "detach": lambda w: w.detach().copy_(torch.full((ROWS, DIM), 2.0)),
    "slices": lambda w: [w[::2].fill_(2), w[1::2, :1].fill_(2), w[1::2][:, 1:].fill_(2)],
    "transposed": lambda w: w.t()[0:].mul_(0).add_(2),
    "unbound": lambda w: [part.fill_(2) for part in w.unbind(1)],
    "out": lambda w: torch.full((ROWS, DIM), 2.0, out=w),
    "masked": lambda w: w.masked_fill_(torch.ones(ROWS, 1, dtype=torch.bool), 2.0),
    "assigned": lambda w: setattr(w, "data", torch.full((ROWS, DIM), 2.0)),
}


@pytest.mark.parametrize(("storage", "owned"), [("host", False), ("device", True)])
@pytest.mark.parametrize("write", WRITES)
def test_writes_go_through(storage: str, owned: bool, write: str) -> None:
    emb = made(storage)
    optimizer = flatbed.optim.Adam(emb) if owned else None
    with torch.no_grad():
        WRITES[write](emb.weight)
    assert torch.equal(emb.read_rows(EVERY), torch.full((ROWS, DIM), 2.0))
    if optimizer is not None:
        assert not emb.table.read_state("exp_avg", EVERY).any()


def test_views_see_updates_and_keep_the_rows_alive() -> None:
    emb = made()
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    weight = emb.weight
    before = weight.clone()
    emb([3]).sum().backward()
    optimizer.step()
    assert torch.equal(weight[3], before[3] - 1)
    emb.write_rows([0], torch.zeros(1, DIM))
    del emb, optimizer
    assert not weight[0].any()


def test_results_of_operations_are_ordinary_tensors() -> None:
    emb = made()
    _kept = flatbed.optim.Adam(emb)  # records are wider than the weights
    weight = emb.weight
    found: list[Any] = [weight + 1, weight.clone(), weight.sum(), weight[[1, 2]], weight @ weight.t()]
    found += [weight.to_sparse(), weight.max(0).values, torch.cat([weight, weight]), copy.deepcopy(weight)]
    found += [torch.zeros(ROWS, DIM).copy_(weight)]
    assert [type(one) for one in found] == [Tensor] * len(found)
    assert weight.shape == (ROWS, DIM)
    assert weight.size(0) == len(weight) == len(weight.tolist()) == ROWS
    assert repr(weight) == repr(weight.detach().clone())
    assert "read_rows" in dir(emb.table)  # of shells that complete names
    buffer = io.BytesIO()
    torch.save(weight[3:5], buffer)
    assert buffer.tell() < 2048
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), weight[3:5])


def test_numpy_gets_copies_that_cannot_be_written() -> None:
    emb = made()
    weight, state = emb.weight, emb.state_dict()["weight"]
    arrays = [weight.numpy(), np.asarray(weight), weight.data.numpy(), weight[2:].numpy()]
    arrays += [state.numpy(), np.asarray(state), state.detach().numpy(), state.cpu().numpy()]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    np.array(weight)[1] = 7  # a copy that was asked for
    assert np.asarray(weight, dtype=np.float64).dtype == np.float64
    assert not bool((weight == 7).any())


def test_parts_and_copies_freeze_nothing() -> None:
    emb = made()
    emb.weight[1:].requires_grad_(False)
    emb.weight.detach().requires_grad_(False)
    emb.weight.data.requires_grad = False
    assert emb.table.requires_grad


def test_values_of_another_shape_are_refused() -> None:
    emb = made()
    with pytest.raises(ValueError, match=r"weights of shape \(12, 3\) cannot become \(4, 3\)"):
        emb.weight.data = torch.zeros(4, DIM)
    with pytest.raises(flatbed.FlatbedError, match="copy_"):
        emb.weight.set_(torch.zeros(12, DIM))
    with pytest.raises(RuntimeError):
        emb.weight.copy_(torch.zeros(5, DIM))


# ---- stale views


MOVES: dict[str, Callable[[flatbed.Embedding], Any]] = {
    "attach": flatbed.optim.Adam,
    "resize": lambda emb: emb.table.resize(ROWS + 1),
    "close": lambda emb: emb.table.close(),
    "drop state": lambda emb: (flatbed.optim.Adam(emb), emb.table.drop_state()),
}


USES: list[Callable[[Tensor], Any]] = [
    lambda view: view.sum(),
    lambda view: view.fill_(0.0),
    lambda view: view[0],
    lambda view: torch.zeros(1).add_(view),
    lambda view: torch.stack([view, view]),
    repr,
    np.asarray,
    lambda view: view.tolist(),
]


@pytest.mark.parametrize("storage", IN_MEMORY)
@pytest.mark.parametrize("move", MOVES)
def test_stale_views_raise(storage: str, move: str) -> None:
    emb = made(storage)
    weight = emb.weight
    views = [weight, weight[2:], weight[3], weight.t(), weight.detach(), weight.data, *weight.unbind(0)[:2]]
    _kept = MOVES[move](emb)
    for view in views:
        for use in USES:
            with pytest.raises(flatbed.FlatbedError, match=r"stale.*emb\.weight again"):
                use(view)
    if move == "close":
        with pytest.raises(flatbed.FlatbedError, match="closed"):
            _ = emb.weight
    else:
        assert torch.equal(emb.weight[:ROWS], emb.read_rows(EVERY))


# ---- rows by their ids


@pytest.mark.parametrize("storage", STORAGES)
def test_read_and_write_rows(storage: str, tmp_path: Path) -> None:
    """Wrong writes change nothing."""
    emb = made(storage, tmp_path)
    expected = emb.read_rows(EVERY)
    assert emb.read_rows(5).shape == (DIM,)
    assert emb.read_rows([[1, 2], [3, 3]]).shape == (2, 2, DIM)
    for ids in (torch.tensor([7, 2]), 4, []):
        values = torch.randn(*np.shape(ids), DIM)
        emb.write_rows(ids, values)
        expected[torch.as_tensor(np.asarray(ids, np.int64)).flatten()] = values.reshape(-1, DIM)
        assert torch.equal(emb.read_rows(EVERY), expected)
    row = [[1.0, 2.0, 3.0]]
    for values in (row, np.array(row), nn.Parameter(torch.tensor(row, dtype=torch.float64))):
        emb.write_rows([0], torch.zeros(1, DIM))
        emb.write_rows([0], values)
        assert emb.read_rows([0]).tolist() == row
    expected = emb.read_rows(EVERY)
    assert not expected.requires_grad
    for ids, values, error in (
        ([1, 2], torch.zeros(2, DIM + 1), ValueError),
        ([1, 2], torch.zeros(DIM), ValueError),
        ([[1, 2]], torch.zeros(2, DIM), ValueError),
        ([1, ROWS], torch.zeros(2, DIM), IndexError),
    ):
        with pytest.raises(error):
            emb.write_rows(ids, values)
    emb.read_rows(EVERY).zero_()
    assert torch.equal(emb.read_rows(EVERY), expected)


def test_state_of_rows() -> None:
    emb = made()
    optimizer = flatbed.optim.Adam(emb)
    emb([1, 1, 4]).sum().backward()
    optimizer.step()
    assert emb.table.state_names == ("exp_avg", "exp_avg_sq")
    found = emb.table.read_state("exp_avg", [[4, 1], [0, 4]])
    torch.testing.assert_close(found[:, :, 0], torch.tensor([[0.1, 0.2], [0.0, 0.1]]))
    with pytest.raises(KeyError, match="found exp_avg, exp_avg_sq"):
        emb.table.read_state("momentum", [1])


def test_the_gradient_of_a_view_is_that_of_the_table() -> None:
    emb = flatbed.Embedding(50, 4)
    assert emb.weight.grad is None
    emb([1, 2]).sum().backward()
    with pytest.raises(flatbed.FlatbedError, match="no gradient of its own"):
        nn.utils.clip_grad_norm_(emb.weight, 0.1)
    with pytest.raises(flatbed.FlatbedError, match="no gradient of its own"):
        emb.weight.grad = torch.zeros(50, 4)
    emb.weight.grad = None
    assert emb.table.grad is None
