"""The family of Adam: steps by moments of the gradient (Adam, AdamW, NAdam, RAdam, Adamax, SparseAdam)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.optim.rules import TensorList, multiply_
from flatbed.rule import Group, Rule, Scalars, Tensors

if TYPE_CHECKING:
    import triton.language as tl
    from typing_extensions import Unpack

    from flatbed.kernels._triton.launch import sqrt

# ---- Adam


def update_moments_(group: Group, at: Tensors) -> TensorList:
    """Apply weight decay of either kind and update both moments; returns the gradients that they got."""
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


def adam_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
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


def adam_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps, weight_decay, decoupled = h[0], h[1], h[2], h[3], h[4], h[5]
    step = s[0] + 1
    step_size = lr / (1 - tl.exp(step * tl.log(beta1)))
    correction = tl.sqrt(1 - tl.exp(step * tl.log(beta2)))
    decay, coupled = 1 - lr * weight_decay * decoupled, weight_decay * (1 - decoupled)
    return (step,), (decay, coupled, 1 - beta1, beta2, 1 - beta2, correction, eps, step_size)


def adam_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    p *= c[0]
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    exp_avg = state[0] + c[2] * (g - state[0])
    exp_avg_sq = c[3] * state[1] + c[4] * g * g
    second = exp_avg_sq
    if HAS & 4:
        second = tl.maximum(state[2], exp_avg_sq, propagate_nan=tl.PropagateNan.ALL)
    p -= c[7] * exp_avg / (sqrt(second) / c[5] + c[6])
    return p, (exp_avg, exp_avg_sq, second)


def adam_fused(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step by torch's CPU kernel."""
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    steps = [torch.scalar_tensor(scalars[0] + 1, device="cpu")] * len(at.params)
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
        reference=adam_reference,
        prepare=adam_prepare,
        update=adam_update,
        fused=adam_fused,
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


# ---- AdamW: Adam with decoupled weight decay


class AdamW(Optimizer):
    """`torch.optim.AdamW` in one pass over memory.

    >>> import flatbed, torch
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = flatbed.optim.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()
    """

    _rule = Adam._rule
    _fixed = {"decoupled_weight_decay": True}  # noqa: RUF012

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, {**locals(), **self._fixed}, **extras)


# ---- NAdam: Adam with Nesterov momentum


def nadam_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
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


def nadam_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps, weight_decay, decoupled, momentum_decay = h[0], h[1], h[2], h[3], h[4], h[5], h[6]
    step = s[0] + 1
    log = -0.040821994520255166 * momentum_decay  # of 0.96 ** momentum_decay
    mu = beta1 * (1 - 0.5 * tl.exp(step * log))
    mu_next = beta1 * (1 - 0.5 * tl.exp((step + 1) * log))
    mu_product = (s[1].to(tl.float32) * mu.to(tl.float32)).to(tl.float64)  # rounded as torch rounds it
    # The bias correction of the denominator is multiplied into the numerators and eps instead.
    correction = tl.sqrt(1 - tl.exp(step * tl.log(beta2)))
    of_gradient = lr * correction * (1 - mu) / (1 - mu_product)
    of_average = lr * correction * mu_next / (1 - mu_product * mu_next)
    decay, coupled = 1 - lr * weight_decay * decoupled, weight_decay * (1 - decoupled)
    coefficients = (decay, coupled, 1 - beta1, beta2, 1 - beta2, eps * correction, of_gradient, of_average)
    return (step, mu_product), coefficients


def nadam_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    p *= c[0]
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    exp_avg = state[0] + c[2] * (g - state[0])
    exp_avg_sq = c[3] * state[1] + c[4] * g * g
    p -= (c[6] * g + c[7] * exp_avg) / (sqrt(exp_avg_sq) + c[5])
    return p, (exp_avg, exp_avg_sq)


