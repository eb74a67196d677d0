"""Scenarios of a `Prefetcher` over sharded tables: the same bits, uneven data, ranks that fail."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flatbed
from flatbed.data import pipeline
from flatbed.data.pipeline import THREAD_NAME
from flatbed.distributed.channel import LOOK_AROUND
from tests.distributed.processes import assert_one_fails, assert_raises, interpreted_kernels, main

ROWS, DIM, STEPS = 23, 16, 5
EVERY = torch.arange(ROWS)
numbers = itertools.count()


def batch_of(step: int, rank: int, rows: int = ROWS) -> dict[str, Any]:
    """Ids with repeats; now and then none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    n = 0 if (step + rank) % 3 == 1 else 4
    users, items = (torch.randint(rows, (n, 3), generator=generator) for _ in range(2))
    return {"users": users, "items": items, "name": "a batch"}


def tables(folder: Path, storage: str, rows: int = ROWS, **options: Any) -> list[flatbed.Embedding]:
    made = []
    for seed in range(2):
        path = folder / f"{dist.get_world_size()}-{next(numbers)}.bed"
        more = {"path": path} if storage == "disk" else {}
        emb = flatbed.Embedding(rows, DIM, 6, seed=seed, shard="row", storage=storage, **more, **options)
        made.append(emb)
    return made


def train(
    modules: list[flatbed.Embedding], loop: Callable[[Any, Any], Any], steps: int = STEPS
) -> list[Tensor]:
    """Train two tables, one of them with two lookups per batch. Returns outputs, weights and state."""
    users, items = modules
    optimizer = flatbed.optim.Adam([users.table, items.table], lr=0.05)
    lookups = {users: "users", items: lambda batch: [batch["items"], batch["users"]]}
    found, n_rows = [], users.num_embeddings
    for batch in loop([batch_of(step, dist.get_rank(), n_rows) for step in range(steps)], lookups):
        products = users(batch["users"]) * items(batch["items"]) + items(batch["users"])
        found.append(products.detach())
        products.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for emb in modules:
        found += [emb.read_rows(range(n_rows)), emb.table.read_state("exp_avg", range(n_rows))]
        emb.table.close(discard=True)
    return found


def assert_prefetching_changes_nothing(
    folder: Path, storage: str, *depths: int, steps: int = STEPS, **options: Any
) -> None:
    expected = train(tables(folder, storage, **options), lambda loader, _: loader, steps)
    for depth in depths:
        loop = lambda *a, depth=depth: flatbed.Prefetcher(*a, depth=depth)  # noqa: E731
        found = train(tables(folder, storage, **options), loop, steps)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), (storage, depth)


def same_bits(folder: Path) -> None:
    assert_prefetching_changes_nothing(folder, "host", 0, 1, 3)
    assert_prefetching_changes_nothing(folder, "disk", 2, cache_rows=5)
    if dist.get_world_size() == 2:
        assert_prefetching_changes_nothing(folder, "disk", 1)
        assert_prefetching_changes_nothing(folder, "device", 2)


def same_bits_with_caches(folder: Path) -> None:
    """The batches ahead of one lookup fit into the cache together; those of two lookups do not."""
    if dist.get_world_size() == 2 and not torch.cuda.is_available():
        with interpreted_kernels():
            for storage in ("host", "disk"):
                assert_prefetching_changes_nothing(folder, storage, 1, steps=3, rows=99, cache_rows=40)


def ids_travel_ahead(folder: Path) -> None:
    """Lookups of prefetched ids exchange no rows; lookups of other ids do, also if those of one rank do."""
    rank = dist.get_rank()
    emb = flatbed.Embedding(ROWS, DIM, seed=0, shard="row")
    shards, sent = emb.table._shards, []
    assert shards is not None
    exchange_rows = shards._exchange_rows

    def spy(route: Any, header: Any, channel: Any) -> Any:
        sent.append(channel.number)
        return exchange_rows(route, header, channel)

    shards._exchange_rows = spy  # type: ignore[method-assign]
    expected = emb.read_rows(EVERY)
    loader = [{"ids": torch.tensor([step, rank])} for step in range(6)]
    for step, batch in enumerate(flatbed.Prefetcher(loader, {emb: "ids"})):
        n_before = sent.count(0)
        ids = batch["ids"].clone() if step % 2 and rank == 0 else batch["ids"]
        assert torch.equal(emb(ids), expected[ids])
        assert sent.count(0) - n_before == step % 2
        with torch.no_grad():
            assert torch.equal(emb(batch["ids"].view(1, 2)), expected[ids].view(1, 2, DIM))
        assert sent.count(0) - n_before == step % 2
    assert len([number for number in sent if number]) == 6
    assert_no_thread()


def assert_no_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(30)  # it may just end
            assert not thread.is_alive()


