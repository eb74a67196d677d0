"""Lion: steps of one size, in the direction of a momentum's sign."""

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
    """One step as torch operations."""
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    signs = torch._foreach_lerp(at["exp_avg"], at.grads, 1 - beta1)
    torch._foreach_sign_(signs)
    if weight_decay != 0:
        multiply_(at.params, 1 - lr * weight_decay)
    torch._foreach_add_(at.params, signs, alpha=-lr)
    torch._foreach_lerp_(at["exp_avg"], at.grads, 1 - beta2)
    return ()


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, weight_decay = h[0], h[1], h[2], h[3]
    return (), (lr, 1 - lr * weight_decay, 1 - beta1, 1 - beta2)


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    exp_avg = state[0]
    direction = exp_avg + c[2] * (g - exp_avg)
    sign = tl.where(direction > 0, 1.0, 0.0) - tl.where(direction < 0, 1.0, 0.0)
    return c[1] * p - c[0] * sign, (exp_avg + c[3] * (g - exp_avg),)


class Lion(Optimizer):
    """Lion, of [Chen et al. 2023](https://arxiv.org/abs/2302.06675), in one pass over memory.

    >>> import flatbed, torch
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = flatbed.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()
    """

    _rule = Rule(
        hyperparameters=("lr", "beta1", "beta2", "weight_decay"),
        state={"exp_avg": None},
        scalars=(),
        reference=reference,
        prepare=prepare,
        update=update,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
