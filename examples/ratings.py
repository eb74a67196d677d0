"""Predict ratings of items by users: matrix factorization with two tables on the host, synthetic data.

Run: python examples/ratings.py [--users 2000] [--items 500]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import flatbed

NOISE = 0.3  # the best possible error


@dataclass(frozen=True)
class Ratings:
    """Ratings as three tensors of the same length."""

    users: Tensor
    items: Tensor
    values: Tensor

    def batches(self, size: int, seed: int) -> Iterator[Ratings]:
        """Yield batches in random order."""
        order = torch.randperm(len(self.values), generator=torch.Generator().manual_seed(seed))
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size].to(self.values.device)
            yield Ratings(self.users[chosen], self.items[chosen], self.values[chosen])


def make_ratings(n_users: int, n_items: int, n_ratings: int, *, seed: int) -> tuple[Ratings, Ratings]:
    """Make ratings from hidden factors and biases: 9/10 for training, 1/10 for tests."""
    random = torch.Generator().manual_seed(seed)
    tastes, traits = (torch.randn(n, 4, generator=random) * 0.6 for n in (n_users, n_items))
    user_bias, item_bias = (torch.randn(n, generator=random) * 0.4 for n in (n_users, n_items))
    users = torch.randint(n_users, (n_ratings,), generator=random)
    items = (
        torch.rand(n_ratings, generator=random) ** 2 * n_items
    ).long()  # skewed: some items have many ratings
    score = (tastes[users] * traits[items]).sum(1) + user_bias[users] + item_bias[items]
    values = 3.5 + score + NOISE * torch.randn(n_ratings, generator=random)
    cut = n_ratings // 10
    return Ratings(users[cut:], items[cut:], values[cut:]), Ratings(users[:cut], items[:cut], values[:cut])


class Factors(nn.Module):
    """Matrix factorization: the product of two vectors and two biases. A row has a bias and a vector."""

    def __init__(self, n_users: int, n_items: int, dim: int, mean: float) -> None:
        super().__init__()
        self.users = flatbed.Embedding(n_users, dim + 1, init=("normal", 0.0, 0.2), seed=1)
        self.items = flatbed.Embedding(n_items, dim + 1, init=("normal", 0.0, 0.2), seed=2)
        self.mean = mean

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user, item = self.users(users), self.items(items)
        products: Tensor = user[:, 1:] * item[:, 1:]
        biases: Tensor = user[:, 0] + item[:, 0]
        return products.sum(1) + biases + self.mean


@torch.no_grad()
def error(model: nn.Module, ratings: Ratings) -> float:
    """Return the root of the mean squared error."""
    predicted = model(ratings.users, ratings.items)
    return float(nn.functional.mse_loss(predicted, ratings.values).sqrt())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, known: Ratings, *, epochs: int, size: int
) -> None:
    n_steps = epochs * -(-len(known.values) // size)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=n_steps)
    for epoch in range(epochs):
        for batch in known.batches(size, seed=epoch):
            loss = nn.functional.mse_loss(model(batch.users, batch.items), batch.values)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=2_000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--ratings", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2_000)
    parser.add_argument("--dim", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.02, help="it falls to a hundredth")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = make_ratings(options.users, options.items, options.ratings, seed=0)
    known, new = (
        Ratings(part.users.to(device), part.items.to(device), part.values.to(device)) for part in parts
    )

    mean = float(known.values.mean())
    model = Factors(options.users, options.items, options.dim, mean).to(device)
    optimizer = flatbed.optim.Adam(model.parameters(), lr=options.lr)
    plain = float((new.values - mean).square().mean().sqrt())
    train(model, optimizer, known, epochs=options.epochs, size=options.batch)
    found = error(model, new)
    print(f"on {device}: {flatbed.tables(model)}")
    print(
        f"error on new ratings: {plain:.3f} for the plain mean, {found:.3f} trained, {NOISE:.3f} is the noise"
    )
    if not found < plain:
        raise SystemExit("the model is no better than the mean: try another --lr")


if __name__ == "__main__":
    main()
