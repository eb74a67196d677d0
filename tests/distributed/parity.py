"""Ranks that train tables, sharded or replicated, end as one process with all backward passes would."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
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
from tests.distributed.processes import assert_equal_on_all_ranks, interpreted_kernels, main

ROWS, DIM, STEPS, PADDING = 23, 16, 4, 6  # whole vectors: torch rounds what is left over differently
EVERY = torch.arange(ROWS)
numbers = count()


def ids_of(step: int, rank: int, *, empty: bool = True) -> Tensor:
    """Ids of a rank's batch, with repeats; now and then none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    n = 0 if empty and (step + rank) % 3 == 1 else 4
    return torch.randint(ROWS, (n, 3), generator=generator)


class Model(nn.Module):
    """A table, a replicated one, a bag over the rows of the first one, and dense layers."""

    def __init__(self, n_rows: int, dim: int, padding_idx: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.items = flatbed.Embedding(n_rows, dim, padding_idx, **options)
        self.words = flatbed.Embedding(n_rows, dim, seed=4, replicate=options.get("replicate", True))
        self.bag = flatbed.EmbeddingBag.from_table(self.items.table, mode="sum")
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 2))
        self.recomputes = False

    def forward(self, ids: Tensor) -> Tensor:
        rows = checkpoint(self.rows, ids, use_reentrant=False) if self.recomputes else self.rows(ids)
        out: Tensor = self.head(rows)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Look rows up in the table twice."""
        rows: Tensor = self.items(ids) + self.words(ids) + self.bag(ids).unsqueeze(1)
        return rows


def plain(module: nn.Module, ids: Tensor) -> Tensor:
    return module(ids)  # type: ignore[no-any-return]


def with_offsets(bag: nn.Module, ids: Tensor) -> Tensor:
    return bag(ids.flatten(), torch.arange(0, ids.numel(), 3))  # type: ignore[no-any-return]


def train(
    model: Any,
    ranks: list[int],
    *,
    make: Any = flatbed.optim.Adam,
    wrap: Callable[[Any], nn.Module] | None = None,
    output: Callable[[nn.Module, Tensor], Tensor] = plain,
    steps: int = STEPS,
    accumulates: bool = False,
    scales: bool = False,
    clips: bool = False,
    zeroes: bool = True,
    unused: int | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Train as one rank, or as one process that takes the batches of all ranks. Returns outputs and norms."""
    called: Any = model if wrap is None else wrap(model)
    optimizer, outputs, norms = make(model, lr=0.05, **options), [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)
    for step in range(steps):
        waits = accumulates and step % 2 == 0
        for rank in ranks:
            if rank == unused:
                if len(ranks) == 1:
                    output(called, EVERY[:0].view(0, 3))  # the other ranks look rows up
                continue
            out = output(called, ids_of(step, rank))
            outputs.append(out.detach())
            generator = torch.Generator().manual_seed(1000 + 100 * step + rank)
            exact = torch.randint(-8, 8, out.shape, generator=generator).float() / 8  # sums in any order
            loss = (out * exact if accumulates else out.pow(2)).sum() / len(ranks)
            with called.no_sync() if waits and isinstance(called, DDP) else nullcontext():
                scaler.scale(loss).backward()
        if waits:
            continue
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if zeroes:
            optimizer.zero_grad()
        if optimizer.grad_norm is not None:
            norms.append(optimizer.grad_norm.reshape(1).clone())
    return outputs, norms


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Rows, state and step counts of all tables. A collective."""
    found = {}
    for number, table in enumerate(flatbed.tables(model)):
        found[f"{number}"] = table.read_rows(EVERY)
        found |= {f"{number}.{name}": table.read_state(name, EVERY) for name in table.state_names}
        found |= {f"{number}.{name}": torch.tensor([value]) for name, value in table.scalars().items()}
    return found


def check(
    folder: Path,
    kind: Any = flatbed.Embedding,
    *,
    shard: str | None = "row",
    table: dict[str, Any] | None = None,
    exact: bool = True,
    **training: Any,
) -> None:
    """Train a table of all ranks and, in every process, one that no rank shares. They end alike.

    Not `exact`: results that depend on a norm, or on dense layers, are equal up to rounding.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    table = {"seed": 3, **(table or {})}
    files: list[dict[str, Any]] = [{}, {}]
    if table.get("storage") == "disk":
        number = f"{world}-{next(numbers)}"
        files = [
            {"path": folder / f"{number}-{'all' if shard else rank}.bed"},
            {"path": folder / f"{number}-{rank}"},
        ]
    shared = kind(ROWS, DIM, padding_idx=PADDING, shard=shard, **files[0], **table)
    whole = kind(ROWS, DIM, padding_idx=PADDING, replicate=False, **files[1], **table)
    outputs, norms = train(shared, [rank], **training)
    for name in ("wrap", "shard_state"):
        training.pop(name, None)
    expected, expected_norms = train(whole, [*range(world)], **training)
    found = {**everything(shared), **{f"norm {i}": norm for i, norm in enumerate(norms)}}
    for value in found.values():
        assert_equal_on_all_ranks(value)
    wanted = {**everything(whole), **{f"norm {i}": norm for i, norm in enumerate(expected_norms)}}
    if "unused" not in training:
        found |= {f"output {i}": out for i, out in enumerate(outputs)}
        wanted |= {f"output {i}": out for i, out in enumerate(expected[rank::world])}
    rounding: Any = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, wanted, **rounding)
    for one in (*flatbed.tables(shared), *flatbed.tables(whole)):
        one.close(discard=True)


