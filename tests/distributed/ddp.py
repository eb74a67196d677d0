"""Scenario of DDP: flat parameters and our optimizers end with the weights of torch's, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import flatbed
from tests.distributed.processes import assert_equal_on_all_ranks, main

STEPS = 6


def train(mode: str, *, bucket_view: bool, accumulates: bool) -> list[Tensor]:
    """Train by torch ("loop", "fused"), by flat parameters of either kind, or by our optimizer."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    contiguous = flatbed.ContiguousParams(model.parameters()) if mode == "compat" else None
    flat = flatbed.FlatParams(model, grads=mode) if mode in ("follow", "bound") else None
    flat = flat if contiguous is None else contiguous.flat
    ddp = DDP(model, gradient_as_bucket_view=bucket_view)
    params: Any = model.parameters() if flat is None else flat.parameters()
    if contiguous is not None:
        params = contiguous.contiguous()
    if mode == "optim":
        optimizer: torch.optim.Optimizer = flatbed.optim.Adam(params, lr=0.01, max_norm=0.1)
    else:
        implementation = {"fused": True} if mode == "fused" else {"foreach": False}
        optimizer = torch.optim.Adam(params, lr=0.01, **implementation)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(4, 6, generator=generator)
        if accumulates and step % 2 == 0:
            with ddp.no_sync():
                ddp(x).pow(2).mean().backward()
            continue
        ddp(x).pow(2).mean().backward()
        if flat is not None:
            flat.clip_grad_norm_(0.1)
        elif mode != "optim":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if flat is not None:
            flat.assert_valid()
        if contiguous is not None:
            contiguous.assert_buffer_is_valid()
    return [p.detach().clone() for p in model.parameters()]


def weights_are_those_of_torch(_: Path) -> None:
    for more in (False, True):
        for expected, modes in (("loop", ("follow", "bound", "compat")), ("fused", ("optim",))):
            weights = train(expected, bucket_view=more, accumulates=more)
            for mode in modes:
                found = train(mode, bucket_view=more, accumulates=more)
                for a, b in zip(weights, found, strict=True):
                    assert torch.equal(a, b), (mode, (a - b).abs().max())
                    assert_equal_on_all_ranks(b)


if __name__ == "__main__":
    main([weights_are_those_of_torch])
