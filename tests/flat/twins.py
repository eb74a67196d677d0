"""A model that is trained per parameter, and the same model flattened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from flatbed import FlatParams
from tests.cases import assert_same, backward, build


class Training(NamedTuple):
    """A model and its optimizer, over flat parameters if there are some."""

    model: Any
    optimizer: torch.optim.Optimizer
    flat: Any = None

    def clip(self, max_norm: float = 0.1) -> torch.Tensor:
        if self.flat is None:
            return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        clipped: torch.Tensor = self.flat.clip_grad_norm_(max_norm)
        return clipped

    def train(self, *numbers: int, clip: bool = False) -> None:
        """Train on batches by their numbers."""
        for number in numbers:
            backward(self.model, number)
            if clip:
                self.clip()
            self.optimizer.step()
            self.optimizer.zero_grad()


def twins(
    grads: Any = "follow",
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    model: str | Callable[[], nn.Module] = "tied",
    device: str = "cpu",
    missing: Any = "raise",
    **options: Any,
) -> tuple[Training, Training]:
    """Return a training per parameter and a flat one, which must have the same results."""
    options = {"lr": 0.01, "foreach": False, **options}
    one, other = (build(model, device) if isinstance(model, str) else model() for _ in range(2))
    flat = FlatParams(other, grads=grads, missing=missing)
    return (
        Training(one, kind(one.parameters(), **options)),
        Training(other, kind(flat.parameters(), **options), flat),
    )


def assert_twins(pair: tuple[Training, Training], tolerance: float = 0.0) -> None:
    """Compare the models, bitwise unless a tolerance is given; the flat one must be valid."""
    assert_same(pair[0].model, pair[1].model, tolerance)
    pair[1].flat.assert_valid()