# ---- tables alone


def rprop(params: Any, lr: float) -> Any:
    return flatbed.optim.from_torch(torch.optim.Rprop, params, lr=lr)


def sharded_tables(folder: Path) -> None:
    """Storages, caches, optimizers, dtypes, bags, accumulation; a rank that looks no rows up."""
    optim, bag, world = flatbed.optim, flatbed.EmbeddingBag, dist.get_world_size()
    for storage in ("host", "disk", "device"):
        check(folder, table={"storage": storage})
    for cache in ({"cache_rows": 5}, {"cache_rows": 2, "cache_policy": "lru"}):
        check(folder, table={"storage": "disk", **cache})
    check(folder, bag, table={"mode": "mean"})
    for unused in (0, world - 1):
        check(folder, unused=unused)
    if world > 2:
        return
    check(folder, make=optim.SGD, momentum=0.9, weight_decay=0.1)
    check(folder, make=optim.SGD, table={"storage": "disk"})
    for make in (optim.Adagrad, optim.SparseAdam, optim.RowwiseAdagrad, rprop):
        check(folder, make=make)
    check(folder, per_row_steps=True, table={"storage": "device"})
    check(folder, bag, make=optim.SGD, output=with_offsets)
    check(folder, make=optim.SGD, accumulates=True)
    check(folder, accumulates=True, table={"storage": "disk"})
    check(folder, table={"dtype": torch.bfloat16})
    check(folder, bag, table={"dtype": torch.float64})
    if not torch.cuda.is_available():
        with interpreted_kernels():
            check(folder, table={"cache_rows": 5}, steps=2)


def replicas(folder: Path) -> None:
    sgd = flatbed.optim.SGD
    check(folder, shard=None)
    check(folder, shard=None, unused=0)
    check(folder, Model, shard=None, exact=False, wrap=ddp())
    if dist.get_world_size() > 2:
        return
    check(folder, shard=None, table={"storage": "disk"})
    check(folder, shard=None, make=sgd, accumulates=True, table={"storage": "device"})
    check(folder, flatbed.EmbeddingBag, shard=None, make=flatbed.optim.Adagrad)
    check(folder, shard=None, per_row_steps=True)
    check(folder, shard=None, exact=False, make=sgd, zeroes=False)
    check(folder, shard=None, exact=False, make=sgd, max_norm=0.5)
    for accumulates in (False, True):
        check(
            folder, Model, shard=None, exact=False, make=sgd, wrap=ddp(), clips=True, accumulates=accumulates
        )


# ---- beside dense parameters


