"""Lightning's Trainer, on one process and on two, with and without flat parameters; saves the weights."""

from __future__ import annotations

import os
import sys
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatbed

warnings.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self, mode: str, results: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode, self.results = mode, results
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[torch.Tensor], _: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.mode == "plain":
            return torch.optim.AdamW(self.net.parameters(), lr=0.01, foreach=False)
        self.flat = flatbed.ContiguousParams(self.net.parameters())
        return torch.optim.AdamW(self.flat.contiguous(), lr=0.01, foreach=False)

    def on_train_batch_end(self, *_: object) -> None:
        if self.mode != "plain":
            self.flat.assert_buffer_is_valid()

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            weights = torch.cat([p.detach().flatten() for p in self.net.parameters()])
            torch.save({"weights": weights, "steps": self.trainer.global_step}, self.results)


def train(mode: str, devices: int, folder: str) -> None:
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",
        max_epochs=1,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Module(mode, f"{folder}/{mode}-{devices}.pt")
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=8))


if __name__ == "__main__":
    for devices in (1, 2):
        for mode in ("plain", "flat"):
            train(mode, devices, sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # see tests/scripts/example.py
