"""Optimizers that read a parameter's shape or norm are found by trying."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatbed import FlatbedError, FlatParams
from flatbed.optim import probe
from tests.cases import OPTIMIZERS, OptimizerCase, batches, build, loss_of


class Simple(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p), alpha=group["lr"])
        return loss


class Lamb(Simple):
    """Scales by the norms of parameter and gradient."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad * (p.norm() / p.grad.norm())


class MuonLike(Simple):
    """Treats matrices otherwise than vectors."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad if p.dim() < 2 else p.grad / p.grad.norm(dim=1, keepdim=True)


class Centralized(Simple):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad - p.grad.mean()


class NeedsMore(Simple):
    """Its constructor takes what `defaults` does not tell."""

    def __init__(self, params: Any, secret: float) -> None:
        super().__init__(params)
        self.secret = secret


class NormedNeedsMore(NeedsMore):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad * self.secret / p.grad.norm()


class NoClosure(Simple):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


class Noisy(Simple):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad + torch.randn(p.shape)


class Unrunnable(Simple):
    def direction(self, p: torch.Tensor) -> torch.Tensor:
        if p.numel() < 20:
            raise RuntimeError("too small for me")
        return p.grad


def step(make: Any, model_name: str = "tied") -> FlatParams:
    model = build(model_name)
    flat = FlatParams(model)
    optimizer = make(flat.parameters())
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    return flat


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.Adafactor, "Adafactor"),
        (Lamb, "Lamb"),
        (MuonLike, "MuonLike"),
        (Centralized, "Centralized"),
        (lambda params: NormedNeedsMore(params, secret=2.0), "NormedNeedsMore"),
        (lambda params: Lamb(params, lr=0.0), "Lamb"),
    ],
)
def test_shape_readers_are_refused(make: Any, name: str) -> None:
    model = build("tied")
    flat = FlatParams(model)
    before = flat.snapshot()
    optimizer = make(flat.parameters())
    loss_of(model, batches(1)[0]).backward()
    for _ in range(2):  # and again, should the first error be swallowed
        with pytest.raises(
            FlatbedError, match=f"{name} updates a flat parameter differently.*flat.originals"
        ):
            optimizer.step()
    assert torch.equal(before.buffers[0], flat.buffers[0])


def test_torchs_muon_refuses_flat_parameters_itself() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    with pytest.raises(ValueError, match="2D parameters"):
        torch.optim.Muon(FlatParams(build("tied")).parameters())


@pytest.mark.parametrize("make", [Simple, lambda p: NeedsMore(p, secret=1.0), NoClosure, Noisy])
def test_elementwise_optimizers_of_others_pass(make: Any) -> None:
    assert step(make).is_valid()


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda c: c.name)
def test_torchs_elementwise_optimizers_pass(case: OptimizerCase) -> None:
    assert step(case).is_valid()


def test_trying_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    model = build("tied")
    optimizer = torch.optim.SGD(FlatParams(model).parameters(), lr=0.1)
    torch.set_rng_state(state)
    probe.refuse_shape_readers(optimizer)
    assert torch.equal(state, torch.get_rng_state())


def test_what_cannot_be_tried_is_said() -> None:
    with pytest.warns(UserWarning, match=r"could not find out whether Unrunnable.*too small for me"):
        step(Unrunnable)


def test_a_tensor_learning_rate_is_not_touched() -> None:
    lr = torch.tensor(0.01)
    model = build("tied")
    flat = FlatParams(model)
    optimizer = torch.optim.Adam(flat.parameters(), lr=lr, foreach=False)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert lr == torch.tensor(0.01)
    assert optimizer.param_groups[0]["lr"] is lr


class Lookahead(torch.optim.Optimizer):
    """A wrapper that would take the real optimizer along into a trial."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError("give me an optimizer")
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        return self.base.step(closure)


def test_a_wrappers_real_optimizer_is_not_stepped_by_the_trial() -> None:
    model = build("tied")
    flat = FlatParams(model)
    base = torch.optim.SGD(flat.parameters(), lr=0.1)
    steps: list[int] = []
    base.register_step_post_hook(lambda *_: steps.append(1))
    wrapper = Lookahead(base)
    loss_of(model, batches(1)[0]).backward()
    with pytest.warns(UserWarning, match="could not find out whether Lookahead"):
        wrapper.step()
    assert (len(steps), wrapper.calls) == (1, 1)


class Nested(torch.optim.SGD):
    """Its step calls its parent's and then goes on."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(0.9)


def test_a_step_within_a_step() -> None:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # so that torch hooks the parent's step as well
    model, reference = build("tied"), build("tied")
    flat = FlatParams(model)
    optimizer, expected = Nested(flat.parameters(), lr=0.1), Nested(reference.parameters(), lr=0.1)
    model.decoder.bias.requires_grad_(False)
    reference.decoder.bias.requires_grad_(False)
    for i in range(3):
        for m, o in ((model, optimizer), (reference, expected)):
            loss_of(m, batches(3)[i]).backward()
            o.step()
            o.zero_grad()
    assert torch.equal(model.decoder.bias, reference.decoder.bias)
    assert torch.equal(model.encoder.weight, reference.encoder.weight)
