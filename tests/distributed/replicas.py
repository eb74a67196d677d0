"""Processes that train replicas of a table; all must end with the rows that one process would end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import flatbed
from tests.distributed.processes import assert_equal_on_all_ranks, assert_raises, main

ROWS, DIM, STEPS = 40, 4, 6
EVERY = torch.arange(ROWS)


class Model(nn.Module):
    def __init__(self, emb: nn.Module, *, dense: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.emb = emb
        self.head = nn.Linear(DIM, 2) if dense else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.emb(ids))
        return out


def batch(step: int, rank: int) -> Tensor:
    """Different ids for every rank; now and then none at all."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    n = 0 if (step + rank) % 4 == 1 else 3
    return torch.randint(ROWS, (n, 3), generator=generator)


def whole(model: Any) -> list[Tensor]:
    """Everything that was trained."""
    table = model.emb.table
    held = [table.read_rows(EVERY), *(table.read_state(name, EVERY) for name in table.state_names)]
    return [*held, *(p.detach() for p in model.parameters() if not isinstance(p, flatbed.Table))]


def assert_replicas_agree(model: Any) -> None:
    for tensor in whole(model):
        assert_equal_on_all_ranks(tensor)


def train(
    ranks: list[int],
    *,
    make: Any = flatbed.optim.Adam,
    wrap: bool = True,
    dense: bool = True,
    bag: bool = False,
    clip: bool = False,
    accumulate: bool = False,
    zero: str = "optimizer",
    options: dict[str, Any] | None = None,
    **table: Any,
) -> list[Tensor]:
    """As one rank among all, or, given all of them, as the single process that does the work of each."""
    kind = flatbed.EmbeddingBag if bag else flatbed.Embedding
    torch.manual_seed(3)
    model = Model(kind(ROWS, DIM, padding_idx=7, **table), dense=dense)
    alone = len(ranks) > 1
    model.emb.table.replicate = not alone
    called: Any = DDP(model) if wrap and not alone else model
    optimizer = make(model, lr=0.05, **(options or {}))
    for step in range(STEPS):
        waits = accumulate and step % 2 == 0
        for rank in ranks:
            ids = batch(step, rank)
            if not (dense or len(ids)):
                continue  # no lookup, no backward pass
            loss = called(ids).pow(2).sum() / len(ranks)
            if waits and wrap and not alone:
                with called.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if waits:
            continue
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if zero != "never":
            (optimizer if zero == "optimizer" else model).zero_grad()
    return whole(model)


CASES: dict[str, dict[str, Any]] = {
    "host": {},
    "clipped": {"options": {"max_norm": 0.5}, "make": flatbed.optim.SGD},
    "accumulated": {"accumulate": True, "storage": "device", "make": flatbed.optim.SGD},
    "tables alone": {"wrap": False, "dense": False, "zero": "model"},
    "disk": {"storage": "disk"},
    "bag": {"bag": True, "make": flatbed.optim.Adagrad},
    "clipped by torch": {"clip": True, "make": flatbed.optim.SGD},
    "clipped and accumulated": {"clip": True, "accumulate": True, "make": flatbed.optim.SGD},
    "without zero_grad": {"wrap": False, "dense": False, "zero": "never", "make": flatbed.optim.SGD},
    "rows count": {"wrap": False, "dense": False, "options": {"per_row_steps": True}},
}


def replicas_train_as_one_process(folder: Path) -> None:
    """The replicas are bitwise equal, and close to one process that trains on all batches."""
    rank = dist.get_rank()
    for name, options in CASES.items():
        is_disk = options.get("storage") == "disk"
        path = {"path": folder / f"{name}-{rank}"} if is_disk else {}
        alone = {"path": folder / f"{name}-{rank}-alone"} if is_disk else {}
        found = train([rank], **options, **path)
        for tensor in found:
            assert_equal_on_all_ranks(tensor)
        expected = train(list(range(dist.get_world_size())), **options, **alone)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


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


def unequal(_: Path) -> None:
    """Replicas that differ are an error on every rank, and nothing is changed."""
    rank = dist.get_rank()
    for options in ({"seed": rank}, {"init": float(rank)}):
        emb = flatbed.Embedding(ROWS, DIM, **options)
        before = emb.weight.clone()
        optimizer = flatbed.optim.SGD(emb, lr=1.0)
        emb([rank]).sum().backward()
        assert_raises(optimizer.step, "not equal on all ranks")
        assert torch.equal(emb.weight, before)
        assert_raises(optimizer.step, "not equal on all ranks")
    emb = flatbed.Embedding(ROWS + rank, DIM)
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    emb([rank]).sum().backward()
    assert_raises(optimizer.step, "not equal on all ranks")


def drifting(_: Path) -> None:
    """Replicas that become different later are found when the rows are used."""
    rank = dist.get_rank()
    emb = flatbed.Embedding(1000, DIM)
    optimizer = flatbed.optim.SGD(emb, lr=1.0)

    def step(row: int) -> None:
        emb([row]).sum().backward()
        optimizer.step()

    step(3)
    if rank == 0:
        emb.write_rows([7], torch.ones(1, DIM))
    step(5)
    assert_raises(lambda: step(7), "not equal on all ranks")

    emb = flatbed.Embedding(1000, DIM)
    optimizer = flatbed.optim.SGD(emb, lr=1.0 + rank)
    step(3)
    assert_raises(lambda: step(3), "not equal on all ranks")

    emb = flatbed.Embedding(1000, DIM)
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    step(3)
    emb.requires_grad_(rank == 0)
    with torch.set_grad_enabled(True):
        if rank == 0:
            step(3)
        else:
            optimizer.step()
    emb.requires_grad_(True)
    assert_raises(lambda: step(3), "not equal on all ranks")


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


def overflows(_: Path) -> None:
    """An overflow on one rank stops all of them."""
    rank = dist.get_rank()
    model = Model(flatbed.Embedding(ROWS, DIM), dense=True)
    called = DDP(model)
    optimizer = flatbed.optim.Adam(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        before = whole(model)
        loss = called(torch.tensor([rank, 5])).pow(2).sum()
        if step == 1 and rank == 0:  # in the rows of one rank alone
            loss = loss + model.emb(torch.tensor([9])).sum() * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = not all(map(torch.equal, before, whole(model)))
        assert moved == (step != 1)
        assert scaler.get_scale() == (8.0 if step < 1 else 4.0)
        assert_replicas_agree(model)
    before = whole(model)
    model(torch.tensor([rank])).sum().backward()
    optimizer.found_inf = torch.tensor(float(rank == 0))
    optimizer.step()
    del optimizer.found_inf
    assert all(map(torch.equal, before, whole(model)))


def one_rank_looks(_: Path) -> None:
    """Work of one rank alone between steps: read rows, evaluate, write and load a checkpoint."""
    rank = dist.get_rank()
    model = Model(flatbed.Embedding(ROWS, DIM), dense=False)
    emb: Any = model.emb
    if rank == 0:
        emb.weight.sum()
    optimizer = flatbed.optim.Adam(model, lr=0.1)
    for step in range(4):
        emb(torch.tensor([rank, 3])).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                emb([1])
            model.load_state_dict(model.state_dict())
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        assert_replicas_agree(model)


if __name__ == "__main__":
    main(
        [
            replicas_train_as_one_process,
            *(left_alone, unequal, drifting, some_alone, overflows, one_rank_looks),
        ]
    )
