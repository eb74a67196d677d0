"""Scenarios of a `Prefetcher` over tables that ranks divide: the same bits, uneven data, ranks that fail."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flatbed
import tests.conftest  # noqa: F401  # kernels that can be interpreted
from flatbed.data.pipeline import THREAD_NAME
from tests.distributed.processes import assert_raises, main
from tests.distributed.shards import interpreted_kernels

ROWS, DIM, STEPS = 23, 16, 5
EVERY = torch.arange(ROWS)
numbers = itertools.count()


def batch_of(step: int, rank: int) -> dict[str, Any]:
    """Ids with repeats; now and then none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    n = 0 if (step + rank) % 3 == 1 else 4
    users, items = (torch.randint(ROWS, (n, 3), generator=generator) for _ in range(2))
    return {"users": users, "items": items, "name": "a batch"}


def tables(folder: Path, storage: str, **options: Any) -> list[flatbed.Embedding]:
    made = []
    for seed in range(2):
        path = folder / f"{dist.get_world_size()}-{next(numbers)}.bed"
        more = {"path": path} if storage == "disk" else {}
        emb = flatbed.Embedding(ROWS, DIM, 6, seed=seed, shard="row", storage=storage, **more, **options)
        made.append(emb)
    return made


def train(modules: list[flatbed.Embedding], loop: Callable[[Any, Any], Any], steps: int = STEPS) -> list[Tensor]:
    """Train two tables, one of them with two lookups per batch. Returns outputs, weights and state."""
    users, items = modules
    optimizer = flatbed.optim.Adam([users.table, items.table], lr=0.05)
    lookups = {users: "users", items: lambda batch: [batch["items"], batch["users"]]}
    found = []
    for batch in loop([batch_of(step, dist.get_rank()) for step in range(steps)], lookups):
        products = users(batch["users"]) * items(batch["items"]) + items(batch["users"])
        found.append(products.detach())
        products.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for emb in modules:
        found += [emb.read_rows(EVERY), emb.table.read_state("exp_avg", EVERY)]
        emb.table.close(discard=True)
    return found


def assert_prefetching_changes_nothing(folder: Path, storage: str, *depths: int, **options: Any) -> None:
    expected = train(tables(folder, storage, **options), lambda loader, _: loader)
    for depth in depths:
        loop = lambda *a, depth=depth: flatbed.Prefetcher(*a, depth=depth)  # noqa: E731
        found = train(tables(folder, storage, **options), loop)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), (storage, depth)


def same_bits(folder: Path) -> None:
    for storage in ("host", "disk", "device"):
        assert_prefetching_changes_nothing(folder, storage, 0, 1, 2, 3)
    assert_prefetching_changes_nothing(folder, "disk", 1, 3, cache_rows=5)


def same_bits_with_caches(folder: Path) -> None:
    if dist.get_world_size() == 2 and not torch.cuda.is_available():
        with interpreted_kernels():
            assert_prefetching_changes_nothing(folder, "host", 1, 3, cache_rows=40)
            assert_prefetching_changes_nothing(folder, "host", 2, cache_rows=5)
            assert_prefetching_changes_nothing(folder, "disk", 2, cache_rows=40)


def assert_no_thread() -> None:
    assert [one.name for one in threading.enumerate() if one.name == THREAD_NAME] == []


SCENARIOS = [same_bits, same_bits_with_caches]

if __name__ == "__main__":
    main(SCENARIOS)
