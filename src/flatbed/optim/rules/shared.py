"""Operations that several rules share, on lists of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from flatbed.rule import Group, Tensors

TensorList = list[Tensor] | tuple[Tensor, ...]


def multiply_(tensors: TensorList, factor: float | Tensor) -> None:
    """`Tensor.mul_` on each of these tensors, which are all of one dtype; rounds as `Tensor.mul_` does."""
    if tensors[0].dtype in (torch.bfloat16, torch.float16) and not isinstance(factor, Tensor):
        # A number would be rounded to 8 bits first.
        factor = torch.tensor(factor, dtype=torch.float32, device="cpu")
    torch._foreach_mul_(tensors, factor)


def update_moments_(group: Group, at: Tensors) -> TensorList:
    """Weight decay of either kind, and the two moments; returns the gradients that went into them."""
    (beta1, beta2), weight_decay, grads = group["betas"], group["weight_decay"], at.grads
    if weight_decay != 0:
        if group["decoupled_weight_decay"]:
            multiply_(at.params, 1 - group["lr"] * weight_decay)
        else:
            grads = torch._foreach_add(grads, at.params, alpha=weight_decay)
    torch._foreach_lerp_(at["exp_avg"], grads, 1 - beta1)
    multiply_(at["exp_avg_sq"], beta2)
    torch._foreach_addcmul_(at["exp_avg_sq"], grads, grads, value=1 - beta2)
    return grads
