"""Gradients that appear, vanish, move and are replaced between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatbed import FlatbedError, FlatParams
from tests.cases import BOTH, backward, batches, loss_of
from tests.flat.twins import Training, assert_twins, twins


def flat_of(flat: FlatParams, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The flat gradient that `tensors` must give."""
    out = torch.zeros_like(flat.buffers[0])
    for s, t in zip(flat.segments, tensors, strict=True):
        out.as_strided(s.shape, s.stride, s.offset).copy_(t)
    return out


def test_reading_gathers_once() -> None:
    _, (model, _, flat) = twins()
    (p,) = flat.parameters()
    assert p.grad is None
    backward(model)
    before = [q.grad for q in flat.originals()]
    expected = flat_of(flat, [g.clone() for g in before])
    assert flat.grad_buffers == [None], "nothing is copied before the gradient is read"
    first = p.grad
    assert torch.equal(first, expected)
    before[0].fill_(99.0)
    assert p.grad is first, "a second read copies nothing"
    assert torch.equal(first, expected)


@pytest.mark.parametrize("zero", ["optimizer", "optimizer, twice", "module", "by hand"])
@pytest.mark.parametrize("set_to_none", [True, False])
@BOTH
def test_every_zero_grad_works(grads: str, set_to_none: bool, zero: str) -> None:
    pair = twins(grads)
    for model, optimizer, _ in pair:
        for i in range(6):
            if zero == "optimizer, twice":
                backward(model, i)
                optimizer.zero_grad(set_to_none)
            backward(model, i)
            optimizer.step()
            if zero.startswith("optimizer"):
                optimizer.zero_grad(set_to_none)
            elif zero == "module":
                model.zero_grad(set_to_none)
            else:
                for p in model.parameters():
                    p.grad = None if set_to_none else p.grad.zero_()
    assert_twins(pair)
    if set_to_none and grads == "follow":
        assert pair[1].flat.parameters()[0].grad is None


def test_an_assigned_gradient_reaches_the_originals() -> None:
    flat = twins()[1].flat
    (p,) = flat.parameters()
    value = torch.randn_like(p)
    p.grad = value
    for q, s in zip(flat.originals(), flat.segments, strict=True):
        assert torch.equal(q.grad.flatten(), value[s.offset : s.end])
    assert torch.equal(p.grad, flat_of(flat, [q.grad for q in flat.originals()])), "the padding stays zero"
    with pytest.raises(RuntimeError, match="same size"):
        p.grad = value[:3]
    p.grad = None
    assert all(q.grad is None for q in flat.originals())


@BOTH
def test_gradients_replaced_between_backward_and_step(grads: str) -> None:
    def double(p: torch.Tensor) -> None:
        p.grad = p.grad * 2

    pair = twins(grads)
    for one in pair:
        one.model.encoder.weight.register_post_accumulate_grad_hook(double)
        for i in range(4):
            backward(one.model, i)
            one.clip()
            one.model.decoder.bias.grad = one.model.decoder.bias.grad + 1.0
            one.optimizer.step()
            one.model.decoder.bias.grad = torch.ones(7)  # zero_grad must drop it
            one.optimizer.zero_grad()
    assert_twins(pair)


@BOTH
def test_gradients_of_the_flat_parameter_itself_count(grads: str) -> None:
    _, (model, optimizer, flat) = twins(grads)
    (p,) = flat.parameters()
    (p**2).sum().backward()
    before = p.detach().clone()
    optimizer.step()
    assert torch.allclose(optimizer.state[p]["exp_avg"], 0.1 * 2 * before)
    optimizer.zero_grad()
    backward(model)
    alone = p.grad.clone()
    p.grad = None
    backward(model)
    (p**2).sum().backward()
    assert torch.allclose(p.grad, alone + 2 * p.detach())


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(FlatParams(model).parameters(), lr=0.1)
    model(torch.tensor([1, 2])).sum().backward()
    before = model[1].weight.detach().clone()
    with pytest.raises(FlatbedError, match=r"'0\.weight'.*sparse=False"):
        optimizer.step()
    assert torch.equal(before, model[1].weight)


# ---- steps


@pytest.mark.parametrize("max_norm", [None, 0.05])
@BOTH
def test_one_call_equals_three(grads: str, max_norm: float | None) -> None:
    pair = twins(grads)
    (_, expected, _), (_, optimizer, flat) = pair
    extra = [nn.Parameter(torch.ones(3)) for _ in pair]
    for one, p in zip(pair, extra, strict=True):
        one.optimizer.add_param_group({"params": [p]})
    for i in range(6):
        for one, p in zip(pair, extra, strict=True):
            backward(one.model, i)
            p.grad = torch.full((3,), 0.5)
        norm = None if max_norm is None else pair[0].clip(max_norm)
        expected.step()
        expected.zero_grad()
        assert flat.step(optimizer, max_norm=max_norm) == norm
        assert extra[1].grad is None
    assert_twins(pair)
    assert torch.equal(*extra)


@BOTH
def test_gradients_replaced_by_the_optimizers_own_hooks(grads: str) -> None:
    """Torch runs an optimizer's own hooks after the global ones, so gathered gradients may be old."""

    def attach(one: Training) -> None:
        def before(*_: Any) -> None:
            one.model.decoder.bias.grad = one.model.decoder.bias.grad * 3

        def after(*_: Any) -> None:
            one.model.decoder.bias.grad = torch.ones(7)

        one.optimizer.register_step_pre_hook(before)
        one.optimizer.register_step_post_hook(after)

    pair = twins(grads)
    for one in pair:
        attach(one)
        one.train(0, 1, 2, 3)
    assert_twins(pair)


@BOTH
def test_an_exception_in_a_step_leaves_nothing_behind(grads: str) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("later")

    pair = twins(grads)
    for model, optimizer, flat in pair:
        backward(model)
        handle = optimizer.register_step_post_hook(fail)
        with pytest.raises(KeyError):
            optimizer.step()
        handle.remove()
        model.zero_grad()
        backward(model, 1)
        model.decoder.bias.grad = torch.ones(7)
        assert flat is None or torch.equal(flat.parameters()[0].grad[64:71], torch.ones(7))
        optimizer.step()
        model.zero_grad()
        model.double()
        model.float()
        backward(model, 2)
        optimizer.step()
    assert_twins(pair)


@BOTH
def test_graphs_of_gradients_and_stale_graphs(grads: str) -> None:
    pair = twins(grads)
    for model, optimizer, _ in pair:
        for x in batches(3):
            loss_of(model, x).backward()
            first = torch.autograd.grad(loss_of(model, x), list(model.parameters()), create_graph=True)
            sum((g**2).sum() for g in first).backward()
            loss = loss_of(model, x)
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert_twins(pair)


# ---- torch.compile


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("compiled", ["model", "clip", "step"])
@BOTH
def test_torch_compile(grads: str, compiled: str) -> None:
    pair = twins(grads)
    model, optimizer, flat = pair[1]
    params = flat.parameters()
    forward: Any = torch.compile(model, backend="aot_eager") if compiled == "model" else model

    def clip() -> Any:
        return nn.utils.clip_grad_norm_(params, 1e-3)

    clip = torch.compile(clip, backend="eager") if compiled == "clip" else clip
    step = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step
    for x in batches(4):
        loss_of(pair[0].model, x).backward()
        assert pair[0].clip(1e-3) > 1e-3
        pair[0].optimizer.step()
        pair[0].optimizer.zero_grad()
        loss_of(forward, x).backward()
        assert clip() > 1e-3
        step()
        optimizer.zero_grad()
    assert_twins(pair, 1e-6)
