"""NAdam: Adam with Nesterov momentum."""

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
    grads = update_moments_(group, at)
    mu, mu_next = (beta1 * (1.0 - 0.5 * (0.96 ** (t * group["momentum_decay"]))) for t in (step, step + 1))
    so_far = torch.tensor(scalars[1], dtype=torch.float32, device="cpu")
    mu_product = (so_far * mu).item()  # rounded as torch rounds it
    denominator = torch._foreach_div(at["exp_avg_sq"], 1 - beta2**step)
    torch._foreach_sqrt_(denominator)
    torch._foreach_add_(denominator, group["eps"])
    of_gradient = -lr * (1.0 - mu) / (1.0 - mu_product)
    torch._foreach_addcdiv_(at.params, grads, denominator, value=of_gradient)
    of_average = (-lr * mu_next) / (1.0 - mu_product * mu_next)
    torch._foreach_addcdiv_(at.params, at["exp_avg"], denominator, value=of_average)
    return step, mu_product


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps, weight_decay, decoupled, momentum_decay = h[0], h[1], h[2], h[3], h[4], h[5], h[6]
    step = s[0] + 1
    log = -0.040821994520255166 * momentum_decay  # of 0.96 ** momentum_decay
    mu = beta1 * (1 - 0.5 * tl.exp(step * log))
    mu_next = beta1 * (1 - 0.5 * tl.exp((step + 1) * log))
    mu_product = (s[1].to(tl.float32) * mu.to(tl.float32)).to(tl.float64)  # rounded as torch rounds it
    # The denominator's bias correction is moved to what is divided.
    correction = tl.sqrt(1 - tl.exp(step * tl.log(beta2)))
    of_gradient = lr * correction * (1 - mu) / (1 - mu_product)
    of_average = lr * correction * mu_next / (1 - mu_product * mu_next)
    decay, coupled = 1 - lr * weight_decay * decoupled, weight_decay * (1 - decoupled)
    coefficients = (decay, coupled, 1 - beta1, beta2, 1 - beta2, eps * correction, of_gradient, of_average)
    return (step, mu_product), coefficients


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    p *= c[0]
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    exp_avg = state[0] + c[2] * (g - state[0])
    exp_avg_sq = c[3] * state[1] + c[4] * g * g
    p -= (c[6] * g + c[7] * exp_avg) / (sqrt(exp_avg_sq) + c[5])
    return p, (exp_avg, exp_avg_sq)


class NAdam(Optimizer):
    """`torch.optim.NAdam` in one pass over memory."""

    _rule = Rule(
        hyperparameters=(
            "lr",
            "beta1",
            "beta2",
            "eps",
            "weight_decay",
            "decoupled_weight_decay",
            "momentum_decay",
        ),
        state={"exp_avg": None, "exp_avg_sq": None},
        scalars=("step", "mu_product"),
        initial={"mu_product": 1.0},
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
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
