"""How it is trained: torch's three ways, each in its best form, and flatbed's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

import flatbed
import flatbed.optim
from flatbed.bench.capture import Captured
from flatbed.bench.models import Batch, Case
from flatbed.bench.rows import FOREACH, FUSED, LOOP

MAX_NORM = 1.0
LEARNING_RATE = 1e-3

FlatbedOptimizer = flatbed.optim.AdamW | flatbed.optim.Adam | flatbed.optim.SGD


@dataclass(frozen=True, slots=True)
class Recipe:
    """An optimizer as torch's class and as flatbed's, with its hyperparameters.

    Which implementation runs is left to the way.
    """

    torch_class: Callable[..., torch.optim.Optimizer]
    flatbed_class: Callable[..., FlatbedOptimizer]
    options: Mapping[str, float]

    def make_torch(self, params: Sequence[Tensor], **more: bool) -> torch.optim.Optimizer:
        """Torch's optimizer over these parameters."""
        return self.torch_class(params, **self.options, **more)

    def make_flatbed(self, params: Sequence[Tensor], **more: float) -> FlatbedOptimizer:
        """The one of flatbed.optim over these parameters."""
        return self.flatbed_class(params, **self.options, **more)


_LR = {"lr": LEARNING_RATE}
OPTIMIZERS: dict[str, Recipe] = {
    "adamw": Recipe(torch.optim.AdamW, flatbed.optim.AdamW, _LR),
    "adam": Recipe(torch.optim.Adam, flatbed.optim.Adam, _LR),
    "sgd": Recipe(torch.optim.SGD, flatbed.optim.SGD, {**_LR, "momentum": 0.9}),
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
    setup: Callable[[nn.Module, Recipe], Trainer]


def _torch_way(
    model: nn.Module, recipe: Recipe, *, implementation: Literal["loop", "foreach", "fused"]
) -> Trainer:
    params = list(model.parameters())
    options = {
        "loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }[implementation]
    clip = partial(nn.utils.clip_grad_norm_, params, foreach=implementation != "loop")
    return Trainer(model, recipe.make_torch(params, **options), clip)


def _flat_way(
    model: nn.Module, recipe: Recipe, *, grads: Literal["follow", "bound"], one_call: bool = False
) -> Trainer:
    flat = flatbed.FlatParams(list(model.parameters()), grads=grads)
    optimizer = recipe.make_torch(flat.parameters(), fused=True)

    def whole(max_norm: float) -> None:
        flat.step(optimizer, max_norm=max_norm)

    return Trainer(model, optimizer, flat.clip_grad_norm_, whole if one_call else None)


def _optim_way(model: nn.Module, recipe: Recipe) -> Trainer:
    optimizer = recipe.make_flatbed(list(model.parameters()), max_norm=MAX_NORM)
    # The step clips by itself; it only has to know to what.
    return Trainer(model, optimizer, partial(setattr, optimizer, "max_norm"))


def _captured_way(model: nn.Module, recipe: Recipe) -> Trainer:
    params = list(model.parameters())
    optimizer = recipe.make_flatbed(params, max_norm=MAX_NORM)

    def step_and_zero() -> None:
        optimizer.step()
        # Gradients stay at the addresses that the graph knows: backward adds to these zeros.
        torch._foreach_zero_([param.grad for param in params if param.grad is not None])

    captured = Captured(step_and_zero)

    def whole(max_norm: float) -> None:
        if max_norm != optimizer.max_norm:
            optimizer.max_norm = max_norm
            captured.forget()  # the norm is a constant of the graph
        captured()

    return Trainer(model, optimizer, partial(setattr, optimizer, "max_norm"), whole)


OPTIM = "flatbed.optim"
CAPTURED = f"{OPTIM}, captured"

# The first is what the others are checked against.
WAYS: tuple[Way, ...] = (
    Way(LOOP, partial(_torch_way, implementation="loop")),
    Way(FOREACH, partial(_torch_way, implementation="foreach")),
    Way(FUSED, partial(_torch_way, implementation="fused")),
    Way("flat following", partial(_flat_way, grads="follow")),
    Way("flat following, one call", partial(_flat_way, grads="follow", one_call=True)),
    Way("flat bound", partial(_flat_way, grads="bound")),
    Way("flat bound, one call", partial(_flat_way, grads="bound", one_call=True)),
    Way(OPTIM, _optim_way),
)
CUDA_WAYS: tuple[Way, ...] = (Way(CAPTURED, _captured_way),)


def find_ways(device: torch.device, names: Sequence[str] = ()) -> tuple[Way, ...]:
    """All ways that the device offers, or those of these names; the first of all is always among them."""
    ways = WAYS + (CUDA_WAYS if device.type == "cuda" else ())
    known = [way.name for way in ways]
    for name in names:
        if name not in known:
            raise ValueError(
                f"no way named {name!r} on {device.type}; there are {', '.join(map(repr, known))}"
            )
    return tuple(way for way in ways if not names or way is ways[0] or way.name in names)
