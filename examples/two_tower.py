"""Recommend items to users: sharded tables, checkpoints for any number of ranks, recall by topk.

    torchrun --nproc-per-node 2 examples/two_tower.py --folder run --steps 60
    python examples/two_tower.py --folder run --steps 120    # one rank continues where two have stopped

Clicks are made up. Users and items have one of 20 tastes, and few of them have most of the clicks.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions keep a process group that exists when they are imported
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import flatbed

N_USERS, N_ITEMS, N_TASTES, DIM = 4_000, 2_000, 20, 32
N_CLICKS, BATCH = 100_000, 1_024
K = 10


def make_clicks(n: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw users and the items they click. The taste of a user or an item is its id modulo 20."""
    random = torch.Generator().manual_seed(seed)

    def zipf(n_ids: int) -> Tensor:
        shares = torch.arange(1.0, n_ids + 1).pow(-1.05)
        return torch.multinomial(shares, n, replacement=True, generator=random)

    users = zipf(N_USERS)
    by_chance = torch.rand(n, generator=random) < 0.1
    tastes = torch.where(by_chance, torch.randint(N_TASTES, (n,), generator=random), users % N_TASTES)
    return users, zipf(N_ITEMS // N_TASTES) * N_TASTES + tastes


class TwoTowers(nn.Module):
    """Scores of users (a table and a network) and items (a table)."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"shard": "row", "device": device, "init": ("normal", 0.0, 0.1)}
        self.users = flatbed.Embedding(N_USERS, DIM, **options)
        self.items = flatbed.Embedding(N_ITEMS, DIM, **options)
        self.network = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, DIM)).to(device)

    def queries(self, users: Tensor) -> Tensor:
        return self.network(self.users(users))  # type: ignore[no-any-return]

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Score all items of the batch for all users of the batch."""
        scores: Tensor = self.queries(users) @ self.items(items).T
        return scores


@torch.no_grad()
def recall(model: TwoTowers, rank: int, world: int) -> float:
    """Return the share of new clicks whose item is among the best ten. All ranks call this."""
    users, items = (ids[rank::world] for ids in make_clicks(2_000, seed=1))
    _, found = model.items.topk(model.queries(users), K)
    n_hits = (found.cpu() == items.unsqueeze(1)).any(1).sum()
    if world > 1:
        n_hits = n_hits.to(found.device)
        dist.all_reduce(n_hits)
    return float(n_hits) / 2_000


def train(model: TwoTowers, optimizer: torch.optim.Optimizer, steps: range, *, rank: int, world: int) -> None:
    """Tell the clicked item from the others of the batch. Scores are lowered, since those are popular."""
    users, items = make_clicks(N_CLICKS, seed=0)
    log_share = torch.bincount(items, minlength=N_ITEMS).clamp(min=1).log()
    score: nn.Module = DDP(model) if world > 1 else model  # averages gradients of the network
    for step in steps:
        first = step * BATCH % (N_CLICKS - BATCH)
        own = slice(first + rank, first + BATCH, world)
        logits = score(users[own], items[own])
        logits = logits - log_share[items[own]].to(logits.device)
        loss = cross_entropy(logits, torch.arange(len(logits), device=logits.device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def run(folder: Path, n_steps: int, device: str) -> None:
    """Train from the last checkpoint of a folder up to a number of steps, and save."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = TwoTowers(device)
    optimizer = flatbed.optim.Adam(model, lr=0.01, max_norm=1.0)
    try:
        first = flatbed.load_checkpoint(folder, model, optimizer)["step"]
    except FileNotFoundError:  # no checkpoint yet
        first = 0
    before = recall(model, rank, world)
    train(model, optimizer, range(first, n_steps), rank=rank, world=world)
    after = recall(model, rank, world)
    flatbed.save_checkpoint(folder, model, optimizer, extra={"step": n_steps})
    if rank == 0:
        popular = float((make_clicks(2_000, seed=1)[1] < K).float().mean())  # the first ids have most clicks
        print(f"{world} ranks, steps {first} to {n_steps}: recall@{K} {before:.3f} → {after:.3f}")
        print(f"the most popular items: {popular:.3f}, by chance: {K / N_ITEMS:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100, help="steps in all, with those of the checkpoint")
    options = parser.parse_args()
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    run(options.folder, options.steps, device)
    if dist.is_initialized():
        gc.collect()  # DDP, which holds the process group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
