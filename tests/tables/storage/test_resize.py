"""Tables that grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from tests.tables.tables import everything
from tests.tables.test_interruptions import interrupted

ROWS, DIM = 10, 3
STORAGES = ("host", "device", "disk")


def made(storage: str, folder: Path, n_rows: int = ROWS, **options: Any) -> flatbed.Embedding:
    path = folder / f"table-{n_rows}" if storage == "disk" else None
    return flatbed.Embedding(n_rows, DIM, storage=storage, path=path, **options)


def train(emb: Any, optimizer: Any, ids: list[int]) -> None:
    emb(ids).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("init", ["normal", 0.5])
def test_new_rows_are_those_of_a_table_built_larger(
    storage: str, used: bool, init: Any, tmp_path: Path
) -> None:
    emb = made(storage, tmp_path, init=init, seed=4)
    larger = made(storage, tmp_path, 27, init=init, seed=4)
    if used:
        emb([1])
    emb.table.resize(27)
    assert torch.equal(emb.read_rows(range(27)), larger.read_rows(range(27)))
    assert emb.state_dict()["weight"].shape == (27, DIM)
    bag = flatbed.EmbeddingBag.from_table(emb.table)
    emb.table.resize(28)
    assert bag.num_embeddings == emb.num_embeddings == emb.table.num_embeddings == 28
    with pytest.raises(IndexError, match="28 rows"):
        emb([28])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "options", [{"initial_accumulator_value": 0.25}, {"per_row_steps": True}, {"max_norm": 0.1}]
)
def test_training_goes_on_as_if_it_had_been_larger(storage: str, options: Any, tmp_path: Path) -> None:
    embs = [made(storage, tmp_path, n_rows, padding_idx=2, seed=1) for n_rows in (ROWS, 20)]
    kind = flatbed.optim.Adagrad if "initial_accumulator_value" in options else flatbed.optim.Adam
    optimizers = [kind(emb, lr=0.1, **options) for emb in embs]
    for number, ids in enumerate(([1, 2, 3], [3, 9], [1, 1], [1, 19], [3, 15, 15], [11])):
        if number == 3:
            embs[0].table.resize(15)
            embs[0].table.resize(20)
        for emb, optimizer in zip(embs, optimizers, strict=True):
            train(emb, optimizer, ids)
    small, large = (everything(emb) for emb in embs)
    assert torch.equal(small[0], large[0])
    assert small[1].keys() == large[1].keys()
    assert all(torch.equal(value, large[1][name]) for name, value in small[1].items())


def test_state_dicts_after_growth_load_into_a_larger_model() -> None:
    emb = flatbed.Embedding(ROWS, DIM)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    train(emb, optimizer, [1])
    emb.table.resize(11)
    theirs = nn.Embedding(11, DIM)
    theirs.load_state_dict(emb.state_dict())
    torchs = torch.optim.Adam(theirs.parameters(), lr=0.1)
    torchs.load_state_dict(optimizer.state_dict())
    assert torchs.state[theirs.weight]["exp_avg"].shape == (11, DIM)


@pytest.mark.parametrize("storage", STORAGES)
def test_refused_resizes_change_nothing(storage: str, tmp_path: Path) -> None:
    emb = made(storage, tmp_path)
    before = emb.read_rows(torch.arange(ROWS))
    with pytest.raises(ValueError, match="can only grow; found 9 rows asked of 10"):
        emb.table.resize(9)
    for wrong in (12.0, "12", None):
        with pytest.raises(TypeError, match="num_embeddings must be an integer"):
            emb.table.resize(wrong)  # type: ignore[arg-type]
    emb.table.resize(ROWS)
    assert emb.num_embeddings == ROWS
    assert torch.equal(emb.read_rows(torch.arange(ROWS)), before)


@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_stay_when_a_table_grows(storage: str, tmp_path: Path) -> None:
    """Gradients from before and after the growth are added, also of a lookup before it."""
    emb = made(storage, tmp_path, init="zeros")
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    emb([1, 9]).sum().backward()
    early = emb([3])
    emb.table.resize(50)
    (emb([1, 49]).sum() + early.sum()).backward()
    optimizer.step()
    assert emb.read_rows([1, 9, 49, 2, 3])[:, 0].tolist() == [-2, -1, -1, 0, -1]


def test_table_without_room_to_grow_stays_as_it_is() -> None:
    emb = flatbed.Embedding(ROWS, DIM)
    before = emb.weight.clone()
    with pytest.raises(flatbed.FlatbedError, match="bytes of host memory"):
        emb.table.resize(10**12)
    assert emb.num_embeddings == ROWS
    assert torch.equal(emb.weight, before)


def test_interrupted_resize(tmp_path: Path) -> None:
    """A table has as many rows as its file, whenever Ctrl-C comes."""
    number, found = 1, set()
    while True:
        path = tmp_path / str(number)
        emb = flatbed.Embedding(ROWS, DIM, storage="disk", path=path, seed=1)
        emb.write_rows([1], torch.ones(1, DIM))
        if not interrupted(lambda: emb.table.resize(20), number):  # noqa: B023
            break
        n_rows = emb.num_embeddings
        emb.write_rows([2], torch.ones(1, DIM))
        assert emb.read_rows(range(n_rows))[[1, 2]].eq(1).all()
        emb.table.close()
        with flatbed.load_table(path) as table:
            assert table.num_embeddings == n_rows
            assert table.read_rows(range(n_rows))[[1, 2]].eq(1).all()
        found.add(n_rows)
        number += 3
    assert found == {ROWS, 20}
