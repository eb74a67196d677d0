"""Inputs of an optimizer step (parameters with state, options, loss scaling), and the stepper protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flatbed.layout import dense_stride, is_dense

# Entries of the fp64 vector `step_stats`, which all steps of one device share.
SKIP, NORM, SKIPPED, STEPS = range(4)

Grads = Sequence[Tensor | None]
"""One gradient per slot; None where a parameter has none."""


@dataclass(slots=True)
class ParamSlot:
    """One parameter as the step sees it: its state, and the dtype of its gradient.

    State, master weight and average are dense and have the parameter's order of dimensions.
    """

    name: str
    param: Tensor
    group: int
    grad_dtype: torch.dtype
    state: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    master: Tensor | None = None
    ema: Tensor | None = None
    published: dict[str, Tensor] | None = None
    """The parameter's entry of `optimizer.state`."""

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of all tensors of state."""
        return next((t.dtype for t in self.state.values()), self.param.dtype)


def stride_of(param: Tensor) -> tuple[int, ...]:
    """The parameter's stride; if it has holes, the dense stride nearest to it."""
    shape, stride = tuple(param.shape), param.stride()
    return stride if is_dense(shape, stride) else dense_stride(shape, stride)


def is_whole(param: Tensor) -> bool:
    """Tell if a parameter has no holes."""
    return is_dense(tuple(param.shape), param.stride())


def in_order(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the order of its parameter's elements; a copy where the orders differ."""
    stride = stride_of(param)
    if grad.stride() == stride or grad.numel() <= 1:
        return grad
    ordered = torch.empty_strided(tuple(grad.shape), stride, dtype=grad.dtype, device=grad.device)
    return ordered.copy_(grad)


@dataclass(slots=True)
class StepOptions:
    """Options of a whole optimizer, beyond torch's. Only `max_norm` may change between steps."""

    max_norm: float | None = None
    skip_nonfinite: bool = False
    master_weights: bool = False
    stochastic_rounding: bool = False
    state_dtype: torch.dtype | None = None
    ema_decay: float | None = None
    per_row_steps: bool = False

    @property
    def needs_norm(self) -> bool:
        """Tell if a step measures the norm of all gradients."""
        return self.max_norm is not None or self.skip_nonfinite

    @property
    def stochastic_state(self) -> bool:
        """Tell if state is rounded stochastically.

        A bf16 second moment that changes by a thousandth per step would otherwise never change.
        """
        return self.state_dtype == torch.bfloat16


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scale and the overflow flag of a GradScaler."""

    scale: Tensor | None
    found_inf: Tensor | None

    def to(self, device: torch.device) -> Scaling:
        """Copy the values to the device of a step."""
        scale, found_inf = (
            None if t is None else t.to(device, non_blocking=True) for t in (self.scale, self.found_inf)
        )
        return Scaling(scale, found_inf)


class Stepper(Protocol):
    """Applies a rule to the parameters or tables of one device. A step calls the methods in this order."""

    device: torch.device

    @property
    def captured(self) -> bool:
        """Tell if CUDA graphs hold launches of this stepper."""

    def squares(self, options: StepOptions) -> Tensor:
        """A vector on the device whose sum is the squared norm of the gradients, still scaled."""

    def update(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        """Update. `squares` holds the sums of all steppers where there are several."""


class DenseStepper(Stepper, Protocol):
    """A stepper of parameters."""

    slots: list[ParamSlot]

    def set_grads(self, grads: Grads, addresses: list[int], unordered: frozenset[int]) -> None:
        """Take one gradient per slot. Those in `unordered` differ from their parameter in element order."""
