"""The examples for Lightning, Accelerate and the Trainer of Hugging Face learn with two gloo processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Without the store of the launcher, whose addresses workers of a busy machine may find stale.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
EXAMPLES = {
    "lightning": ("lightning", ["examples/lightning_fsdp.py", "--devices", "2"]),
    "accelerate": ("accelerate", [*TORCHRUN, "examples/accelerate_fsdp.py"]),
    "trainer-class": ("transformers", [*TORCHRUN, "examples/trainer_fsdp.py"]),
    "trainer-optimizer": ("transformers", [*TORCHRUN, "examples/trainer_fsdp.py", "--built"]),
}
"""The package that an example needs, and its command."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_processes(example: str) -> None:
    package, command = EXAMPLES[example]
    pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, *command, "--steps", "16"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"loss ([\d.]+) norm ([\d.]+)", done.stdout)
    assert len(found) == 16
    losses = [float(loss) for loss, _ in found]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert all(float(norm) > 0 for _, norm in found)
