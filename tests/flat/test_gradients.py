"""Gradients that appear, vanish, move and are replaced between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatbed import FlatbedError, FlatParams
from tests.cases import BOTH, assert_same, backward, batches, build, loss_of

Pair = tuple[nn.Module, torch.optim.Optimizer]


def make(grads: Any = "follow") -> tuple[nn.Module, FlatParams, torch.optim.Optimizer]:
    model = build("tied")
    flat = FlatParams(model, grads=grads)
    return model, flat, torch.optim.AdamW(flat.parameters(), lr=0.01, foreach=False)


def make_reference() -> Pair:
    model = build("tied")
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def flat_of(flat: FlatParams, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The flat gradient that `tensors` must give."""
    out = torch.zeros_like(flat.buffers[0])
    for s, t in zip(flat.segments, tensors, strict=True):
        out.as_strided(s.shape, s.stride, s.offset).copy_(t)
    return out


# ---- follow


def test_reading_gathers_once() -> None:
    model, flat, _ = make()
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


def test_strided_and_absent_gradients_are_gathered() -> None:
    params = [nn.Parameter(torch.randn(n)) for n in (3, 64, 1, 0, 130, 64)]
    flat = FlatParams(params)
    for turn in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.numel() * 2)[::2] if turn == 1 else torch.randn_like(p)
            if turn == 2 and i == 1:
                p.grad = None
        expected = flat_of(flat, [torch.zeros_like(p) if p.grad is None else p.grad for p in params])
        (f,) = flat.parameters()
        assert torch.equal(f.grad, expected)
        f.grad = None
        assert all(p.grad is None for p in params)


@pytest.mark.parametrize("zero", ["optimizer", "optimizer, twice", "module", "by hand"])
@pytest.mark.parametrize("set_to_none", [True, False])
@BOTH
def test_every_zero_grad_works(grads: str, set_to_none: bool, zero: str) -> None:
    pairs: list[Pair] = [make_reference()]
    model, flat, optimizer = make(grads)
    for i in range(6):
        for m, o in [*pairs, (model, optimizer)]:
            if zero == "optimizer, twice":
                backward(m, i)
                o.zero_grad(set_to_none)
            backward(m, i)
            o.step()
            if zero.startswith("optimizer"):
                o.zero_grad(set_to_none)
            elif zero == "module":
                m.zero_grad(set_to_none)
            else:
                for p in m.parameters():
                    p.grad = None if set_to_none else p.grad.zero_()
    assert_same(pairs[0][0], model)
    if set_to_none and grads == "follow":
        assert flat.parameters()[0].grad is None


def test_an_assigned_gradient_reaches_the_originals() -> None:
    _, flat, _ = make()
    (p,) = flat.parameters()
    value = torch.randn_like(p)
    p.grad = value
    for q, s in zip(flat.originals(), flat.segments, strict=True):
        assert torch.equal(q.grad.flatten(), value[s.offset : s.end])
    assert torch.equal(p.grad, flat_of(flat, [q.grad for q in flat.originals()])), "the padding stays zero"
    p.grad = None
    assert all(q.grad is None for q in flat.originals())


@BOTH
def test_gradients_replaced_between_backward_and_step(grads: str) -> None:
    pairs: list[Pair] = [make_reference()]
    model, flat, optimizer = make(grads)

    def double(p: torch.Tensor) -> None:
        p.grad = p.grad * 2

    for m, o in [*pairs, (model, optimizer)]:
        m.encoder.weight.register_post_accumulate_grad_hook(double)
        for i in range(4):
            backward(m, i)
            flat.clip_grad_norm_(0.1) if m is model else nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            m.decoder.bias.grad = m.decoder.bias.grad + 1.0
            o.step()
            m.decoder.bias.grad = torch.ones(7)  # zero_grad must drop it
            o.zero_grad()
    assert_same(pairs[0][0], model)


@BOTH
def test_gradients_of_the_flat_parameter_itself_count(grads: str) -> None:
    model, flat, optimizer = make(grads)
    (p,) = flat.parameters()
    (p**2).sum().backward()
    before = p.detach().clone()
    optimizer.step()
    assert torch.allclose(optimizer.state[p]["exp_avg"], 0.1 * 2 * before)
    optimizer.zero_grad()
    (p**2).sum().backward()
    assert torch.allclose(p.grad, 2 * p.detach())
    assert torch.allclose(model.encoder.weight.grad, 2 * model.encoder.weight)
    p.grad = None
    backward(model)
    alone = p.grad.clone()
    p.grad = None
    backward(model)
    (p**2).sum().backward()
    assert torch.allclose(p.grad, alone + 2 * p.detach())


