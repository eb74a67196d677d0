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
    seen = killed(tmp_path, 100, cache_rows=0)
    assert seen["between checkpoints"] >= 25
    assert seen["steps lost between checkpoints"] >= 15
    assert seen["during a checkpoint"] >= 12
    assert seen["checkpoints dropped"] >= 2
    assert seen["checkpoints completed by recovery"] >= 2
    assert seen["while opening"] >= 2
    assert seen["gone on"] >= 40
    assert seen["checkpoints completed"] >= 100


def test_kills_while_training_with_a_cache_and_a_prefetcher(tmp_path: Path) -> None:
    seen = killed(tmp_path, 60, cache_rows=150)
    assert seen["rows that left the cache"] >= 250
    assert seen["between checkpoints"] >= 15
    assert seen["steps lost between checkpoints"] >= 9
    assert seen["during a checkpoint"] >= 1
    assert seen["while opening"] >= 1
    assert seen["gone on"] >= 24
    assert seen["checkpoints completed"] >= 60
