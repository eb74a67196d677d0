"""Sharded tables beside DDP, FSDP2, hybrid sharding and sharded state, clipped, scaled and accumulated."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import check_script


def test_scenarios(tmp_path: Path) -> None:
    check_script("shard_combinations", tmp_path, 2, 4)
