"""Training on disk that is killed at any moment goes on from its last checkpoint, as if never stopped."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests import programs

ROUNDS = 8  # of kills at most: on a busy machine, rare moments are hit less often


def killed(folder: Path, n_kills: int, *, cache_rows: int, wanted: dict[str, int]) -> None:
    """Kill a program at random moments, round by round, until it was hit in each kind of moment."""
    seen: Counter[str] = Counter()
    for seed in range(ROUNDS):
        place = folder / str(seed)
        place.mkdir()
        done = programs.run("tests.tables.crash_training", place, n_kills, seed, cache_rows, filters="error")
        seen.update(json.loads(done.stdout))
        if all(seen[moment] >= count for moment, count in wanted.items()):
            return
    raise AssertionError(f"hit {dict(seen)}, expected at least {wanted}")


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
    killed(tmp_path, 50, cache_rows=0, wanted=wanted)


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
    killed(tmp_path, 30, cache_rows=150, wanted=wanted)
