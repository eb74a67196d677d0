"""Scenarios that gloo processes run together, with one number of ranks after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.processes import check_script

WORLDS = {
    "checkpoints": (4, 3, 1),  # 4 ranks save, 3 go on, 1 goes on
    "ddp": (2,),
    "failures": (3,),
    "fsdp": (2, 4),
    "parity": (2, 4),
    "replicas": (3,),
    "shard_prefetch": (2, 4),
    "shards": (2, 4),
    "zero": (4, 2),
}
"""Numbers of ranks for each script; its docstring tells what it checks."""


@pytest.mark.parametrize("script", WORLDS)
def test_scenarios(script: str, tmp_path: Path) -> None:
    check_script(script, tmp_path, *WORLDS[script])
