"""The kernels compile for a GPU even where there is none, and their memory accesses are 16 bytes wide."""

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
def test_every_rule_compiles_to_wide_loads_and_stores() -> None:
    # A process of its own: in this one Triton interprets.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_rules.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 10
    for name, counts in found.items():
        # 512 elements for 128 threads: one access each, of gradient and parameter besides the state.
        assert counts["loads"] == counts["states"] + 2, name
        assert counts["stores"] == counts["states"] + 1, name
