"""Sharded tables: 4 ranks save, 3, 1 and 2 go on, and a process without ranks reads everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import flatbed
from tests.distributed.processes import check_script
from tests.distributed.sharded_checkpoints import (
    DIM,
    ROWS,
    Towers,
    build,
    contents,
    difference,
    digests,
    train,
)

WORLDS = [4, 3, 1, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the scenarios have left."""
    found: Path = tmp_path_factory.mktemp("ranks")
    check_script("sharded_checkpoints", found, *WORLDS)
    return found


def test_training_goes_on_as_in_one_process(folder: Path, tmp_path: Path) -> None:
    model, optimizers = build(tmp_path, 0)
    for world in WORLDS:
        train(model, optimizers, world=world, ranks=range(world))
        assert difference(contents(model, optimizers), torch.load(folder / f"run-{world}.pt")) is None, world


def test_a_process_without_ranks_loads_what_ranks_saved(folder: Path, tmp_path: Path) -> None:
    model, optimizers = build(tmp_path, 0)
    assert flatbed.load_checkpoint(folder / "run", model, optimizers) == {"world": WORLDS[-1]}
    expected = torch.load(folder / f"run-{WORLDS[-1]}.pt")
    assert difference(contents(model, optimizers), expected) is None
    table = flatbed.load_table(folder / "run", name="items")
    assert torch.equal(table.read_rows(range(ROWS)), expected["items.weight"])


def test_files_are_the_same_bytes_for_any_number_of_ranks(folder: Path) -> None:
    found = {world: digests(folder / f"same-{world}") for world in WORLDS}
    assert len(found[1]) == 7
    assert all(one == found[1] for one in found.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_alone_reads_a_checkpoint(folder: Path) -> None:
    """By names: all tables and dense weights of a version by DCP, one table by safetensors."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    reader = pytest.importorskip("torch.distributed.checkpoint.hf_storage").HuggingFaceStorageReader
    (version,) = (folder / "run").glob("v*")
    expected = torch.load(folder / f"run-{WORLDS[-1]}.pt")
    model = nn.Module()
    model.items = nn.Embedding(ROWS, DIM)
    model.users = nn.Embedding(ROWS, 2 * DIM, dtype=torch.bfloat16)
    model.dense = nn.Linear(2, 2)
    dcp.load(model.state_dict(), storage_reader=reader(str(version)), no_dist=True)
    assert torch.equal(model.items.weight.detach(), expected["items.weight"])
    assert torch.equal(model.users.weight.detach(), expected["users.weight"])
    assert torch.equal(model.dense.weight.detach(), expected["dense.weight"])
    moments = {"items.weight.exp_avg": torch.zeros(ROWS, DIM)}
    dcp.load(moments, storage_reader=reader(str(version)), no_dist=True)
    assert torch.equal(moments["items.weight.exp_avg"], expected["items.weight.exp_avg"])
    found = load_file(version / "table-0.safetensors")["items.weight"]
    assert torch.equal(found, expected["items.weight"])


def test_another_size_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(flatbed.FlatbedError, match="of 101 × 32, and this one is of 7 × 32"):
        flatbed.load_checkpoint(folder / "run", Towers(tmp_path, 0, rows=7))
