from __future__ import annotations

from pathlib import Path

from tests.distributed.processes import check_script


def test_replicas_of_three_processes_stay_equal(tmp_path: Path) -> None:
    check_script("replicas", tmp_path, 3)
