"""Adamax: Adam with the largest gradient in place of the second moment."""

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


def reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own loop."""
    (beta1, beta2), weight_decay, grads = group["betas"], group["weight_decay"], at.grads
    step = scalars[0] + 1
    if weight_decay != 0:
        grads = torch._foreach_add(grads, at.params, alpha=weight_decay)
    torch._foreach_lerp_(at["exp_avg"], grads, 1 - beta1)
    sizes = torch._foreach_abs(grads)
    torch._foreach_add_(sizes, group["eps"])
    multiply_(at["exp_inf"], beta2)
    for exp_inf, size in zip(at["exp_inf"], sizes, strict=True):
        torch.maximum(exp_inf, size, out=exp_inf)  # its form for lists makes a copy on the way
    step_size = group["lr"] / (1 - beta1**step)
    torch._foreach_addcdiv_(at.params, at["exp_avg"], at["exp_inf"], value=-step_size)
    return (step,)


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps, weight_decay = h[0], h[1], h[2], h[3], h[4]
    step = s[0] + 1
    step_size = lr / (1 - tl.exp(step * tl.log(beta1)))
    return (step,), (step_size, 1 - beta1, beta2, eps, weight_decay)


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[4] != 0, g + c[4] * p, g)  # 0 * inf would be nan
    exp_avg = state[0] + c[1] * (g - state[0])
    exp_inf = tl.maximum(c[2] * state[1], tl.abs(g) + c[3], propagate_nan=tl.PropagateNan.ALL)
    return p - c[0] * exp_avg / exp_inf, (exp_avg, exp_inf)


class Adamax(Optimizer):
    """`torch.optim.Adamax` in one pass over memory."""

    _rule = Rule(
        hyperparameters=("lr", "beta1", "beta2", "eps", "weight_decay"),
        state={"exp_avg": None, "exp_inf": None},
        reference=reference,
        prepare=prepare,
        update=update,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
