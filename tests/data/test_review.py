"""What reviews have found: each once wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import flatbed
from flatbed import FlatbedError, Prefetcher

GIVEN = [torch.arange(4) + 5 * n for n in range(4)]


def test_a_table_that_grows_in_the_loop() -> None:
    """Ids are looked at early; what counts is whether there are rows when the batch is handed out."""
    emb = flatbed.Embedding(10, 4)
    seen = 0
    for n, ids in enumerate(Prefetcher(GIVEN, {emb: lambda b: b}, depth=3)):
        seen += len(emb(ids))
        if n == 1:
            emb.table.resize(20)
    assert seen == 16


def test_ids_that_no_row_has_name_the_table() -> None:
    emb = flatbed.Embedding(10, 4)
    with pytest.raises(IndexError, match=r"ids function for Table\(10 × 4.*id 10 at position 0"):
        for _ in Prefetcher(GIVEN, {emb: lambda b: b}, depth=3):
            pass


def test_a_batch_that_raises_stop_iteration() -> None:
    class Strange:
        def to(self, device: Any) -> Any:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Prefetcher([1, Strange(), 2], {}, device="cpu"))


def test_not_for_copies_and_not_without_bounds() -> None:
    emb = flatbed.Embedding(10, 4)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(Prefetcher(GIVEN, {emb: lambda b: b}))
    with pytest.raises(ValueError, match="1024 at most; found 20000000"):
        Prefetcher(GIVEN, {emb: lambda b: b}, depth=20_000_000)


def test_a_closed_table_with_a_cache() -> None:
    emb = flatbed.Embedding(10, 4, cache_rows=5)
    emb(torch.tensor([1])).sum().backward()
    emb.table.close()
    emb.table.grad = None
    with pytest.raises(FlatbedError, match="closed"):
        emb(torch.tensor([1]))


@pytest.mark.parametrize("cache_rows", [0, 6])
def test_files_that_are_replaced_in_the_loop(cache_rows: int, tmp_path: Path) -> None:
    emb = flatbed.Embedding(20, 4, storage="disk", path=tmp_path / "a.bed", cache_rows=cache_rows)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    emb.table.save(tmp_path / "first.safetensors")
    for ids in Prefetcher(GIVEN * 5, {emb: lambda b: b % 20}, depth=4):
        emb(ids % 20).sum().backward()
        optimizer.step()
        emb.table.load(tmp_path / "first.safetensors")
    assert torch.equal(emb.read_rows(torch.arange(20)), flatbed.Embedding(20, 4).weight)
    emb.table.close(discard=True)


def test_a_prefetcher_in_inference_mode() -> None:
    emb = flatbed.Embedding(20, 4)
    with torch.inference_mode():
        found = [emb(ids) for ids in Prefetcher(GIVEN, {emb: lambda b: b})]
    assert torch.equal(torch.cat(found), emb.weight[:20][torch.cat(GIVEN)])
