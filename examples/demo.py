"""Train one network with torch and with flatbed: the same numbers, in less time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import flatbed

WIDTH = 32
PARTS = ("forward", "backward", "clip", "optimizer", "zero_grad")


class Block(nn.Module):
    """One small layer of many."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def make_network(depth: int) -> nn.Module:
    """Build a deep and narrow network, with the same weights on every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(depth)), nn.Linear(WIDTH, 1))


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(64, 8, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x.sum(dim=1, keepdim=True))


@dataclass
class Run:
    """A network in training, and the seconds of each part of its steps."""

    name: str
    network: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def step(self, x: Tensor, y: Tensor) -> None:
        with self.timed("forward"):
            loss = nn.functional.mse_loss(self.network(x), y)
        with self.timed("backward"):
            torch.autograd.backward(loss)
        with self.timed("clip"):
            self.clip(1.0)
        with self.timed("optimizer"):
            self.optimizer.step()
        with self.timed("zero_grad"):
            self.optimizer.zero_grad()
        self.losses.append(loss.item())

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[part].append(time.perf_counter() - begin)

    def milliseconds(self, part: str) -> float:
        return 1e3 * median(self.seconds[part])


def torch_run(name: str, network: nn.Module, **options: bool) -> Run:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, **options)  # type: ignore[arg-type]
    return Run(name, network, optimizer, partial(nn.utils.clip_grad_norm_, list(network.parameters())))


def optim_run(name: str, network: nn.Module) -> Run:
    optimizer = flatbed.optim.AdamW(network.parameters(), lr=1e-3, max_norm=1.0)  # the one changed line
    return Run(name, network, optimizer, lambda max_norm: torch.zeros(()))  # the optimizer clips


def flat_run(name: str, network: nn.Module, **options: bool) -> Run:
    flat = flatbed.FlatParams(network)  # the one new line; the optimizer gets flat.parameters()
    optimizer = torch.optim.AdamW(flat.parameters(), lr=1e-3, **options)  # type: ignore[arg-type]
    return Run(name, network, optimizer, flat.clip_grad_norm_)


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def table_of(runs: list[Run]) -> Table:
    table = Table(title="Milliseconds per step, median", title_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run.name.replace(".", "\n."), justify="right")
    for part in PARTS:
        table.add_row(part, *(f"{run.milliseconds(part):.2f}" for run in runs))
    table.add_section()
    totals = [sum(map(run.milliseconds, PARTS)) for run in runs]
    table.add_row("whole step", *(f"{total:.2f}" for total in totals), style="bold")
    fastest = min(total for run, total in zip(runs, totals, strict=True) if run.name.startswith("torch"))
    table.add_row("speed", *(f"{fastest / total:.2f}×" for total in totals), style="bold green")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=100, help="layers of the network")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    console = Console()
    torch.set_num_threads(1)  # small layers take longer on several cores
    networks = (make_network(options.depth) for _ in range(5))
    torch_loop = torch_run("torch loop", next(networks), foreach=False)
    flat_loop = flat_run("flat loop", next(networks), foreach=False)
    torch_fused = torch_run("torch fused", next(networks), fused=True)
    flat_fused = flat_run("flat fused", next(networks), fused=True)
    optim = optim_run("flatbed.optim", next(networks))
    runs = [torch_loop, flat_loop, torch_fused, optim, flat_fused]
    for step in track(range(options.steps), "training in turn", console=console, transient=True):
        for run in runs:
            run.step(*make_batch(step))

    n_params = len(list(torch_loop.network.parameters()))
    console.print(f"{n_params} small parameters, {options.steps} steps of AdamW, the same batches:")
    same = True
    for expected, ours in ((torch_fused, optim), (torch_loop, flat_loop)):
        difference = largest_difference(expected.network, ours.network)
        for run in (expected, ours):
            console.print(f"  {run.name:13}  loss {run.losses[0]!r} → {run.losses[-1]!r}")
        console.print(f"  largest difference between any two weights: {difference!r}")
        same = same and difference == 0.0 and expected.losses == ours.losses
    console.print(table_of(runs))
    if not same:
        raise SystemExit("The results differ: please report this.")


if __name__ == "__main__":
    main()
