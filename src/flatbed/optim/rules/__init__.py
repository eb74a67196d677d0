"""Rules by family: their arithmetic as torch operations, and for one element as Triton functions."""

from __future__ import annotations

import torch
from torch import Tensor

TensorList = list[Tensor] | tuple[Tensor, ...]


def multiply_(tensors: TensorList, factor: float | Tensor) -> None:
    """`Tensor.mul_` on each of these tensors, which are all of one dtype; rounds as `Tensor.mul_` does."""
    if tensors[0].dtype in (torch.bfloat16, torch.float16) and not isinstance(factor, Tensor):
        # A number would be rounded to 8 bits first.
        factor = torch.tensor(factor, dtype=torch.float32, device="cpu")
    torch._foreach_mul_(tensors, factor)
