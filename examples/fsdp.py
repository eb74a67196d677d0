"""Train with FSDP2 and flatbed.optim under torchrun. Killed workers and changes of their number do no harm.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/fsdp.py --folder run

Every few steps a distributed checkpoint is written. After a crash torchrun starts all workers again, and they
continue from the last complete checkpoint; so does a later run with more or fewer workers. With gloo, set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: otherwise workers find the addresses of the first attempt.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flatbed

BATCH, WIDTH = 24, 32


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    return nn.Sequential(*layers)


def batch_of(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    """One rank's part of a batch that does not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x[rank::world], x.sum(1, keepdim=True)[rank::world].sin()


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that is complete: its metadata is written last."""
    found = [path.parent for path in folder.glob("*/.metadata")]
    return max(found, key=lambda path: int(path.name), default=None)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Continue from the last checkpoint, if there is one; return its step."""
    path = last_checkpoint(folder)
    if path is None:
        return 0
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined,unused-ignore]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(path.name)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.save(state, checkpoint_id=folder / str(step))  # type: ignore[attr-defined,unused-ignore]


def kill_once(folder: Path) -> None:
    """Die as by `kill -9`, but only in the first attempt."""
    marker = folder / "killed"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, *, steps: int, every: int, kill_at: int | None) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build().to(device)
    fully_shard(model, mesh=init_device_mesh(device, (world,)))
    optimizer = flatbed.optim.AdamW(model, lr=0.01, max_norm=1.0)
    first = load(folder, model, optimizer)
    if rank == 0:
        print(f"{world} ranks begin after step {first}", flush=True)
    for step in range(first + 1, steps + 1):
        x, y = (part.to(device) for part in batch_of(step, rank, world))
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step} loss {float(loss) / world:.6f} norm {optimizer.grad_norm:.6f}", flush=True)
        if step == kill_at and rank == world - 1:
            kill_once(folder)
        if step % every == 0:
            save(folder, step, model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--kill-at", type=int, default=None, help="kill a worker after this step, once")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options.folder, steps=options.steps, every=options.every, kill_at=options.kill_at)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
