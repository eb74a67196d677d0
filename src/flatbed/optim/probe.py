"""What an optimizer of torch's keeps and does, found out by trying it on a small parameter."""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.errors import FlatbedError

SHAPE = (3, 4)
STEPS = 3
Run = tuple[Tensor, dict[str, Any]]
"""A parameter after some steps, and its state."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of state, in the form in which an optimizer keeps it."""

    kind: type | torch.dtype
    shape: tuple[int, ...] = ()

    def made(self, value: float, device: torch.device) -> Any:
        if isinstance(self.kind, torch.dtype):
            return torch.full(self.shape, value, dtype=self.kind, device=device)
        return self.kind(value)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What was found out."""

    tensors: dict[str, float | str | None]
    """State per element, with its first value: a number, an option's name, or None for the weight itself."""
    numbers: dict[str, Number]
    """State that is one number."""
    rows_are_new: bool
    """Whether a row that was never updated has to be known as such."""
    defaults: dict[str, Any]


def try_out(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> StateSpec:
    """Run an optimizer on small parameters; raise if it cannot be used row by row."""
    trial = OptimizerProbe(kind, options)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(SHAPE, generator=generator)
        grads = [torch.randn(SHAPE, generator=generator) for _ in range(STEPS)]
        _, state = trial.run(start, grads)
        tensors, numbers = trial.sorted_state(state)
        trial.refuse_hidden(start, grads)
        trial.refuse_neighbours(start, grads)
        first = {name: trial.first_value(name, grads[0], counted=bool(numbers)) for name in tensors}
        new = any(value is None or isinstance(value, str) for value in first.values())
        if tensors and not numbers and not new:
            new = trial.differs_without_state(start, grads[0], {n: trial.value(v) for n, v in first.items()})
        return StateSpec(first, numbers, new, trial.defaults())


class OptimizerProbe:
    """An optimizer class with options, on trial."""

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self.kind = kind
        self.options = options
        self.name = kind.__name__

    def refuse(self, reason: str) -> FlatbedError:
        return FlatbedError(f"{self.name} cannot train a table: {reason}")

    def build(self, param: nn.Parameter, **changed: Any) -> torch.optim.Optimizer:
        options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.options.items()}
        return self.kind([param], **{**options, **changed})

    def defaults(self) -> dict[str, Any]:
        return dict(self.build(nn.Parameter(torch.zeros(SHAPE))).defaults)

    def _lr(self) -> float:
        lr = self.defaults().get("lr", 0.01)
        return float(lr) or 0.01  # a warm-up's first learning rate may be 0, which would show nothing

    def run(
        self, start: Tensor, grads: list[Tensor], *, state: dict[str, Any] | None = None, **changed: Any
    ) -> Run:
        param = nn.Parameter(start.clone())
        if "lr" in self.defaults():
            changed = {"lr": self._lr(), **changed}
        optimizer = self.build(param, **changed)
        if "closure" in _required(optimizer):
            raise self.refuse("its step needs a closure that evaluates the loss again, for all parameters")
        if state is not None:
            optimizer.state[param] = copy.deepcopy(state)
        for grad in grads:
            param.grad = grad.clone()
            try:
                optimizer.step()
            except Exception as error:
                raise self.refuse(
                    f"its step fails on a plain gradient of shape {tuple(start.shape)} "
                    f"({type(error).__name__}: {error})"
                ) from error
        return param.detach(), dict(optimizer.state[param])

    def sorted_state(self, state: dict[str, Any]) -> tuple[list[str], dict[str, Number]]:
        """Names of the state that is per element, and the numbers."""
        tensors, numbers = [], {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == SHAPE:
                if value.dtype != torch.float32:
                    raise self.refuse(f"its state '{name}' is {value.dtype} for a parameter of float32")
                tensors.append(name)
            elif isinstance(value, Tensor) and value.numel() == 1:
                numbers[name] = Number(value.dtype, tuple(value.shape))
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers[name] = Number(type(value))
            elif value is not None:
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise self.refuse(
                    f"its state '{name}' ({found}) is neither per element nor one number, for a parameter of "
                    f"shape {SHAPE}"
                )
        return tensors, numbers

    def refuse_hidden(self, start: Tensor, grads: list[Tensor]) -> None:
        """All that it goes on from must be in its state, and state that comes late must begin with zeros."""
        whole = self.run(start, grads)
        param, state = self.run(start, grads[:1])
        late = [name for name in whole[1] if state.get(name) is None and isinstance(whole[1][name], Tensor)]
        zeros = {name: torch.zeros_like(whole[1][name]) for name in late}
        again = self.run(param, grads[1:], state={**state, **zeros})
        if not self._same(again, whole, torch.ones(SHAPE, dtype=torch.bool)):
            raise self.refuse(
                f"its state '{late[0]}' begins in a later step than the first, and not with zeros"
                if late
                else "it keeps something between steps that is not in its state"
            )

    def refuse_neighbours(self, start: Tensor, grads: list[Tensor]) -> None:
        """No element may depend on another, and nothing on how many there are."""
        whole, state = self.run(start, grads)
        others = [g.clone() for g in grads]
        others[1][1, 2] += 0.5
        elsewhere = start.clone()
        elsewhere[1, 2] -= 0.25
        kept = torch.ones(SHAPE, dtype=torch.bool)
        kept[1, 2] = False
        for run in (self.run(start, others), self.run(elsewhere, grads)):
            if not self._same(run, (whole, state), kept):
                raise self.refuse("an element's update depends on other elements")
        part, held = self.run(start[::2], [g[::2] for g in grads])
        for name, value in [("", part), *held.items()]:
            expected = whole if not name else state[name]
            if isinstance(value, Tensor) and value.shape == part.shape:
                expected = expected[::2]
            if isinstance(value, Tensor) and not torch.allclose(value, expected, rtol=1e-5, atol=1e-7):
                raise self.refuse("an element's update depends on how many others there are")

    @staticmethod
    def _same(one: Run, other: Run, kept: Tensor) -> bool:
        def equal(a: Any, b: Any) -> bool:
            if not isinstance(a, Tensor):
                return bool(a == b)
            return torch.equal(a[kept], b[kept]) if a.shape == SHAPE else torch.equal(a, b)

        return equal(one[0], other[0]) and all(equal(one[1][name], other[1][name]) for name in one[1])

    def value(self, first: float | str | None) -> float:
        return self._lr() if isinstance(first, str) else float(first or 0.0)

    def first_value(self, name: str, grad: Tensor, *, counted: bool) -> float | str | None:
        """What state begins with: seen after a step that has nothing to do."""
        zeros = torch.zeros(SHAPE)
        plain: dict[str, Any] = {"weight_decay": 0.0} if "weight_decay" in self.defaults() else {}
        moved = self.run(zeros + 2.0, [zeros], **plain)[1].get(name)
        state = self.run(zeros, [zeros], **plain)[1]
        at_rest = state.get(name)
        if moved is None or at_rest is None:
            return 0.0
        if not bool((at_rest == at_rest.flatten()[0]).all()):
            raise self.refuse(f"the first value of its state '{name}' is not the same for all elements")
        if not torch.equal(moved, at_rest) and torch.allclose(moved, zeros + 2.0, rtol=0.05):
            return None
        nothing = self.run(zeros, [grad], state={**state, name: zeros}, **plain)
        if self._same(nothing, self.run(zeros, [grad], state=state, **plain), zeros == 0):
            return 0.0  # the step left something there that makes no difference, such as Adamax's eps
        if counted and not torch.equal(self.run(zeros, [zeros, zeros], **plain)[1][name], at_rest):
            raise self.refuse(
                f"what its state '{name}' begins with cannot be told, since it changes without gradients"
            )
        if "lr" in self.defaults():
            lr = self._lr()
            doubled = self.run(zeros, [zeros], lr=2 * lr, **plain)[1][name]
            if not torch.equal(doubled, at_rest):
                return "lr"
        return float(at_rest.flatten()[0])

    def differs_without_state(self, start: Tensor, grad: Tensor, first: dict[str, float]) -> bool:
        """Whether the first step is another one than from the first values of state."""
        absent, after = self.run(start, [grad])
        given = {name: torch.full(SHAPE, value) for name, value in first.items()}
        present, then = self.run(start, [grad], state=given)
        kept = torch.ones(SHAPE, dtype=torch.bool)
        return not self._same((absent, after), (present, then), kept)


def _required(optimizer: torch.optim.Optimizer) -> set[str]:
    """Arguments without which its step cannot be called."""
    parameters = inspect.signature(type(optimizer).step).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.name != "self"}
