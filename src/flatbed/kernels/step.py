"""What a step is given: parameters with their places, and what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from flatbed.layout import dense_stride, is_dense

# Entries of the fp64 vector that all steps on one device share.
SKIP, NORM, SKIPPED, STEPS = range(4)

Grads = Sequence[Tensor | None]
"""One per row; None where a parameter has no gradient."""


@dataclass(slots=True)
class ParamSlot:
    """One parameter, where its state lies, and what its gradient is like.

    State, master and average are dense and have the parameter's order of dimensions.
    """

    name: str
    param: Tensor
    group: int
    grad_dtype: torch.dtype
    state: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    master: Tensor | None = None
    ema: Tensor | None = None

    @property
    def state_dtype(self) -> torch.dtype:
        """One for all tensors of state."""
        return next((t.dtype for t in self.state.values()), self.param.dtype)


def stride_of(param: Tensor) -> tuple[int, ...]:
    """The parameter's stride; if it has holes, the dense one nearest to it."""
    shape, stride = tuple(param.shape), param.stride()
    return stride if is_dense(shape, stride) else dense_stride(shape, stride)


def is_whole(param: Tensor) -> bool:
    """Whether a parameter has no holes."""
    return is_dense(tuple(param.shape), param.stride())


def in_order(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the order of its parameter's elements; a copy, if it is not."""
    stride = stride_of(param)
    if grad.stride() == stride or grad.numel() <= 1:
        return grad
    ordered = torch.empty_strided(tuple(grad.shape), stride, dtype=grad.dtype, device=grad.device)
    return ordered.copy_(grad)


@dataclass(slots=True)
class Settings:
    """What all steps have in common; the user may change it between them."""

    max_norm: float | None = None
    skip_nonfinite: bool = False
    stochastic_rounding: bool = False
    stochastic_state: bool = False
    """Round bf16 state by chance: a second moment that moves by a thousandth would else not move at all."""
    ema_decay: float | None = None

    @property
    def normed(self) -> bool:
        """Whether the norm of all gradients is needed."""
        return self.max_norm is not None or self.skip_nonfinite


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a GradScaler hands over."""

    scale: Tensor | None
    found_inf: Tensor | None

    def to(self, device: torch.device) -> Scaling:
        """The same, on the device of a step."""
        scale, found_inf = (
            None if t is None else t.to(device, non_blocking=True) for t in (self.scale, self.found_inf)
        )
        return Scaling(scale, found_inf)


class Stepper(Protocol):
    """Runs a rule over the parameters of one device. The calls of a step come in this order."""

    rows: list[ParamSlot]
    device: torch.device
    addressed: bool
    """Whether it goes by addresses, and not by the tensors themselves."""

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs hold launches of this stepper."""

    def place(self, grads: Grads, unordered: frozenset[int], addresses: list[int] | None) -> None:
        """Take gradients. Those in `unordered` do not lie in the order of their parameter's elements.
        Addresses are given when some are not those of the last step; a missing gradient's is 0.
        """

    def squares(self, settings: Settings, scaling: Scaling | None) -> Tensor:
        """A vector on the device whose sum is the squared norm of the gradients as they are."""

    def update(self, settings: Settings, scaling: Scaling | None, squares: Tensor | None) -> None:
        """Step. `squares` are those of all devices, if there are several."""
