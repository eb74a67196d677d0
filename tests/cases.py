"""The case table: every elementwise torch optimizer, and models with unusual parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn, optim

BOTH = pytest.mark.parametrize("grads", ["follow", "bound"])
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass(frozen=True)
class OptimizerCase:
    name: str
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    fused: bool = False  # torch has a fused CPU kernel for it

    def __call__(self, params: Any, **more: Any) -> torch.optim.Optimizer:
        return self.kind(params, **{**self.options, **more})


OPTIMIZERS = [
    OptimizerCase("sgd", optim.SGD, {"lr": 0.05}, fused=True),
    OptimizerCase("sgd-momentum", optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, fused=True),
    OptimizerCase("sgd-dampening", optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}, fused=True),
    OptimizerCase("sgd-nesterov", optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, fused=True),
    OptimizerCase("adam", optim.Adam, {"lr": 0.01, "weight_decay": 0.1}, fused=True),
    OptimizerCase("adam-amsgrad", optim.Adam, {"lr": 0.01, "amsgrad": True}, fused=True),
    OptimizerCase("adamw", optim.AdamW, {"lr": 0.01}, fused=True),
    OptimizerCase(
        "adamw-amsgrad-max", optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}, fused=True
    ),
    OptimizerCase("adamax", optim.Adamax, {"lr": 0.01}),
    OptimizerCase("nadam", optim.NAdam, {"lr": 0.01, "weight_decay": 0.01}),
    OptimizerCase("radam", optim.RAdam, {"lr": 0.01}),
    OptimizerCase("rmsprop", optim.RMSprop, {"lr": 0.01}),
    OptimizerCase("rmsprop-centered", optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    OptimizerCase("adagrad", optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}, fused=True),
    OptimizerCase("adadelta", optim.Adadelta, {"lr": 1.0}),
    OptimizerCase("asgd", optim.ASGD, {"lr": 0.01, "t0": 3}),
    OptimizerCase("rprop", optim.Rprop, {"lr": 0.01}),
]


class Mixed(nn.Module):
    """Odd shapes: a scalar, an empty parameter, a transposed one, one with a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(3, 7).t())
        self.one = nn.Parameter(torch.randn(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.scale + self.nothing.sum()
        return (y @ self.transposed) * self.one


class Conv(nn.Module):
    """Channels-last convolutions with batch norm, 2-D and 3-D."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias: before a batch norm its gradient is nothing but rounding noise.
        self.flat = nn.Conv2d(3, 5, 3, bias=False)
        self.flat.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.deep = nn.Conv3d(5, 4, 2).to(memory_format=torch.channels_last_3d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.reshape(-1, 1, 1, 7).expand(-1, 3, 6, 7)
        hidden = torch.relu(self.norm(self.flat(image)))
        return self.deep(hidden.unsqueeze(2).expand(-1, -1, 3, -1, -1)).flatten(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(7, 7, bias=False)
        self.decoder = nn.Linear(7, 7)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(7, 9).requires_grad_(False)
        self.head = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.frozen(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(7, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "conv": Conv,
    "tied": Tied,
    "frozen": PartlyFrozen,
    "rnn": Recurrent,
}


def build(name: str, device: str = "cpu") -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().to(device)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """A group of matrices with weight decay, and a group of the rest with another learning rate."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "lr": 0.003, "weight_decay": 0.0},
    ]


def batches(n: int, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, 7, generator=generator).to(device) for _ in range(n)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def backward(model: nn.Module, i: int = 0) -> None:
    loss_of(model, batches(i + 1)[i].to(next(model.parameters()).dtype)).backward()


def assert_same(left: nn.Module, right: nn.Module, tolerance: float = 0.0) -> None:
    """Compare every entry of two models' state, bitwise unless a tolerance is given."""
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        if tolerance == 0.0:
            assert torch.equal(a[name], b[name]), f"{name}: {(a[name] - b[name]).abs().max()}"
        else:
            torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=name)
