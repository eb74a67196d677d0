"""Sharded tables beside DDP, FSDP2, hybrid sharding and sharded state, clipped, scaled and accumulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.processes import check_script


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_scenarios(tmp_path: Path, n_ranks: int) -> None:
    check_script("shard_combinations", tmp_path, n_ranks)
