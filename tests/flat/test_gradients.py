"""Gradients that appear, vanish, move and are replaced between steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from flatbed import FlatbedError, FlatParams
from flatbed.layout import plan
from tests.cases import assert_same, batches, build, loss_of

BOTH = pytest.mark.parametrize("grads", ["follow", "bound"])


def make(grads: str = "follow", **more: Any) -> tuple[nn.Module, FlatParams, torch.optim.Optimizer]:
    model = build("tied")
    flat = FlatParams(model, grads=grads, **more)  # type: ignore[arg-type]
    return model, flat, torch.optim.AdamW(flat.parameters(), lr=0.01, foreach=False)


def backward(model: nn.Module, i: int = 0) -> None:
    loss_of(model, batches(i + 1)[i]).backward()


def flat_of(flat: FlatParams, tensors: list[torch.Tensor]) -> torch.Tensor:
    """What the flat gradient must hold, written the slow way."""
    out = torch.zeros_like(flat.buffers[0])
    for s, t in zip(flat.segments, tensors, strict=True):
        out.as_strided(s.shape, s.stride, s.offset).copy_(t)
    return out


# ---- following


def test_backward_steals_and_reading_gathers() -> None:
    model, flat, _ = make()
    (p,) = flat.parameters()
    assert p.grad is None
    backward(model)
    stolen = [q.grad for q in flat.originals()]
    expected = flat_of(flat, [g.clone() for g in stolen])
    assert flat.grad_buffers == [None], "nothing is copied before somebody asks"
    first = p.grad
    assert torch.equal(first, expected)
    views = [q.grad for q in flat.originals()]
    assert all(v is not s for v, s in zip(views, stolen, strict=True))
    stolen[0].fill_(99.0)
    assert p.grad is first, "a second read copies nothing"
    assert torch.equal(first, expected)


def test_clipping_either_view_is_clipping_the_other() -> None:
    model, flat, _ = make()
    backward(model)
    (p,) = flat.parameters()
    nn.utils.clip_grad_norm_(flat.parameters(), 1e-3)
    assert torch.linalg.vector_norm(torch.stack([q.grad.norm() for q in flat.originals()])) < 1.01e-3
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    assert p.grad.norm() < 1.01e-4
    assert flat.grad_norm() < 1.01e-4


@pytest.mark.parametrize("zero", ["optimizer", "module", "by hand"])
@pytest.mark.parametrize("set_to_none", [True, False])
@BOTH
def test_every_zero_grad_works(grads: str, set_to_none: bool, zero: str) -> None:
    reference = build("tied")
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)
    model, flat, optimizer = make(grads)
    for i in range(6):
        for m, o in ((reference, expected), (model, optimizer)):
            backward(m, i)
            o.step()
            if zero == "optimizer":
                o.zero_grad(set_to_none)
            elif zero == "module":
                m.zero_grad(set_to_none)
            else:
                for p in m.parameters():
                    if set_to_none:
                        p.grad = None
                    else:
                        p.grad.zero_()
    assert_same(reference, model)
    if set_to_none and grads == "follow":
        assert flat.parameters()[0].grad is None


def test_setting_none_drops_the_originals_gradients() -> None:
    model, flat, _ = make()
    backward(model)
    flat.parameters()[0].grad = None
    assert all(p.grad is None for p in model.parameters())
    assert flat.parameters()[0].grad is None


def test_zero_grad_copies_nothing_in_order_to_drop_it() -> None:
    model, flat, optimizer = make()
    backward(model)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert flat.grad_buffers == [None]


def test_setting_a_tensor_reaches_the_originals() -> None:
    _, flat, _ = make()
    (p,) = flat.parameters()
    value = torch.randn_like(p)
    p.grad = value
    for q, s in zip(flat.originals(), flat.segments, strict=True):
        assert torch.equal(q.grad.flatten(), value[s.offset : s.end])
    with pytest.raises(ValueError, match=r"was assigned a tensor of torch\.float32 and shape \(3,\)"):
        p.grad = torch.zeros(3)


@BOTH
def test_a_gradient_replaced_by_a_hook(grads: str) -> None:
    reference = build("tied")
    model, _, optimizer = make(grads)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)

    def double(p: torch.Tensor) -> None:
        p.grad = p.grad * 2

    for m, o in ((reference, expected), (model, optimizer)):
        m.encoder.weight.register_post_accumulate_grad_hook(double)
        for i in range(5):
            backward(m, i)
            o.step()
            o.zero_grad()
    assert_same(reference, model)


@BOTH
def test_a_gradient_replaced_between_clipping_and_the_step(grads: str) -> None:
    reference = build("tied")
    model, flat, optimizer = make(grads)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)
    for i in range(4):
        for m, o in ((reference, expected), (model, optimizer)):
            backward(m, i)
            flat.clip_grad_norm_(0.1) if m is model else nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            m.decoder.bias.grad = m.decoder.bias.grad + 1.0
            o.step()
            m.decoder.bias.grad = torch.ones(7)  # must be dropped by zero_grad, wherever it is
            o.zero_grad()
    assert_same(reference, model)


@BOTH
def test_gradients_through_the_flat_parameter_itself_count(grads: str) -> None:
    model, flat, _ = make(grads)
    (p,) = flat.parameters()
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
    model, _, optimizer = make(grads)
    reference = build("tied")
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)
    for m, o in ((reference, expected), (model, optimizer)):
        for i in range(3):
            loss_of(m, batches(3)[i]).backward()
            first = torch.autograd.grad(loss_of(m, batches(3)[i]), list(m.parameters()), create_graph=True)
            sum((g**2).sum() for g in first).backward()
            o.step()
            o.zero_grad()
    assert_same(reference, model)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    flat = FlatParams(model)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    model(torch.tensor([1, 2])).sum().backward()
    before = model[1].weight.detach().clone()
    with pytest.raises(FlatbedError, match=r"'0\.weight' cannot be gathered: it is sparse"):
        optimizer.step()
    assert torch.equal(before, model[1].weight)
    assert [p.name for p in flat.check()] == ["0.weight"]
    optimizer.zero_grad()
    assert model[0].weight.grad is None


# ---- bound


def test_bound_gradients_are_views_from_the_start() -> None:
    model, flat, optimizer = make("bound")
    views = [p.grad for p in flat.originals()]
    buffer = flat.grad_buffers[0]
    backward(model)
    assert all(p.grad is v for p, v in zip(flat.originals(), views, strict=True))
    assert flat.parameters()[0].grad is buffer
    assert buffer.any()
    optimizer.zero_grad()
    assert not buffer.any()
    assert all(p.grad is v for p, v in zip(flat.originals(), views, strict=True))


def test_bound_takes_existing_gradients_in() -> None:
    model = build("tied")
    backward(model)
    expected = [p.grad.clone() for p in model.parameters()]
    flat = FlatParams(model, grads="bound")
    assert torch.equal(flat.grad_buffers[0], flat_of(flat, expected))


def test_bound_after_module_zero_grad_becomes_bound_again() -> None:
    model, flat, optimizer = make("bound")
    model.zero_grad()
    backward(model)
    optimizer.step()
    assert all(p.grad is v for p, v in zip(flat.originals(), flat._buffers[0].views, strict=True))


def test_bound_gradients_written_past_autograd_count() -> None:
    """As a replayed CUDA graph writes them: no version moves, and nothing may be called missing."""
    model, flat, optimizer = make("bound")
    before = model.encoder.weight.detach().clone()
    flat.grad_buffers[0].data.fill_(1.0)
    optimizer.step()
    assert not torch.equal(before, model.encoder.weight)


# ---- missing and frozen


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(7, 2)
        self.right = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor, which: str = "both") -> torch.Tensor:
        total = torch.zeros(())
        if which in ("both", "left"):
            total = total + self.left(x).pow(2).sum()
        if which in ("both", "right"):
            total = total + self.right(x).pow(2).sum()
        return total


@pytest.mark.parametrize("zero", ["optimizer", "module"])
@BOTH
def test_a_missing_gradient_raises_and_names(grads: str, zero: str) -> None:
    model = TwoHeads()
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.1)
    (x,) = batches(1)
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad() if zero == "optimizer" else model.zero_grad()
    before = flat.snapshot()
    model(x, "left").backward()
    flat.clip_grad_norm_(1.0)  # reading is fine, stepping is not
    with pytest.raises(
        FlatbedError, match=r"'right\.weight', 'right\.bias' got no gradient while others did"
    ):
        optimizer.step()
    assert torch.equal(before.buffers[0], flat.buffers[0])
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()


@BOTH
def test_missing_zero_takes_it_as_zero(grads: str) -> None:
    """The reference: per-parameter training in which the absent gradient is a tensor of zeros."""
    model, reference = TwoHeads(), TwoHeads()
    reference.load_state_dict(model.state_dict())
    flat = FlatParams(model, grads=grads, missing="zero")  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.1, foreach=False)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.1, foreach=False)
    for i, x in enumerate(batches(6)):
        which = ("both", "left", "right")[i % 3]
        for m, o in ((model, optimizer), (reference, expected)):
            m(x, which).backward()
            if m is reference:
                for p in m.parameters():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            o.step()
            o.zero_grad()
    assert_same(model, reference)


@BOTH
def test_a_buffer_without_any_gradient_is_skipped_as_torch_does(grads: str) -> None:
    model, reference = TwoHeads(), TwoHeads()
    reference.load_state_dict(model.state_dict())

    def groups(m: TwoHeads) -> list[dict[str, Any]]:
        return [{"params": m.left.parameters()}, {"params": m.right.parameters()}]

    flat = FlatParams(groups(model), grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.groups(), lr=0.1, foreach=False)
    expected = torch.optim.AdamW(groups(reference), lr=0.1, foreach=False)
    for i, x in enumerate(batches(4)):
        for m, o in ((model, optimizer), (reference, expected)):
            m(x, "left" if i % 2 else "both").backward()
            o.step()
            m.zero_grad()
    assert_same(model, reference)


@pytest.mark.parametrize("clear", [True, False])
@BOTH
def test_frozen_after_flattening_stays_to_the_bit(grads: str, clear: bool) -> None:
    model = TwoHeads()
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.1, weight_decay=0.5)
    (x,) = batches(1)
    model(x).backward()
    optimizer.step()
    if clear:
        optimizer.zero_grad()
    model.right.requires_grad_(False)
    kept = [p.detach().clone() for p in model.right.parameters()]
    trained = model.left.weight.detach().clone()
    for _ in range(3):
        model(x).backward()
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(kept, model.right.parameters(), strict=True))
    assert not torch.equal(trained, model.left.weight)
    model.right.requires_grad_(True)
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
    assert not torch.equal(kept[0], model.right.weight)


def test_frozen_at_flattening_and_trained_later_is_not_silent() -> None:
    model = TwoHeads()
    model.right.requires_grad_(False)
    flat = FlatParams(model)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    model.right.requires_grad_(True)
    (x,) = batches(1)
    model(x).backward()
    assert {p.name for p in flat.check()} == {"right.weight", "right.bias"}
    with pytest.raises(FlatbedError, match="was frozen when the model was flattened"):
        optimizer.step()
    optimizer.add_param_group({"params": list(model.right.parameters())})
    before = model.right.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.right.weight)


# ---- versions


@BOTH
def test_a_stale_backward_raises_as_torch_does(grads: str) -> None:
    model, _, optimizer = make(grads)
    (x,) = batches(1)
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_frozen_parameter_is_not_marked_as_changed() -> None:
    model = TwoHeads()
    flat = FlatParams(model)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1, weight_decay=0.1)
    model.right.requires_grad_(False)
    x = batches(1)[0].requires_grad_()
    held = model.right(x).sum()  # its backward needs right.weight
    model(x).backward()
    optimizer.step()
    held.backward()
    assert model.left.weight._version > model.right.weight._version


# ---- norms


def test_norms_by_name() -> None:
    model = build("mixed")
    flat = FlatParams(model)
    loss_of(model, batches(1)[0]).backward()
    expected = {n: p.grad.norm().item() for n, p in model.named_parameters()}
    assert flat.grad_norms() == pytest.approx(expected, rel=1e-6)
    assert flat.norms() == pytest.approx({n: p.norm().item() for n, p in model.named_parameters()}, rel=1e-6)
    assert flat.nonfinite() == []
    model.scale.grad.fill_(float("nan"))
    model.inner[2].bias.grad[3] = float("inf")
    model.transposed.grad.fill_(1e30)  # finite, though its norm overflows
    assert flat.nonfinite() == ["scale", "inner.2.bias"] or flat.nonfinite() == ["inner.2.bias", "scale"]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_total_norm_is_torchs_bit_for_bit(norm_type: float, grouped: bool) -> None:
    model = nn.Sequential(*[nn.Linear(5 + i % 3, 5 + (i + 1) % 3) for i in range(40)])
    params = list(model.parameters())
    source: Any = [{"params": params[::2]}, {"params": params[1::2]}] if grouped else params
    flat = FlatParams(source)
    model(torch.randn(3, 5)).sum().backward()
    order = params[::2] + params[1::2] if grouped else params
    expected = nn.utils.clip_grad_norm_(order, 1e9, norm_type)
    assert torch.equal(flat.grad_norm(norm_type), expected)
    reference = [p.grad.clone() for p in params]
    nn.utils.clip_grads_with_norm_(params, 0.01, expected)
    clipped = [p.grad.clone() for p in params]
    for p, g in zip(params, reference, strict=True):
        p.grad.copy_(g)
    assert torch.equal(flat.clip_grad_norm_(0.01, norm_type), expected)
    assert all(torch.equal(p.grad, c) for p, c in zip(params, clipped, strict=True))


def test_norm_of_large_and_odd_tensors_is_torchs() -> None:
    params = [nn.Parameter(torch.randn(n)) for n in (1_000_003, 64, 64, 1, 0, 1_000_003)]
    params.append(nn.Parameter(torch.randn(17, 9, 3, 3).to(memory_format=torch.channels_last)))
    for p in params:
        p.grad = torch.randn_like(p)
    expected = nn.utils.get_total_norm([p.grad for p in params], foreach=False)
    assert torch.equal(FlatParams(params).grad_norm(), expected)


def test_norms_of_many_alike_are_torchs() -> None:
    """Taken as rows of a matrix, which must not change a bit."""
    params = [nn.Parameter(torch.randn(n)) for n in [65] * 30 + [7] * 30 + [4097] * 3]
    flat = FlatParams(params)
    assert len(flat._buffers[0].runs) == 3
    for norm_type in (2.0, 1.0, float("inf")):
        for p in params:
            p.grad = torch.randn_like(p)
        expected = nn.utils.get_total_norm([p.grad for p in params], norm_type, foreach=False)
        assert torch.equal(flat.grad_norm(norm_type), expected)
    names = [p.grad.norm().item() for p in params]
    assert list(flat.grad_norms().values()) == names


def test_norm_skips_what_has_no_gradient() -> None:
    model = TwoHeads()
    flat = FlatParams(model)
    assert flat.grad_norm() == 0
    assert flat.clip_grad_norm_(1.0) == 0
    model(batches(1)[0], "right").backward()
    expected = nn.utils.get_total_norm([p.grad for p in model.right.parameters()])
    assert torch.equal(flat.grad_norm(), expected)
    assert flat.grad_norms()["left.weight"] == 0


def test_clip_refuses_bad_input() -> None:
    model, flat, _ = make()
    backward(model)
    with pytest.raises(ValueError, match="must not be negative; found -1"):
        flat.clip_grad_norm_(-1.0)
    model.decoder.bias.grad.fill_(float("nan"))
    with pytest.raises(FlatbedError, match=r"decoder\.bias"):
        flat.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_ordinary_optimizers_are_left_alone() -> None:
    _, flat, _ = make()
    other = build("mixed")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loss_of(other, batches(1)[0]).backward()
    optimizer.step()
    assert flat.is_valid()
    assert flatbed.flat.hooks.flat_parameters(optimizer) == []


# ---- the three calls as one


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
def test_one_call_keeps_every_check(grads: str) -> None:
    model = TwoHeads()
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.1, weight_decay=0.5)
    (x,) = batches(1)
    for _ in range(2):
        model(x).backward()
        flat.step(optimizer, max_norm=1.0)
    model(x, "left").backward()
    with pytest.raises(FlatbedError, match=r"'right\.weight', 'right\.bias' got no gradient"):
        flat.step(optimizer, max_norm=1.0)
    model.right.requires_grad_(False)
    kept = model.right.weight.detach().clone()
    flat.step(optimizer)
    assert torch.equal(kept, model.right.weight)
    with pytest.raises(ValueError, match="must not be negative"):
        flat.step(optimizer, max_norm=-1.0)
    with pytest.raises(ValueError, match="does not hold all flat parameters"):
        flat.step(torch.optim.SGD(build("tied").parameters(), lr=0.1))


@pytest.mark.parametrize("one_call", [False, True])
@BOTH
def test_gradients_replaced_by_the_optimizers_own_hooks(grads: str, one_call: bool) -> None:
    """Torch runs them after ours, so what we gathered before may be old by then."""
    reference = build("tied")
    model, flat, optimizer = make(grads)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)

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
        if one_call:
            flat.step(optimizer)
        else:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(reference, model)


def test_gathering_vectors_on_the_cpu() -> None:
    """By one `torch.cat` with the padding in between, which strided and absent gradients must not break."""
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
        assert all(p.grad is v or p.grad is None for p, v in zip(params, flat._buffers[0].views, strict=True))
        f.grad = None


def test_a_gradient_of_another_dtype_is_refused_by_name() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has one dtype for a parameter and its gradient")
    params = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    flat = FlatParams([("a", params[0]), ("b", params[1])])
    params[0].grad = torch.ones(3)
    params[1].grad_dtype = torch.float64
    params[1].grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(FlatbedError, match=r"'b' cannot be gathered: it is torch\.float64"):
        _ = flat.parameters()[0].grad


@BOTH
def test_a_closures_gradients_are_checked_after_it_ran(grads: str) -> None:
    model = TwoHeads()
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(flat.parameters(), lr=0.1, weight_decay=0.5)
    (x,) = batches(1)

    def closure(which: str = "both") -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, which)
        loss.backward()
        return loss

    optimizer.step(closure)
    before = flat.snapshot()
    with pytest.raises(FlatbedError, match=r"'right\.weight', 'right\.bias' got no gradient"):
        optimizer.step(lambda: closure("left"))
    assert torch.equal(before.buffers[0], flat.buffers[0])
    model.right.requires_grad_(False)
    kept = model.right.weight.detach().clone()
    optimizer.step(closure=lambda: closure("left"))
    assert torch.equal(kept, model.right.weight)
    assert not torch.equal(before.buffers[0], flat.buffers[0])


def test_several_buffers_are_summed_in_the_sources_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter too large for a shared buffer stands between small ones in torch's sum."""
    monkeypatch.setattr("flatbed.flat.params.plan", functools.partial(plan, max_bytes=2048))
    different = 0
    for seed in range(20):
        torch.manual_seed(seed)
        params = [nn.Parameter(torch.zeros(n)) for n in (3, 999, 70, 8, 1001, 5, 90)]
        for p in params:
            p.grad = torch.randn_like(p)
        grads = [p.grad.clone() for p in params]
        flat = FlatParams(params)
        assert len(flat.buffers) == 3
        assert torch.equal(flat.grad_norm(), nn.utils.get_total_norm(grads, foreach=False))
        shuffled = [grads[i] for i in (0, 2, 3, 5, 6, 1, 4)]
        different += not torch.equal(flat.grad_norm(), nn.utils.get_total_norm(shuffled, foreach=False))
    assert different, "the order must matter for this test to mean anything"


