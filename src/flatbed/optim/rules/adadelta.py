"""Adadelta: steps as large as recent steps, for their gradients."""

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
    rho, eps, grads = group["rho"], group["eps"], at.grads
    if group["weight_decay"] != 0:
        grads = torch._foreach_add(grads, at.params, alpha=group["weight_decay"])
    multiply_(at["square_avg"], rho)
    torch._foreach_addcmul_(at["square_avg"], grads, grads, value=1 - rho)
    denominator = torch._foreach_add(at["square_avg"], eps)
    torch._foreach_sqrt_(denominator)
    deltas = torch._foreach_add(at["acc_delta"], eps)
    torch._foreach_sqrt_(deltas)
    torch._foreach_div_(deltas, denominator)
    torch._foreach_mul_(deltas, grads)
    multiply_(at["acc_delta"], rho)
    torch._foreach_addcmul_(at["acc_delta"], deltas, deltas, value=1 - rho)
    torch._foreach_add_(at.params, deltas, alpha=-group["lr"])
    return (scalars[0] + 1,)


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, rho, eps, weight_decay = h[0], h[1], h[2], h[3]
    return (s[0] + 1,), (lr, rho, 1 - rho, eps, weight_decay)


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[4] != 0, g + c[4] * p, g)  # 0 * inf would be nan
    square_avg = c[1] * state[0] + c[2] * g * g
    delta = sqrt((state[1] + c[3]) / (square_avg + c[3])) * g
    acc_delta = c[1] * state[1] + c[2] * delta * delta
    return p - c[0] * delta, (square_avg, acc_delta)


class Adadelta(Optimizer):
    """`torch.optim.Adadelta` in one pass over memory."""

    _rule = Rule(
        hyperparameters=("lr", "rho", "eps", "weight_decay"),
        state={"square_avg": None, "acc_delta": None},
        reference=reference,
        prepare=prepare,
        update=update,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