def ddp(*, recomputes: bool = False, **options: Any) -> Callable[[Model], nn.Module]:
    """Wrap a model, and see that DDP leaves the rows as they are."""

    def wrap(model: Model) -> nn.Module:
        model.recomputes = recomputes
        before = model.items.read_rows(EVERY)
        called = DDP(model, **options)
        assert torch.equal(before, model.items.read_rows(EVERY))
        return called

    return wrap


def fsdp(*shape: int) -> Callable[[Model], nn.Module]:
    def wrap(model: Model) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        fully_shard(model, mesh=mesh, ignored_params=set(flatbed.tables(model)))
        return model

    return wrap


def beside_dense_layers(folder: Path) -> None:
    world = dist.get_world_size()
    cases: list[dict[str, Any]] = [
        {"wrap": ddp(), "accumulates": True, "scales": True},
        {"wrap": ddp(), "shard_state": True},
        {"wrap": fsdp(world), "accumulates": True, "scales": True},
    ]
    if world == 2:
        cases += [
            {"wrap": ddp()},
            {"wrap": fsdp(world)},
            {"wrap": ddp(recomputes=True)},
            {"wrap": ddp(find_unused_parameters=True)},
            {"wrap": ddp(static_graph=True), "make": flatbed.optim.SGD},
            {"wrap": ddp(gradient_as_bucket_view=True), "make": flatbed.optim.SGD},
        ]
    else:
        cases += [{"wrap": fsdp(2, 2)}]
    for case in cases:
        check(folder, Model, exact=False, max_norm=0.5, **case)


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


def overflows(_: Path) -> None:
    """An overflow on one rank stops all of them."""
    rank = dist.get_rank()
    for shard in ("row", None):
        model = Model(ROWS, DIM, PADDING, seed=3, shard=shard)
        called = DDP(model)
        optimizer = flatbed.optim.Adam(model, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            before = everything(model)
            loss = called(torch.tensor([[rank, 5]])).pow(2).sum()
            extra = model.items(torch.tensor([9])).sum()  # in the rows of one rank alone
            loss = loss + extra * (float("inf") if step == 1 and rank == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = everything(model)
            assert all(map(torch.equal, before.values(), after.values())) == (step == 1)
            assert scaler.get_scale() == (8.0 if step < 1 else 4.0)
            for value in after.values():
                assert_equal_on_all_ranks(value)
        assert model.items.table.scalars() == {"step": 3.0}
        model(torch.tensor([[rank]])).sum().backward()
        optimizer.found_inf = torch.tensor(float(rank == 0))
        optimizer.step()
        assert model.items.table.scalars() == {"step": 3.0}


def norms_of_pipeline_stages(_: Path) -> None:
    """Tables that all stages share count once; a table of one stage counts, too, also in steps without it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = nn.Parameter(torch.zeros(1))
    options: dict[str, Any] = {"max_norm": 8.0, "norm_group": dist.group.WORLD}
    for shard in ("row", None):
        emb = flatbed.Embedding(ROWS, DIM, shard=shard)
        optimizer = flatbed.optim.SGD([emb.table, p], lr=0.1, **options)
        emb(torch.tensor([rank])).sum().backward()
        p.grad = torch.full((1,), 2.0)
        optimizer.step()
        expected = torch.tensor(world * DIM / world**2 + world * 4.0).sqrt()
        torch.testing.assert_close(optimizer.grad_norm, expected)
        assert_equal_on_all_ranks(optimizer.grad_norm)
    own = flatbed.Embedding(ROWS, DIM, replicate=False)
    optimizer = flatbed.optim.SGD([p] if rank else own, lr=0.1, **options)
    for step in range(3):
        optimizer.zero_grad()
        if rank == 0 and step > 0:
            own(torch.tensor([1])).sum().backward()
        p.grad = torch.full((1,), 2.0)
        optimizer.step()
        expected = torch.tensor((step > 0) * DIM + (world - 1) * 4.0).sqrt()
        torch.testing.assert_close(optimizer.grad_norm, expected)


SCENARIOS = [
    *(sharded_tables, replicas, beside_dense_layers, interpreted_caches, overflows, norms_of_pipeline_stages),
]

if __name__ == "__main__":
    main(SCENARIOS)
