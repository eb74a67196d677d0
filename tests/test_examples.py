"""The examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tables_that_are_killed_go_on() -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "tables.py"),
            "--users",
            "500",
            "--items",
            "200",
            "--steps",
            "40",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    before, after = (float(word) for word in first.split()[1:4:2])
    assert after < before
    assert second.endswith("as without a crash: True")
