"""DDP, Lightning and Accelerate, each in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from tests.cases import assert_same

ROOT = Path(__file__).parents[2]


def start(script: str, *args: str) -> str:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "scripts" / script), *args],
        env={**env, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ddp_with_two_processes(tmp_path: Path) -> None:
    out = start("ddp.py", str(tmp_path / "store"))
    assert out.count("same") == 16


@pytest.mark.parametrize("devices", [1, 2])
def test_lightning(devices: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    for mode in ("plain", "flat"):
        assert "trained" in start("lightning_ddp.py", mode, str(devices), str(tmp_path))
    plain, flat = (torch.load(tmp_path / f"{m}-{devices}.pt", weights_only=True) for m in ("plain", "flat"))
    torch.testing.assert_close(flat, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
@pytest.mark.parametrize("grads", ["follow", "bound"])
def test_accelerates_loop(grads: str, when: str) -> None:
    accelerate = pytest.importorskip("accelerate")

    def run(flat_grads: str | None) -> nn.Module:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        data = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=4)
        if when == "after prepare":
            model = accelerator.prepare(model)
        flat = None if flat_grads is None else flatbed.FlatParams(model, grads=flat_grads)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(
            model.parameters() if flat is None else flat.parameters(), lr=0.01, foreach=False
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        if when == "before prepare":
            model.double().float()  # as a late move to a device: every parameter leaves its buffer
            model = accelerator.prepare(model)
        optimizer, data, scheduler = accelerator.prepare(optimizer, data, scheduler)
        for x in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).pow(2).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if flat is not None:
            flat.assert_valid()
        return model

    assert_same(run(None), run(grads))


@pytest.mark.filterwarnings("ignore")
def test_one_kernel_optimizers_in_accelerates_loop() -> None:
    accelerate = pytest.importorskip("accelerate")

    def run(make: Any, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        data = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=4)
        optimizer = make(model.parameters(), lr=0.01, **options)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        for x in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).pow(2).mean())
                if accelerator.sync_gradients and not hasattr(optimizer.optimizer, "max_norm"):
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return model

    assert_same(run(torch.optim.AdamW, fused=True), run(flatbed.optim.AdamW, max_norm=0.1))


@pytest.mark.filterwarnings("ignore")
def test_one_call_through_accelerates_wrapper() -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    flat = flatbed.FlatParams(model)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(flat.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    accelerator.backward(100 * model(torch.ones(2, 4)).sum())
    norm = flat.step(optimizer, max_norm=0.01)
    assert norm is not None
    assert norm > 1
    assert (model.weight - before).norm() < 0.011
    assert model.weight.grad is None