# ---- bound: what got a gradient, whatever else was done to gradients in place


def _clip_all(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _scale_all(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


@pytest.mark.parametrize("meanwhile", [_clip_all, _scale_all, lambda model: None])
@BOTH
def test_work_on_gradients_does_not_hide_a_missing_one(grads: str, meanwhile: Any) -> None:
    model = TwoHeads()
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.1, weight_decay=0.5)
    (x,) = batches(1)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x, "right").backward()  # dropped again: it must not count for the next step
    optimizer.zero_grad()
    model(x, "left").backward()
    meanwhile(model)
    with pytest.raises(FlatbedError, match=r"'right\.weight', 'right\.bias' got no gradient"):
        optimizer.step()


@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize(
    "meanwhile", [_clip_all, _scale_all, lambda model: model.zero_grad(set_to_none=False)]
)
@BOTH
def test_work_on_gradients_does_not_move_a_frozen_parameter(grads: str, meanwhile: Any, when: str) -> None:
    model = TwoHeads()
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.1, weight_decay=0.5)
    (x,) = batches(1)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = model.right.weight.detach().clone()
    if when == "before backward":
        model.right.requires_grad_(False)
    model(x).backward()
    model.right.requires_grad_(False)
    meanwhile(model)
    optimizer.step()
    assert torch.equal(kept, model.right.weight)


