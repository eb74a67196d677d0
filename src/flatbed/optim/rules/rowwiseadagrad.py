"""RowwiseAdagrad: one accumulated number per row of a table instead of one per element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.rule import Group, Rule, Scalars, Tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flatbed.kernels._triton.launch import sqrt


def reference(group: Group, at: Tensors, scalars: Scalars) -> Scalars:
    """One step as torch operations."""
    for p, g, total in zip(at.params, at.grads, at["sum"], strict=True):
        total.add_(g.square().mean(1, keepdim=True))
        p.sub_(group["lr"] * g / total.sqrt().add_(group["eps"]))
    return scalars


def prepare(h, s):  # type: ignore[no-untyped-def] # noqa: D103
    return (), (h[0], h[1])


def update(p, g, state, c, HAS):  # type: ignore[no-untyped-def] # noqa: D103
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
        reference=reference,
        prepare=prepare,
        update=update,
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
