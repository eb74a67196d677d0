"""Scenarios of `shard="row"`: reads and writes of all ranks, and ranks that differ or fail."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import flatbed
from tests.distributed.parity import DIM, EVERY, PADDING, ROWS, ids_of
from tests.distributed.processes import assert_equal_on_all_ranks, assert_one_fails, assert_raises, main


def warm_caches(folder: Path) -> None:
    path = folder / f"warm-{dist.get_world_size()}.bed"
    emb = flatbed.Embedding(ROWS, DIM, shard="row", storage="disk", path=path, cache_rows=4)
    emb.table.warm(EVERY.repeat(2))
    emb.table.warm([0, 1], counts=[3, 1])
    emb(EVERY)
    assert emb.table.cache_stats().hits > 0
    emb.table.close(discard=True)


def lookups_without_gradient(_: Path) -> None:
    emb = flatbed.Embedding(ROWS, DIM, PADDING, seed=3, shard="row")
    whole = flatbed.Embedding(ROWS, DIM, PADDING, seed=3)
    ids = ids_of(0, dist.get_rank())
    with torch.no_grad():
        assert torch.equal(emb(ids), whole(ids))
        assert emb(torch.empty(0, dtype=torch.int64)).shape == (0, DIM)
        assert torch.equal(emb(7), whole(7))
    with torch.inference_mode():
        assert torch.equal(emb(ids), whole(ids))
    emb.requires_grad_(False)
    assert not emb(ids).requires_grad
    bag = flatbed.EmbeddingBag(ROWS, DIM, padding_idx=PADDING, seed=3, shard="row")
    with torch.no_grad():
        assert torch.equal(
            bag(EVERY.view(1, -1)),
            flatbed.EmbeddingBag(ROWS, DIM, padding_idx=PADDING, seed=3)(EVERY.view(1, -1)),
        )


def reads_and_writes(_: Path) -> None:
    """Besides those of `random_operations`."""
    rank = dist.get_rank()
    emb = flatbed.Embedding(ROWS, DIM, shard="row", init="zeros")
    emb.write_rows(EVERY[: 0 if rank else 2], torch.full((0 if rank else 2, DIM), 9.0))
    assert emb.read_rows([[0], [1]]).tolist() == [[[9.0] * DIM]] * 2
    assert emb.read_rows(EVERY[: rank * 3]).shape == (rank * 3, DIM)
    weights = torch.randn(ROWS, DIM)
    made = flatbed.Embedding.from_pretrained(weights, shard="row")
    assert torch.equal(made.read_rows(EVERY), weights)
    emb.load_state_dict({"weight": weights})
    assert torch.equal(emb.read_rows(EVERY), weights)
    assert torch.equal(emb.to_torch().weight, weights)
    emb.reset_parameters()
    assert not torch.equal(emb.read_rows(EVERY), weights)
    assert_equal_on_all_ranks(emb.read_rows(EVERY))


def gradients_of_own_rows(_: Path) -> None:
    """After an exchange, `table.grad` has the mean over ranks for the rows that this rank holds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    emb = flatbed.Embedding(ROWS, DIM, shard="row", init="zeros")
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    (emb([3, 4, 5, 6, 20 + rank // 2]) * (rank + 1)).sum().backward()
    assert emb.table.grad is not None
    total = world * (world + 1) / 2
    grads = dict(zip(emb.table.grad_rows.tolist(), emb.table.grad[:, 0].tolist(), strict=True))
    assert {row: grads[row] for row in grads if row < 20} == {
        row: total / world for row in (3, 4, 5, 6) if row % world == rank
    }
    emb.table.grad *= 0.5
    emb([3]).sum().backward()  # accumulated
    optimizer.step()
    assert emb.read_rows([3, 4])[:, 0].tolist() == [-total / world / 2 - 1, -total / world / 2]
    assert emb.table.grad_rows is not None
    optimizer.zero_grad()
    optimizer.step()  # no rank has a gradient
    assert emb.read_rows([4])[0, 0] == -total / world / 2


def exports(folder: Path) -> None:
    weights = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    emb = flatbed.Embedding.from_pretrained(weights, shard="row")
    path = folder / f"exported-{dist.get_world_size()}"
    emb.table.export(path.with_suffix(".npy"))
    emb.table.export(path.with_suffix(".safetensors"))
    emb.table.export(path, shard_bytes=7 * DIM * 4)
    assert np.array_equal(np.load(path.with_suffix(".npy")), weights.numpy())
    assert torch.equal(load_file(path.with_suffix(".safetensors"))["weight"], weights)
    parts = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    assert torch.equal(torch.cat([tensor for part in parts for tensor in part.values()]), weights)
    with pytest.raises(flatbed.FlatbedError, match="not an empty folder"):
        emb.table.export(path)  # told to the ranks that only read
    assert torch.equal(emb.read_rows(EVERY), weights)


def search(_: Path) -> None:
    rank = dist.get_rank()
    weights = torch.randint(-3, 4, (ROWS, DIM), generator=torch.Generator().manual_seed(1)).float()
    emb = flatbed.Embedding.from_pretrained(weights, padding_idx=4, shard="row")
    whole = flatbed.Embedding.from_pretrained(weights, padding_idx=4)
    queries = torch.randint(-3, 4, (2 + rank, DIM), generator=torch.Generator().manual_seed(2 + rank)).float()
    for k in (1, 5, ROWS - 1):
        for found, expected in zip(emb.topk(queries, k), whole.topk(queries, k), strict=True):
            assert torch.equal(found, expected)
    values, ids = emb.topk(queries, 3, metric="cosine")
    torch.testing.assert_close(values, whole.topk(queries, 3, metric="cosine")[0])
    assert ids.shape == (2 + rank, 3)
    assert emb.topk(queries[: 2 * rank], 2)[0].shape == (min(2 * rank, 2 + rank), 2)
    assert_one_fails(0, lambda bad: emb.topk(queries, ROWS if bad else 1), ValueError, "k must be")
    assert_one_fails(0, lambda bad: emb.topk(queries, 1, chunk_rows=1 - bad), ValueError, "at least 1")
    assert torch.equal(emb.topk(queries, 1)[1], whole.topk(queries, 1)[1])  # ranks can continue


def random_operations(folder: Path) -> None:
    """Any sequence of operations leaves a sharded table and one that holds all rows with the same bits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, storage in enumerate(("host", "disk", "device") if world == 2 else ("disk",)):
        shared = torch.Generator().manual_seed(number)  # what all ranks do next
        paths = [folder / f"walk-{world}-{name}" for name in ("sharded.bed", f"{rank}.whole")]
        given = [{"path": path} if storage == "disk" else {} for path in paths]
        options: dict[str, Any] = {"seed": 3, "storage": storage}
        sharded = flatbed.Embedding(ROWS, DIM, PADDING, shard="row", **given[0], **options)
        whole = flatbed.Embedding(ROWS, DIM, PADDING, replicate=False, **given[1], **options)
        optimizers = [flatbed.optim.Adam(emb, lr=0.1) for emb in (sharded, whole)]

        def draw(n: int, shared: torch.Generator = shared) -> int:
            return int(torch.randint(n, (), generator=shared))

        for _ in range(30):
            operation, n_rows = draw(6), whole.num_embeddings
            ids = [torch.randint(n_rows, (draw(7),), generator=shared) for _ in range(world)]
            if operation < 3:  # with accumulation, of gradients that add up exactly
                sharded(ids[rank]).sum().backward()
                for some in ids:
                    (whole(some).sum() / world).backward()
                if draw(3):
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            elif operation == 3:
                values = [torch.randn(len(some), DIM, generator=shared) for some in ids]
                sharded.write_rows(ids[rank], values[rank])
                whole.write_rows(torch.cat(ids), torch.cat(values))
            elif operation == 4:
                for emb in (sharded, whole):
                    emb.table.resize(n_rows + 3)
            elif storage != "device":
                sharded.table.set_cache(draw(5))
            every = torch.arange(whole.num_embeddings)
            assert torch.equal(sharded.read_rows(every), whole.read_rows(every)), (storage, operation)
            for name in whole.table.state_names:
                assert torch.equal(sharded.table.read_state(name, every), whole.table.read_state(name, every))
            assert sharded.table.scalars() == whole.table.scalars()
        with pytest.raises(ValueError, match="only grow"):
            sharded.table.resize(ROWS)
        for emb in (sharded, whole):
            emb.table.close(discard=True)


def several_tables_and_groups(_: Path) -> None:
    """Two tables in one optimizer; a mesh; process groups of some ranks, unequal numbers of them on ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.new_group([0])
    group = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (world,))
    users = flatbed.Embedding(ROWS, DIM, shard="row", mesh=mesh)
    items = flatbed.Embedding(40, DIM, shard="row")
    optimizer = flatbed.optim.Adam([users.table, items.table], lr=0.1, max_norm=1.0)
    before = users.read_rows(EVERY), items.read_rows(range(40))
    for _ in range(2):
        (users([rank, 3]) * items([39, rank])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(users.read_rows(EVERY), before[0])
    assert not torch.equal(items.read_rows(range(40)), before[1])
    options: Any = {"shard": "row", "process_group": group, "seed": 1, "replicate": world == 2}
    if rank >= 2:
        with pytest.raises((ValueError, flatbed.FlatbedError)):
            flatbed.Embedding(ROWS, DIM, **options)
        return
    pair = flatbed.Embedding(ROWS, DIM, **options)
    assert "rank" in repr(pair.table)
    assert torch.equal(pair.read_rows(EVERY), flatbed.Embedding(ROWS, DIM, seed=1).read_rows(EVERY))
    if world > 2:
        with pytest.raises(ValueError, match=r"2 of 4 ranks.*replicate=False"):
            flatbed.Embedding(ROWS, DIM, shard="row", process_group=group)
        of_pair = flatbed.optim.SGD(pair, lr=0.1, max_norm=1.0)
        pair([1]).sum().backward()
        assert_raises(of_pair.step, "2 of 4 ranks")


# ---- failures


def bad_ids_on_one_rank(_: Path) -> None:
    culprit = dist.get_world_size() - 1
    emb = flatbed.Embedding(ROWS, DIM, shard="row")
    bag = flatbed.EmbeddingBag(ROWS, DIM, shard="row")
    optimizer = flatbed.optim.SGD([emb.table, bag.table], lr=0.1)
    for bad in ([ROWS], [-1]):
        for action in (emb, emb.read_rows, lambda ids: bag(ids, [0])):
            call = lambda is_bad, bad=bad, action=action: action(bad if is_bad else [1])  # noqa: E731
            assert_one_fails(culprit, call, IndexError, "out of range")
    assert_one_fails(culprit, lambda bad: emb([0.5] if bad else [1]), TypeError, "integers")
    assert_one_fails(culprit, lambda bad: bag([[[1]]] if bad else [[1]]), ValueError, "bags are")
    values = torch.zeros(1, DIM)
    assert_one_fails(culprit, lambda bad: emb.write_rows([ROWS if bad else 1], values), IndexError, "range")
    assert_one_fails(culprit, lambda bad: emb.write_rows([1], values[:, bad:]), ValueError, "shape")
    if dist.get_rank() == culprit:  # after the exchange: the others do not wait for this rank
        full = mock.patch.object(emb.table._local_io, "write_weights_", side_effect=OSError("No space left"))
        with full, pytest.raises(OSError, match="No space"):
            emb.write_rows([1], values)
    else:
        emb.write_rows([1], values)
    emb.table._store.mark_half_loaded()  # by a checkpoint, on all ranks
    for action in (emb, emb.read_rows, emb.topk):
        with pytest.raises(flatbed.FlatbedError, match="load one again"):
            action(*((values, 1) if action == emb.topk else ([1],)))
    emb.table._store.mark_loaded(Path())
    emb([1, 2]).sum().backward()  # ranks can continue
    optimizer.step()


def ranks_that_differ(folder: Path) -> None:
    rank = dist.get_rank()
    options: list[tuple[str, dict[str, Any]]] = [
        ("seed", {"seed": rank}),
        ("init", {"init": float(rank)}),
        ("dtype", {"dtype": torch.float64 if rank else torch.float32}),
        ("padding_idx", {"padding_idx": rank}),
    ]
    for name, given in options:
        assert_raises(
            lambda given=given: flatbed.Embedding(ROWS, DIM, shard="row", **given), f"{name} differs"
        )
    assert_raises(lambda: flatbed.Embedding(ROWS, DIM + rank, shard="row"), "dim differs")
    assert_raises(lambda: flatbed.Embedding(ROWS + rank, DIM, shard="row"), "rows")
    makers = [
        ("optimizer", lambda emb: (flatbed.optim.Adam if rank else flatbed.optim.SGD)(emb, lr=0.1)),
        ("lr", lambda emb: flatbed.optim.SGD(emb, lr=0.1 + rank)),
        ("options", lambda emb: flatbed.optim.SGD(emb, lr=0.1, max_norm=1.0 + rank)),
    ]
    for name, make in makers:
        emb = flatbed.Embedding(ROWS, DIM, shard="row")
        optimizer, before = make(emb), emb.read_rows(EVERY)
        for _ in range(2):
            emb([rank]).sum().backward()
            assert_raises(optimizer.step, name, "differs between ranks")
        assert torch.equal(emb.read_rows(EVERY), before)
    emb = flatbed.Embedding(ROWS, DIM, shard="row")
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    emb([1]).sum().backward()
    optimizer.step()
    emb.requires_grad_(rank == 0)
    assert_raises(optimizer.step, "requires_grad differs")
    emb.requires_grad_()
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
    assert_raises(optimizer.step, "lr differs")


def weights_that_differ(_: Path) -> None:
    """Each rank is given all rows: those of one rank among those of another would go unnoticed."""
    rank = dist.get_rank()
    weights = torch.full((ROWS, DIM), float(rank == 1))
    said = ("a sample of weight differs between ranks", "rank 1")
    assert_raises(lambda: flatbed.Embedding.from_pretrained(weights, shard="row"), *said)
    emb = flatbed.Embedding(ROWS, DIM, seed=0, shard="row")
    before = emb.read_rows(EVERY)
    assert_raises(lambda: emb.load_state_dict({"weight": weights.bfloat16()}), *said)
    assert torch.equal(emb.read_rows(EVERY), before)


def warnings_of_steps(model: nn.Module, emb: flatbed.Embedding, n_steps: int = 6) -> list[str]:
    """Train a table and a model beside it, and return the warnings that compare ranks."""
    optimizer = flatbed.optim.Adam([emb.table, *model.parameters()], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(n_steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 if step else 0.0  # a warm-up
            model(emb(ids_of(step, dist.get_rank(), empty=False))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "ranks" in str(one.message)]


def dense_parameters_that_drift_apart(_: Path) -> None:
    """Without DDP each rank trains its own, and warns once. Parameters that differ at first are meant to."""
    emb = flatbed.Embedding(ROWS, DIM, seed=0, shard="row")
    torch.manual_seed(0)
    (found,) = warnings_of_steps(nn.Linear(DIM, 3), emb)
    assert "rank 1" in found
    assert "DistributedDataParallel" in found
    assert warnings_of_steps(DDP(nn.Linear(DIM, 3)), emb) == []
    assert warnings_of_steps(nn.Identity(), emb) == []
    torch.manual_seed(dist.get_rank())
    assert warnings_of_steps(nn.Linear(DIM, 3), emb) == []
    assert warnings_of_steps(nn.Linear(DIM, 3 + dist.get_rank()), emb) == []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = nn.Sequential(nn.Linear(DIM, 8))
    fully_shard(sharded, mesh=mesh)
    assert warnings_of_steps(sharded, emb) == []


def ranks_in_another_order(_: Path) -> None:
    rank = dist.get_rank()
    first, second = (flatbed.Embedding(ROWS, DIM, shard="row") for _ in range(2))
    optimizer = flatbed.optim.SGD([first.table, second.table], lr=0.1)
    assert_raises(lambda: (first if rank else second)([1]), "a lookup of table", "same order")
    assert_raises(lambda: first([1]) if rank else first.read_rows([1]), "a read", "a lookup", "same order")
    with torch.set_grad_enabled(rank > 0):  # the first rank evaluates alone
        assert_raises(lambda: first([1]), "a lookup of table", "a lookup without gradients", "same order")
    first([1]).sum().backward()
    assert_raises(lambda: first([1]) if rank else optimizer.step(), "the gradients", "a lookup")
    assert_raises(lambda: first.topk(torch.ones(1, DIM), 1 + rank), "k differs")


def refused(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    emb = flatbed.Embedding(ROWS, DIM, shard="row")
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    table = emb.table
    actions: list[Callable[[], Any]] = [
        lambda: emb.weight,
        lambda: nn.init.normal_(table),
        emb.state_dict,
        optimizer.state_dict,
        lambda: copy.deepcopy(emb),
        lambda: pickle.dumps(emb),
    ]
    for action in actions:
        assert_raises(action, "ranks share this one")
    emb([1]).sum().backward()
    assert_raises(lambda: nn.utils.clip_grad_norm_(emb.parameters(), 1.0), "max_norm=")
    alone = [dist.new_group([one]) for one in range(world)][rank]
    for n_rows, options, message in (
        (ROWS, {"shard": "row", "process_group": alone}, "replicate=False"),
        (ROWS, {"shard": "row", "replicate": False}, "replicate=False"),
        (world - 1, {"shard": "row"}, "a row for each"),
        (ROWS, {"shard": "column"}, "shard"),
        (ROWS, {"process_group": dist.group.WORLD}, "process_group"),
    ):
        with pytest.raises(ValueError, match=message):
            flatbed.Embedding(n_rows, DIM, **options)  # type: ignore[arg-type]
    by_itself = flatbed.Embedding(ROWS, DIM, shard="row", process_group=alone, replicate=False)
    assert by_itself.table._shards is None


def files_of_ranks(folder: Path) -> None:
    """A file for each rank. Those of other numbers of ranks, or of some ranks alone, are refused."""
    rank, world = dist.get_rank(), dist.get_world_size()
    path = folder / f"files-{world}.bed"
    options: Any = {"shard": "row", "storage": "disk", "seed": 1}
    for n_steps in range(2):
        emb = flatbed.Embedding(ROWS, DIM, path=path, resume=n_steps > 0, **options)
        optimizer = flatbed.optim.Adam(emb, lr=0.1)
        emb(EVERY).sum().backward()
        optimizer.step()
        assert emb.table.scalars()["step"] == n_steps + 1
        assert_raises(emb.table.close, "save again")
        flatbed.save_checkpoint(folder / f"files-{world}", emb, optimizer)
        emb.table.close()
    dist.barrier()
    own = path.with_name(f"{path.name}.{rank}-of-{world}")
    assert own.exists()
    with pytest.raises(flatbed.FlatbedError, match=f"rank {rank} of {world}"):
        flatbed.load_table(own, read_only=True)
    if rank == 0:
        own.rename(folder / f"away-{world}")
    assert_raises(
        lambda: flatbed.Embedding(ROWS, DIM, path=path, **options), "a file to continue from differs"
    )
    (folder / f"other.bed.{rank}-of-9").touch()
    (folder / "plain.bed").touch()
    dist.barrier()
    for name, found in (("other.bed", "on 9 ranks"), ("plain.bed", "on 1 ranks")):
        with pytest.raises(flatbed.FlatbedError, match=found):
            flatbed.Embedding(ROWS, DIM, path=folder / name, **options)
    dist.barrier()


SCENARIOS = [
    several_tables_and_groups,  # before all others: the first table of a process group makes another one
    *(warm_caches, lookups_without_gradient, reads_and_writes, gradients_of_own_rows, exports, search),
    *(random_operations, bad_ids_on_one_rank, ranks_that_differ, weights_that_differ),
    *(dense_parameters_that_drift_apart, ranks_in_another_order, refused, files_of_ranks),
]

if __name__ == "__main__":
    main(SCENARIOS)
