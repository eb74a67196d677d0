"""`shard="row"`: tables divided among 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import check_script


def test_scenarios(tmp_path: Path) -> None:
    check_script("shards", tmp_path, 2, 4)
