"""Calls that were forgotten, came too late or in between: noticed before rows are mixed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatbed.compat.speedtorch as SpeedTorch
from flatbed.errors import FlatbedError
from tests.compat.speedtorch_models import DIM, N, factories, start, values

Loop = tuple[nn.Embedding, torch.optim.Optimizer, Any, Any]


def loop(n_slots: int = 2, kind: Any = torch.optim.Adam, *, sparse: bool = False) -> Loop:
    embedding = nn.Embedding(n_slots, DIM, sparse=sparse)
    optimizer = kind(embedding.parameters(), lr=0.1)
    rows = SpeedTorch.ModelFactory(embedding, N, DIM)
    rows.customInit(values(start()[0]))
    state = SpeedTorch.OptimizerFactory(optimizer, N, DIM, nn.Sequential(embedding), "0")
    state.optInit()
    return embedding, optimizer, rows, state


def backward(embedding: nn.Embedding, ids: list[int]) -> None:
    embedding.zero_grad()
    embedding(torch.arange(len(ids))).square().sum().backward()


def train(made: Loop, ids: list[int]) -> None:
    embedding, optimizer, rows, state = made
    for switcher in (rows, state):
        switcher.beforeForwardPass(ids)
    backward(embedding, ids)
    optimizer.step()
    for switcher in (rows, state):
        switcher.afterOptimizerStep(ids)


# ---- the optimizer's switcher was forgotten


@pytest.mark.parametrize("ids", [[3, 4], [3, 4, 5]], ids=["same size", "grown"])
def test_a_step_with_the_state_of_other_rows(ids: list[int]) -> None:
    made = loop()
    embedding, optimizer, rows, state = made
    train(made, [1, 2])
    rows.beforeForwardPass(ids)
    backward(embedding, ids)
    before = embedding.weight.detach().clone()
    with pytest.raises(FlatbedError, match=r"state of other rows .*OptimizerFactory.*beforeForwardPass"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)
    state.beforeForwardPass(ids)
    optimizer.step()
    rows.afterOptimizerStep(ids)
    state.afterOptimizerStep(ids)


def test_a_step_before_the_optimizers_switcher_was_ever_called() -> None:
    embedding, optimizer, rows, _state = loop()
    rows.beforeForwardPass([1, 2])
    backward(embedding, [1, 2])
    with pytest.raises(FlatbedError, match="state of other rows"):
        optimizer.step()
    with pytest.raises(FlatbedError, match="state of other rows"):
        optimizer.step(lambda: 1.0)


def test_the_models_switcher_was_forgotten() -> None:
    made = loop()
    embedding, optimizer, _rows, state = made
    train(made, [1, 2])
    state.beforeForwardPass([3, 4])
    backward(embedding, [3, 4])
    with pytest.raises(FlatbedError, match="state of other rows"):
        optimizer.step()


def test_steps_that_are_right() -> None:
    """Of variables without a gradient, without state, after reading others, without a switcher any more."""
    made = loop()
    embedding, optimizer, rows, state = made
    train(made, [1, 2])
    rows.beforeForwardPass([5, 6])  # to read
    optimizer.zero_grad()
    optimizer.step()
    rows.beforeForwardPass([1, 2])
    backward(embedding, [1, 2])
    optimizer.step()  # the state of these rows is still there
    state.close()
    rows.afterOptimizerStep([1, 2])
    rows.beforeForwardPass([7, 8])
    backward(embedding, [7, 8])
    optimizer.step()
    embedding, optimizer, rows, state = loop(kind=torch.optim.SGD)
    before = rows.getNumpyVersion().copy()
    rows.beforeForwardPass([1, 2])
    backward(embedding, [1, 2])
    optimizer.step()
    rows.afterOptimizerStep([1, 2])
    assert (rows.getNumpyVersion() != before).any(1).nonzero()[0].tolist() == [1, 2]


def test_a_switcher_that_was_made_again() -> None:
    embedding, optimizer, rows, state = loop()
    again = SpeedTorch.OptimizerFactory(optimizer, N, DIM, nn.Sequential(embedding), "0")
    again.optInit()
    train((embedding, optimizer, rows, again), [1, 2])
    train((embedding, optimizer, rows, again), [3, 4])
    state.beforeForwardPass([3, 4])
    again.beforeForwardPass([3, 4])
    with pytest.raises(FlatbedError, match="another switcher"):
        state.afterOptimizerStep([3, 4])


# ---- gradients of a graph of other rows


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("ids", [[5, 6, 7, 8], [5, 6], [5, 6, 7, 8, 9, 9]], ids=["same", "fewer", "more"])
def test_a_backward_pass_of_rows_that_are_gone(ids: list[int], sparse: bool) -> None:
    embedding, _, rows, _ = loop(4, torch.optim.SGD, sparse=sparse)
    rows.beforeForwardPass([1, 1, 3, 4])
    loss = embedding(torch.arange(4)).sum()
    rows.beforeForwardPass(ids)
    with pytest.raises(FlatbedError, match=r"backward\(\) .* rows that were switched in before"):
        loss.backward()
    assert embedding.weight.grad is None
    embedding(torch.arange(len(ids))).sum().backward()
    rows.afterOptimizerStep(ids)


def test_a_backward_pass_over_both_kinds_of_rows() -> None:
    embedding, _, rows, _ = loop(4, torch.optim.SGD)
    rows.beforeForwardPass([1, 1, 3, 4])
    loss = embedding(torch.arange(4)).sum()
    rows.beforeForwardPass([5, 6, 7, 8])
    with pytest.raises(FlatbedError, match=r"rows that were switched in before"):
        (loss + embedding(torch.arange(4)).sum()).backward()


def test_backward_passes_of_several_forward_passes() -> None:
    embedding, _, rows, state = loop(4, torch.optim.SGD)
    with torch.inference_mode():
        rows.beforeForwardPass([5, 6, 7, 8])
    rows.beforeForwardPass([1, 1, 3, 4])
    losses = [embedding(torch.arange(4)).sum() for _ in range(3)]
    state.beforeForwardPass([1, 1, 3, 4])  # of the same rows
    losses[2].backward(retain_graph=True)
    losses[2].backward()
    (losses[0] + losses[1]).backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad[:, 0].tolist() == [8, 8, 4, 4]
    assert torch.autograd.grad(embedding(torch.arange(2)).sum(), embedding.weight)[0][:, 0].tolist() == [
        2,
        2,
        0,
        0,
    ]


# ---- other rows in between


@pytest.mark.parametrize("way", ["loadCupy", "loadTorch", "customInit", "zerosInit"])
def test_rows_that_were_replaced_in_between(way: str, tmp_path: Path) -> None:
    rows = loop()[2]
    other = torch.full((N, DIM), 3.0)
    np.save(tmp_path / "rows.npy", other.numpy())
    torch.save(other, tmp_path / "rows.pt")
    rows.beforeForwardPass([1, 2])
    given = {"loadCupy": "rows.npy", "loadTorch": "rows.pt"}
    if way in given:
        getattr(rows, way)(tmp_path / given[way])
    else:
        rows.customInit(values(other)) if way == "customInit" else rows.zerosInit()
    with pytest.raises(FlatbedError, match=r"without a beforeForwardPass\(\)"):
        rows.afterOptimizerStep([1, 2])
    assert (rows.getNumpyVersion() == (0.0 if way == "zerosInit" else 3.0)).all()


def test_state_that_was_loaded_in_between(tmp_path: Path) -> None:
    made = loop()
    _, _, rows, state = made
    train(made, [1, 2])
    state.saveTorch(tmp_path / "state.pt")
    rows.beforeForwardPass([1, 2])
    state.beforeForwardPass([1, 2])
    state.loadTorch(tmp_path / "state.pt")
    with pytest.raises(FlatbedError, match=r"without a beforeForwardPass\(\)"):
        state.afterOptimizerStep([1, 2])


def test_two_collections_of_one_variable() -> None:
    embedding = nn.Embedding(2, DIM)
    one, other = (SpeedTorch.ModelFactory(embedding, N, DIM) for _ in range(2))
    one.zerosInit()
    other.customInit(nn.init.ones_)
    one.beforeForwardPass([1, 2])
    other.beforeForwardPass([1, 2])
    with pytest.raises(FlatbedError, match=r"another switcher of this variable.*nothing was written"):
        one.afterOptimizerStep([1, 2])
    assert not one.getNumpyVersion().any()
    other.afterOptimizerStep([1, 2])
    one.beforeForwardPass([1, 2])
    one.afterOptimizerStep([1, 2])


# ---- files that cannot be loaded


@pytest.mark.parametrize("home", ["device", "host", "disk"])
@pytest.mark.parametrize("way", ["loadCupy", "loadTorch"])
@pytest.mark.parametrize("what", ["missing", "small"])
def test_rows_that_could_not_be_loaded(home: str, way: str, what: str, tmp_path: Path) -> None:
    np.save(tmp_path / "small.npy", np.ones((3, DIM), np.float32))
    torch.save(torch.ones(3, DIM), tmp_path / "small.pt")
    make, make_state = factories(home, tmp_path)
    embedding = nn.Embedding(2, DIM)
    model = nn.Sequential(embedding)
    optimizer = torch.optim.Adam(model.parameters())
    for switcher in (make(embedding), make_state(optimizer, model, "0")):
        with pytest.raises((FlatbedError, ValueError)):
            getattr(switcher, way)(tmp_path / (what + (".npy" if way == "loadCupy" else ".pt")))
        with pytest.raises(FlatbedError, match="has no rows yet"):
            switcher.beforeForwardPass([1, 2])
        assert switcher.fileName is None
    assert not list(tmp_path.glob("*.bed"))


# ---- options as they are now


def test_the_learning_rate_of_a_state_dict_is_the_first_step_size() -> None:
    embedding = nn.Embedding(2, DIM)
    optimizer = torch.optim.Rprop(embedding.parameters(), lr=0.1)
    state = SpeedTorch.OptimizerFactory(optimizer, N, DIM, nn.Sequential(embedding), "0")
    optimizer.load_state_dict(optimizer.state_dict())  # which makes new groups
    optimizer.param_groups[0]["lr"] = 0.5
    state.optInit()
    assert (state.getNumpyVersion()["step_size"] == 0.5).all()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_first_values_are_those_of_the_datatype(dtype: torch.dtype, sparse: bool) -> None:
    embedding = nn.Embedding(2, DIM, dtype=dtype, sparse=sparse)
    optimizer = torch.optim.Adagrad(embedding.parameters(), initial_accumulator_value=0.3)
    state = SpeedTorch.OptimizerFactory(optimizer, N, DIM, nn.Sequential(embedding), "0", dtype)
    state.optInit()
    assert torch.from_numpy(state.getNumpyVersion()["sum"]).eq(torch.tensor(0.3, dtype=dtype)).all()


def test_state_that_was_loaded_has_to_be_switched_in(tmp_path: Path) -> None:
    made = loop()
    embedding, optimizer, rows, state = made
    train(made, [1, 2])
    state.saveCupy(tmp_path / "state.npy")
    state.loadCupy(tmp_path / "state.npy")
    rows.beforeForwardPass([1, 2])
    backward(embedding, [1, 2])
    with pytest.raises(FlatbedError, match="state of other rows"):
        optimizer.step()
    train(made, [1, 2])
