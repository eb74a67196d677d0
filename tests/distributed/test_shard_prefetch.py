"""A `Prefetcher` over sharded tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.processes import ROOT, check_script


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_scenarios(tmp_path: Path, n_ranks: int) -> None:
    check_script("shard_prefetch", tmp_path, n_ranks)


@pytest.mark.parametrize(
    ("way", "culprit"),
    [("killed", 1), ("killed", 0), ("raised", 1), ("stuck", 1)],  # rank 0 hosts the store
)
def test_a_rank_that_ends_in_a_loop_ends_the_others(tmp_path: Path, way: str, culprit: int) -> None:
    """All other ranks raise within the timeout and name the rank. Their threads end."""
    subprocess.run(
        [sys.executable, "-m", "tests.distributed.prefetch_failures", str(tmp_path), way, str(culprit)],
        check=False,
        timeout=120,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    for rank in {0, 1, 2} - {culprit}:
        found = (tmp_path / f"{rank}.txt").read_text()
        assert found.startswith("ExchangeError")
        assert f"rank {culprit} " in found
        assert found.endswith("no thread left")
