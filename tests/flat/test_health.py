"""What leaves a buffer, how it is named, and how it comes back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from flatbed import FlatbedError, FlatParams
from tests.cases import assert_same, batches, build, loss_of

BOTH = pytest.mark.parametrize("grads", ["follow", "bound"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int = 0, clip: Any = None) -> None:
    x = batches(i + 1)[i].to(next(model.parameters()).dtype)
    loss_of(model, x).backward()
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
    # Torch itself cannot go on with fp32 state after a cast; a test below says what happens then.
    [(m, w) for m in MOVES for w in ("before", "during") if (m, w) != (cast, "during")],
    ids=lambda v: getattr(v, "__name__", v),
)
@BOTH
def test_moves_heal_by_themselves(grads: str, move: Any, when: str) -> None:
    """The same moves on a per-parameter run whose optimizer is built (or refilled) afterwards."""
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
def test_check_names_what_left_and_rebind_heals(move: Any) -> None:
    model = build("rnn")
    flat = FlatParams(model)
    assert flat.check() == []
    move(model)
    if move is not share_memory:  # memory moved as a whole: every view still is one
        problems = flat.check()
        assert problems
        assert {p.name for p in problems} <= {s.name for s in flat.segments}
        assert all(p.cause and p.remedy and p.what for p in problems)
        assert not flat.is_valid()
        with pytest.raises(FlatbedError, match=r"Likely cause: .*Remedy: "):
            flat.assert_valid()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    flat.rebind()
    assert flat.is_valid()
    assert all(torch.equal(values[n], p) for n, p in model.named_parameters())


def test_check_tells_causes_apart() -> None:
    model = build("rnn")
    flat = FlatParams(model)
    replace_data(model)
    (problem,) = flat.check()
    assert problem.name == "head.weight"
    assert "flatten_parameters" in problem.cause
    cast(model)
    assert all("moved or cast" in p.cause for p in flat.check())
    assert len(flat.check()) == len(flat.segments)
    model.head = nn.Linear(6, 2)
    assert any("no longer part of the module" in p.what for p in flat.check())


def test_a_cast_after_training_began_raises_with_the_way_out() -> None:
    model = build("rnn")
    flat = FlatParams(model)
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.01)
    step(model, optimizer)
    saved = flat.optimizer_state_dict(optimizer)
    model.double()
    fresh = torch.optim.AdamW(flat.parameters(), lr=0.01)
    flat.load_optimizer_state_dict(fresh, saved)
    loss_of(model, batches(1)[0].double()).backward()
    with pytest.raises(FlatbedError, match="cast after training began"):
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
    with pytest.raises(
        FlatbedError, match=r"no longer share a device and dtype.*'encoder\.weight' is torch\.float64"
    ):
        optimizer.step()


def test_another_shape_raises() -> None:
    p = nn.Parameter(torch.randn(3))
    flat = FlatParams([p])
    p.data = torch.randn(4)
    assert "shape is (4,) and was (3,)" in str(flat.check()[0])
    with pytest.raises(FlatbedError, match="build a new FlatParams"):
        flat.rebind()


def test_tied_weights_that_came_apart_raise() -> None:
    model = build("tied")
    flat = FlatParams(model)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    assign_state(model)
    assert model.encoder.weight is not model.decoder.weight
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(FlatbedError, match=r"tied weight 'encoder\.weight' has come apart"):
        optimizer.step()
    model.decoder.weight = model.encoder.weight
    model.zero_grad()
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert flat.is_valid()


def test_a_replacement_of_another_shape_or_frozen_raises() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    flat = FlatParams(model)
    model[0].weight = nn.Parameter(torch.randn(2, 3))
    with pytest.raises(FlatbedError, match=r"replaced '0\.weight' .* has shape \(2, 3\)"):
        flat.rebind()
    model[0].weight = nn.Parameter(torch.randn(3, 3), requires_grad=False)
    with pytest.raises(FlatbedError, match="it is frozen"):
        flat.rebind()


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
def test_an_optimizer_that_is_not_in_place_is_healed(grads: str) -> None:
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
    p.data = p.data + 1.0  # past every hook
    assert "replaces p.data" in flat.check()[0].cause
    flat.rebind()
    assert torch.allclose(model.encoder.weight, reference.encoder.weight + 1.0)


def test_moving_a_part_unnoticed_raises() -> None:
    """Module.to() moves gradients along: a flat gradient clipped or zeroed meanwhile would miss them."""
    model = build("mixed")
    flat = FlatParams(model, grads="bound")
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    step(model, optimizer)
    model.inner[0].double().float()
    loss_of(model, batches(1)[0]).backward()
    before = flat.buffers[0].clone()
    with pytest.raises(FlatbedError, match=r"'inner\.0\.weight' was moved while other"):
        optimizer.step()
    assert torch.equal(before, flat.buffers[0])
    flat.rebind()
    assert flat.is_valid()


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


def test_flattening_twice_hands_the_parameters_over() -> None:
    model = build("tied")
    first = FlatParams(model)
    second = FlatParams(model)
    assert not first.is_valid()
    assert second.is_valid()


def test_parametrized_modules() -> None:
    reference, model = nn.Linear(7, 7), nn.Linear(7, 7)
    reference.load_state_dict(model.state_dict())
    for m in (reference, model):
        nn.utils.parametrizations.weight_norm(m)
    flat = FlatParams(model)
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.01, foreach=False)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)
    for i in range(3):
        step(reference, expected, i)
        step(model, optimizer, i)
    assert_same(reference, model)
    assert flat.is_valid()


@BOTH
def test_torch_compile_of_the_model(grads: str) -> None:
    reference, model = build("tied"), build("tied")
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.01, foreach=False)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)
    for i in range(4):
        step(reference, expected, i)
        step(compiled, optimizer, i)  # type: ignore[arg-type]
    assert_same(reference, model, 1e-6)
    assert flat.is_valid()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@BOTH
def test_torch_compile_of_the_step(grads: str) -> None:
    reference, model = build("tied"), build("tied")
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.01)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01)
    compiled = torch.compile(optimizer.step, backend="eager")
    for i in range(4):
        step(reference, expected, i)
        loss_of(model, batches(i + 1)[i]).backward()
        compiled()
        optimizer.zero_grad()
    assert_same(reference, model, 1e-6)
    assert flat.is_valid()


# ---- what a step without any gradient means


@pytest.mark.parametrize("source", ["module", "parameters"])
@BOTH
def test_a_model_that_became_another_is_not_trained_in_silence(grads: str, source: str) -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 1))
    flat = FlatParams(model if source == "module" else model.parameters(), grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    step(model, optimizer)
    if source == "module":
        model[0], model[1] = nn.Linear(7, 7), nn.Linear(7, 1)
    else:
        assign_state(model)
    loss_of(model, batches(1)[0]).backward()
    if source == "module":
        with pytest.raises(FlatbedError, match="no longer part of the module"):
            optimizer.step()
    else:
        with pytest.warns(UserWarning, match="no parameter of this FlatParams has a gradient"):
            optimizer.step()


def test_a_replaced_layer_is_named_as_such() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 1))
    optimizer = torch.optim.SGD(FlatParams(model).parameters(), lr=0.1)
    model[1] = nn.Linear(7, 1)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(FlatbedError, match=r"1\.weight: is no longer part of the module"):
        optimizer.step()


def test_values_turned_around_in_place_are_noticed() -> None:
    p, vector = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(4))
    flat = FlatParams([("p", p), ("vector", vector)])
    p.data = p.data.t()
    expected = p.detach().clone()
    assert [problem.name for problem in flat.check()] == ["p"]
    optimizer = torch.optim.SGD(flat.parameters(), lr=1.0)
    p.grad, vector.grad = torch.ones(3, 3), torch.ones(4)
    optimizer.step()
    assert torch.equal(p, expected - 1)
    vector.data = vector.data[:2]
    assert "shape is (2,) and was (4,)" in flat.check()[0].what


def test_a_shallow_copy_is_refused() -> None:
    with pytest.raises(FlatbedError, match=r"copy\.deepcopy"):
        copy.copy(FlatParams(build("tied")))