# ---- uneven data


def loop_over(n_batches: int, emb: flatbed.Embedding, **options: Any) -> Iterator[dict[str, Any]]:
    rank = dist.get_rank()
    loader = [{"ids": np.array([step, rank]), "n": np.array(step)} for step in range(n_batches)]
    return iter(flatbed.Prefetcher(loader, {emb: "ids"}, **options))


def train_on(batches: Iterator[dict[str, Any]], emb: flatbed.Embedding) -> list[int]:
    """Take a step with each batch; return the numbers of ids."""
    optimizer, sizes = flatbed.optim.SGD(emb, lr=0.1), []
    for batch in batches:
        sizes.append(len(batch["ids"]))
        emb(batch["ids"]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sizes


def uneven_loaders(_: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    emb = flatbed.Embedding(ROWS, DIM, shard="row")
    for depth in (0, 3):
        for first in (0, 3):  # batches of rank 1, the first to end
            n = first if rank == 1 else 5 + rank
            assert train_on(loop_over(n, emb, depth=depth), emb) == [2] * first
        n = 2 if rank == 1 else 4 + rank
        sizes = train_on(loop_over(n, emb, depth=depth, uneven="empty"), emb)
        assert sizes == [2] * n + [0] * ((4 + world - 1 if world > 2 else 4) - n)
        error = lambda n=n, depth=depth: train_on(loop_over(n, emb, depth=depth, uneven="error"), emb)  # noqa: E731
        assert_raises(error, "rank 1 has ended after 2 batches", "rank 0", "uneven")
        none = lambda depth=depth: train_on(  # noqa: E731
            loop_over(0 if rank == 1 else 2, emb, depth=depth, uneven="empty"), emb
        )
        assert_raises(none, "rank 1 has no batch", "stop")
        for uneven in ("stop", "empty", "error"):
            assert train_on(loop_over(0, emb, depth=depth, uneven=uneven), emb) == []
            assert train_on(loop_over(3, emb, depth=depth, uneven=uneven), emb) == [2] * 3
    assert_no_thread()
    assert len(emb.table._shards.channel.loaders) == 1  # type: ignore[union-attr]


def bags_of_ended_loaders(_: Path) -> None:
    """An ended rank has no bags, and the others train on: the same bits as one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    last = world + 1  # batches of the last rank to end

    def bags_of(rank: int, step: int) -> dict[str, Tensor]:
        ids = batch_of(step, rank + step)["users"].flatten()
        return {"ids": ids, "offsets": torch.tensor([0, len(ids) // 3, len(ids)]), "labels": torch.ones(2, 1)}

    for padding_idx, depth in ((None, 2), (6, 0)):
        kind: dict[str, Any] = {"padding_idx": padding_idx, "mode": "sum", "include_last_offset": True}
        bag = flatbed.EmbeddingBag(ROWS, DIM, seed=1, shard="row", **kind)
        optimizer = flatbed.optim.Adam(bag, lr=0.05)
        loader, sizes = [bags_of(rank, step) for step in range(2 + rank)], []
        for batch in flatbed.Prefetcher(loader, {bag: "ids"}, depth=depth, uneven="empty"):
            output = bag(batch["ids"], batch["offsets"])
            (output - batch["labels"]).square().sum().backward()
            sizes.append(len(output))
            optimizer.step()
            optimizer.zero_grad()
        assert sizes == [2] * (2 + rank) + [0] * (last - 2 - rank)
        whole = flatbed.EmbeddingBag(ROWS, DIM, seed=1, replicate=False, **kind)
        optimizer = flatbed.optim.Adam(whole, lr=0.05)
        for step in range(last):
            for batch in [bags_of(one, step) for one in range(world) if step < 2 + one]:
                output = whole(batch["ids"], batch["offsets"])
                ((output - batch["labels"]).square().sum() / world).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(bag.read_rows(EVERY), whole.read_rows(EVERY))


# ---- failures


class Broken(Exception):
    pass


def failing_loaders(_: Path) -> None:
    rank, culprit = dist.get_rank(), dist.get_world_size() - 1
    emb = flatbed.Embedding(ROWS, DIM, shard="row")
    plain = flatbed.Embedding(ROWS, DIM, replicate=False)

    def batches(bad: Any) -> Iterator[dict[str, Any]]:
        for step in range(6):
            if step == 3 and rank == culprit:
                if isinstance(bad, Exception):
                    raise bad
                yield {"ids": np.array([bad])}
            yield {"ids": np.array([step, rank])}

    def run(bad: Any, depth: int, *more: flatbed.Embedding) -> None:
        taken = 0
        try:
            for batch in flatbed.Prefetcher(batches(bad), dict.fromkeys((emb, *more), "ids"), depth=depth):
                emb(batch["ids"])
                taken += 1
        finally:
            assert taken == 3

    for depth in (0, 3):
        for arguments, error, message in [
            ((Broken("no file"), depth), Broken, "no file"),
            ((ROWS, depth), IndexError, "out of range"),
            ((-1, depth, plain), IndexError, "out of range"),
            ((0.5, depth), TypeError, "integers"),
        ]:
            run_case = lambda _, arguments=arguments: run(*arguments)  # noqa: E731
            assert_one_fails(culprit, run_case, error, message, "after 3 batches")
            assert_no_thread()
    assert train_on(loop_over(3, emb), emb) == [2] * 3


def leaving_early(_: Path) -> None:
    emb = flatbed.Embedding(ROWS, DIM, shard="row")
    for depth in (1, 3):
        for _ in range(2):  # all ranks
            for step, batch in enumerate(loop_over(9, emb, depth=depth)):
                emb(batch["ids"])
                if step == 2:
                    break
            assert_no_thread()
        batches = loop_over(9, emb, depth=depth)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert emb(EVERY).shape == (ROWS, DIM)
        n_taken = 0
        for batch in loop_over(3, emb, depth=depth):  # after the last batch, on one rank
            emb(batch["ids"])
            n_taken += 1
            if n_taken == 3 and dist.get_rank() == 0:
                break
        assert n_taken == 3
    rank, kept = dist.get_rank(), loop_over(9, emb)
    emb(next(kept)["ids"])
    if rank:  # the others collect the iterator later
        with mock.patch.object(pipeline, "JOIN_SECONDS", 0.0):
            kept.close()  # type: ignore[attr-defined]
    for step, batch in enumerate(loop_over(3, emb)):
        if rank and step == 1:
            time.sleep(2 * LOOK_AROUND.total_seconds())
        emb(batch["ids"])
    kept.close()  # type: ignore[attr-defined]
    with torch.no_grad():
        for batch in loop_over(3, emb):
            assert torch.equal(emb(batch["ids"]), emb.read_rows(batch["ids"]))


def loops_that_differ(_: Path) -> None:
    rank = dist.get_rank()
    emb, other = (flatbed.Embedding(ROWS, DIM, shard="row") for _ in range(2))
    assert_raises(lambda: next(loop_over(2, emb, uneven="error" if rank else "stop")), "uneven differs")
    assert_raises(lambda: next(loop_over(2, emb, depth=rank)), "depth differs")
    assert_raises(lambda: next(loop_over(2, emb if rank else other)), "tables differs")
    assert_raises(lambda: next(loop_over(2, emb)) if rank else emb([1]), "a loop over", "a lookup")
    lookups = {emb: lambda ids: [ids] * (1 + rank)}
    assert_raises(lambda: [*flatbed.Prefetcher([EVERY] * 3, lookups)], "the prefetch of table", "same")
    if dist.get_world_size() > 2:
        group = dist.new_group([0, 1])
        if rank < 2:
            pair = flatbed.Embedding(ROWS, DIM, shard="row", process_group=group, replicate=False)
            with pytest.raises(ValueError, match="same ranks"):
                flatbed.Prefetcher([], {emb: 0, pair: 0})
    with pytest.raises(ValueError, match="uneven"):
        flatbed.Prefetcher([], uneven="pad")
    assert_no_thread()


def several_loops_and_growth(_: Path) -> None:
    emb = flatbed.Embedding(ROWS, DIM, shard="row")
    channel = emb.table._shards.channel  # type: ignore[union-attr]
    n_channels = len(channel.loaders)
    for _ in range(2):  # two loops at once, and one inside
        for step, batches in enumerate(zip(loop_over(4, emb), loop_over(6, emb, depth=1), strict=False)):
            found = [emb(batch["ids"]) for batch in batches]
            assert torch.equal(found[0], found[1])
            if step == 1:
                assert train_on(loop_over(3, emb, uneven="empty"), emb) == [2] * 3
    assert len(channel.loaders) <= n_channels + 3

    def last_rows() -> Iterator[Tensor]:
        while emb.num_embeddings < ROWS + 5:
            yield torch.tensor([emb.num_embeddings - 1, dist.get_rank()])

    for step, ids in enumerate(flatbed.Prefetcher(last_rows(), {emb: lambda ids: ids})):
        assert torch.equal(emb(ids), emb.read_rows(ids))
        emb.table.resize(ROWS + step)
    assert_no_thread()


SCENARIOS = [
    *(same_bits, same_bits_with_caches, ids_travel_ahead, uneven_loaders, bags_of_ended_loaders),
    *(failing_loaders, leaving_early, loops_that_differ, several_loops_and_growth),
]

if __name__ == "__main__":
    main(SCENARIOS)
