"""One rank that differs from the others or fails ends all of three ranks."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import check_script


def test_scenarios(tmp_path: Path) -> None:
    check_script("failures", tmp_path, 3)
