"""RAdam: Adam with a rectified step size while the second moment is inexact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.optim.rules.shared import multiply_, update_moments_
from flatbed.rule import Group, Rule, Scalars, Tensors

if TYPE_CHECKING:
    import triton.language as tl
    from typing_extensions import Unpack

    from flatbed.kernels._triton.launch import sqrt


def reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own loop."""
    lr, (beta1, beta2), step = group["lr"], group["betas"], scalars[0] + 1
    update_moments_(group, at)
    updates = torch._foreach_div(at["exp_avg"], 1 - beta1**step)
    multiply_(updates, lr)
    correction, rho_inf = 1 - beta2**step, 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * (beta2**step) / correction
    if rho > 5.0:
        rectification = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
        adaptive = torch._foreach_sqrt(at["exp_avg_sq"])
        torch._foreach_add_(adaptive, group["eps"])
        torch._foreach_reciprocal_(adaptive)
        multiply_(adaptive, correction**0.5)
        torch._foreach_mul_(updates, adaptive)
        multiply_(updates, rectification)
    torch._foreach_add_(at.params, updates, alpha=-1.0)
    return (step,)


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps, weight_decay, decoupled, step = h[0], h[1], h[2], h[3], h[4], h[5], s[0] + 1
    power = tl.exp(step * tl.log(beta2))
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * power / (1 - power)
    rectified = rho > 5.0  # otherwise, values that have a root
    rho, rho_inf = tl.where(rectified, rho, 6.0), tl.where(rectified, rho_inf, 6.0)
    ratio = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
    step_size = lr / (1 - tl.exp(step * tl.log(beta1)))
    step_size *= tl.where(rectified, tl.sqrt(ratio * (1 - power)), 1.0)
    decay, coupled = 1 - lr * weight_decay * decoupled, weight_decay * (1 - decoupled)
    return (step,), (decay, coupled, 1 - beta1, beta2, 1 - beta2, eps, step_size, rectified.to(tl.float64))


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    p *= c[0]
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    exp_avg = state[0] + c[2] * (g - state[0])
    exp_avg_sq = c[3] * state[1] + c[4] * g * g
    p -= c[6] * exp_avg / tl.where(c[7] != 0, sqrt(exp_avg_sq) + c[5], 1.0)
    return p, (exp_avg, exp_avg_sq)


class RAdam(Optimizer):
    """`torch.optim.RAdam` in one pass over memory."""

    _rule = Rule(
        hyperparameters=("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay"),
        state={"exp_avg": None, "exp_avg_sq": None},
        reference=reference,
        prepare=prepare,
        update=update,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
