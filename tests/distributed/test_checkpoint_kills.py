"""A save by two ranks that ends at any moment leaves the old or the new checkpoint on both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import flatbed
from flatbed.tables.storage.disk import DiskStorage
from tests.distributed import checkpoint_kills
from tests.distributed.processes import run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


KILLS = ["0-4", "0-25", "0-52", "1-2", "1-6", "1-12"]
"""Ranks that are killed, and the operations on files."""
Rows = dict[int, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have left, whole and killed."""
    found: Path = tmp_path_factory.mktemp("kills")
    ends = json.loads(run_script("checkpoint_kills", found, *KILLS))
    assert ends.pop("whole") == [0, 0], [file.read_text() for file in (found / "whole").glob("error-*")]
    assert ends == {kill: [-9, 1] for kill in KILLS}, "one rank is killed, and the other one raises"
    return found


def step_of(place: Path, expected: Rows) -> int:
    """Return the step of the checkpoint that a folder holds, with the rows of all files compared."""
    current = json.loads((place / "run" / "CURRENT.json").read_text())["version"]
    manifest = json.loads((place / "run" / current / "checkpoint.json").read_text())
    step: int = manifest["extra"]["step"]
    movies = flatbed.load_table(place / "run", name="movies")
    assert torch.equal(movies.read_rows(range(checkpoint_kills.ROWS)), expected[step]["movies"])
    for rank in range(checkpoint_kills.WORLD):
        rows = expected[step]["users"][rank :: checkpoint_kills.WORLD]
        users = DiskStorage.open(place / f"users.bed.{rank}-of-{checkpoint_kills.WORLD}")
        assert torch.equal(users.record.view(users.read(0, len(rows)), "weight"), rows), (rank, step)
        assert users.meta["scalars"]["step"] == step
        users.close()
    return step


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return checkpoint_kills.expected(tmp_path_factory.mktemp("expected") / "place")


def operations(folder: Path) -> list[tuple[int, str, str]]:
    return [json.loads(line) for line in (folder / "whole" / "log").read_text().splitlines()]


def test_both_ranks_end_at_every_operation(folder: Path, expected: Rows) -> None:
    log = operations(folder)
    steps = [step_of(folder / "whole" / "copies" / str(number), expected) for number in range(len(log))]
    assert steps == sorted(steps)
    assert steps.count(1) > 40
    assert steps.count(2) > 5
    assert {rank for rank, *_ in log} == {0, 1}
    assert step_of(folder / "whole" / "place", expected) == 2


def test_every_rank_syncs_its_part_before_the_file_gets_its_name(folder: Path) -> None:
    """Otherwise a loss of power might leave a file with its name and without some of its bytes."""
    of_table = [(rank, name) for rank, name, file in operations(folder) if ".table-0.safetensors" in file]
    end = of_table.index((0, "replace"))
    for rank in range(checkpoint_kills.WORLD):
        own = [name for one, name in of_table[:end] if one == rank]
        assert "pwrite" in own
        assert own[-1] == "fsync"


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_rank_ends_the_save_of_the_other(kill: str, folder: Path, expected: Rows) -> None:
    message = (folder / kill / f"error-{1 - int(kill[0])}").read_text()
    assert message.startswith(f"ExchangeError: rank {kill[0]} ")
    assert step_of(folder / kill / "place", expected) in (1, 2)
