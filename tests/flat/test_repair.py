"""Parameters that leave their buffer: how they are named and brought back."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from flatbed import FlatbedError, FlatParams
from tests.cases import BOTH, assert_same, backward, batches, build, loss_of


def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int = 0, clip: Any = None) -> None:
    backward(model, i)
    if clip is not None:
        clip()
    optimizer.step()
    optimizer.zero_grad()


def cast(model: nn.Module) -> None:
    model.double()


def cast_and_back(model: nn.Module) -> None:
    model.to(torch.float64).to(torch.float32)


def assign_state(model: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True), assign=True)


def replace_data(model: nn.Module) -> None:
    model.head.weight.data = model.head.weight.data + 0.0


def swap_backup(model: nn.Module) -> None:
    """The pattern of many EMA helpers: the old memory stays alive while another takes its place."""
    model.backup = {n: p.data for n, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data.clone()


def share_memory(model: nn.Module) -> None:
    model.share_memory()


def new_parameter(model: nn.Module) -> None:
    model.head.bias = nn.Parameter(model.head.bias.detach().clone())


MOVES = [cast, cast_and_back, assign_state, replace_data, swap_backup, share_memory, new_parameter]


@pytest.mark.parametrize(
    ("move", "when"),
    # Torch itself cannot continue with fp32 state after a cast; another test covers that.
    [(m, w) for m in MOVES for w in ("before", "during") if (m, w) != (cast, "during")],
    ids=lambda v: getattr(v, "__name__", v),
)
@BOTH
def test_the_next_step_brings_parameters_back(grads: str, move: Any, when: str) -> None:
    reference, model = build("rnn"), build("rnn")
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.01, foreach=False)
    if when == "during":
        step(reference, expected)
        step(model, optimizer)
    if move is cast:
        cast(reference)
    move(model)
    for i in range(1, 5):
        step(reference, expected, i, lambda: nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        step(model, optimizer, i, lambda: flat.clip_grad_norm_(0.1))
    assert_same(reference, model)
    flat.assert_valid()
    for p, s in zip(model.parameters(), flat.segments, strict=True):
        assert p.data_ptr() == flat.buffers[0].data_ptr() + s.offset * p.element_size()


@pytest.mark.parametrize("move", MOVES, ids=lambda f: f.__name__)
def test_check_names_what_left_and_rebind_brings_it_back(move: Any) -> None:
    model = build("rnn")
    flat = FlatParams(model)
    assert flat.check() == []
    move(model)
    assert not flat.is_valid()
    assert all("rebind()" in problem for problem in flat.check())
    with pytest.raises(FlatbedError, match=r"'head\.(weight|bias)'"):
        flat.assert_valid()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    flat.rebind()
    assert flat.is_valid()
    assert all(torch.equal(values[n], p) for n, p in model.named_parameters())


def test_a_parameter_of_another_shape_cannot_be_brought_back() -> None:
    model = build("rnn")
    flat = FlatParams(model)
    model.head.weight.data = model.head.weight.data.t().clone()
    with pytest.raises(FlatbedError, match=r"'head.weight' .*\(6, 2\).*\(2, 6\).*new FlatParams"):
        flat.rebind()


@BOTH
def test_a_part_that_moved_keeps_its_gradients(grads: str) -> None:
    """`Module.to` moves the gradients of a part out of the flat gradient."""
    reference, model = build("mixed"), build("mixed")
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1, foreach=False)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, foreach=False)
    for i in range(4):
        for m, o in ((reference, expected), (model, optimizer)):
            if i % 2:
                m.inner[0].double().float()
            backward(m, i)
            if not i % 2:
                m.inner[0].double().float()
            o.step()
            o.zero_grad()
    assert_same(reference, model)
    assert flat.is_valid()


def test_a_cast_after_training_began_raises_with_the_remedy() -> None:
    model = build("rnn")
    flat = FlatParams(model)
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.01)
    step(model, optimizer)
    saved = flat.optimizer_state_dict(optimizer)
    model.double()
    fresh = torch.optim.AdamW(flat.parameters(), lr=0.01)
    flat.load_optimizer_state_dict(fresh, saved)
    loss_of(model, batches(1)[0].double()).backward()
    with pytest.raises(FlatbedError, match=r"cast after training began.*optimizer_state_dict"):
        optimizer.step()
    fresh.step()
    assert fresh.state[flat.parameters()[0]]["step"] == 2


@BOTH
def test_a_partly_cast_model_raises_by_name(grads: str) -> None:
    model = build("tied")
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    model.encoder.double()
    x = batches(1)[0].double()
    model.encoder(x).sum().backward()
    with pytest.raises(FlatbedError, match=r"'encoder\.weight' is torch\.float64.*whole model"):
        optimizer.step()


def test_tied_weights_that_came_apart_raise() -> None:
    model = build("tied")
    flat = FlatParams(model)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    assign_state(model)
    assert model.encoder.weight is not model.decoder.weight
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(FlatbedError, match=r"'encoder\.weight' has come apart.*Tie them"):
        optimizer.step()
    model.decoder.weight = model.encoder.weight
    model.zero_grad()
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert flat.is_valid()


class OutOfPlace(torch.optim.Optimizer):
    """An optimizer that replaces p.data instead of updating it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@BOTH
def test_an_optimizer_that_is_not_in_place_is_followed(grads: str) -> None:
    reference, model = build("tied"), build("tied")
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = OutOfPlace(flat.parameters(), lr=0.1)
    expected = OutOfPlace(reference.parameters(), lr=0.1)
    for i in range(3):
        step(reference, expected, i)
        step(model, optimizer, i)
    assert_same(reference, model)
    assert flat.is_valid()
    (p,) = flat.parameters()
    p.data = p.data + 1.0  # outside a step
    assert "replaces p.data" in flat.check()[0]
    flat.rebind()
    assert torch.allclose(model.encoder.weight, reference.encoder.weight + 1.0)


@BOTH
def test_moving_the_model_between_clipping_and_the_step_keeps_the_clipping(grads: str) -> None:
    reference, model = build("tied"), build("tied")
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1, foreach=False)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, foreach=False)
    for m in (reference, model):
        loss_of(m, batches(1)[0]).backward()
    flat.clip_grad_norm_(0.1)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    for m, o in ((reference, expected), (model, optimizer)):
        m.double()
        o.step()
    assert_same(reference, model)


# ---- models whose layers were replaced


@BOTH
def test_a_model_with_other_parameters_is_not_trained_in_silence(grads: str) -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 1))
    flat = FlatParams(model.parameters(), grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    step(model, optimizer)
    model[1] = nn.Linear(7, 1)
    backward(model)
    with pytest.raises(FlatbedError, match=r"'param 2'.*received no gradient.*new FlatParams"):
        optimizer.step()
    optimizer.zero_grad()
    assign_state(model)
    backward(model)
    with pytest.warns(UserWarning, match="no parameter of this FlatParams has a gradient"):
        optimizer.step()


@pytest.mark.parametrize(
    ("new", "found"),
    [(nn.Parameter(torch.randn(2, 3)), r"shape \(2, 3\)"), (nn.Parameter(torch.ones(3, 3), False), "frozen")],
)
def test_a_parameter_that_cannot_take_over_raises(new: nn.Parameter, found: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    flat = FlatParams(model)
    model[0].weight = new
    with pytest.raises(FlatbedError, match=rf"'0\.weight'.*{found}.*new FlatParams"):
        flat.rebind()
