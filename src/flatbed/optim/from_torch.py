"""Rules from any optimizer class of torch. A trial on small tensors finds its state, or refuses the class."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flatbed.errors import FlatbedError
from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.rule import Group, Rule, Scalars, Tensors

NOT_OPTIONS = ("params", "param_names", "initial_lr")
SHAPE = (3, 4)
LARGE = (130, 128)  # some optimizers treat matrices of at least 128 rows and columns differently
STEPS = 6
Run = tuple[Tensor, dict[str, Any]]
"""A parameter after some steps, and its state."""


@contextmanager
def quietly(seed: int = 0, device: torch.device | None = None) -> Iterator[None]:
    """Hide warnings, leave the random state of the process alone, and ignore its default device."""
    devices = [] if device is None or device.type != "cuda" else [device]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices), torch.device("cpu"):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        yield


def cloned(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with copies of their tensors."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state that an optimizer keeps.

    - `tensors`: state per element, mapped to its first value. That is a number, the name of an option, or
      None for the weight itself.
    - `numbers`: state that is one number for all elements, mapped to its value after the trial. The value
      shows whether the number is an int, a float or a tensor.
    - `rows_are_new`: the first update of a row differs from later ones.
    """

    tensors: dict[str, float | str | None]
    numbers: dict[str, Any]
    rows_are_new: bool
    defaults: dict[str, Any]


