"""Ranks that end or fail while others look rows up: a folder, a way to fail, and three ranks."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flatbed

WORLD, CULPRIT, ROWS, DIM = 3, 1, 30, 4
TIMEOUT = 10.0


def worker(rank: int, folder: str, way: str) -> None:
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=limit
    )
    disk = {"storage": "disk", "path": Path(folder) / "items.bed"} if way == "disk" else {}
    emb = flatbed.Embedding(ROWS, DIM, shard="row", **disk)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    out = Path(folder) / f"{rank}.txt"
    for step in range(6):
        if rank == CULPRIT and step == 3:
            fail(emb, way)
        begin = time.monotonic()
        try:
            emb(torch.tensor([rank, 5, 7])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        except Exception as error:
            out.write_text(f"{time.monotonic() - begin:.1f} {type(error).__name__}: {error}")
            os._exit(0)
    out.write_text("trained")
    os._exit(0)


def fail(emb: flatbed.Embedding, way: str) -> None:
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "finished":
        os._exit(0)
    elif way == "stuck":
        time.sleep(3 * TIMEOUT)
    elif way == "disk":  # the lookups of others fail to read the rows of this rank
        emb.table.close(discard=True)


if __name__ == "__main__":
    fork = mp.get_context("fork")
    ranks = [fork.Process(target=worker, args=(rank, *sys.argv[1:])) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        if rank != CULPRIT:
            process.join()
    ranks[CULPRIT].kill()
    ranks[CULPRIT].join()
