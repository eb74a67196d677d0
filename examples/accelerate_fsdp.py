"""Accelerate with FSDP2 and flatbed.optim, which clips by the norm of all shards.

torchrun --nproc-per-node 2 examples/accelerate_fsdp.py

On CPUs Accelerate falls back to DDP; the program is the same.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatbed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = flatbed.optim.AdamW(model.parameters(), lr=0.01, max_norm=10.0)
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    model, prepared, data = accelerator.prepare(model, optimizer, data)  # shards the model and the groups
    for _, (features, target) in zip(range(options.steps), data, strict=False):
        loss = (model(features) - target).pow(2).mean()
        accelerator.backward(loss)
        prepared.step()  # instead of accelerator.clip_grad_norm_ and step
        prepared.zero_grad()
        accelerator.print(f"loss {loss.detach():.5f} norm {optimizer.grad_norm:.5f}")
    model, prepared, data = accelerator.free_memory(
        model, prepared, data
    )  # DDP must end before its process group
    accelerator.end_training()


if __name__ == "__main__":
    main()
