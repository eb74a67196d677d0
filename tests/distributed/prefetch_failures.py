"""Ranks that end or fail in a loop over a `Prefetcher`: a folder, a way to fail, the rank that does."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flatbed
from flatbed.data.pipeline import THREAD_NAME

WORLD, ROWS, DIM = 3, 30, 4
TIMEOUT = 10.0


def worker(rank: int, folder: str, way: str, culprit: int) -> None:
    limit = datetime.timedelta(seconds=TIMEOUT)
    store = store_of(rank, Path(folder))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    emb = flatbed.Embedding(ROWS, DIM, shard="row")
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    loader = [torch.tensor([rank, 5, step]) for step in range(9)]
    out = Path(folder) / f"{rank}.txt"
    try:
        for step, ids in enumerate(flatbed.Prefetcher(loader, {emb: lambda ids: ids})):
            if rank == culprit and step == 3:
                fail(way)
            emb(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        out.write_text("trained")
    except flatbed.FlatbedError as error:
        out.write_text(f"{type(error).__name__}: {error}")
        for thread in threading.enumerate():
            if thread.name == THREAD_NAME:
                thread.join(3 * TIMEOUT)
                assert not thread.is_alive()
        out.write_text(f"{out.read_text()}\nno thread left")
    for other in set(range(WORLD)) - {culprit}:  # rank 0 hosts the store that the others ask
        while not (Path(folder) / f"{other}.txt").exists():
            time.sleep(0.1)
    os._exit(0)


def fail(way: str) -> None:
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "stuck":
        time.sleep(6 * TIMEOUT)
    elif way == "raised":
        raise ValueError("the loss is nan")


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


if __name__ == "__main__":
    culprit = int(sys.argv[3])
    fork = mp.get_context("fork")
    ranks = [fork.Process(target=worker, args=(rank, *sys.argv[1:3], culprit)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        if rank != culprit:
            process.join()
    ranks[culprit].kill()
    ranks[culprit].join()