@BOTH
def test_create_graph(grads: str) -> None:
    pairs: list[Pair] = [make_reference()]
    model, _, optimizer = make(grads)
    for m, o in [*pairs, (model, optimizer)]:
        for i in range(3):
            loss_of(m, batches(3)[i]).backward()
            first = torch.autograd.grad(loss_of(m, batches(3)[i]), list(m.parameters()), create_graph=True)
            sum((g**2).sum() for g in first).backward()
            o.step()
            o.zero_grad()
    assert_same(pairs[0][0], model)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    flat = FlatParams(model)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    model(torch.tensor([1, 2])).sum().backward()
    before = model[1].weight.detach().clone()
    with pytest.raises(FlatbedError, match=r"'0\.weight'.*sparse=False"):
        optimizer.step()
    assert torch.equal(before, model[1].weight)


# ---- bound


def test_bound_gradients_are_views_from_the_start() -> None:
    model, flat, optimizer = make("bound")
    views = [p.grad for p in flat.originals()]
    (buffer,) = flat.grad_buffers
    backward(model)
    assert all(p.grad is v for p, v in zip(flat.originals(), views, strict=True))
    assert flat.parameters()[0].grad is buffer
    assert buffer.any()  # type: ignore[union-attr]
    optimizer.zero_grad()
    assert not buffer.any()  # type: ignore[union-attr]
    assert all(p.grad is v for p, v in zip(flat.originals(), views, strict=True))


# ---- steps


@pytest.mark.parametrize("max_norm", [None, 0.05])
@BOTH
def test_one_call_equals_three(grads: str, max_norm: float | None) -> None:
    reference, expected_flat, expected = make(grads)
    model, flat, optimizer = make(grads)
    extra = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    expected.add_param_group({"params": [extra[0]]})
    optimizer.add_param_group({"params": [extra[1]]})
    for i in range(6):
        backward(reference, i)
        backward(model, i)
        for p in extra:
            p.grad = torch.full((3,), 0.5)
        norm = None if max_norm is None else expected_flat.clip_grad_norm_(max_norm)
        expected.step()
        expected.zero_grad()
        got = flat.step(optimizer, max_norm=max_norm)
        assert (got is None) == (norm is None)
        assert got is None or torch.equal(got, norm)
        assert extra[1].grad is None
    assert_same(reference, model)
    assert torch.equal(*extra)


@BOTH
def test_gradients_replaced_by_the_optimizers_own_hooks(grads: str) -> None:
    """Torch runs an optimizer's own hooks after the global ones, so gathered gradients may be old."""
    reference, expected = make_reference()
    model, flat, optimizer = make(grads)

    def attach(m: nn.Module, o: torch.optim.Optimizer) -> None:
        def before(*_: Any) -> None:
            m.decoder.bias.grad = m.decoder.bias.grad * 3

        def after(*_: Any) -> None:
            m.decoder.bias.grad = torch.ones(7)

        o.register_step_pre_hook(before)
        o.register_step_post_hook(after)

    attach(reference, expected)
    attach(model, optimizer)
    for i in range(4):
        backward(reference, i)
        expected.step()
        expected.zero_grad()
        backward(model, i)
        flat.step(optimizer)
    assert_same(reference, model)


@BOTH
def test_an_exception_in_a_step_leaves_nothing_behind(grads: str) -> None:
    pairs: list[Pair] = [make_reference()]
    model, flat, optimizer = make(grads)

    def fail(*_: Any) -> None:
        raise KeyError("later")

    for m, o in [*pairs, (model, optimizer)]:
        backward(m)
        handle = o.register_step_post_hook(fail)
        with pytest.raises(KeyError):
            o.step()
        handle.remove()
        m.zero_grad()
        backward(m, 1)
        m.decoder.bias.grad = torch.ones(7)
        assert m is not model or torch.equal(flat.parameters()[0].grad[64:71], torch.ones(7))
        o.step()
        m.zero_grad()
        m.double()
        m.float()
        backward(m, 2)
        o.step()
    assert_same(pairs[0][0], model)


@BOTH
def test_a_stale_backward_raises_as_in_torch(grads: str) -> None:
    model, _, optimizer = make(grads)
    loss = loss_of(model, batches(1)[0])
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- torch.compile


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled_clipping_reads_the_gradients() -> None:
    model, flat, _ = make()
    backward(model)
    params = flat.parameters()
    compiled = torch.compile(lambda: nn.utils.clip_grad_norm_(params, 1e-3), backend="eager")
    assert compiled() > 1e-3
    assert flat.grad_norm() < 1.01e-3


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("compiled", ["model", "step"])
@BOTH
def test_torch_compile(grads: str, compiled: str) -> None:
    pairs: list[Pair] = [make_reference()]
    model, flat, optimizer = make(grads)
    forward = torch.compile(model, backend="aot_eager") if compiled == "model" else model
    step = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step
    for i in range(4):
        for m, s, o in ((pairs[0][0], pairs[0][1].step, pairs[0][1]), (forward, step, optimizer)):
            loss_of(m, batches(i + 1)[i]).backward()  # type: ignore[arg-type]
            s()
            o.zero_grad()
    assert_same(pairs[0][0], model, 1e-6)
    assert flat.is_valid()
