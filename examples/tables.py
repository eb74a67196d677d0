"""Train embedding tables that live on disk, kill the run half way, and go on as if nothing had happened.

Run: python examples/tables.py [--users 20000] [--items 5000]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import flatbed


class Factors(nn.Module):
    """Ratings as products of a user's and an item's vector."""

    def __init__(self, folder: Path, n_users: int, n_items: int) -> None:
        super().__init__()
        small = ("normal", 0.0, 0.3)
        self.users = flatbed.Embedding(n_users, 16, storage="disk", path=folder / "users.bed", init=small)
        self.items = flatbed.Embedding(n_items, 16, init=small)  # in host memory
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        products: Tensor = self.users(users) * self.items(items)
        return products.sum(1) + self.bias

    def close(self) -> None:
        for table in flatbed.tables(self):
            table.close(discard=True)


def batch(step: int, model: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """Ratings that have a pattern to be found: users like items of their own kind."""
    generator = torch.Generator().manual_seed(step)
    users = torch.randint(model.users.num_embeddings, (4096,), generator=generator)
    items = torch.randint(model.items.num_embeddings, (4096,), generator=generator)
    return users, items, (users % 4 == items % 4).float()


def train(model: Factors, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        users, items, ratings = batch(step, model)
        loss = nn.functional.mse_loss(model(users, items), ratings)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        folder, half = Path(temporary), options.steps // 2

        model = Factors(folder, options.users, options.items).to(device)
        optimizer = flatbed.optim.Adam(model, lr=0.03)
        losses = train(model, optimizer, range(half))
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {half} steps on {device}; {flatbed.tables(model)}")
        flatbed.save_checkpoint(folder / "run", model, optimizer, extra={"step": half})
        straight = train(model, optimizer, range(half, options.steps))  # what the crash below will cost
        model.close()

        model = Factors(folder, options.users, options.items).to(device)  # a new process would begin here
        optimizer = flatbed.optim.Adam(model, lr=0.03)
        begin = flatbed.load_checkpoint(folder / "run", model, optimizer)["step"]
        resumed = train(model, optimizer, range(begin, options.steps))
        model.close()
        same = resumed == straight
        print(f"loss {resumed[-1]:.3f} after resuming at step {begin}; as without a crash: {same}")
        if not same:
            raise SystemExit("the resumed run took another course")


if __name__ == "__main__":
    main()
