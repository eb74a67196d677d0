"""Files that 2 and 4 ranks write together."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import check_script


def test_scenarios(tmp_path: Path) -> None:
    check_script("shared_files", tmp_path, 2, 4)
