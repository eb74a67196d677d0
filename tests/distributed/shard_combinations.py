"""Scenarios of `shard="row"` beside other parallelism: each ends as one process would."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import flatbed
from tests.distributed.processes import assert_equal_on_all_ranks, assert_raises, main
from tests.distributed.shards import EVERY, PADDING, ROWS, ids_of, interpreted_kernels

DIM, STEPS = 16, 4


class Model(nn.Module):
    """A sharded table, a replicated one, a bag over the rows of the sharded one, and dense layers."""

    def __init__(self, *, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.items = flatbed.Embedding(ROWS, DIM, PADDING, seed=3, **options)
        self.words = flatbed.Embedding(ROWS, DIM, seed=4, replicate=options.get("replicate", True))
        self.bag = flatbed.EmbeddingBag.from_table(self.items.table, mode="sum")
        self.head = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 2))
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        rows = checkpoint(self.rows, ids, use_reentrant=False) if self.recompute else self.rows(ids)
        out: Tensor = self.head(rows)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Look rows up in the table twice."""
        rows: Tensor = self.items(ids) + self.words(ids) + self.bag(ids).unsqueeze(1)
        return rows


Wrap = Callable[[Model], nn.Module]


def alone(model: Model) -> nn.Module:
    return model


def train(
    model: Model,
    ranks: list[int],
    *,
    wrap: Wrap = alone,
    accumulate: bool = False,
    scaled: bool = False,
    make: Any = flatbed.optim.Adam,
    **options: Any,
) -> list[Tensor]:
    """Train as one rank, or as one process with the batches of all ranks. Returns the norms."""
    called: Any = wrap(model)
    optimizer, norms = make(model, lr=0.05, max_norm=0.5, **options), []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    for step in range(STEPS):
        waits = accumulate and step % 2 == 0
        for rank in ranks:
            loss = called(ids_of(step, rank)).pow(2).sum() / len(ranks)
            with called.no_sync() if waits and isinstance(called, DDP) else nullcontext():
                scaler.scale(loss).backward()
        if waits:
            continue
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.clone())
    return norms


def assert_as_one_process(wrap: Wrap, **options: Any) -> None:
    """Clipped results are equal up to rounding, and norms have the same bits on all ranks."""
    model = Model(recompute=options.pop("recompute", False), shard="row")
    norms = train(model, [dist.get_rank()], wrap=wrap, **options)
    whole = Model(replicate=False)
    options.pop("shard_state", None)
    expected = train(whole, [*range(dist.get_world_size())], **options)
    for norm, other in zip(norms, expected, strict=True):
        assert_equal_on_all_ranks(norm.reshape(1))
        torch.testing.assert_close(norm, other, rtol=1e-5, atol=1e-6)
    for name in ("items", "words"):
        rows = getattr(model, name).read_rows(EVERY)
        assert_equal_on_all_ranks(rows)
        torch.testing.assert_close(rows, getattr(whole, name).read_rows(EVERY), rtol=1e-4, atol=1e-5)
    assert model.items.table.scalars() == whole.items.table.scalars()


def ddp_of(**options: Any) -> Wrap:
    """Wrap a model, and see that DDP leaves the table's rows as they are."""

    def wrap(model: Model) -> nn.Module:
        before = model.items.read_rows(EVERY)
        called = DDP(model, **options)
        assert torch.equal(before, model.items.read_rows(EVERY))
        return called

    return wrap


def ddp(_: Path) -> None:
    assert_as_one_process(ddp_of())
    assert_as_one_process(ddp_of(), accumulate=True, scaled=True)
    if dist.get_world_size() > 2:
        return
    assert_as_one_process(ddp_of(find_unused_parameters=True))
    assert_as_one_process(ddp_of(static_graph=True), make=flatbed.optim.SGD)
    assert_as_one_process(ddp_of(gradient_as_bucket_view=True), make=flatbed.optim.SGD)


def sharded_optimizer_state(_: Path) -> None:
    assert_as_one_process(ddp_of(), shard_state=True)


def fsdp_over(mesh: Any) -> Wrap:
    def wrap(model: Model) -> nn.Module:
        fully_shard(model, mesh=mesh, ignored_params=set(flatbed.tables(model)))
        return model

    return wrap


def fsdp2(_: Path) -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    assert_as_one_process(fsdp_over(mesh))
    assert_as_one_process(fsdp_over(mesh), accumulate=True, scaled=True)
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert_as_one_process(fsdp_over(grid))


def recomputed_lookups(_: Path) -> None:
    assert_as_one_process(ddp_of(), recompute=True)


def groups_of_some_ranks(_: Path) -> None:
    """Ranks may be part of different numbers of process groups. A norm of some ranks alone is refused."""
    rank = dist.get_rank()
    dist.new_group([0])  # one process group more on rank 0 than on the others
    pair = dist.new_group([0, 1])
    emb = flatbed.Embedding(ROWS, DIM, shard="row", seed=1)
    assert torch.equal(emb.read_rows([3]), flatbed.Embedding(ROWS, DIM, seed=1).read_rows([3]))
    if dist.get_world_size() == 2:
        return
    if rank < 2:
        some = flatbed.Embedding(ROWS, DIM, shard="row", process_group=pair, replicate=False)
        optimizer = flatbed.optim.SGD(some, lr=0.1, max_norm=1.0)
        some([1]).sum().backward()
        assert_raises(optimizer.step, "2 of 4 ranks")


def learning_rates_that_differ_later(_: Path) -> None:
    emb = flatbed.Embedding(ROWS, DIM, shard="row")
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    for step in range(2):
        emb([1]).sum().backward()
        if step:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + dist.get_rank())
            assert_raises(optimizer.step, "lr differs")
        else:
            optimizer.step()


def interpreted_caches(_: Path) -> None:
    """Rows are evicted between lookup and step, which clips the gradients of two backward passes."""
    if dist.get_world_size() > 2 or torch.cuda.is_available():
        return
    rank, batches = dist.get_rank(), [[1, 2, 2], [9, 4, 1]]
    with interpreted_kernels():
        emb = flatbed.Embedding(ROWS, DIM, seed=3, shard="row", cache_rows=2, cache_policy="lru")
        bag = flatbed.EmbeddingBag.from_table(emb.table, mode="sum")
        whole = flatbed.Embedding(ROWS, DIM, seed=3, replicate=False)
        optimizers = [flatbed.optim.SGD(one, lr=0.1, max_norm=0.5) for one in (emb, whole)]
        emb(batches[rank]).pow(2).sum().backward()
        bag([batches[1 - rank]]).sum().backward()
        for batch in batches:
            (whole(batch).pow(2).sum() / 2).backward()
            (whole(batch).sum() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert emb.table.cache_stats().misses > 0
        torch.testing.assert_close(emb.read_rows(EVERY), whole.read_rows(EVERY))


SCENARIOS = [
    groups_of_some_ranks,  # before all others: the first table of a process group makes another one
    learning_rates_that_differ_later,
    ddp,
    sharded_optimizer_state,
    fsdp2,
    recomputed_lookups,
    interpreted_caches,
]

if __name__ == "__main__":
    main(SCENARIOS)
