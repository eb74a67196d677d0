"""The family of Adagrad: gradients over the root of their squares.

Adagrad, RowwiseAdagrad, RMSprop and Adadelta.
"""

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

    from flatbed.kernels._triton.launch import sqrt

# ---- Adagrad: steps shrink with the sum of squared gradients


def adagrad_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
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


def adagrad_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, lr_decay, weight_decay, eps = h[0], h[1], h[2], h[3]
    return (s[0] + 1,), (lr / (1 + s[0] * lr_decay), weight_decay, eps)


def adagrad_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    total = state[0] + g * g
    return p - c[0] * g / (sqrt(total) + c[2]), (total,)


def adagrad_fused(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step by torch's CPU kernel."""
    steps = [torch.scalar_tensor(scalars[0] + 1, device="cpu")] * len(at.params)
    options = {name: group[name] for name in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}
    torch._fused_adagrad_(at.params, at.grads, at["sum"], steps, **options)
    return (scalars[0] + 1,)


class Adagrad(Optimizer):
    """`torch.optim.Adagrad` in one pass over memory."""

    _rule = Rule(
        hyperparameters=("lr", "lr_decay", "weight_decay", "eps"),
        state={"sum": None},
        initial={"sum": "initial_accumulator_value"},
        reference=adagrad_reference,
        prepare=adagrad_prepare,
        update=adagrad_update,
        fused=adagrad_fused,
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
            if "sum" in state:  # tables keep theirs in their records
                state["sum"].share_memory_()


# ---- RowwiseAdagrad: one accumulated number per row of a table instead of one per element


def rowwise_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations."""
    for p, g, total in zip(at.params, at.grads, at["sum"], strict=True):
        total.add_(g.square().mean(1, keepdim=True))
        p.sub_(group["lr"] * g / total.sqrt().add_(group["eps"]))
    return scalars


def rowwise_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    return (), (h[0], h[1])


def rowwise_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    total = state[0] + state[1]
    return p - c[0] * g / (sqrt(total) + c[1]), (total,)


class RowwiseAdagrad(Optimizer):
    """Adagrad for tables with one number of state per row: the mean of its squared gradients, added up.

    It needs 4 bytes of state per row, where Adagrad needs as much as the weights and Adam twice that.

    >>> import flatbed, torch
    >>> emb = flatbed.Embedding(100, 8)
    >>> optimizer = flatbed.optim.RowwiseAdagrad([emb.table], lr=0.01)
    >>> emb(torch.tensor([1, 5, 5])).sum().backward()
    >>> optimizer.step()
    """

    _rule = Rule(
        hyperparameters=("lr", "eps"),
        state={"sum": None},
        initial={"sum": "initial_accumulator_value"},
        scalars=(),
        reference=rowwise_reference,
        prepare=rowwise_prepare,
        update=rowwise_update,
        rowwise=True,
        for_tables="give it to Adagrad, in an optimizer of its own",
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)


# ---- RMSprop: plain, centered and with momentum


def rmsprop_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own loop."""
    lr, alpha, momentum, grads = group["lr"], group["alpha"], group["momentum"], at.grads
    if group["weight_decay"] != 0:
        grads = torch._foreach_add(grads, at.params, alpha=group["weight_decay"])
    multiply_(at["square_avg"], alpha)
    torch._foreach_addcmul_(at["square_avg"], grads, grads, value=1 - alpha)
    if group["centered"]:
        torch._foreach_lerp_(at["grad_avg"], grads, 1 - alpha)
        denominator = torch._foreach_addcmul(at["square_avg"], at["grad_avg"], at["grad_avg"], value=-1)
        torch._foreach_sqrt_(denominator)
    else:
        denominator = torch._foreach_sqrt(at["square_avg"])
    torch._foreach_add_(denominator, group["eps"])
    if momentum > 0:
        multiply_(at["momentum_buffer"], momentum)
        torch._foreach_addcdiv_(at["momentum_buffer"], grads, denominator)
        torch._foreach_add_(at.params, at["momentum_buffer"], alpha=-lr)
    else:
        torch._foreach_addcdiv_(at.params, grads, denominator, value=-lr)
    return (scalars[0] + 1,)


def rmsprop_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, alpha, eps, weight_decay, momentum = h[0], h[1], h[2], h[3], h[4]
    return (s[0] + 1,), (lr, alpha, 1 - alpha, eps, weight_decay, momentum)


def rmsprop_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[4] != 0, g + c[4] * p, g)  # 0 * inf would be nan
    square_avg = c[1] * state[0] + c[2] * g * g
    buffer, grad_avg = state[1], state[2]
    variance = square_avg
    if HAS & 4:
        grad_avg += c[2] * (g - grad_avg)
        # Rounding may take the variance below zero.
        variance = tl.maximum(square_avg - grad_avg * grad_avg, 0.0, propagate_nan=tl.PropagateNan.ALL)
    direction = g / (sqrt(variance) + c[3])
    if HAS & 2:
        buffer = c[5] * buffer + direction
        direction = buffer
    return p - c[0] * direction, (square_avg, buffer, grad_avg)


class RMSprop(Optimizer):
    """`torch.optim.RMSprop` in one pass over memory."""

    _rule = Rule(
        hyperparameters=("lr", "alpha", "eps", "weight_decay", "momentum"),
        state={"square_avg": None, "momentum_buffer": "momentum", "grad_avg": "centered"},
        reference=rmsprop_reference,
        prepare=rmsprop_prepare,
        update=rmsprop_update,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)


# ---- Adadelta: step size from the ratio of recent updates to recent gradients


def adadelta_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own loop."""
    rho, eps, grads = group["rho"], group["eps"], at.grads
    if group["weight_decay"] != 0:
        grads = torch._foreach_add(grads, at.params, alpha=group["weight_decay"])
    multiply_(at["square_avg"], rho)
    torch._foreach_addcmul_(at["square_avg"], grads, grads, value=1 - rho)
    denominator = torch._foreach_add(at["square_avg"], eps)
    torch._foreach_sqrt_(denominator)
    deltas = torch._foreach_add(at["acc_delta"], eps)
    torch._foreach_sqrt_(deltas)
    torch._foreach_div_(deltas, denominator)
    torch._foreach_mul_(deltas, grads)
    multiply_(at["acc_delta"], rho)
    torch._foreach_addcmul_(at["acc_delta"], deltas, deltas, value=1 - rho)
    torch._foreach_add_(at.params, deltas, alpha=-group["lr"])
    return (scalars[0] + 1,)


def adadelta_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, rho, eps, weight_decay = h[0], h[1], h[2], h[3]
    return (s[0] + 1,), (lr, rho, 1 - rho, eps, weight_decay)


def adadelta_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[4] != 0, g + c[4] * p, g)  # 0 * inf would be nan
    square_avg = c[1] * state[0] + c[2] * g * g
    delta = sqrt((state[1] + c[3]) / (square_avg + c[3])) * g
    acc_delta = c[1] * state[1] + c[2] * delta * delta
    return p - c[0] * delta, (square_avg, acc_delta)


class Adadelta(Optimizer):
    """`torch.optim.Adadelta` in one pass over memory."""

    _rule = Rule(
        hyperparameters=("lr", "rho", "eps", "weight_decay"),
        state={"square_avg": None, "acc_delta": None},
        reference=adadelta_reference,
        prepare=adadelta_prepare,
        update=adadelta_update,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
