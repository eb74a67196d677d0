"""Parameters without gradient, and parameters frozen before or after flattening."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flatbed import FlatbedError, FlatParams
from tests.cases import BOTH, assert_same, batches
from tests.flat.twins import Training, assert_twins, twins

MISSING = r"'right\.weight', 'right\.bias' received no gradient.*missing='zero'"
(X,) = batches(1)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.left = nn.Linear(7, 2)
        self.right = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor, which: str = "both") -> torch.Tensor:
        heads = {"both": [self.left, self.right], "left": [self.left], "right": [self.right]}[which]
        return torch.stack([head(x).pow(2).sum() for head in heads]).sum()


def make(grads: Any, steps: int = 0, **more: Any) -> tuple[Training, Training]:
    """Return twins of the model, the flat one after some steps."""
    pair = twins(grads, model=TwoHeads, lr=0.1, weight_decay=0.5, **more)
    for _ in range(steps):
        pair[1].model(X).backward()
        pair[1].optimizer.step()
        pair[1].optimizer.zero_grad()
    return pair


@pytest.mark.parametrize("zero", ["optimizer", "module"])
@BOTH
def test_a_missing_gradient_raises_and_changes_nothing(grads: str, zero: str) -> None:
    model, optimizer, flat = make(grads, steps=2)[1]
    model(X, "right").backward()  # dropped: it must not count for the next step
    optimizer.zero_grad() if zero == "optimizer" else model.zero_grad()
    before = flat.snapshot()
    model(X, "left").backward()
    flat.clip_grad_norm_(1.0)  # reading is fine, stepping is not
    with pytest.raises(FlatbedError, match=MISSING):
        optimizer.step()
    with pytest.raises(FlatbedError, match=MISSING):
        flat.step(optimizer, max_norm=1.0)
    assert torch.equal(before.buffers[0], flat.buffers[0])
    optimizer.zero_grad()
    model(X).backward()
    optimizer.step()


@BOTH
def test_missing_zero_takes_an_absent_gradient_as_zero(grads: str) -> None:
    """The reference is per-parameter training in which the absent gradient is a tensor of zeros."""
    pair = make(grads, missing="zero")
    for i, x in enumerate(batches(6)):
        for model, optimizer, flat in pair:
            model(x, ("both", "left", "right")[i % 3]).backward()
            for p in model.parameters() if flat is None else ():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            optimizer.step()
            optimizer.zero_grad()
    assert_twins(pair)


@BOTH
def test_a_buffer_without_any_gradient_is_skipped_as_in_torch(grads: str) -> None:
    def groups(m: TwoHeads) -> list[dict[str, Any]]:
        return [{"params": m.left.parameters()}, {"params": m.right.parameters()}]

    model, reference = TwoHeads(), TwoHeads()
    flat = FlatParams(groups(model), grads=grads)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(flat.groups(), lr=0.1, foreach=False)
    expected = torch.optim.AdamW(groups(reference), lr=0.1, foreach=False)
    for i, x in enumerate(batches(4)):
        for m, o in ((model, optimizer), (reference, expected)):
            m(x, "left" if i % 2 else "both").backward()
            o.step()
            m.zero_grad()
    assert_same(model, reference)


@BOTH
def test_a_closures_gradients_are_checked_after_it_ran(grads: str) -> None:
    model, optimizer, flat = make(grads)[1]

    def closure(which: str = "both") -> Any:
        optimizer.zero_grad()
        loss = model(X, which)
        loss.backward()
        return loss

    optimizer.step(closure)
    before = flat.snapshot()
    with pytest.raises(FlatbedError, match=MISSING):
        optimizer.step(lambda: closure("left"))
    assert torch.equal(before.buffers[0], flat.buffers[0])
    model.right.requires_grad_(False)
    kept = model.right.weight.detach().clone()
    optimizer.step(closure=lambda: closure("left"))
    assert torch.equal(kept, model.right.weight)
    assert not torch.equal(before.buffers[0], flat.buffers[0])


@BOTH
def test_an_optimizer_that_ignores_the_closure(grads: str) -> None:
    """It steps with the gradients of an earlier backward pass."""

    class Momentum(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.sub_(self.state[p]["sum"])

    model = TwoHeads()
    flat = FlatParams(model, grads=grads)  # type: ignore[arg-type]
    optimizer = Momentum(flat.parameters())
    model(X).backward()
    optimizer.step(lambda: None)
    optimizer.zero_grad()
    before = flat.snapshot()
    model(X, "left").backward()
    with pytest.raises(FlatbedError, match=MISSING):
        optimizer.step(lambda: None)
    assert torch.equal(before.buffers[0], flat.buffers[0])


@BOTH
def test_steps_under_fake_tensors_leave_no_gradient_behind(grads: str) -> None:
    """A flat gradient without values stayed, and later steps trained nothing."""
    model, optimizer, flat = make(grads, steps=1)[1]
    model(X).backward()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(FlatbedError, match="gathering gradients under FakeTensorMode"),
    ):
        optimizer.step()
    before = flat.snapshot()
    optimizer.step()
    assert not torch.equal(before.buffers[0], flat.buffers[0])


# ---- in-place work on gradients between backward and step


def scale_all(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def zero_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def cast_and_back(model: nn.Module) -> None:
    model.double().float()


@pytest.mark.parametrize("meanwhile", [scale_all, cast_and_back])
@BOTH
def test_work_on_gradients_does_not_hide_a_missing_one(grads: str, meanwhile: Any) -> None:
    model, optimizer, _ = make(grads, steps=2)[1]
    model(X, "left").backward()
    meanwhile(model)
    with pytest.raises(FlatbedError, match=MISSING):
        optimizer.step()


@pytest.mark.parametrize("factor", [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
def test_a_gradient_with_negative_zeros_is_a_gradient(factor: list[float]) -> None:
    """A zeroed bound gradient holds negative zeros, and so may a computed one."""
    late, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    flat = FlatParams([late, other], grads="bound")
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        (-(late * torch.tensor(factor)) + other).sum().backward()
        assert torch.signbit(late.grad[0])
        if any(factor):
            other.grad.mul_(0.5)  # moves the version of one gradient and not of the other
        optimizer.step()
        optimizer.zero_grad()
    assert late[0] < 1, "decayed, as torch would"


def test_bound_gradients_written_without_autograd_count() -> None:
    """A replayed CUDA graph writes gradients without moving a version counter."""
    model, optimizer, flat = make("bound")[1]
    before = model.left.weight.detach().clone()
    flat.grad_buffers[0].data.fill_(1.0)
    optimizer.step()
    assert not torch.equal(before, model.left.weight)


# ---- frozen parameters


@pytest.mark.parametrize("meanwhile", [None, scale_all, zero_in_place])
@pytest.mark.parametrize("when", ["before backward", "after backward"])
@BOTH
def test_frozen_after_flattening_keeps_its_bits(grads: str, meanwhile: Any, when: str) -> None:
    model, optimizer, _ = make(grads, steps=2)[1]
    kept = [p.detach().clone() for p in model.right.parameters()]
    moving = model.left.weight.detach().clone()
    for _ in range(2):
        if when == "before backward":
            model.right.requires_grad_(False)
        model(X).backward()
        model.right.requires_grad_(False)
        if meanwhile is not None:
            meanwhile(model)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(kept, model.right.parameters(), strict=True))
    assert not torch.equal(moving, model.left.weight)
    model.right.requires_grad_(True)
    model(X).backward()
    optimizer.step()
    assert not torch.equal(kept[0], model.right.weight)


def test_a_frozen_parameter_is_not_marked_as_changed() -> None:
    model, optimizer, _ = make("follow")[1]
    model.right.requires_grad_(False)
    x = batches(1)[0].requires_grad_()
    held = model.right(x).sum()  # its backward needs right.weight
    model(x).backward()
    optimizer.step()
    held.backward()
    assert model.left.weight._version > model.right.weight._version


def test_frozen_at_flattening_and_trained_later_raises() -> None:
    model = TwoHeads()
    model.right.requires_grad_(False)
    flat = FlatParams(model)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    model.right.requires_grad_(True)
    model(X).backward()
    assert "'right.weight', 'right.bias' was frozen" in flat.check()[0]
    with pytest.raises(FlatbedError, match=r"'right\.weight'.*frozen when.*add_param_group"):
        optimizer.step()
    optimizer.add_param_group({"params": list(model.right.parameters())})
    before = model.right.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.right.weight)
