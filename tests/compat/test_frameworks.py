"""Lightning and Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from tests import programs
from tests.cases import BOTH, assert_same


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    programs.run("tests.scripts.lightning_ddp", tmp_path)
    for devices in (1, 2):
        files = [tmp_path / f"{mode}-{devices}.pt" for mode in ("plain", "flat")]
        plain, flat = (torch.load(file, weights_only=True) for file in files)
        assert plain["steps"] == flat["steps"] == 4 // devices
        torch.testing.assert_close(flat["weights"], plain["weights"], rtol=1e-6, atol=1e-7)


def accelerated(make: Any, *, clip: bool = True, before: bool = False) -> nn.Module:
    """Train in Accelerate's loop; `make` builds the optimizer before or after the model is prepared."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    data = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=4)
    if before:
        optimizer = make(model)
        model.double().float()  # as a late move to a device: every parameter leaves its buffer
    model = accelerator.prepare(model)
    if not before:
        optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    optimizer, data, scheduler = accelerator.prepare(optimizer, data, scheduler)
    for x in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).pow(2).mean())
            if accelerator.sync_gradients and clip:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", [True, False])
@BOTH
def test_flat_parameters_in_accelerates_loop(grads: Any, before: bool) -> None:
    def flat(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(flatbed.FlatParams(model, grads=grads), lr=0.01, foreach=False)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    assert_same(accelerated(plain), accelerated(flat, before=before))


@pytest.mark.filterwarnings("ignore")
def test_flatbed_optim_in_accelerates_loop() -> None:
    expected = accelerated(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    ours = accelerated(lambda m: flatbed.optim.AdamW(m.parameters(), lr=0.01, max_norm=0.1), clip=False)
    assert_same(expected, ours)


@pytest.mark.filterwarnings("ignore")
def test_one_call_through_accelerates_wrapper() -> None:
    """While Accelerate accumulates, it skips the step, and gradients are neither clipped nor dropped."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(4, 4)
    flat = flatbed.FlatParams(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(flat.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(100 * model(torch.ones(2, 4)).sum())
            norms.append(flat.step(optimizer, max_norm=0.01))
    assert norms[0] is None
    assert norms[1] > 100
    assert 0.005 < (model.weight - before).norm() < 0.011
    assert model.weight.grad is None
