"""DTensor parameters: FSDP2, hybrid sharding, tensor parallelism, with 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.processes import check_script


@pytest.mark.parametrize("world", [2, 4])
def test_scenarios(world: int, tmp_path: Path) -> None:
    check_script("fsdp", world, tmp_path)
