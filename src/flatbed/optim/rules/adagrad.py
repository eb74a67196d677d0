"""Adagrad: steps shrink with the sum of squared gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.rule import Group, Rule, Scalars, Tensors

if TYPE_CHECKING:
    import triton.language as tl
    from typing_extensions import Unpack

    from flatbed.kernels._triton.launch import sqrt


def reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own loop."""
    step, grads = scalars[0] + 1, at.grads
    if group["weight_decay"] != 0:
        grads = torch._foreach_add(grads, at.params, alpha=group["weight_decay"])
    step_size = group["lr"] / (1 + (step - 1) * group["lr_decay"])
    torch._foreach_addcmul_(at["sum"], grads, grads, value=1)
    denominator = torch._foreach_sqrt(at["sum"])
    torch._foreach_add_(denominator, group["eps"])
    torch._foreach_addcdiv_(at.params, grads, denominator, value=-step_size)
    return (step,)


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, lr_decay, weight_decay, eps = h[0], h[1], h[2], h[3]
    return (s[0] + 1,), (lr / (1 + s[0] * lr_decay), weight_decay, eps)


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    total = state[0] + g * g
    return p - c[0] * g / (sqrt(total) + c[2]), (total,)


def fused(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step by torch's CPU kernel."""
    steps = [torch.tensor(scalars[0] + 1, device="cpu")] * len(at.params)
    options = {name: group[name] for name in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}
    torch._fused_adagrad_(at.params, at.grads, at["sum"], steps, **options)
    return (scalars[0] + 1,)


class Adagrad(Optimizer):
    """`torch.optim.Adagrad` in one pass over memory."""

    _rule = Rule(
        hyperparameters=("lr", "lr_decay", "weight_decay", "eps"),
        state={"sum": None},
        initial={"sum": "initial_accumulator_value"},
        reference=reference,
        prepare=prepare,
        update=update,
        fused=fused,
        eager=True,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)

    def share_memory(self) -> None:
        """Let other processes see the state, as torch's Adagrad does."""
        for state in self.state.values():
            if "sum" in state:  # a table's lies with its rows
                state["sum"].share_memory_()
