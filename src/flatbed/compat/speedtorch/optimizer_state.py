"""State that an optimizer keeps for each element of a variable."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatbed import FlatbedError
from flatbed.optim.optimizer import Optimizer
from flatbed.optim.probe import SHAPE, OptimizerProbe, probe_state

IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options that choose how a step is computed and not its result."""


def variable_of(model: nn.Module, name: str) -> nn.Parameter:
    """Find the weight of the module of this name, or the parameter itself."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be the module that has the variable; found {type(model).__name__}")
    for path in (f"{name}.weight", name):
        try:
            return model.get_parameter(path)
        except AttributeError:
            continue
    names = [known.removesuffix(".weight") for known, _ in model.named_parameters(remove_duplicate=False)]
    raise ValueError(f"the model has no variable {name!r}; found {', '.join(names) or 'no parameters'}")


def group_of(optimizer: torch.optim.Optimizer, variable: Tensor, name: str) -> dict[str, Any]:
    """Find the param group of a variable."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"given_optimizer must be an optimizer of torch; found {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        if any(param is variable for param in group["params"]):
            return group
    raise ValueError(
        f"the optimizer does not have '{name}' among its parameters: build it with the model's parameters "
        "before the switcher"
    )


def probe_rows(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, float | str | None]:
    """Find state per element by a trial of the optimizer's class with the group's options.

    Returns first values by name: a number, the name of an option, or None for the weight itself.
    """
    kind = type(optimizer)
    if isinstance(optimizer, Optimizer):
        raise FlatbedError(
            f"found {kind.__name__} of flatbed.optim, which stores its own state: use torch.optim's, or "
            "flatbed.Embedding instead of switchers"
        )
    known = inspect.signature(kind).parameters
    options = {n: _plain(v) for n, v in group.items() if n in known and n not in IMPLEMENTATION}
    try:
        try:
            return _probe(kind, options, dtype)
        except FlatbedError as error:
            dense = error
        try:
            return _probe(_with_sparse_gradients(kind), options, dtype)
        except FlatbedError:
            raise dense from None
    except FlatbedError as error:
        reason = str(error).partition(": ")[2]
        raise FlatbedError(f"{kind.__name__} cannot be switched row by row: {reason}") from error
    except Exception as error:
        raise FlatbedError(
            f"{kind.__name__} cannot be switched row by row: {type(error).__name__} in its trial ({error})"
        ) from error


def _probe(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> dict[str, float | str | None]:
    found = probe_state(kind, options)
    constants = [name for name, first in found.tensors.items() if isinstance(first, float) and first]
    if not constants:
        return found.tensors
    # The trial has run in float32, and the numbers are those of the datatype.
    zeros = torch.zeros(SHAPE, dtype=dtype)
    no_decay: dict[str, Any] = {"weight_decay": 0.0} if "weight_decay" in found.defaults else {}
    _, state = OptimizerProbe(kind, options).run(zeros, [zeros], **no_decay)
    return found.tensors | {name: float(state[name].flatten()[0]) for name in constants}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_plain(one) for one in value)
    return value.item() if isinstance(value, Tensor) else value


def _with_sparse_gradients(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Derive a class whose step makes gradients sparse first, which some optimizers insist on."""

    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is not None and not param.grad.is_sparse:
                at = torch.arange(len(param)).unsqueeze(0)
                param.grad = torch.sparse_coo_tensor(
                    at, param.grad, param.shape, is_coalesced=True, check_invariants=False
                )
        return kind.step(self, closure)

    return type(kind.__name__, (kind,), {"step": step})