def test_a_gradient_of_negative_zeros_is_a_gradient() -> None:
    """It looks like what zeroing leaves, but it arrived with the others."""
    scale = nn.Parameter(torch.ones(3))
    other = nn.Parameter(torch.ones(3))
    flat = FlatParams([scale, other], grads="bound")
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        (-(scale * torch.zeros(3)) + other).sum().backward()
        assert torch.signbit(scale.grad).all()
        optimizer.step()
        optimizer.zero_grad()
    assert (scale < 1).all(), "decayed, as torch would"


# ---- an exception inside a step


@BOTH
def test_an_exception_in_a_step_leaves_nothing_behind(grads: str) -> None:
    model, flat, optimizer = make(grads)
    reference = build("tied")
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)

    def fail(*_: Any) -> None:
        raise KeyError("later")

    for m, o in ((reference, expected), (model, optimizer)):
        backward(m)
        handle = o.register_step_post_hook(fail)
        with pytest.raises(KeyError):
            o.step()
        handle.remove()
        m.zero_grad()
        backward(m, 1)
        m.decoder.bias.grad = torch.ones(7)
        assert m is reference or torch.equal(flat.parameters()[0].grad[64:71], torch.ones(7))
        o.step()
        m.zero_grad()
        m.double()
        m.float()
        backward(m, 2)
        o.step()
    assert_same(reference, model)


