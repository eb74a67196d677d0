"""Distributed checkpoints of sharded parameters and tables: 4 ranks save, 3 go on, 1 goes on."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import check_script


def test_scenarios(tmp_path: Path) -> None:
    check_script("checkpoints", tmp_path, 4, 3, 1)
