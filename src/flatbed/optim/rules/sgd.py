"""SGD and Lion: steps by a gradient and its momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.optim.rules import multiply_
from flatbed.rule import Group, Rule, Scalars, Tensors

if TYPE_CHECKING:
    import triton.language as tl
    from typing_extensions import Unpack

# ---- SGD: with and without momentum


def sgd_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
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


def sgd_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, momentum, dampening, weight_decay, nesterov = h[0], h[1], h[2], h[3], h[4]
    of_gradient = tl.where(s[0] == 0, 1.0, 1 - dampening)
    seen = tl.where(momentum != 0, 1.0, s[0])
    return (seen,), (lr, weight_decay, momentum, of_gradient, nesterov)


def sgd_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    buffer = c[2] * state[0] + c[3] * g
    if HAS & 1:
        g = tl.where(c[4] != 0, g + c[2] * buffer, buffer)
    return p - c[0] * g, (buffer,)


def sgd_fused(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step by torch's CPU kernel."""
    wrong = at.params[0].dtype in (torch.bfloat16, torch.float16)  # pytorch/pytorch#191763
    if wrong or group["momentum"] == group["weight_decay"] == 0:  # then lists give the same bits, faster
        grads = torch._foreach_neg(at.grads) if group["maximize"] else at.grads
        return sgd_reference(group, Tensors(at.params, grads, at.state), scalars)
    options = {name: group[name] for name in (*SGD._rule.hyperparameters, "maximize")}
    first, buffers = scalars[0] == 0, at.state.get("momentum_buffer", [])
    torch._fused_sgd_(at.params, at.grads, buffers, is_first_step=first, **options)
    return (1.0 if buffers else scalars[0],)


class SGD(Optimizer):
    """`torch.optim.SGD` in one pass over memory.

    >>> import flatbed, torch
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = flatbed.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()
    """

    _rule = Rule(
        hyperparameters=("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        state={"momentum_buffer": "momentum"},
        scalars=("_seen",),  # whether the buffer has had its first gradient
        initial={"momentum_buffer": -0.0},  # shows in state dicts that it is new; no sum of gradients is -0.0
        row_scalars={"_seen": "dampening"},
        reference=sgd_reference,
        prepare=sgd_prepare,
        update=sgd_update,
        fused=sgd_fused,
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


# ---- Lion: steps of one size, in the direction of a momentum's sign


def lion_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations."""
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    signs = torch._foreach_lerp(at["exp_avg"], at.grads, 1 - beta1)
    torch._foreach_sign_(signs)
    if weight_decay != 0:
        multiply_(at.params, 1 - lr * weight_decay)
    torch._foreach_add_(at.params, signs, alpha=-lr)
    torch._foreach_lerp_(at["exp_avg"], at.grads, 1 - beta2)
    return ()


def lion_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, weight_decay = h[0], h[1], h[2], h[3]
    return (), (lr, 1 - lr * weight_decay, 1 - beta1, 1 - beta2)


def lion_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    exp_avg = state[0]
    direction = exp_avg + c[2] * (g - exp_avg)
    sign = tl.where(direction > 0, 1.0, 0.0) - tl.where(direction < 0, 1.0, 0.0)
    return c[1] * p - c[0] * sign, (exp_avg + c[3] * (g - exp_avg),)


class Lion(Optimizer):
    """Lion, of [Chen et al. 2023](https://arxiv.org/abs/2302.06675), in one pass over memory.

    >>> import flatbed, torch
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = flatbed.optim.Lion(model.parameters(), lr=1e-4)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()
    """

    _rule = Rule(
        hyperparameters=("lr", "beta1", "beta2", "weight_decay"),
        state={"exp_avg": None},
        scalars=(),
        reference=lion_reference,
        prepare=lion_prepare,
        update=lion_update,
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
