"""Optimizers over flat parameters: elementwise ones pass, those that read shapes, norms or means raise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatbed import FlatbedError, FlatParams
from tests.cases import OPTIMIZERS, OptimizerCase, backward, build
from tests.flat.twins import assert_twins, twins


class Simple(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def direction(self, p: Any) -> torch.Tensor:
        grad: torch.Tensor = p.grad
        return grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p), alpha=group["lr"])
        return loss


def simple(name: str, direction: Callable[[Any, Any], torch.Tensor], base: type = Simple) -> type[Simple]:
    return type(name, (base,), {"direction": direction})


class IgnoresClosure(Simple):
    """Its step takes a closure and never calls it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()


class NeedsMore(Simple):
    """Its constructor takes more than `defaults` tells."""

    def __init__(self, params: Any, secret: float = 0.0) -> None:
        if not secret:
            raise TypeError("secret is needed")
        super().__init__(params)
        self.secret = secret


class OtherNames(Simple):
    """Its constructor's arguments have other names than what they become, and a subclass passes them on."""

    def __init__(self, params: Any, rate: float, *, factor: float) -> None:
        super().__init__(params, lr=rate * factor)


class PassesOn(OtherNames):
    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **options)


class OfOptions(Simple):
    """Its constructor takes any options, and its step reads an attribute that they have set."""

    def __init__(self, params: Any, **options: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": options["lr"], "mode": options.get("mode")})
        self.is_normed = options.get("mode") == "norm"

    def direction(self, p: Any) -> torch.Tensor:
        grad: torch.Tensor = p.grad
        return grad / grad.norm() if self.is_normed else grad


class NoClosure(Simple):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()


class JoinsAll(Simple):
    """Subtracts the mean over all gradients, to which the padding of a buffer contributes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        params = [p for group in self.param_groups for p in group["params"]]
        mean = torch.cat([p.grad.flatten() for p in params]).mean()
        for p in params:
            p.sub_(p.grad - mean, alpha=0.01)


def ada_norm(self: Any, p: Any) -> torch.Tensor:
    """Scale gradients up while their norm falls, and leave them alone while it rises."""
    state, norm = self.state[p], p.grad.norm()
    state["norm"] = 0.95 * state.get("norm", 0 * norm) + 0.05 * norm
    return p.grad * (state["norm"] / norm).clamp(min=1.0)


def ada_shift(self: Any, p: Any) -> torch.Tensor:
    """Move nothing before the eleventh step, and then scale by the largest element of an old gradient."""
    held = self.state[p].setdefault("grads", deque(maxlen=11))
    held.append(p.grad.clone())
    return p.grad / held[0].abs().max() if len(held) == 11 else torch.zeros_like(p)


def ava_grad(self: Any, p: Any) -> torch.Tensor:
    """Scale by a norm that the step before has left in the group."""
    group = self.param_groups[0]
    gamma = group.get("gamma", 1.0)
    group["gamma"] = float(p.grad.norm() / p.numel() ** 0.5)
    return p.grad * gamma


def factor_large(self: Any, p: Any) -> torch.Tensor:
    """As Adafactor of big_vision does it."""
    if p.dim() < 2 or min(p.shape) < 128:
        return p.grad.sign()
    squares = p.grad.square()
    return p.grad / (squares.mean(0) * squares.mean(1, keepdim=True) / squares.mean()).sqrt()


def project(self: Any, p: Any) -> torch.Tensor:
    """As AdamP does it: only gradients that are almost orthogonal to the weights are changed."""
    weight, grad = p.flatten(), p.grad.flatten()
    cosine = torch.dot(weight, grad) / (weight.norm() * grad.norm() + 1e-8)
    is_projected = p.dim() > 1 and cosine.abs() < 0.1 / p[0].numel() ** 0.5
    return p.grad - 0.5 * p * grad.norm() / weight.norm() if is_projected else p.grad


def centralize(self: Any, p: Any) -> torch.Tensor:
    return p.grad if p.dim() < 2 else p.grad - p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True)


def lars(self: Any, p: Any) -> torch.Tensor:
    scaled: torch.Tensor = p.grad * (p.norm() / p.grad.norm())
    return scaled


def of_convolutions(self: Any, p: Any) -> torch.Tensor:
    return p.grad if p.dim() < 4 else centralize(self, p)


DIRECTIONS = (centralize, of_convolutions, factor_large, project, ada_norm, ada_shift, ava_grad)
SHAPE_READERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "Lars": lambda params: simple("Lars", lars)(params, lr=0.0),
    "ClosureLars": simple("ClosureLars", lars, IgnoresClosure),
    "SecretLars": lambda params: simple("SecretLars", lars, NeedsMore)(params, secret=2.0),  # type: ignore[call-arg]
    "PassingLars": lambda params: simple("PassingLars", lars, PassesOn)(params, 0.1, factor=0.1),  # type: ignore[call-arg]
    "OfOptions": lambda params: OfOptions(params, lr=0.1, mode="norm"),
    **{direction.__name__: simple(direction.__name__, direction) for direction in DIRECTIONS},
    "JoinsAll": JoinsAll,
}


@pytest.mark.parametrize("name", SHAPE_READERS)
def test_shape_readers_are_refused(name: str) -> None:
    model = build("tied")
    flat = FlatParams(model)
    before = flat.snapshot()
    optimizer = SHAPE_READERS[name](flat.parameters())
    backward(model)
    for _ in range(2):  # the second error matters if the first was swallowed
        with pytest.raises(FlatbedError, match=rf"^{name} .*flat\.originals"):
            optimizer.step()
    assert torch.equal(before.buffers[0], flat.buffers[0])


class WithoutConstructor(Simple):
    __init__ = torch.optim.Optimizer.__init__  # type: ignore[assignment]


ELEMENTWISE: list[Any] = [
    *OPTIMIZERS,
    Simple,
    IgnoresClosure,
    lambda p: WithoutConstructor(p, {"lr": 0.01}),
    lambda p: NeedsMore(p, secret=1.0),
    lambda p: PassesOn(p, 0.1, factor=0.1),
    lambda p: OfOptions(p, lr=0.1),
    NoClosure,
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
]


@pytest.mark.parametrize("make", ELEMENTWISE, ids=lambda c: getattr(c, "name", getattr(c, "__name__", "")))
def test_elementwise_optimizers_pass(make: OptimizerCase) -> None:
    model = build("tied")
    flat = FlatParams(model)
    optimizer = make(flat.parameters())
    backward(model)
    state, lr = torch.get_rng_state(), optimizer.param_groups[0]["lr"]
    before = torch.as_tensor(lr).clone()
    optimizer.step()
    assert flat.is_valid()
    assert torch.equal(state, torch.get_rng_state())
    assert optimizer.param_groups[0]["lr"] is lr
    assert torch.equal(torch.as_tensor(lr), before)


def too_small(self: Any, p: Any) -> torch.Tensor:
    if p.numel() < 20:
        raise RuntimeError("too small for me")
    return p.grad  # type: ignore[no-any-return]


class Lookahead(torch.optim.Optimizer):
    """A wrapper around the real optimizer, which a trial must not step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError("an optimizer is needed")
        super().__init__(base.param_groups, base.defaults)
        self.base = base

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.base.step(closure)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (simple("Unrunnable", too_small), "too small for me"),
        (simple("Noisy", lambda self, p: p.grad + torch.randn(p.shape)), "random"),
        (simple("Still", lambda self, p: 0 * p.grad), "moved nothing"),
        (lambda params: Lookahead(torch.optim.SGD(params, lr=0.1)), "Lookahead"),
    ],
)
def test_an_inconclusive_trial_warns(make: Any, reason: str) -> None:
    model = build("tied")
    optimizer = make(FlatParams(model).parameters())
    backward(model)
    steps: list[int] = []
    real = getattr(optimizer, "base", optimizer)
    real.register_step_post_hook(lambda *_: steps.append(1))
    with pytest.warns(UserWarning, match=rf"could not find out.*{reason}"):
        optimizer.step()
    assert steps == [1]


class Nested(torch.optim.SGD):
    """Its step calls its parent's step and then changes the parameters."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(0.9)


def test_a_step_within_a_step() -> None:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch then hooks the parent's step as well
    pair = twins(kind=Nested)
    for one in pair:
        one.model.decoder.bias.requires_grad_(False)
        one.train(0, 1, 2)
    assert_twins(pair)
