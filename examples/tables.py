"""Train an embedding table on disk, drop the run half way, and resume with the same result.

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
    """Predicts a rating as the product of a user's and an item's vector."""

    def __init__(self, folder: Path, n_users: int, n_items: int) -> None:
        super().__init__()
        small = ("normal", 0.0, 0.3)
        path = folder / "users.bed"
        self.users = flatbed.Embedding(n_users, 16, storage="disk", path=path, init=small, seed=1)
        self.items = flatbed.Embedding(n_items, 16, init=small, seed=2)  # in host memory
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        products: Tensor = self.users(users) * self.items(items)
        return products.sum(1) + self.bias

    def close_without_saving(self) -> None:
        """Close the tables and drop changes since the last checkpoint, as a crash would."""
        for table in flatbed.tables(self):
            table.close(discard=True)


def batch(step: int, model: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """Make ratings with a pattern: users like items of their own kind."""
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
        uninterrupted = train(model, optimizer, range(half, options.steps))  # for comparison
        model.close_without_saving()

        model = Factors(folder, options.users, options.items).to(device)  # as a new process would
        optimizer = flatbed.optim.Adam(model, lr=0.03)
        begin = flatbed.load_checkpoint(folder / "run", model, optimizer)["step"]
        resumed = train(model, optimizer, range(begin, options.steps))
        model.close_without_saving()
        is_equal = resumed == uninterrupted
        print(f"loss {resumed[-1]:.3f} after resuming at step {begin}; as without a crash: {is_equal}")
        if not is_equal:
            raise SystemExit("the resumed run has other losses")


if __name__ == "__main__":
    main()
