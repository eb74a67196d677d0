"""SGD, with and without momentum."""

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
    momentum, weight_decay, grads = group["momentum"], group["weight_decay"], at.grads
    if weight_decay != 0:
        grads = torch._foreach_add(grads, at.params, alpha=weight_decay)
    if momentum != 0:
        buffers = at["momentum_buffer"]
        if scalars[0] == 0:  # the first gradient is not dampened
            torch._foreach_copy_(buffers, grads)
        else:
            multiply_(buffers, momentum)
            torch._foreach_add_(buffers, grads, alpha=1 - group["dampening"])
        grads = torch._foreach_add(grads, buffers, alpha=momentum) if group["nesterov"] else buffers
    torch._foreach_add_(at.params, grads, alpha=-group["lr"])
    return (1.0 if momentum != 0 else scalars[0],)


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, momentum, dampening, weight_decay, nesterov = h[0], h[1], h[2], h[3], h[4]
    of_gradient = tl.where(s[0] == 0, 1.0, 1 - dampening)
    seen = tl.where(momentum != 0, 1.0, s[0])
    return (seen,), (lr, weight_decay, momentum, of_gradient, nesterov)


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    buffer = c[2] * state[0] + c[3] * g
    if HAS & 1:
        g = tl.where(c[4] != 0, g + c[2] * buffer, buffer)
    return p - c[0] * g, (buffer,)


def fused(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step by torch's CPU kernel."""
    wrong = at.params[0].dtype in (torch.bfloat16, torch.float16)  # pytorch/pytorch#191763
    if wrong or group["momentum"] == group["weight_decay"] == 0:  # where lists give the same bits, faster
        grads = torch._foreach_neg(at.grads) if group["maximize"] else at.grads
        return reference(group, Tensors(at.params, grads, at.state), scalars)
    options = {name: group[name] for name in (*SGD._rule.hyperparameters, "maximize")}
    first, buffers = scalars[0] == 0, at.state.get("momentum_buffer", [])
    torch._fused_sgd_(at.params, at.grads, buffers, is_first_step=first, **options)
    return (1.0 if buffers else scalars[0],)


class SGD(Optimizer):
    """`torch.optim.SGD` in one pass over memory.

    >>> import flatbed, torch
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = flatbed.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()
    """

    _rule = Rule(
        hyperparameters=("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        state={"momentum_buffer": "momentum"},
        scalars=("_seen",),  # whether the buffer has had its first gradient
        initial={"momentum_buffer": -0.0},  # tells a state dict the same; no sum of gradients is -0.0
        row_scalars={"_seen": "dampening"},
        reference=reference,
        prepare=prepare,
        update=update,
        fused=fused,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
