"""A `Prefetcher` over sharded tables."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import check_script


def test_scenarios(tmp_path: Path) -> None:
    check_script("shard_prefetch", tmp_path, 2, 4)
