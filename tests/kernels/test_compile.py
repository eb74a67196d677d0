"""The kernels compile for a GPU even where there is none, and the dense step's accesses are 16 bytes wide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests compile and run the same kernels")
def test_every_kernel_compiles() -> None:
    # In another process: in this one Triton interprets, and accepts code that the compiler refuses.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    script = str(Path(__file__).with_name("compile_kernels.py"))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == {}
    assert (len(found["rules"]), len(found["dense"])) == (12, 10)
    for name, counts in found["dense"].items():
        # 512 elements for 128 threads: one access each, of gradient and parameter besides the state, twice:
        # where only the gradient is not aligned, it alone is read in smaller parts.
        assert counts["loads"] == 2 * counts["states"] + 3, name
        assert counts["stores"] == 2 * counts["states"] + 2, name
