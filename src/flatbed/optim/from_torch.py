"""Any optimizer class of torch as a rule: its own step, run on the rows of a batch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.errors import FlatbedError
from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.optim.probe import StateSpec, probe_state
from flatbed.rule import Group, Rule, Scalars, Tensors

NOT_OPTIONS = ("params", "param_names", "initial_lr")


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
        # The optimizer creates the state of its first step, and of new rows if it counts no steps.
        if begun and (seen or self.found.numbers):
            if self._optimizer is None:
                self._optimizer = self.kind([nn.Parameter(torch.zeros(1))], **self.options)
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
            self._refuse_more(optimizer.state[param])
            for name in self.found.tensors:
                value = optimizer.state[param].get(name)
                if isinstance(value, Tensor) and value is not at[name][i]:
                    at[name][i].copy_(value)
        after = optimizer.state[params[0]] if params else {}
        optimizer.state.clear()
        return 1.0, 1.0, *(float(after[name]) for name in self.found.numbers)

    def _refuse_more(self, state: dict[str, Any]) -> None:
        known = (*self.found.tensors, *self.found.numbers)
        more = [name for name, value in state.items() if name not in known and value is not None]
        if more:
            raise FlatbedError(
                f"{self.kind.__name__} keeps state ({more[0]}) that it did not keep when from_torch probed "
                f"it: an option was changed since; pass it to from_torch instead"
            )

    def _state(
        self, at: Tensors, i: int, numbers: list[float], *, new_for: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One parameter's state; new rows get their first values by the current options."""
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


def from_torch(kind: type[torch.optim.Optimizer], params: ParamsT, **options: Any) -> Optimizer:
    """Train tables (and other parameters) with any optimizer class of torch that updates elementwise.

    Takes the class's own options, and those of every flatbed optimizer (`max_norm`, …). A trial on a small
    parameter finds the state of the class; classes whose state or update is not elementwise (LBFGS,
    Adafactor, Muon, …) are refused.

    >>> import flatbed, torch
    >>> emb = flatbed.Embedding(100, 8)
    >>> optimizer = flatbed.optim.from_torch(torch.optim.Rprop, [emb.table], lr=0.01)
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
    found = probe_state(kind, options)
    rule = Rule(
        hyperparameters=(),
        state=dict.fromkeys(found.tensors),
        scalars=("_seen", "_begun", *found.numbers),
        reference=TorchRule(kind, options, found),
        initial={name: first for name, first in found.tensors.items() if first is not None},
        row_scalars={"_seen": None} if found.rows_are_new else {},
        handles_maximize=True,
    )
    made = type(kind.__name__, (Optimizer,), {"_rule": rule, "__module__": __name__, "__doc__": kind.__doc__})
    optimizer: Optimizer = made(params, found.defaults, **extras)
    return optimizer
