"""Adam, and the arithmetic of AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.optim.rules.shared import update_moments_
from flatbed.rule import Group, Rule, Scalars, Tensors

if TYPE_CHECKING:
    import triton.language as tl
    from typing_extensions import Unpack

    from flatbed.kernels._triton.launch import sqrt


def reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own loop."""
    lr, (beta1, beta2), step = group["lr"], group["betas"], scalars[0] + 1
    update_moments_(group, at)
    if group["amsgrad"]:
        torch._foreach_maximum_(at["max_exp_avg_sq"], at["exp_avg_sq"])
    denominator = torch._foreach_sqrt(at["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
    torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(denominator, group["eps"])
    torch._foreach_addcdiv_(at.params, at["exp_avg"], denominator, value=-(lr / (1 - beta1**step)))
    return (step,)


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps, weight_decay, decoupled = h[0], h[1], h[2], h[3], h[4], h[5]
    step = s[0] + 1
    step_size = lr / (1 - tl.exp(step * tl.log(beta1)))
    correction = tl.sqrt(1 - tl.exp(step * tl.log(beta2)))
    decay, coupled = 1 - lr * weight_decay * decoupled, weight_decay * (1 - decoupled)
    return (step,), (decay, coupled, 1 - beta1, beta2, 1 - beta2, correction, eps, step_size)


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    p *= c[0]
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    exp_avg = state[0] + c[2] * (g - state[0])
    exp_avg_sq = c[3] * state[1] + c[4] * g * g
    second = exp_avg_sq
    if HAS & 4:
        second = tl.maximum(state[2], exp_avg_sq, propagate_nan=tl.PropagateNan.ALL)
    p -= c[7] * exp_avg / (sqrt(second) / c[5] + c[6])
    return p, (exp_avg, exp_avg_sq, second)


def fused(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step by torch's CPU kernel."""
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    steps = [torch.tensor(scalars[0] + 1, device="cpu")] * len(at.params)
    moments = at["exp_avg"], at["exp_avg_sq"], at.state.get("max_exp_avg_sq", [])
    options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    kernel(at.params, at.grads, *moments, steps, **options)
    return (scalars[0] + 1,)


class Adam(Optimizer):
    """`torch.optim.Adam` in one pass over memory.

    >>> import flatbed, torch
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = flatbed.optim.Adam(model.parameters(), lr=1e-3, max_norm=1.0)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()
    """

    _rule = Rule(
        hyperparameters=("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay"),
        state={"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"},
        reference=reference,
        prepare=prepare,
        update=update,
        fused=fused,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