class NAdam(Optimizer):
    """`torch.optim.NAdam` in one pass over memory."""

    _rule = Rule(
        hyperparameters=(*Adam._rule.hyperparameters, "momentum_decay"),
        state={"exp_avg": None, "exp_avg_sq": None},
        scalars=("step", "mu_product"),
        initial={"mu_product": 1.0},
        reference=nadam_reference,
        prepare=nadam_prepare,
        update=nadam_update,
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


# ---- RAdam: Adam with a rectified step size while the second moment is inexact


def radam_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own loop."""
    lr, (beta1, beta2), step = group["lr"], group["betas"], scalars[0] + 1
    update_moments_(group, at)
    updates = torch._foreach_div(at["exp_avg"], 1 - beta1**step)
    multiply_(updates, lr)
    correction, rho_inf = 1 - beta2**step, 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * (beta2**step) / correction
    if rho > 5.0:
        rectification = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
        adaptive = torch._foreach_sqrt(at["exp_avg_sq"])
        torch._foreach_add_(adaptive, group["eps"])
        torch._foreach_reciprocal_(adaptive)
        multiply_(adaptive, correction**0.5)
        torch._foreach_mul_(updates, adaptive)
        multiply_(updates, rectification)
    torch._foreach_add_(at.params, updates, alpha=-1.0)
    return (step,)


def radam_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps, weight_decay, decoupled, step = h[0], h[1], h[2], h[3], h[4], h[5], s[0] + 1
    power = tl.exp(step * tl.log(beta2))
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * power / (1 - power)
    rectified = rho > 5.0  # otherwise, rho is replaced by a value for which the root exists
    rho, rho_inf = tl.where(rectified, rho, 6.0), tl.where(rectified, rho_inf, 6.0)
    ratio = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
    step_size = lr / (1 - tl.exp(step * tl.log(beta1)))
    step_size *= tl.where(rectified, tl.sqrt(ratio * (1 - power)), 1.0)
    decay, coupled = 1 - lr * weight_decay * decoupled, weight_decay * (1 - decoupled)
    return (step,), (decay, coupled, 1 - beta1, beta2, 1 - beta2, eps, step_size, rectified.to(tl.float64))


def radam_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    p *= c[0]
    g = tl.where(c[1] != 0, g + c[1] * p, g)  # 0 * inf would be nan
    exp_avg = state[0] + c[2] * (g - state[0])
    exp_avg_sq = c[3] * state[1] + c[4] * g * g
    p -= c[6] * exp_avg / tl.where(c[7] != 0, sqrt(exp_avg_sq) + c[5], 1.0)
    return p, (exp_avg, exp_avg_sq)


class RAdam(Optimizer):
    """`torch.optim.RAdam` in one pass over memory."""

    _rule = Rule(
        hyperparameters=Adam._rule.hyperparameters,
        state={"exp_avg": None, "exp_avg_sq": None},
        reference=radam_reference,
        prepare=radam_prepare,
        update=radam_update,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)


# ---- Adamax: Adam with the largest gradient in place of the second moment


def adamax_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
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
        torch.maximum(exp_inf, size, out=exp_inf)  # the operation for lists would make a copy
    step_size = group["lr"] / (1 - beta1**step)
    torch._foreach_addcdiv_(at.params, at["exp_avg"], at["exp_inf"], value=-step_size)
    return (step,)


def adamax_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps, weight_decay = h[0], h[1], h[2], h[3], h[4]
    step = s[0] + 1
    step_size = lr / (1 - tl.exp(step * tl.log(beta1)))
    return (step,), (step_size, 1 - beta1, beta2, eps, weight_decay)


def adamax_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    g = tl.where(c[4] != 0, g + c[4] * p, g)  # 0 * inf would be nan
    exp_avg = state[0] + c[1] * (g - state[0])
    exp_inf = tl.maximum(c[2] * state[1], tl.abs(g) + c[3], propagate_nan=tl.PropagateNan.ALL)
    return p - c[0] * exp_avg / exp_inf, (exp_avg, exp_inf)


class Adamax(Optimizer):
    """`torch.optim.Adamax` in one pass over memory."""

    _rule = Rule(
        hyperparameters=("lr", "beta1", "beta2", "eps", "weight_decay"),
        state={"exp_avg": None, "exp_inf": None},
        reference=adamax_reference,
        prepare=adamax_prepare,
        update=adamax_update,
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


# ---- SparseAdam: torch's Adam for the rows of a batch, with eps added to the uncorrected root


def sparse_reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own operations."""
    lr, (beta1, beta2), step = group["lr"], group["betas"], scalars[0] + 1
    step_size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    for p, g, exp_avg, exp_avg_sq in zip(at.params, at.grads, at["exp_avg"], at["exp_avg_sq"], strict=True):
        exp_avg.add_(g.sub(exp_avg).mul_(1 - beta1))
        exp_avg_sq.add_(g.pow(2).sub_(exp_avg_sq).mul_(1 - beta2))
        p.add_(-step_size * exp_avg.div(exp_avg_sq.sqrt().add_(group["eps"])))
    return (step,)


def sparse_prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps = h[0], h[1], h[2], h[3]
    step = s[0] + 1
    correction = tl.sqrt(1 - tl.exp(step * tl.log(beta2))) / (1 - tl.exp(step * tl.log(beta1)))
    return (step,), (1 - beta1, 1 - beta2, eps, lr * correction)


def sparse_update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
    exp_avg = state[0] + (g - state[0]) * c[0]
    exp_avg_sq = state[1] + (g * g - state[1]) * c[1]
    return p - c[3] * (exp_avg / (sqrt(exp_avg_sq) + c[2])), (exp_avg, exp_avg_sq)


class SparseAdam(Optimizer):
    """`torch.optim.SparseAdam` for tables.

    >>> import flatbed, torch
    >>> emb = flatbed.Embedding(100, 8)
    >>> optimizer = flatbed.optim.SparseAdam([emb.table], lr=1e-3)
    >>> emb(torch.tensor([1, 5, 5])).sum().backward()
    >>> optimizer.step()
    """

    _rule = Rule(
        hyperparameters=("lr", "beta1", "beta2", "eps"),
        state={"exp_avg": None, "exp_avg_sq": None},
        reference=sparse_reference,
        prepare=sparse_prepare,
        update=sparse_update,
        for_tables="give it to Adam or AdamW, in an optimizer of its own",
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(params, locals(), **extras)
