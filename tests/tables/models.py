"""A small model with a table, and the same with torch's embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import flatbed

ROWS, DIM = 16, 4
EVERY = torch.arange(ROWS)


class Model(nn.Module):
    """An embedding, ours or torch's, and something dense."""

    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        self.emb = emb
        torch.manual_seed(3)
        self.head = nn.Linear(DIM, 2)

    def forward(self, ids: Any) -> Tensor:
        out: Tensor = self.head(self.emb(torch.as_tensor(ids)))
        return out


def pair() -> tuple[Model, Model]:
    weights = torch.randn(ROWS, DIM)
    emb = flatbed.Embedding.from_pretrained(weights, freeze=False)
    return Model(emb), Model(nn.Embedding.from_pretrained(weights, freeze=False))


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")