def probe_state(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> StateSpec:
    """Run an optimizer class on small parameters; raise if it cannot train the rows of a table."""
    probe = OptimizerProbe(kind, options)
    with quietly():
        start, *grads = torch.randn(STEPS + 1, *SHAPE, generator=torch.Generator().manual_seed(0))
        trained = probe.run(start, grads)
        if torch.equal(trained[0], start):
            raise probe.refusal(f"{STEPS} steps on random gradients moved nothing, which proves nothing")
        tensors, numbers = probe.sorted_state(trained[1])
        probe.refuse_hidden(start, grads, trained)
        probe.refuse_neighbours(start, grads, trained)
        large, *its_grads = torch.randn(STEPS + 1, *LARGE, generator=torch.Generator().manual_seed(0))
        probe.refuse_neighbours(large, its_grads, probe.run(large, its_grads))
        first = {name: probe.first_value(name, grads[0], counted=bool(numbers)) for name in tensors}
        is_new = any(value is None or isinstance(value, str) for value in first.values())
        if tensors and not numbers and not is_new:
            given = {name: torch.full(SHAPE, float(value or 0.0)) for name, value in first.items()}
            is_new = not _same(probe.run(start, grads[:1]), probe.run(start, grads[:1], state=given))
        return StateSpec(first, numbers, is_new, probe.defaults)


class OptimizerProbe:
    """An optimizer class with options, run on parameters of shape `SHAPE`."""

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self.kind, self.options = kind, options
        self.defaults = dict(self._build(nn.Parameter(torch.zeros(SHAPE, device="cpu"))).defaults)
        # The first learning rate of a warm-up may be 0, and the trial would see no update.
        self._lr: dict[str, Any] = {"lr": float(self.defaults["lr"]) or 0.01} if "lr" in self.defaults else {}
        self._no_decay: dict[str, Any] = {"weight_decay": 0.0} if "weight_decay" in self.defaults else {}

    def _build(self, param: nn.Parameter, **changed: Any) -> torch.optim.Optimizer:
        return self.kind([param], **{**cloned(self.options), **changed})

    def refusal(self, reason: str) -> FlatbedError:
        return FlatbedError(f"{self.kind.__name__} cannot train a table: {reason}")

    def run(
        self, start: Tensor, grads: list[Tensor], *, state: dict[str, Any] | None = None, **changed: Any
    ) -> Run:
        """Take a step for each gradient, from the given state or a new one."""
        param = nn.Parameter(start.clone())
        optimizer = self._build(param, **{**self._lr, **changed})
        closure = inspect.signature(self.kind.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise self.refusal("its step needs a closure that evaluates the loss again, for all parameters")
        if state is not None:
            optimizer.state[param] = copy.deepcopy(state)
        for grad in grads:
            param.grad = grad.clone()
            try:
                optimizer.step()
            except Exception as error:
                raise self.refusal(
                    f"its step fails on a plain gradient of shape {tuple(start.shape)} "
                    f"({type(error).__name__}: {error})"
                ) from error
        return param.detach(), dict(optimizer.state[param])

    def sorted_state(self, state: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Return the names of state that is per element, and the state that is one number."""
        tensors: list[str] = []
        numbers: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == SHAPE and value.dtype == torch.float32:
                tensors.append(name)
            elif value.numel() == 1 if isinstance(value, Tensor) else type(value) in (int, float):
                numbers[name] = value
            elif value is not None:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                shape = tuple(getattr(value, "shape", ()))
                raise self.refusal(
                    f"its state '{name}' ({kind} {shape}) is neither per element nor one number, for a "
                    f"parameter of float32 and shape {SHAPE}"
                )
        return tensors, numbers

    def refuse_hidden(self, start: Tensor, grads: list[Tensor], expected: Run) -> None:
        """Raise if a step depends on more than the state, or if state of later steps does not start at zero.

        State of later steps is state that appears after the first step.
        """
        param, state = self.run(start, grads[:1])
        late = [n for n, v in expected[1].items() if state.get(n) is None and isinstance(v, Tensor)]
        zeros = {name: torch.zeros_like(expected[1][name]) for name in late}
        if not _same(self.run(param, grads[1:], state={**state, **zeros}), expected):
            raise self.refusal(
                f"its state '{late[0]}' begins in a later step than the first, and not with zeros"
                if late
                else "it keeps something between steps that is not in its state"
            )

    def refuse_neighbours(self, start: Tensor, grads: list[Tensor], expected: Run) -> None:
        """Raise unless training one element alone gives the same value as training it with others."""
        for one in (slice(0, 1), slice(2, 3)):
            param, state = self.run(start[one, one], [grad[one, one] for grad in grads])
            for alone, whole in [(param, expected[0]), *((state[name], expected[1][name]) for name in state)]:
                if isinstance(alone, Tensor):
                    among = whole[one, one] if whole.shape == start.shape else whole
                    if not torch.allclose(alone, among, rtol=1e-5, atol=1e-7):
                        raise self.refusal("an element's update depends on other elements or their number")

    def first_value(self, name: str, grad: Tensor, *, counted: bool) -> float | str | None:
        """Return the first value of a state, found by steps with gradients of zero."""
        zeros = torch.zeros(SHAPE)
        plain = self._no_decay
        moved = self.run(zeros + 2.0, [zeros], **plain)[1].get(name)
        state = self.run(zeros, [zeros], **plain)[1]
        at_rest = state.get(name)
        if moved is None or at_rest is None:
            return 0.0
        if not bool((at_rest == at_rest.flatten()[0]).all()):
            raise self.refusal(f"the first value of its state '{name}' is not the same for all elements")
        if not torch.equal(moved, at_rest) and torch.allclose(moved, zeros + 2.0, rtol=0.05):
            return None
        from_zero = self.run(zeros, [grad], state={**state, name: zeros}, **plain)
        if _same(from_zero, self.run(zeros, [grad], state=state, **plain)):
            return 0.0  # the step left a value that makes no difference, such as Adamax's eps
        if counted and not torch.equal(self.run(zeros, [zeros, zeros], **plain)[1][name], at_rest):
            raise self.refusal(
                f"the first value of its state '{name}' is unknown, since it changes without gradients"
            )
        if self._lr:
            doubled = self.run(zeros, [zeros], lr=2 * self._lr["lr"], **plain)[1][name]
            if not torch.equal(doubled, at_rest):
                return "lr"
        return float(at_rest.flatten()[0])


def _same(one: Run, other: Run) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)

    return equal(one[0], other[0]) and all(equal(one[1][name], other[1][name]) for name in one[1])


# ---- the rule


class TorchRule:
    """A rule's `reference` that runs a torch optimizer's step."""

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, Any], found: StateSpec) -> None:
        self.kind, self.options, self.found = kind, options, found
        self._optimizer: torch.optim.Optimizer | None = None

    def __call__(self, group: Group, at: Tensors, scalars: Scalars) -> Scalars:
        seen, begun, *numbers = scalars
        params = [nn.Parameter(p.detach()) for p in at.params]
        for param, grad in zip(params, at.grads, strict=True):
            param.grad = grad
        known = {name: value for name, value in group.items() if name not in NOT_OPTIONS}
        # The optimizer itself makes the state of its first step, and of new rows if it counts no steps.
        if begun and (seen or self.found.numbers):
            if self._optimizer is None:
                self._optimizer = self.kind([nn.Parameter(torch.zeros(1, device="cpu"))], **self.options)
            optimizer = self._optimizer
            optimizer.state = defaultdict(dict)
            optimizer.param_groups[0].update(known, params=params)
            for i, param in enumerate(params):
                optimizer.state[param] = self._state(at, i, numbers, new_for=None if seen else known)
        else:
            optimizer = self.kind([{"params": params, **known}], **self.options)
        with torch.enable_grad():
            optimizer.step()
        for i, (param, p) in enumerate(zip(params, at.params, strict=True)):
            if param.data_ptr() != p.data_ptr():
                p.copy_(param.detach())
            probed = {*self.found.tensors, *self.found.numbers}
            if more := [k for k, v in optimizer.state[param].items() if k not in probed and v is not None]:
                raise FlatbedError(
                    f"{self.kind.__name__} keeps state ({more[0]}) that it did not keep when from_torch "
                    f"probed it: an option was changed since; pass it to from_torch instead"
                )
            for name in self.found.tensors:
                value = optimizer.state[param].get(name)
                if isinstance(value, Tensor) and value is not at[name][i]:
                    at[name][i].copy_(value)
        after = optimizer.state[params[0]] if params else {}
        optimizer.state.clear()
        return 1.0, 1.0, *(float(after[name]) for name in self.found.numbers)

    def _state(
        self, at: Tensors, i: int, numbers: list[float], *, new_for: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the state of one parameter. New rows get their first values from the current options."""
        p = at.params[i]
        state: dict[str, Any] = {}
        on_device = self.options.get("capturable") or self.options.get("fused")
        for (name, seen), value in zip(self.found.numbers.items(), numbers, strict=True):
            is_tensor = isinstance(seen, Tensor)
            device = p.device if on_device else torch.device("cpu")
            state[name] = torch.full_like(seen, value, device=device) if is_tensor else type(seen)(value)
        for name, first in self.found.tensors.items():
            state[name] = at[name][i]
            if new_for is not None and first is None:
                state[name].copy_(p)
            elif new_for is not None and isinstance(first, str):
                state[name].fill_(float(new_for[first]))
        return state


class OfTorch(Optimizer):
    """The base of the classes that `from_torch` makes. Pickles have what to make the class of."""

    _torch: ClassVar[TorchRule]

    def __reduce__(self) -> Any:
        return _unpickled, (self._torch.kind, self._torch.options), self.__getstate__()


def _unpickled(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Optimizer:
    made = _class_of(kind, options)
    return made.__new__(made)


def _class_of(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> type[OfTorch]:
    found = probe_state(kind, options)
    reference = TorchRule(kind, options, found)
    rule = Rule(
        hyperparameters=(),
        state=dict.fromkeys(found.tensors),
        # `_seen`: this parameter or row has had a step. `_begun`: this parameter or table has.
        scalars=("_seen", "_begun", *found.numbers),
        reference=reference,
        initial={name: first for name, first in found.tensors.items() if first is not None},
        row_scalars={"_seen": None} if found.rows_are_new else {},
        handles_maximize=True,
    )
    about = {"_rule": rule, "_torch": reference, "__module__": __name__, "__doc__": kind.__doc__}
    return type(kind.__name__, (OfTorch,), about)


def from_torch(kind: type[torch.optim.Optimizer], params: ParamsT, **options: Any) -> Optimizer:
    """Train tables (and other parameters) with any optimizer class of torch that updates elementwise.

    Takes the class's own options, and the options of every flatbed optimizer (`max_norm`, …). A trial on a
    small parameter finds the state of the class. Classes whose state or update is not elementwise (LBFGS,
    Adafactor, Muon, …) are refused.

    >>> import flatbed, torch
    >>> emb = flatbed.Embedding(100, 8)
    >>> optimizer = flatbed.optim.from_torch(torch.optim.Rprop, emb, lr=0.01)
    >>> emb(torch.tensor([1, 5, 5])).sum().backward()
    >>> optimizer.step()
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch takes a class of torch.optim, such as torch.optim.Adamax, and then what to train; "
            f"found {repr(kind) if isinstance(kind, type) else f'an object of {type(kind).__name__}'}"
        )
    if issubclass(kind, Optimizer):
        raise TypeError(f"{kind.__name__} of flatbed.optim takes tables itself: {kind.__name__}(model)")
    if kind is torch.optim.SparseAdam:
        raise FlatbedError("SparseAdam takes sparse gradients; use flatbed.optim.SparseAdam for tables")
    extras = {name: options.pop(name) for name in list(options) if name in Extras.__annotations__}
    made = _class_of(kind, options)
    optimizer: Optimizer = made(params, made._torch.found.defaults, **extras)
    return optimizer
