"""Two gloo processes train under DDP, per parameter and flat; both must end with the same weights."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import flatbed

STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def train(rank: int, mode: str | None, bucket_view: bool, accumulate: bool) -> list[torch.Tensor]:
    model = network()
    parameters: Any = None
    if mode == "compat":
        parameters = flatbed.ContiguousParams(model.parameters())
        params: Any = parameters.contiguous()
        flat = parameters.flat
    elif mode not in (None, "fused", "optim"):
        flat = flatbed.FlatParams(model, grads=mode)
        params = flat.parameters()
    else:
        flat, params = None, model.parameters()
    ddp = DDP(model, gradient_as_bucket_view=bucket_view)
    if mode == "optim":
        optimizer: torch.optim.Optimizer = flatbed.optim.Adam(params, lr=0.01, max_norm=0.1)
    else:
        implementation = {"fused": True} if mode == "fused" else {"foreach": False}
        optimizer = torch.optim.Adam(params, lr=0.01, **implementation)
    generator = torch.Generator().manual_seed(rank)
    for i in range(STEPS):
        x = torch.randn(4, 6, generator=generator)
        if accumulate and i % 2 == 0:
            with ddp.no_sync():
                ddp(x).pow(2).mean().backward()
            continue
        ddp(x).pow(2).mean().backward()
        if mode == "optim":
            pass  # it clips by itself
        elif flat is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            flat.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        if flat is not None:
            flat.assert_valid()
        if parameters is not None:
            parameters.assert_buffer_is_valid()
    return [p.detach().clone() for p in model.parameters()]


def worker(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for bucket_view, accumulate in ((False, False), (True, True)):
        expected = train(rank, None, bucket_view, accumulate)
        for mode in ("follow", "bound", "compat", "optim"):
            if mode == "optim":
                expected = train(rank, "fused", bucket_view, accumulate)
            got = train(rank, mode, bucket_view, accumulate)
            for a, b in zip(expected, got, strict=True):
                assert torch.equal(a, b), (mode, bucket_view, accumulate, (a - b).abs().max())
                both = [torch.empty_like(b) for _ in range(2)]
                dist.all_gather(both, b)
                assert torch.equal(*both), "the replicas must agree"
            if rank == 0:
                print("same", mode, bucket_view, accumulate)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # see tests/scripts/example.py


if __name__ == "__main__":
    mp.start_processes(worker, args=(sys.argv[1],), nprocs=2, start_method="fork")
