"""The Trainer of Hugging Face with flatbed.optim, which clips by the norm of all shards.

torchrun --nproc-per-node 2 examples/trainer_fsdp.py

With GPUs the model is sharded by FSDP2. On CPUs, and with --built, the Trainer uses DDP: with FSDP it takes
classes of optimizers only.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import flatbed


class Regression(nn.Module):
    """A small network that returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - labels).pow(2).mean()}


class Sums(Dataset[dict[str, Tensor]]):
    """Vectors and their sums."""

    def __init__(self) -> None:
        self.x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum(0, keepdim=True)}


class PrintNorm(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Prints the loss and the norm that the optimizer measured."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in kwargs["logs"]:
            optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
            print(f"loss {float(kwargs['logs']['loss']):.5f} norm {optimizer.grad_norm:.5f}", flush=True)


def train(steps: int, *, built: bool) -> None:
    sharded = torch.cuda.is_available() and not built
    args = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # the optimizer clips
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        fsdp="full_shard" if sharded else "",
        fsdp_config={"version": 2, "auto_wrap_policy": "NO_WRAP"} if sharded else None,
    )
    model, kwargs = Regression(), {"lr": 0.01, "max_norm": 10.0}
    way: dict[str, Any] = {"optimizer_cls_and_kwargs": (flatbed.optim.AdamW, kwargs)}
    if built:
        way = {"optimizers": (flatbed.optim.AdamW(model.parameters(), lr=0.01, max_norm=10.0), None)}
    trainer: Any = Trainer(model=model, args=args, train_dataset=Sums(), callbacks=[PrintNorm()], **way)
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--built", action="store_true", help="pass an optimizer instead of a class")
    options = parser.parse_args()
    train(options.steps, built=options.built)
    gc.collect()  # the trainer and its model, before their process group
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
