"""`shard="row"`: tables sharded across 2 and 4 ranks, and ranks that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flatbed
from tests.distributed.processes import ROOT, check_script


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_scenarios(tmp_path: Path, n_ranks: int) -> None:
    check_script("shards", tmp_path, n_ranks)


@pytest.mark.parametrize(
    ("way", "reason"),
    [("killed", ""), ("finished", ""), ("stuck", ""), ("disk", "is closed")],
)
def test_a_failed_rank_ends_the_others(tmp_path: Path, way: str, reason: str) -> None:
    """All other ranks raise within the timeout, and name the rank and, if it is known, the reason."""
    subprocess.run(
        [sys.executable, "-m", "tests.distributed.shard_failures", str(tmp_path), way],
        check=False,
        timeout=120,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    for rank in (0, 2):
        found = (tmp_path / f"{rank}.txt").read_text()
        assert "ExchangeError" in found
        assert "rank 1" in found
        assert reason in found


def test_one_rank_is_the_ordinary_table(tmp_path: Path) -> None:
    """Without a process group, or with one rank, the table holds all rows, in a file of the given name."""
    emb = flatbed.Embedding(7, 4, seed=1, shard="row")
    assert torch.equal(emb.weight, flatbed.Embedding(7, 4, seed=1).weight)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        path = tmp_path / "items.bed"
        on_disk = flatbed.EmbeddingBag(7, 4, seed=1, shard="row", storage="disk", path=path)
        on_disk(torch.tensor([[1, 2]]))
        assert on_disk.table._shards is None
        assert path.exists()
        on_disk.table.close()
    finally:
        dist.destroy_process_group()
    (tmp_path / "items.bed.0-of-2").touch()
    with pytest.raises(flatbed.FlatbedError, match="on 2 ranks"):
        flatbed.Embedding(7, 4, shard="row", storage="disk", path=tmp_path / "items.bed")


def test_a_launched_process_without_a_process_group_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank would hold all rows."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(flatbed.FlatbedError, match="init_process_group"):
        flatbed.Embedding(70, 4, shard="row")
