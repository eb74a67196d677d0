"""SparseAdam: Adam as torch has it for the rows of a batch, with eps added to the uncorrected root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.rule import Group, Rule, Scalars, Tensors

if TYPE_CHECKING:
    import triton.language as tl
    from typing_extensions import Unpack

    from flatbed.kernels._triton.launch import sqrt


def reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations, in the order of torch's own."""
    lr, (beta1, beta2), step = group["lr"], group["betas"], scalars[0] + 1
    step_size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    for p, g, exp_avg, exp_avg_sq in zip(at.params, at.grads, at["exp_avg"], at["exp_avg_sq"], strict=True):
        exp_avg.add_(g.sub(exp_avg).mul_(1 - beta1))
        exp_avg_sq.add_(g.pow(2).sub_(exp_avg_sq).mul_(1 - beta2))
        p.add_(-step_size * exp_avg.div(exp_avg_sq.sqrt().add_(group["eps"])))
    return (step,)


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    lr, beta1, beta2, eps = h[0], h[1], h[2], h[3]
    step = s[0] + 1
    correction = tl.sqrt(1 - tl.exp(step * tl.log(beta2))) / (1 - tl.exp(step * tl.log(beta1)))
    return (step,), (1 - beta1, 1 - beta2, eps, lr * correction)


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
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
        reference=reference,
        prepare=prepare,
        update=update,
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
