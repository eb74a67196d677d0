"""One mistake, as data: what is done, and what must be said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import flatbed

Attempt = Callable[[Path], object]
"""Makes the mistake; it is given an empty folder."""


class Mistake(NamedTuple):
    """A call that someone in a hurry would write, and the error that tells them what to write instead."""

    of: str
    """The public function, without the name of the package: FlatParams.step."""
    what: str
    attempt: Attempt
    error: type[BaseException]
    message: str
    """A regular expression: what was found, what was expected, what to do."""

    def __str__(self) -> str:
        return f"{self.of}-{self.what.replace(' ', '_')}"


@contextmanager
def unchanged(look: Callable[[], Any]) -> Iterator[None]:
    """What is seen must be the same after the mistake as before."""
    before = look()
    try:
        yield
    finally:
        assert _same(before, look()), "the mistake has left its mark"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


# ---- what mistakes are made with


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def embedding(**options: Any) -> flatbed.Embedding:
    return flatbed.Embedding(10, 4, **options)


def backward(module: nn.Module) -> None:
    """A gradient for every parameter."""
    module(torch.ones(2, 4)).sum().backward()


def stepped(kind: type[torch.optim.Optimizer], module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """An optimizer that has state."""
    optimizer = kind(module.parameters(), **options)
    backward(module)
    optimizer.step()
    return optimizer
