"""Mistakes are named, and change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatbed
import flatbed.compat.speedtorch as SpeedTorch
from flatbed.errors import FlatbedError
from tests.compat.speedtorch_models import DIM, REFUSED, N, start, values


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.u_embeddings = nn.Embedding(4, DIM, **options)
        self.head = nn.Linear(DIM, 1)


@pytest.fixture
def pair() -> tuple[Model, Any, Any]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    rows = SpeedTorch.ModelFactory(model.u_embeddings, N, DIM)
    state = SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "u_embeddings")
    rows.customInit(values(start()[0]))
    state.optInit()
    return model, rows, state


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_that_cannot_be_switched(kind: Any) -> None:
    model = nn.Sequential(nn.Embedding(4, DIM))
    with pytest.raises(FlatbedError, match=REFUSED[kind]):
        SpeedTorch.OptimizerFactory(kind(model.parameters()), N, DIM, model, "0")


def test_optimizers_of_flatbed_have_tables() -> None:
    model = Model()
    with pytest.raises(FlatbedError, match=r"Adam of flatbed.optim .*Embedding"):
        SpeedTorch.OptimizerFactory(flatbed.optim.Adam(model.parameters()), N, DIM, model, "u_embeddings")


class Odd(torch.optim.Optimizer):
    """Its options cannot be had from its groups."""

    def __init__(self, params: Any, *, secret: int) -> None:
        super().__init__(params, {"lr": 0.1})


def test_optimizers_that_cannot_be_tried() -> None:
    model = Model()
    with pytest.raises(FlatbedError, match=r"Odd cannot be switched row by row: .*secret"):
        SpeedTorch.OptimizerFactory(Odd(model.parameters(), secret=1), N, DIM, model, "u_embeddings")


def test_variables_that_are_not_there() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"no variable 'w_embeddings'; found u_embeddings, head, head.bias"):
        SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "w_embeddings")
    other = torch.optim.Adam(model.head.parameters())
    with pytest.raises(ValueError, match="does not have 'u_embeddings' among its parameters"):
        SpeedTorch.OptimizerFactory(other, N, DIM, model, "u_embeddings")
    with pytest.raises(TypeError, match="given_optimizer"):
        SpeedTorch.OptimizerFactory("Adam", N, DIM, model, "u_embeddings")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"module with a weight.*found str"):
        SpeedTorch.ModelFactory("u_embeddings", N, DIM)
    by_parameter = SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "u_embeddings.weight")
    assert by_parameter.optVarList == ["exp_avg", "exp_avg_sq"]


def test_shapes_and_datatypes() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"shape \(4, 16\); expected \(rows of a batch, 8\)"):
        SpeedTorch.ModelFactory(model.u_embeddings, N, 8)
    with pytest.raises(ValueError, match=r"'u_embeddings' has shape \(4, 16\)"):
        SpeedTorch.OptimizerFactory(optimizer, N, 8, model, "u_embeddings")
    with pytest.raises(ValueError, match=r"torch.float32, but its collection of torch.float64"):
        SpeedTorch.ModelFactory(model.u_embeddings, N, DIM, datatype="float64")
    with pytest.raises(TypeError, match="datatype 'int32'"):
        SpeedTorch.ModelFactory(model.u_embeddings, N, DIM, datatype="int32")
    with pytest.raises(TypeError, match="datatype 'float33' is not known"):
        SpeedTorch.ModelFactory(model.u_embeddings, N, DIM, datatype="float33")
    with pytest.raises(ValueError, match="total_classes must be at least 1; found 0"):
        SpeedTorch.ModelFactory(model.u_embeddings, 0, DIM)
    with pytest.raises(TypeError, match=r"embed_dimension must be an integer; found 1\.5"):
        SpeedTorch.ModelFactory(model.u_embeddings, N, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="CPUPinn must be True"):
        SpeedTorch.ModelFactory(model.u_embeddings, N, DIM, CPUPinn="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"padding_idx": 0}, {"scale_grad_by_freq": True}])
def test_options_that_mean_slots(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"an embedding with {next(iter(option))} cannot be switched"):
        SpeedTorch.ModelFactory(Model(**option).u_embeddings, N, DIM)


def test_calls_before_the_first(tmp_path: Path) -> None:
    model = Model()
    rows = SpeedTorch.ModelFactory(model.u_embeddings, N, DIM)
    optimizer = torch.optim.Adam(model.parameters())
    state = SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "u_embeddings")
    for call in (lambda: rows.beforeForwardPass([1]), lambda: rows.saveCupy(tmp_path / "x.npy")):
        with pytest.raises(FlatbedError, match=r"ModelFactory has no rows yet: call zerosInit\(\)"):
            call()
    for call in (lambda: state.beforeForwardPass([1]), state.getNumpyVersion):
        with pytest.raises(FlatbedError, match=r"OptimizerFactory has no rows yet: call optInit\(\)"):
            call()
    with pytest.raises(FlatbedError, match=r"DataGadget has no data yet: call gadgetInit\(\)"):
        SpeedTorch.DataGadget(np.ones((2, 2))).getData([0])
    with pytest.raises(FlatbedError, match=r"COM has no data yet: call comInit\(\)"):
        SpeedTorch.COM(3).addCounts([0], [0])
    with pytest.raises(ValueError, match="batchSize must be at least 1"):
        rows.variableTransformer(0, 1)


def test_calls_out_of_order(pair: tuple[Model, Any, Any]) -> None:
    model, rows, state = pair
    for switcher in (rows, state):
        with pytest.raises(FlatbedError, match=r"afterOptimizerStep\(\) without a beforeForwardPass"):
            switcher.afterOptimizerStep([1, 2])
        switcher.beforeForwardPass([1, 2], [3])
        with torch.no_grad():
            model.u_embeddings.weight.fill_(9.0)
        for other in (([1, 3], [3]), ([1, 2, 3, 3], None), ([2, 1], [3])):
            with pytest.raises(FlatbedError, match="other ids than"):
                switcher.afterOptimizerStep(*other)
        assert np.array_equal(rows.getNumpyVersion(), start()[0].numpy())
    with pytest.raises(FlatbedError, match="not come home"):
        rows.beforeForwardPass([1, 2])
    rows.beforeForwardPass([1, 2])
    state.beforeForwardPass([1, 3])
    with pytest.raises(FlatbedError, match="another switcher of this variable was given other ids"):
        rows.afterOptimizerStep([1, 2])
    rows.beforeForwardPass([1, 3])
    rows.afterOptimizerStep([1, 3])
    state.afterOptimizerStep([1, 3])
    with pytest.raises(FlatbedError, match="without a beforeForwardPass"):
        rows.afterOptimizerStep([1, 3])


def train(model: Model, rows: Any, state: Any, ids: list[int]) -> None:
    """Until after the step."""
    rows.beforeForwardPass(ids)
    state.beforeForwardPass(ids)
    state.given_optimizer.zero_grad()
    model.head(model.u_embeddings(torch.arange(len(ids)))).sum().backward()
    state.given_optimizer.step()


@pytest.mark.parametrize("forgotten", ["rows", "state"])
def test_a_step_that_is_about_to_be_lost(forgotten: str, pair: tuple[Model, Any, Any]) -> None:
    """Said once for each, with nothing changed: the rows can still come home."""
    model, rows, state = pair
    switchers = {"rows": rows, "state": state}
    lost, other = switchers.pop(forgotten), next(iter(switchers.values()))
    for ids in ([1, 2], [3, 2], [4, 1]):
        before = np.copy(lost.getNumpyVersion()["exp_avg"] if lost is state else lost.getNumpyVersion())
        train(model, rows, state, ids)
        other.afterOptimizerStep(ids)
        with pytest.raises(FlatbedError, match=r"not come home: call afterOptimizerStep\(\)"):
            lost.beforeForwardPass([5, 6])
        after = lost.getNumpyVersion()["exp_avg"] if lost is state else lost.getNumpyVersion()
        assert np.array_equal(before, after)
        if ids == [4, 1]:
            lost.beforeForwardPass([5, 6])  # it is to be lost
            return
        lost.afterOptimizerStep(ids)
        after = lost.getNumpyVersion()["exp_avg"] if lost is state else lost.getNumpyVersion()
        assert not np.array_equal(before, after)


def test_reading_and_whole_loops_raise_nothing(pair: tuple[Model, Any, Any]) -> None:
    model, rows, state = pair
    before = rows.getNumpyVersion().copy()
    for ids in ([1, 2], [3, 2], [3, 2], [1, 2, 3, 4, 5]):
        for _ in range(2):
            rows.beforeForwardPass(ids)
            model.u_embeddings(torch.arange(2))
        train(model, rows, state, ids)
        rows.afterOptimizerStep(ids)
        state.afterOptimizerStep(ids)
        rows.beforeForwardPass([7, 8])
        state.beforeForwardPass([7, 8])
    assert (rows.getNumpyVersion() != before).any(1).nonzero()[0].tolist() == [1, 2, 3, 4, 5]


def test_ids_that_changed_in_place_are_noticed(pair: tuple[Model, Any, Any]) -> None:
    _, rows, _ = pair
    ids = np.array([1, 2], dtype=np.int64)
    rows.beforeForwardPass(ids)
    ids[0] = 5
    with pytest.raises(FlatbedError, match="other ids than"):
        rows.afterOptimizerStep(ids)


@pytest.mark.parametrize("bad", [N, -1])
def test_ids_out_of_range(bad: int, pair: tuple[Model, Any, Any]) -> None:
    model, rows, state = pair
    rows.beforeForwardPass([1, 2, 3, 4])
    before = model.u_embeddings.weight.detach().clone()
    for switcher in (rows, state):
        with pytest.raises(IndexError, match=f"id {bad} at position 1 is out of range for a table of {N}"):
            switcher.beforeForwardPass([0, bad])
        with pytest.raises(IndexError, match=rf"id {bad} at position \(0, 1\)"):
            switcher.beforeForwardPass([0], np.array([[0, bad]], dtype=np.int32))
    assert torch.equal(model.u_embeddings.weight, before)
    rows.afterOptimizerStep([1, 2, 3, 4])
    with pytest.raises(TypeError, match="ids must be integers"):
        rows.beforeForwardPass(np.array([0.5]))
    with pytest.raises(TypeError, match="ids must be integers"):
        rows.beforeForwardPass("ids")


def test_an_option_that_was_changed_is_noticed(pair: tuple[Model, Any, Any]) -> None:
    model, rows, state = pair
    optimizer = state.given_optimizer
    optimizer.param_groups[0]["amsgrad"] = True
    rows.beforeForwardPass([1, 2, 3, 4])
    state.beforeForwardPass([1, 2, 3, 4])
    model.u_embeddings(torch.arange(4)).sum().backward()
    optimizer.step()
    with pytest.raises(FlatbedError, match=r"keeps state \(max_exp_avg_sq\).*make the switcher again"):
        state.afterOptimizerStep([1, 2, 3, 4])


def test_loaded_state_needs_the_optimizers_own(pair: tuple[Model, Any, Any], tmp_path: Path) -> None:
    _, _, state = pair
    state.saveCupy(tmp_path / "state")
    state.loadCupy(tmp_path / "state")
    with pytest.raises(FlatbedError, match="load its state dict, too"):
        state.beforeForwardPass([1])


def test_files_that_do_not_fit(pair: tuple[Model, Any, Any], tmp_path: Path) -> None:
    _, rows, state = pair
    with pytest.raises(FlatbedError, match=r"there is no array at .*missing\.npy"):
        rows.loadCupy(tmp_path / "missing")
    np.save(tmp_path / "small.npy", np.ones((3, DIM), np.float32))
    with pytest.raises(ValueError, match=r"float32 of shape \(3, 16\); expected float32 of \(40, 16\)"):
        rows.loadCupy(tmp_path / "small.npy")
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(FlatbedError, match=r"no \.npy file that can be used"):
        rows.loadCupy(tmp_path / "objects.npy")
    torch.save(Model, tmp_path / "strange.pt")
    with pytest.raises(FlatbedError, match="does not hold plain tensors"):
        rows.loadTorch(tmp_path / "strange.pt")
    torch.save(torch.ones(2), tmp_path / "few.pt")
    with pytest.raises(ValueError, match=r"holds torch.float32 of \(2,\); expected .* of \(40, 16\)"):
        rows.loadTorch(tmp_path / "few.pt")
    with pytest.raises(ValueError, match="does not hold exp_avg, exp_avg_sq"):
        state.loadTorch(tmp_path / "few.pt")
    assert np.array_equal(rows.getNumpyVersion(), start()[0].numpy())
    with pytest.raises(FlatbedError, match="in memory: save it"):
        rows.checkpoint()
