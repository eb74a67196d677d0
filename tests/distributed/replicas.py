"""Scenarios of replicated tables: ranks that differ or drift apart, and work of one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import flatbed
from tests.distributed.processes import assert_equal_on_all_ranks, assert_raises, main

ROWS, DIM = 40, 4


def left_alone(_: Path) -> None:
    """With replicate=False nothing is exchanged: one rank may even train by itself."""
    rank = dist.get_rank()
    emb = flatbed.Embedding(ROWS, DIM, replicate=False)
    before = emb.weight.clone()
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    if rank == 0:
        for _ in range(3):
            emb([1]).sum().backward()
            assert emb.table.grad is not None
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(emb.read_rows([1]) != before[1], torch.full((1, DIM), rank == 0))


def no_rows(_: Path) -> None:
    """Steps in which no rank has looked a row up count, as in torch, and send no empty tensors."""
    emb = flatbed.Embedding(ROWS, DIM)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    before = emb.weight.clone()
    sent: list[int] = []
    gather = dist.all_gather
    with patch.object(dist, "all_gather", lambda parts, own: sent.append(own.numel()) or gather(parts, own)):
        emb(torch.empty(0, dtype=torch.int64)).sum().backward()
        optimizer.step()
    assert sent
    assert all(sent)
    assert float(optimizer.state[emb.table]["step"]) == 1
    assert torch.equal(emb.weight, before)


def assert_unequal(action: Callable[[], Any]) -> None:
    assert_raises(action, "not equal on all ranks")


def unequal(_: Path) -> None:
    """Replicas that differ are an error on every rank, and nothing is changed."""
    rank = dist.get_rank()
    for n_rows, options in ((ROWS, {"seed": rank}), (ROWS, {"init": float(rank)}), (ROWS + rank, {})):
        emb = flatbed.Embedding(n_rows, DIM, **options)
        before = emb.weight.clone()
        optimizer = flatbed.optim.SGD(emb, lr=1.0)
        emb([rank]).sum().backward()
        assert_unequal(optimizer.step)
        assert torch.equal(emb.weight, before)
        assert_unequal(optimizer.step)


def drifting(_: Path) -> None:
    """Replicas that become different later are found when the rows are used."""
    rank = dist.get_rank()

    def steps_of(lr: float) -> tuple[flatbed.Embedding, Callable[[int], None]]:
        emb = flatbed.Embedding(1000, DIM)
        optimizer = flatbed.optim.SGD(emb, lr=lr)

        def step(row: int) -> None:
            if emb.table.requires_grad:
                emb([row]).sum().backward()
            optimizer.step()

        step(3)
        return emb, step

    emb, step = steps_of(1.0)
    if rank == 0:
        emb.write_rows([7], torch.ones(1, DIM))
    step(5)
    assert_unequal(lambda: step(7))
    emb, step = steps_of(1.0 + rank)
    assert_unequal(lambda: step(3))
    emb, step = steps_of(1.0)
    emb.requires_grad_(rank == 0)
    step(3)  # with the mean of all ranks, also on those without a gradient of their own
    emb.requires_grad_(True)
    step(3)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, emb.read_rows([3]).tolist())
    assert all(rows == found[0] for rows in found)


def some_alone(_: Path) -> None:
    """A table that is no replica beside what all ranks share."""
    rank = dist.get_rank()
    emb, own = flatbed.Embedding(ROWS, DIM), flatbed.Embedding(ROWS, DIM, replicate=False, seed=rank)
    layer = torch.nn.Linear(DIM, 1)
    torch.nn.init.ones_(layer.weight)
    called = DDP(layer)
    optimizer = flatbed.optim.SGD([*layer.parameters(), own.table, emb.table], lr=0.1, max_norm=1.0)
    called(own([rank]) + emb([rank])).sum().backward()
    assert_raises(optimizer.step, "replicate=False")
    flatbed.optim.SGD(own, lr=0.1, max_norm=1.0).step()  # alone it is fine


def one_rank_looks(_: Path) -> None:
    """Work of one rank alone between steps: read rows, evaluate, write and load a checkpoint."""
    rank = dist.get_rank()
    emb = flatbed.Embedding(ROWS, DIM)
    if rank == 0:
        emb.weight.sum()
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    for step in range(4):
        emb(torch.tensor([rank, 3])).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                emb([1])
            emb.load_state_dict(emb.state_dict())
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        assert_equal_on_all_ranks(emb.read_rows(range(ROWS)))
        assert_equal_on_all_ranks(emb.table.read_state("exp_avg", range(ROWS)))


if __name__ == "__main__":
    main([left_alone, no_rows, unequal, drifting, some_alone, one_rank_looks])
