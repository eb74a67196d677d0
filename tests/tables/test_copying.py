"""Copies of tables and of modules that have them: deepcopy, pickle, torch.save."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from flatbed.errors import FlatbedError
from flatbed.tables import copying
from flatbed.tables.embedding import Embedding
from flatbed.tables.storage import base
from tests.tables.test_saving import everything, same, train, trained

ROWS, DIM = 50, 5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHUNK_BYTES", 1000)


def through_torch(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": through_torch,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
storages = pytest.mark.parametrize("storage", ["host", "device"])


@ways
@storages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copy_is_equal_and_apart(storage: str, dtype: torch.dtype, way: Any, tmp_path: Path) -> None:
    cache_rows = 6 if storage == "host" else None
    emb, optimizer = trained(storage, tmp_path, dtype=dtype, padding_idx=1, seed=4, cache_rows=cache_rows)
    before = everything(emb.table)
    made = way(emb)
    assert same(everything(made.table), before)
    assert made.table.scalars() == {"step": 3.0}
    assert repr(made) == repr(emb)
    train(emb, optimizer)
    assert same(everything(made.table), before)
    emb(torch.tensor([1, 2])).sum().backward()
    frozen = way(emb.requires_grad_(False))
    assert (frozen.table.requires_grad, frozen.table.grad) == (False, None)
    emb.table.grad = None
    other = flatbed.optim.Adam(made, lr=0.1)  # goes on where the original was
    train(made, other)
    assert same(everything(made.table), everything(emb.table))
    assert made.table.scalars() == {"step": 6.0}
    assert made.table.cache_stats().rows == (cache_rows or 0)


@ways
@storages
def test_table_that_was_never_used(storage: str, way: Any) -> None:
    emb = Embedding(ROWS, DIM, storage=storage, seed=8, replicate=False)
    made = way(emb)
    assert not made.table.replicate
    assert torch.equal(made.weight, Embedding(ROWS, DIM, seed=8).weight)
    emb(torch.tensor([0]))
    optimizer = flatbed.optim.Adagrad(emb, initial_accumulator_value=0.5)
    made = way(emb)  # its state waits to be laid out
    assert float(made.table.read_state("sum", 3)[0]) == 0.5
    assert same(everything(made.table), everything(emb.table))
    del optimizer


@ways
def test_table_that_is_shared_stays_shared(way: Any) -> None:
    first = Embedding(ROWS, DIM)
    model = nn.ModuleList([first, Embedding.from_table(first.table), first])
    made = way(model)
    assert made[0].table is made[1].table is made[2].table
    assert made[0].table is not first.table


def test_disk_tables_say_what_to_do(tmp_path: Path) -> None:
    emb, _ = trained("disk", tmp_path)
    with pytest.raises(FlatbedError, match=r"t\.bed.*load_table"):
        copy.deepcopy(emb)
    with pytest.raises(FlatbedError, match=r"t\.bed.*save_checkpoint or table\.save"):
        pickle.dumps(emb)


def test_too_large_to_pickle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emb, _ = trained("host", tmp_path)
    monkeypatch.setattr(copying, "available_bytes", lambda: 1000)
    with pytest.raises(FlatbedError, match=r"3,000 bytes, and 1,000 bytes.*table\.save"):
        pickle.dumps(emb)


def test_missing_device_becomes_the_cpu() -> None:
    emb = Embedding(ROWS, DIM, storage="device")
    about, *rest = copying.pickled_parts(emb.table)
    made = copying.rebuild(flatbed.Table, {**about, "device": f"cuda:{torch.cuda.device_count()}"}, *rest)
    assert made.device == torch.device("cpu")
