"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flatbed.optim.optimizer import Optimizer
from flatbed.optim.options import Extras, ParamsT
from flatbed.optim.rules.adam import Adam

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AdamW(Optimizer):
    """`torch.optim.AdamW` in one pass over memory.

    >>> import flatbed, torch
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = flatbed.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, max_norm=1.0)
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
