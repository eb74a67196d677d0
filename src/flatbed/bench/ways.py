"""How it is trained: torch's three ways, each in its best form, and flatbed's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

import flatbed
from flatbed.bench.models import Batch, Case
from flatbed.bench.rows import FUSED, LOOP

MAX_NORM = 1.0
LEARNING_RATE = 1e-3


class MakeOptimizer(Protocol):
    """An optimizer's class with its hyperparameters; which implementation runs is left to the way."""

    def __call__(
        self, params: Iterable[Tensor], *, foreach: bool | None = None, fused: bool | None = None
    ) -> torch.optim.Optimizer: ...


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=LEARNING_RATE),
    "adam": partial(torch.optim.Adam, lr=LEARNING_RATE),
    "sgd": partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9),
}


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model set up for training in one way: `clip` takes the largest allowed norm of all gradients.

    A way that does clip, step and zero_grad in one call brings it as `whole`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], object]
    whole: Callable[[float], object] | None = None

    def backward(self, case: Case, batch: Batch) -> None:
        """The part that is the same in every way."""
        loss = case.loss(self.model, batch)
        torch.autograd.backward(loss)

    def update(self, max_norm: float = MAX_NORM) -> None:
        """The part that differs: clip, step, zero_grad."""
        if self.whole is not None:
            self.whole(max_norm)
            return
        self.clip(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class Way:
    """A way of training, by name."""

    name: str
    setup: Callable[[nn.Module, MakeOptimizer], Trainer]


def _torch_way(
    model: nn.Module, make_optimizer: MakeOptimizer, *, implementation: Literal["loop", "foreach", "fused"]
) -> Trainer:
    params = list(model.parameters())
    options: dict[str, bool] = {
        "loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }[implementation]
    clip = partial(nn.utils.clip_grad_norm_, params, foreach=implementation != "loop")
    return Trainer(model, make_optimizer(params, **options), clip)


def _flat_way(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    grads: Literal["follow", "bound"],
    one_call: bool = False,
) -> Trainer:
    flat = flatbed.FlatParams(list(model.parameters()), grads=grads)
    optimizer = make_optimizer(flat.parameters(), fused=True)

    def whole(max_norm: float) -> None:
        flat.step(optimizer, max_norm=max_norm)

    return Trainer(model, optimizer, flat.clip_grad_norm_, whole if one_call else None)


# The first is what the others are checked against.
WAYS: tuple[Way, ...] = (
    Way(LOOP, partial(_torch_way, implementation="loop")),
    Way("torch foreach", partial(_torch_way, implementation="foreach")),
    Way(FUSED, partial(_torch_way, implementation="fused")),
    Way("flat following", partial(_flat_way, grads="follow")),
    Way("flat following, one call", partial(_flat_way, grads="follow", one_call=True)),
    Way("flat bound", partial(_flat_way, grads="bound")),
    Way("flat bound, one call", partial(_flat_way, grads="bound", one_call=True)),
)
