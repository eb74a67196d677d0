"""The torchrun example survives `kill -9` of a worker, and goes on with another number of workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import flatbed
from examples.fsdp import batch_of, build
from tests import programs
from tests.scripts.ranks import run_on_ranks

TORCHRUN = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]


def steps_of(out: str) -> list[tuple[int, float, float]]:
    found = re.findall(r"step (\d+) loss ([\d.]+) norm ([\d.]+)", out)
    return [(int(step), float(loss), float(norm)) for step, loss, norm in found]


def plain_training(steps: int) -> list[tuple[int, float, float]]:
    model = build()
    optimizer = flatbed.optim.AdamW(model, lr=0.01, max_norm=1.0)
    found = []
    for step in range(1, steps + 1):
        x, y = batch_of(step)
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.grad_norm is not None
        found.append((step, float(loss.detach()), float(optimizer.grad_norm)))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo processes on a CPU")
def test_a_killed_worker_and_another_number_of_workers(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path), "--every", "3"]
    script = [*TORCHRUN, "tests/scripts/example.py", "examples/fsdp.py", *options]
    # Without the store of the launcher, whose addresses workers of a busy machine may find stale.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = programs.run("torch.distributed.run", *script, "--steps", 8, "--kill-at", 5, env=env).stdout
    assert "2 ranks begin after step 3" in first, "the second attempt"
    second = run_on_ranks("fsdp.py", *options, "--steps", "12", n_ranks=1)
    assert "1 ranks begin after step 6" in second
    found = steps_of(first + second)
    assert [step for step, *_ in found] == [*range(1, 6), *range(4, 9), *range(7, 13)]
    again = [line for line in found if line[0] in (4, 5)]
    assert again[:2] == again[2:], "the same bits after the crash"
    expected = {step: rest for step, *rest in plain_training(12)}
    for step, *rest in found:
        assert rest == pytest.approx(expected[step], rel=1e-3)