def test_an_old_gradient_is_not_applied_after_an_exception() -> None:
    model, flat, optimizer = make()
    backward(model)
    handle = optimizer.register_step_post_hook(lambda *_: [][0])
    with pytest.raises(IndexError):
        optimizer.step()
    handle.remove()
    model.zero_grad()
    before = flat.snapshot()
    with pytest.warns(UserWarning, match="no parameter of this FlatParams has a gradient"):
        optimizer.step()
    assert torch.equal(before.buffers[0], flat.buffers[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled_clipping_sees_the_gradients() -> None:
    model, flat, _ = make()
    backward(model)
    params = flat.parameters()
    compiled = torch.compile(lambda: nn.utils.clip_grad_norm_(params, 1e-3), backend="eager")
    assert compiled() > 1e-3
    assert flat.grad_norm() < 1.01e-3


def test_padding_stays_zero() -> None:
    for options in ({"eps": 0.0}, {}):
        _, flat, _ = make()
        optimizer = torch.optim.Adam(flat.parameters(), lr=0.1, **options)
        (p,) = flat.parameters()
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert p[71:].eq(0).all()
        assert p.grad[71:].eq(0).all()
        assert p[:49].ne(0).all()


def test_a_gradient_that_lags_behind_but_is_there_counts() -> None:
    """Its first element looks untouched and others were scaled since: the rest of it tells."""
    late, scaled = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    flat = FlatParams([late, scaled], grads="bound")
    optimizer = torch.optim.SGD(flat.parameters(), lr=1.0)
    (-(late * torch.tensor([0.0, 1.0, 1.0])) + scaled).sum().backward()
    assert torch.signbit(late.grad[0])
    scaled.grad.mul_(0.5)
    optimizer.step()
    assert late.tolist() == [1.0, 2.0, 2.0]
    assert scaled.tolist() == [0.5, 0.5, 0.5]


def test_a_finished_step_leaves_nothing_under_way() -> None:
    model, _, optimizer = make()
    backward(model)
    optimizer.step()
    assert flatbed.flat.hooks._under_way[optimizer] == []
