"""Training on disk that is killed at any moment goes on from its last checkpoint, as if never stopped."""

from __future__ import annotations

from pathlib import Path

from tests.tables.storage.disk.test_crash import killed

SCRIPT = "tests.tables.crash_training"


def test_kills_while_training(tmp_path: Path) -> None:
    wanted = {
        "between checkpoints": 25,
        "steps lost between checkpoints": 15,
        "during a checkpoint": 12,
        "checkpoints dropped": 2,
        "checkpoints completed by recovery": 2,
        "while opening": 2,
        "gone on": 40,
        "checkpoints completed": 100,
    }
    killed(SCRIPT, tmp_path, 50, "0", wanted=wanted)


def test_kills_while_training_with_a_cache_and_a_prefetcher(tmp_path: Path) -> None:
    wanted = {
        "rows that left the cache": 250,
        "between checkpoints": 15,
        "steps lost between checkpoints": 9,
        "during a checkpoint": 1,
        "while opening": 1,
        "gone on": 24,
        "checkpoints completed": 60,
    }
    killed(SCRIPT, tmp_path, 30, "150", wanted=wanted)
