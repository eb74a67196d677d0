"""RMSprop, plain, centered and with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.optim.rules.shared import multiply_
from flatbed.rule import Group, Rule, Scalars, Tensors

if TYPE_CHECKING:
    import triton.language as tl
    from typing_extensions import Unpack

    from flatbed.kernels._triton.launch import sqrt


def reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own loop."""
    lr, alpha, momentum, grads = group["lr"], group["alpha"], group["momentum"], at.grads
    if group["weight_decay"] != 0:
        grads = torch._foreach_add(grads, at.params, alpha=group["weight_decay"])
    multiply_(at["square_avg"], alpha)
    torch._foreach_addcmul_(at["square_avg"], grads, grads, value=1 - alpha)
    if group["centered"]:
        torch._foreach_lerp_(at["grad_avg"], grads, 1 - alpha)
        denominator = torch._foreach_addcmul(at["square_avg"], at["grad_avg"], at["grad_avg"], value=-1)
        torch._foreach_sqrt_(denominator)
    else:
        denominator = torch._foreach_sqrt(at["square_avg"])
    torch._foreach_add_(denominator, group["eps"])
    if momentum > 0:
        multiply_(at["momentum_buffer"], momentum)
        torch._foreach_addcdiv_(at["momentum_buffer"], grads, denominator)
        torch._foreach_add_(at.params, at["momentum_buffer"], alpha=-lr)
    else:
        torch._foreach_addcdiv_(at.params, grads, denominator, value=-lr)
    return (scalars[0] + 1,)


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, alpha, eps, weight_decay, momentum = h[0], h[1], h[2], h[3], h[4]
    return (s[0] + 1,), (lr, alpha, 1 - alpha, eps, weight_decay, momentum)


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[4] != 0, g + c[4] * p, g)  # 0 * inf would be nan
    square_avg = c[1] * state[0] + c[2] * g * g
    buffer, grad_avg = state[1], state[2]
    variance = square_avg
    if HAS & 4:
        grad_avg += c[2] * (g - grad_avg)
        # Rounding may take it below zero.
        variance = tl.maximum(square_avg - grad_avg * grad_avg, 0.0, propagate_nan=tl.PropagateNan.ALL)
    direction = g / (sqrt(variance) + c[3])
    if HAS & 2:
        buffer = c[5] * buffer + direction
        direction = buffer
    return p - c[0] * direction, (square_avg, buffer, grad_avg)


class RMSprop(Optimizer):
    """`torch.optim.RMSprop` in one pass over memory."""

    _rule = Rule(
        hyperparameters=("lr", "alpha", "eps", "weight_decay", "momentum"),
        state={"square_avg": None, "momentum_buffer": "momentum", "grad_avg": "centered"},
        reference=reference,
        prepare=prepare,
        update=update,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
