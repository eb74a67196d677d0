"""Train one network with torch and with flatbed: the same numbers, in less time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

import flatbed

WIDTH = 32


def make_network(depth: int) -> nn.Module:
    """Build a deep and narrow network, with the same weights on every call."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1))


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(64, 8, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x.sum(dim=1, keepdim=True))


class Run:
    """A network in training, its losses, and the seconds of its updates."""

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]
    ) -> None:
        self.network, self.optimizer, self.clip = network, optimizer, clip
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = nn.functional.mse_loss(self.network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        begin = time.perf_counter()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(loss.item())


def with_torch(network: nn.Module) -> Run:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    return Run(network, optimizer, partial(nn.utils.clip_grad_norm_, list(network.parameters()), 1.0))


def with_flatbed(network: nn.Module) -> Run:
    optimizer = flatbed.optim.AdamW(network.parameters(), lr=1e-3, max_norm=1.0)  # the one changed line
    return Run(network, optimizer, lambda: None)  # the optimizer clips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=100, help="layers of the network")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small layers take longer on several cores
    runs = {"torch fused": with_torch(make_network(options.depth))}
    runs["flatbed.optim"] = with_flatbed(make_network(options.depth))
    for step in range(options.steps):
        for run in runs.values():
            run.step(*make_batch(step))

    weights = [list(run.network.parameters()) for run in runs.values()]
    print(f"{len(weights[0])} small parameters, {options.steps} steps of AdamW, the same batches in turns:")
    for name, run in runs.items():
        update = f"clip, step and zero_grad {1e3 * median(run.seconds):.2f} ms"
        print(f"  {name:13}  loss {run.losses[0]!r} → {run.losses[-1]!r}, {update}")
    difference = max(float((p - q).detach().abs().max()) for p, q in zip(*weights, strict=True))
    print(f"  largest difference between any two weights: {difference!r}")
    if difference:
        raise SystemExit("The results differ: please report this.")


if __name__ == "__main__":
    main()
