"""The variable of a switcher, its optimizer's options, and what that keeps for each element."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.errors import FlatbedError
from flatbed.optim.optimizer import Optimizer
from flatbed.optim.probe import SHAPE, OptimizerProbe, StateSpec, probe_state

HOW = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed, and not what it is."""


def variable_of(model: nn.Module, name: str) -> nn.Parameter:
    """The weight of the module of this name, or the parameter itself."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be the module that has the variable; found {type(model).__name__}")
    known = dict(model.named_parameters(remove_duplicate=False))
    found = known.get(f"{name}.weight", known.get(name))
    if found is None:
        names = ", ".join(n.removesuffix(".weight") for n in known) or "no parameters"
        raise ValueError(f"the model has no variable {name!r}; found {names}")
    return found


def group_of(optimizer: torch.optim.Optimizer, variable: Tensor, name: str) -> dict[str, Any]:
    """The param group that a variable is in."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"given_optimizer must be an optimizer of torch; found {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        if any(param is variable for param in group["params"]):
            return group
    raise ValueError(
        f"the optimizer does not have '{name}' among its parameters: build it with the model's, "
        "and the switcher after that"
    )


def found_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> StateSpec:
    """What an optimizer keeps for each element, by a trial of its class with the same options."""
    kind = type(optimizer)
    if isinstance(optimizer, Optimizer):
        raise FlatbedError(
            f"{kind.__name__} of flatbed.optim keeps its state where it wants it: use torch.optim's here, or "
            "flatbed.Embedding instead of switchers"
        )
    wanted = inspect.signature(kind).parameters
    options = {n: _plain(v) for n, v in group.items() if n in wanted and n not in HOW}
    try:
        try:
            return _in_dtype(probe_state(kind, options), OptimizerProbe(kind, options), dtype)
        except FlatbedError as error:
            dense = error
        try:
            sparse = _given_sparse(kind)
            return _in_dtype(probe_state(sparse, options), OptimizerProbe(sparse, options), dtype)
        except FlatbedError:
            raise dense from None
    except FlatbedError as error:
        reason = str(error).partition(": ")[2]
        raise FlatbedError(f"{kind.__name__} cannot be switched row by row: {reason}") from error
    except Exception as error:
        raise FlatbedError(
            f"{kind.__name__} cannot be switched row by row: it could not be tried "
            f"({type(error).__name__}: {error})"
        ) from error


def _in_dtype(found: StateSpec, trial: OptimizerProbe, dtype: torch.dtype) -> StateSpec:
    """First values that are numbers, as they are in the datatype: the trial has those of float32."""
    if not any(isinstance(first, float) and first for first in found.tensors.values()):
        return found
    zeros = torch.zeros(SHAPE, dtype=dtype)
    plain: dict[str, Any] = {"weight_decay": 0.0} if "weight_decay" in found.defaults else {}
    _, state = trial.run(zeros, [zeros], **plain)
    tensors = {
        name: float(state[name].flatten()[0]) if isinstance(first, float) and first else first
        for name, first in found.tensors.items()
    }
    return replace(found, tensors=tensors)


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(one) for one in value)
    return value.item() if isinstance(value, Tensor) else value


def _given_sparse(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class as it is with sparse gradients, which some insist on."""

    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is not None and not param.grad.is_sparse:
                at = torch.arange(len(param)).unsqueeze(0)
                param.grad = torch.sparse_coo_tensor(
                    at, param.grad, param.shape, is_coalesced=True, check_invariants=False
                )
        return kind.step(self, closure)

    made: type[torch.optim.Optimizer] = type(kind.__name__, (kind,), {"step": step})
    return made
