"""Training on disk that is killed at any moment goes on from its last checkpoint, as if never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_hundred_kills_while_training(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.rows.crash_training", str(tmp_path), "200", "0"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] == 200
    assert seen["between checkpoints"] >= 50
    assert seen["steps lost between checkpoints"] >= 30
    assert seen["during a checkpoint"] >= 25
    assert seen["checkpoints dropped"] >= 5
    assert seen["checkpoints completed by recovery"] >= 5
    assert seen["while opening"] >= 5
    assert seen["gone on"] >= 80
    assert seen["checkpoints completed"] >= 200
