"""Ranks that end or fail while others look rows up, with and without a `Prefetcher`.

`python -m tests.distributed.rank_failures FOLDER loop-killed-0 lookup-stuck-1` trains on three ranks for each
argument, all at the same time: what the ranks iterate over, how one of them fails, and its number. With
"build", it ends before it builds the table; with "workers", that of its DataLoader ends. With "again", all
ranks begin another loop after the failure. The other ranks write their errors to FOLDER/loop-killed-0/1.txt.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import flatbed
from flatbed.data.pipeline import THREAD_NAME

WORLD, ROWS, DIM, STEPS = 3, 30, 4, 9
TIMEOUT = 6.0  # of ranks that wait for one that may still answer; others need none


def worker(rank: int, folder: Path, kind: str, way: str, culprit: int) -> None:
    dist.init_process_group("gloo", store=store_of(rank, folder), rank=rank, world_size=WORLD)
    waits_for = set(range(WORLD)) - (set() if way == "again" else {culprit})
    out = folder / f"{rank}.txt"
    try:
        if kind == "build":
            shorten_timeouts()
            if rank == culprit:
                os._exit(0)
        emb = flatbed.Embedding(ROWS, DIM, shard="row")
        optimizer = flatbed.optim.SGD(emb, lr=0.1)
        train(emb, optimizer, torch.tensor([rank]))
        batches = Batches(rank, kind if rank == culprit else "")
        for is_last in [False, True] if way == "again" else [True]:
            with nullcontext() if is_last else suppress(ValueError, flatbed.FlatbedError):
                loop(kind, prefetched(kind, batches, emb), emb, optimizer, way, fails=rank == culprit)
        out.write_text("trained")
    except flatbed.FlatbedError as error:
        out.write_text(f"{type(error).__name__}: {error}")
        for thread in threading.enumerate():
            if thread.name == THREAD_NAME:
                thread.join(60)
                assert not thread.is_alive()
        out.write_text(f"{out.read_text()}\nno thread left")
    while not all((folder / f"{other}.txt").exists() for other in waits_for):
        time.sleep(0.1)  # rank 0 hosts the store that the others ask
    os._exit(0)


class Batches(Dataset[Tensor]):
    """Ids of a rank.

    "workers": the worker that loads them ends itself. "late": their end takes long. "longer": there is
    another batch, which fails.
    """

    def __init__(self, rank: int, failure: str) -> None:
        self.rank, self.failure = rank, failure

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> Tensor:
        if self.failure == "workers" and step == STEPS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([self.rank, 5, step])

    def __iter__(self) -> Iterator[Tensor]:
        yield from (self[step] for step in range(5 if self.failure == "late" else STEPS))
        if self.failure == "longer":
            raise ValueError("a file is damaged")
        if self.failure == "late":  # loaders of other ranks wait for this one when the loop's body fails
            time.sleep(0.1)


def prefetched(kind: str, batches: Batches, emb: flatbed.Embedding) -> Any:
    """Return what a rank iterates over.

    "other": it looks other ids up than those that are prefetched. "last": it fails in the last batch. "with":
    the loop is the body of a `with`.
    """
    if kind == "lookup":
        return batches
    loader = DataLoader(batches, batch_size=None, num_workers=1) if kind == "workers" else batches
    depth, uneven = 0 if kind == "threadless" else 2, "empty" if kind == "longer" else "stop"
    found = flatbed.Prefetcher(loader, {emb: lambda ids: ids}, depth=depth, uneven=uneven)
    return iter(found) if kind == "with" else found


def loop(
    kind: str,
    batches: Any,
    emb: flatbed.Embedding,
    optimizer: torch.optim.Optimizer,
    way: str,
    *,
    fails: bool,
) -> None:
    """Train, and fail in this way in the loop's body, if this rank is to fail."""
    with batches if kind == "with" else nullcontext():
        for step, ids in enumerate(batches):
            if step == (STEPS - 1 if kind == "last" else 3) and kind != "longer":
                if way == "stuck" or kind in ("other", "threadless"):
                    shorten_timeouts(emb)
                if fails and way == "left":
                    break
                if fails:
                    fail(emb, way)
            train(emb, optimizer, ids.clone() if kind == "other" else ids)


def train(emb: flatbed.Embedding, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    emb(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def shorten_timeouts(emb: flatbed.Embedding | None = None) -> None:
    """Set the timeouts of this rank, when no rank has to wait for one that is still starting."""
    dist.barrier()
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    if emb is not None:
        assert emb.table._shards is not None
        channel = emb.table._shards.channel
        for one in (channel, *channel.loaders):
            one._gloo._set_default_timeout(limit)


def fail(emb: flatbed.Embedding, way: str) -> None:
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "stuck":
        time.sleep(600)
    elif way in ("raised", "again"):
        raise ValueError("the loss is nan")
    elif way == "damaged":  # the lookups of others fail to read the rows of this rank
        failing = mock.Mock(side_effect=flatbed.FlatbedError("items.bed is damaged"))
        emb.table._local_io.weights = failing  # type: ignore[method-assign]


def store_of(rank: int, folder: Path) -> dist.Store:
    """Return the store of all ranks, which the process of rank 0 hosts."""
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), WORLD, is_master=False)


def main(folder: Path, cases: list[str]) -> None:
    fork, others, culprits = mp.get_context("fork"), [], []
    for case in cases:
        kind, way, culprit = case.split("-")
        (folder / case).mkdir()
        for rank in range(WORLD):
            process = fork.Process(target=worker, args=(rank, folder / case, kind, way, int(culprit)))
            process.start()
            (culprits if rank == int(culprit) else others).append(process)
    for process in others:
        process.join()
    for process in culprits:
        process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
