"""Replicas of a table in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("world", "n_same", "n_done"), [(2, 10, 6), (3, 4, 0)])
def test_replicas_stay_equal(world: int, n_same: int, n_done: int, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/scripts/ddp_tables.py"), str(tmp_path / "store"), str(world)],
        env={**env, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same ") == n_same, done.stdout
    assert done.stdout.count("done ") == n_done, done.stdout
