"""Lightning's ModelParallelStrategy (FSDP2) with flatbed.optim, which clips by the norm of all shards.

python examples/lightning_fsdp.py --devices 2
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import flatbed


class Regression(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def configure_model(self) -> None:
        """Shard the model; Lightning calls this before the optimizer is built."""
        mesh: Any = self.device_mesh
        fully_shard(self.net, mesh=mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return flatbed.optim.AdamW(self.net, lr=0.01, max_norm=10.0)  # instead of gradient_clip_val

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss: Tensor = (self.net(x) - y).pow(2).mean()
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        if self.trainer.is_global_zero:
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            print(f"loss {float(outputs['loss']):.5f} norm {float(optimizer.grad_norm):.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        strategy=ModelParallelStrategy(data_parallel_size=options.devices, tensor_parallel_size=1),
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), data)


if __name__ == "__main__":
    main()
