"""`shard_state=True`: DDP with the optimizer's state sharded across 4 and 2 ranks."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import check_script


def test_scenarios(tmp_path: Path) -> None:
    check_script("zero", tmp_path, 4, 2)
