"""`shard="row"` without other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flatbed


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
