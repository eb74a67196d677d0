"""Parameters that leave their buffer: how they are named and brought back."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from flatbed import FlatbedError, FlatParams
from tests.cases import BOTH, backward, batches, build, loss_of
from tests.flat.twins import assert_twins, twins


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


HOW = ("step before", "step during", "rebind")


@pytest.mark.parametrize(
    ("move", "how"),
    [(move, how) for move in MOVES for how in HOW],
    ids=lambda v: getattr(v, "__name__", v),
)
@BOTH
def test_parameters_are_named_and_brought_back(grads: str, move: Any, how: str) -> None:
    # Torch's Adam cannot continue with state of another dtype; its SGD can.
    kind, options = (torch.optim.SGD, {"momentum": 0.9}) if move is cast else (torch.optim.AdamW, {})
    pair = twins(grads, kind, model="rnn", **options)
    flat = pair[1].flat
    assert flat.check() == []
    for one in pair:
        if how == "step during":
            one.train(0)
        if move is cast or one.flat is not None:
            move(one.model)
    assert not flat.is_valid()
    assert all("rebind()" in problem for problem in flat.check())
    with pytest.raises(FlatbedError, match=r"'head\.(weight|bias)'"):
        flat.assert_valid()
    if how == "rebind":
        flat.rebind()
        assert_twins(pair)
    for one in pair:
        one.train(1, 2, 3, 4, clip=True)
    assert_twins(pair)
    for p, s in zip(pair[1].model.parameters(), flat.segments, strict=True):
        assert p.data_ptr() == flat.buffers[0].data_ptr() + s.offset * p.element_size()


@BOTH
def test_a_part_that_moved_keeps_its_gradients(grads: str) -> None:
    """`Module.to` moves the gradients of a part out of the flat gradient."""
    pair = twins(grads, torch.optim.SGD, model="mixed")
    for one in pair:
        for i in range(4):
            if i % 2:
                one.model.inner[0].double().float()
            backward(one.model, i)
            if not i % 2:
                one.model.inner[0].double().float()
            one.optimizer.step()
            one.optimizer.zero_grad()
    assert_twins(pair)


@BOTH
def test_moving_the_model_between_clipping_and_the_step_keeps_the_clipping(grads: str) -> None:
    pair = twins(grads, torch.optim.SGD)
    for one in pair:
        backward(one.model)
        one.clip()
        one.model.double()
        one.optimizer.step()
    assert_twins(pair)


class OutOfPlace(torch.optim.Optimizer):
    """An optimizer that replaces p.data instead of updating it."""

    def __init__(self, params: Any, lr: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@BOTH
def test_an_optimizer_that_is_not_in_place_is_followed(grads: str) -> None:
    pair = twins(grads, OutOfPlace)
    for one in pair:
        one.train(0, 1, 2)
    assert_twins(pair)
    (p,) = pair[1].flat.parameters()
    p.data = p.data + 1.0  # outside a step
    assert "replaces p.data" in pair[1].flat.check()[0]
    pair[1].flat.rebind()
    assert torch.allclose(pair[1].model.encoder.weight, pair[0].model.encoder.weight + 1.0)


# ---- what cannot be brought back


def transpose(model: Any) -> None:
    model.encoder.weight.data = torch.ones(7, 8)


def cast_a_part(model: Any) -> None:
    model.encoder.double()


def take_apart(model: Any) -> None:
    model.encoder.weight = nn.Parameter(torch.ones(7, 7))


def of_another_shape(model: Any) -> None:
    model.decoder.bias = nn.Parameter(torch.ones(8))


def freeze_new(model: Any) -> None:
    model.decoder.bias = nn.Parameter(torch.ones(7), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (transpose, r"'encoder.weight' .*\(7, 8\).*\(7, 7\).*flatten the parameters again"),
        (cast_a_part, r"'encoder\.weight' is torch\.float64.*whole model"),
        (take_apart, r"'encoder\.weight' has come apart.*Tie them"),
        (of_another_shape, r"'decoder\.bias'.*shape \(8,\).*flatten the parameters again"),
        (freeze_new, r"'decoder\.bias'.*frozen.*flatten the parameters again"),
    ],
)
@BOTH
def test_what_cannot_be_brought_back_raises_by_name(grads: Any, change: Any, message: str) -> None:
    model = build("tied")
    flat = FlatParams(model, grads=grads)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    change(model)
    with pytest.raises(FlatbedError, match=message):
        flat.rebind()
    with pytest.raises(FlatbedError, match=message):
        optimizer.step()


def test_weights_can_be_tied_again() -> None:
    _, (model, optimizer, flat) = twins()
    assign_state(model)
    assert model.encoder.weight is not model.decoder.weight
    model.decoder.weight = model.encoder.weight
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert flat.is_valid()


@BOTH
def test_a_model_with_other_parameters_is_not_trained_in_silence(grads: Any) -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 1))
    flat = FlatParams(model.parameters(), grads=grads)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    model[1] = nn.Linear(7, 1)
    backward(model)
    with pytest.raises(FlatbedError, match=r"'param 2'.*received no gradient.*flatten the parameters again"):
        optimizer.step()
    optimizer.zero_grad()
    assign_state(model)
    backward(model)
    with pytest.warns(UserWarning, match="none of the flattened parameters has a gradient"):
        optimizer.step()


def test_check_names_a_layer_that_was_replaced() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 1))
    flat = FlatParams(model, missing="zero")
    model[1] = nn.Linear(7, 1)
    assert [problem.split()[0] for problem in flat.check()] == ["'1.weight'", "'1.bias'"]
    with pytest.raises(FlatbedError, match=r"no longer part of the module.*flatten the parameters again"):
        flat.assert_valid()
