"""The nearest rows of a table, and tables as files and modules of torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import flatbed
import flatbed.optim
from flatbed.errors import FlatbedError
from flatbed.tables import retrieval
from flatbed.tables.row_store import RowStore
from flatbed.tables.storage import base
from tests.cases import DEVICES
from tests.tables.tables import STORAGES, Setup

CHUNKS = (None, 1, 1025, 4096)


def small_integers(*shape: int, most: int = 2) -> Tensor:
    """Numbers whose products are exact in any order, with many equal ones."""
    return torch.randint(-most, most + 1, shape).float()


def reference(
    queries: Tensor, weight: Tensor, k: int, padding_idx: int | None = None
) -> tuple[Tensor, Tensor]:
    """All scores, sorted; equal ones by id."""
    ids = torch.arange(len(weight))
    kept = ids if padding_idx is None else ids[ids != padding_idx]
    found = (queries @ weight[kept].T).sort(dim=1, descending=True, stable=True)
    return found.values[:, :k], kept[found.indices[:, :k]]


def assert_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=0, equal_nan=True)


def tables_of(weight: Tensor, folder: Path, device: str = "cpu") -> list[Any]:
    """The same weights in every storage, with and without optimizer state."""
    made = []
    for storage in STORAGES:
        for with_state in (False, True):
            emb = Setup(storage, device, folder).embedding(weight)
            if with_state:
                flatbed.optim.Adam(emb.parameters())
            made.append(emb)
    return made


# ---- topk


@pytest.mark.parametrize("metric", ["dot", "cosine"])
def test_every_storage_and_chunk_gives_the_same_bits(metric: str, tmp_path: Path) -> None:
    weight, queries = torch.randn(4500, 24), torch.randn(7, 24)
    found = [
        emb.table.topk(queries, 10, metric=metric, chunk_rows=chunk_rows)
        for emb in tables_of(weight, tmp_path)
        for chunk_rows in CHUNKS
    ]
    for other in found[1:]:
        assert_equal(other, found[0])
    plain = (functional.normalize(one, eps=1e-8) if metric == "cosine" else one for one in (queries, weight))
    left, right = plain
    expected = (left @ right.T).topk(10)
    torch.testing.assert_close(found[0][0], expected.values)
    assert torch.equal(found[0][1], expected.indices)


@DEVICES
@pytest.mark.parametrize("k", [1, 3, 40, 700, 5000])
def test_equal_scores_are_ordered_by_id(k: int, device: str, tmp_path: Path) -> None:
    weight, queries = small_integers(5000, 4), small_integers(9, 4)
    for emb in tables_of(weight, tmp_path, device):
        for chunk_rows in (None, 1):
            found = emb.topk(queries, k, chunk_rows=chunk_rows)
            assert found[0].device == found[1].device == torch.empty(0, device=device).device
            assert_equal(found, reference(queries, weight, k))


@given(st.data())
def test_any_sizes_agree_with_a_stable_sort(data: Any) -> None:
    n_rows = data.draw(st.integers(1, 3000), "rows")
    dim, n_queries = data.draw(st.integers(1, 9), "dim"), data.draw(st.integers(1, 5), "queries")
    padding_idx = data.draw(st.none() | st.integers(0, n_rows - 1), "padding_idx") if n_rows > 1 else None
    k = data.draw(st.integers(1, n_rows - (padding_idx is not None)), "k")
    chunk_rows = data.draw(st.none() | st.integers(1, 4000), "chunk_rows")
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    weight, queries = small_integers(n_rows, dim), small_integers(n_queries, dim, most=1)
    special = data.draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, -0.0]), max_size=3))
    for value in special:
        weight[torch.randint(n_rows, ()), torch.randint(dim, ())] = value
    emb = flatbed.Embedding.from_pretrained(weight, padding_idx=padding_idx)
    with mock.patch.object(retrieval, "MAX_QUERIES", 3):  # more are split
        found = emb.topk(queries, k, chunk_rows=chunk_rows)
    assert_equal(found, reference(queries, weight, k, padding_idx))


@DEVICES
@pytest.mark.parametrize("storage", STORAGES)
def test_rows_that_changed_count(storage: str, device: str, tmp_path: Path) -> None:
    weight = small_integers(3000, 8)
    emb = Setup(storage, device, tmp_path).embedding(weight)
    if storage != "device":
        emb.table.set_cache(cache_rows=64)
    optimizer = flatbed.optim.SGD(emb.parameters(), lr=1.0)
    ids = torch.tensor([5, 2999, 1024])
    emb(ids.to(device)).sum().mul(-64).backward()
    optimizer.step()
    emb.write_rows([7], torch.full((1, 8), 50.0))
    values, found = emb.topk(torch.ones(8), 4)
    assert sorted(found.tolist()) == [5, 7, 1024, 2999]
    assert torch.equal(values, emb.read_rows(found).sum(1))


def test_rows_that_changed_in_a_cache_of_kernels_count(kernel_device: str) -> None:
    emb = flatbed.Embedding(1100, 4, init="zeros", cache_rows=16, device=kernel_device)
    optimizer = flatbed.optim.SGD(emb.parameters(), lr=1.0)
    emb(torch.tensor([1, 1099], device=kernel_device)).sum().mul(-3).backward()
    optimizer.step()
    values, ids = emb.topk(torch.ones(4), 3)
    assert (values.tolist(), ids.tolist()) == ([12.0, 12.0, 0.0], [1, 1099, 0])


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_are_computed_in_fp32_at_least(dtype: torch.dtype, device: str) -> None:
    weight, queries = small_integers(2000, 16, most=9).to(dtype), small_integers(2, 16, most=9)
    emb = flatbed.Embedding.from_pretrained(weight, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = emb.topk(queries.to(dtype), 5)
    assert found[0].dtype == wide
    assert_equal(found, reference(queries.to(wide), weight.to(wide), 5))
    assert emb.topk(queries.double(), 5)[0].dtype == torch.float64


def test_queries_keep_their_shape_and_need_no_tensor() -> None:
    emb = flatbed.Embedding(50, 4)
    queries = torch.randn(2, 3, 4, requires_grad=True)
    values, ids = emb.topk(queries, 6)
    assert values.shape == ids.shape == (2, 3, 6)
    assert emb.topk(queries[:0], 6)[0].shape == (0, 3, 6)
    assert not values.requires_grad
    alone = emb.topk(queries[1, 2].tolist(), 6)
    torch.testing.assert_close(alone, (values[1, 2], ids[1, 2]))
    torch.testing.assert_close(emb.topk(queries.detach().numpy(), 6), (values, ids))
    assert emb.topk(queries.detach().mT.contiguous().mT, 6)[1].equal(ids)
    of_rows = emb.topk(emb.weight[:3].detach(), 1)
    assert type(of_rows[0]) is Tensor
    torch.testing.assert_close(of_rows, emb.topk(emb.read_rows([0, 1, 2]), 1))


def test_a_row_of_zeros_has_cosine_zero() -> None:
    emb = flatbed.Embedding.from_pretrained(torch.tensor([[0.0, 0.0], [-1.0, 0.0], [3.0, 4.0]]))
    values, ids = emb.topk([[2.0, 0.0]], 3, metric="cosine")
    torch.testing.assert_close(values, torch.tensor([[0.6, 0.0, -1.0]]))
    assert ids.tolist() == [[2, 0, 1]]


@pytest.mark.parametrize(
    ("queries", "k", "options", "kind", "message"),
    [
        (torch.ones(2, 5), 1, {}, ValueError, r"\(n, 4\).*found shape \(2, 5\)"),
        (torch.ones(2, 4).long(), 1, {}, TypeError, "found torch.int64"),
        ("queries", 1, {}, TypeError, "str"),
        (torch.ones(2, 4), 10, {}, ValueError, "between 1 and 9.*padding_idx; found 10"),
        (torch.ones(2, 4), 2.5, {}, TypeError, "k must be an integer; found 2.5"),
        (torch.ones(2, 4), 1, {"metric": "l2"}, ValueError, "dot, cosine; found 'l2'"),
        (torch.ones(2, 4), 1, {"chunk_rows": 0}, ValueError, "at least 1; found 0"),
    ],
)
def test_wrong_arguments(
    queries: Any, k: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    emb = flatbed.Embedding(10, 4, padding_idx=3)
    with pytest.raises(kind, match=message):
        emb.topk(queries, k, **options)


# ---- files


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("storage", "dtype"), list(zip((*STORAGES, "host"), DTYPES, strict=True)))
def test_export(storage: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHUNK_BYTES", 1 << 12)  # several blocks
    weight = torch.randn(300, 5).to(dtype)
    emb = Setup(storage, "cpu", tmp_path).embedding(weight)
    flatbed.optim.Adam(emb.parameters())
    out = tmp_path / "out"
    out.mkdir()
    emb.table.export(out / "w.safetensors")
    assert torch.equal(load_file(out / "w.safetensors")["weight"], weight)
    assert torch.equal(flatbed.load_table(out / "w.safetensors").read_rows(range(300)), weight)
    emb.table.export(out / "whole")
    assert [file.name for file in (out / "whole").iterdir()] == ["model.safetensors"]
    if dtype == torch.bfloat16:
        with pytest.raises(FlatbedError, match=r"no bfloat16.*safetensors"):
            emb.table.export(out / "w.npy")
    else:
        emb.table.export(out / "w.npy")
        assert np.array_equal(np.load(out / "w.npy"), weight.numpy())
        assert np.load(out / "w.npy", mmap_mode="r").shape == (300, 5)
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("shard_rows", [1, 70, 299])
def test_shards_are_those_of_hugging_face(shard_rows: int, tmp_path: Path) -> None:
    weight, folder, n_shards = torch.randn(300, 4), tmp_path / "model", -(-300 // shard_rows)
    flatbed.Embedding.from_pretrained(weight).table.export(folder, shard_bytes=shard_rows * 16 + 15)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": weight.nbytes}
    names = [f"model-{i:05}-of-{n_shards:05}.safetensors" for i in range(1, n_shards + 1)]
    assert [*index["weight_map"].values()] == names
    assert sorted(file.name for file in folder.iterdir()) == [*names, "model.safetensors.index.json"]
    parts = []
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            parts.append(shard.get_tensor(name))
    assert torch.equal(torch.cat(parts), weight)


def test_an_export_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emb, kept = flatbed.Embedding(64, 4), tmp_path / "kept"
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    for path, options, error, words in (
        (kept, {}, FlatbedError, "not an empty folder: remove it, or choose another"),
        (tmp_path / "missing" / "model", {}, FlatbedError, r"no folder .*missing"),
        (tmp_path / "model", {"shard_bytes": 15}, ValueError, "a row of 16 bytes; found 15"),
        (tmp_path / "o.npy", {"shard_bytes": 64}, ValueError, r"o\.npy is one file: leave it out"),
        (tmp_path / "o.csv", {}, ValueError, r"o\.csv ends in \.csv; expected \.npy"),
    ):
        with pytest.raises(error, match=words):
            emb.table.export(path, **options)

    def fails(self: Any, name: str, start: int, stop: int) -> Tensor:
        raise OSError(5, "broken")

    monkeypatch.setattr(RowStore, "read_field", fails)
    for name in ("model", "w.npy", "w.safetensors"):
        with pytest.raises((FlatbedError, OSError), match="broken"):
            emb.table.export(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


# ---- modules of torch


@pytest.mark.parametrize("storage", STORAGES)
def test_to_torch(storage: str, tmp_path: Path) -> None:
    weight, freeze = torch.randn(40, 6), storage == "host"
    emb = Setup(storage, "cpu", tmp_path).embedding(weight, padding_idx=3).requires_grad_(not freeze)
    made = emb.eval().to_torch()
    assert type(made) is nn.Embedding
    assert (made.padding_idx, made.weight.requires_grad, made.training) == (3, not freeze, False)
    assert torch.equal(made.weight, weight)
    made.weight.data.zero_()
    assert torch.equal(emb.read_rows(range(40)), weight)


@pytest.mark.parametrize(("mode", "include_last_offset"), [("sum", False), ("mean", True)])
def test_bags_to_torch(mode: str, include_last_offset: bool) -> None:
    bag = flatbed.EmbeddingBag(40, 6, padding_idx=0, mode=mode, include_last_offset=include_last_offset)
    made = bag.to_torch()
    assert type(made) is nn.EmbeddingBag
    assert (made.padding_idx, made.mode, made.include_last_offset) == (0, mode, include_last_offset)
    ids, offsets = torch.tensor([3, 0, 5, 5, 9]), torch.tensor([0, 2, 5])
    assert torch.equal(made(ids, offsets), bag(ids, offsets))
