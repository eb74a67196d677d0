"""Training on disk that is killed at any moment goes on from its last checkpoint, as if never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def killed(folder: Path, n_kills: int, *, cache_rows: int) -> dict[str, int]:
    """Counts of events in so many kills; with a cache, a prefetcher hands out the batches."""
    given = [str(folder), str(n_kills), "0", str(cache_rows)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.tables.crash_training", *given],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, int] = json.loads(done.stdout)
    assert seen["kills"] == n_kills
    return seen


def test_kills_while_training(tmp_path: Path) -> None:
    """Rare moments, such as those in which recovery completes a checkpoint, are in test_crash.py."""
    seen = killed(tmp_path, 50, cache_rows=0)
    assert seen["between checkpoints"] >= 8
    assert seen["steps lost between checkpoints"] >= 4
    assert seen["during a checkpoint"] >= 3
    assert seen["gone on"] >= 15
    assert seen["checkpoints completed"] >= 40


def test_kills_while_training_with_a_cache_and_a_prefetcher(tmp_path: Path) -> None:
    seen = killed(tmp_path, 30, cache_rows=150)
    assert seen["rows that left the cache"] >= 80
    assert seen["between checkpoints"] >= 4
    assert seen["steps lost between checkpoints"] >= 2
    assert seen["gone on"] >= 8
    assert seen["checkpoints completed"] >= 20
