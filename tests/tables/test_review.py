"""What reviewers have broken once."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed import Embedding, optim
from flatbed.errors import FlatbedError
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.memory import MemoryStorage


def trained(**options: Any) -> tuple[Embedding, Any]:
    emb = Embedding(10, 4, **options)
    optimizer = optim.Adam(emb, lr=0.1)
    emb(torch.arange(5)).sum().backward()
    optimizer.step()
    return emb, optimizer


# ---- layouts


def test_copies_made_before_a_pending_layout_keep_the_weights() -> None:
    emb = Embedding(10, 4)
    emb.weight.fill_(3.0)
    optim.Adam(emb)
    for made in (copy.deepcopy(emb), pickle.loads(pickle.dumps(emb))):
        assert torch.equal(made.weight, torch.full((10, 4), 3.0))
    file = io.BytesIO()
    torch.save(emb, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).weight, torch.full((10, 4), 3.0))


@pytest.mark.parametrize("first_use", ["step", "load"])
def test_a_new_layout_keeps_state(first_use: str) -> None:
    """As when a trained table moves to a GPU."""
    emb, optimizer = trained()
    if first_use == "load":
        other = Embedding(10, 4)
        loading = optim.Adam(other, lr=0.1)
        other.load_state_dict(emb.state_dict())
        loading.load_state_dict(optimizer.state_dict())
        emb, optimizer = other, loading
    before = emb.table.read_state("exp_avg", range(10)).clone()
    assert bool(before.any())
    emb.table.store.relayout(emb.table.store.record)
    assert torch.equal(emb.table.read_state("exp_avg", range(10)), before)


def test_a_layout_that_was_never_made_takes_no_state_along() -> None:
    """Adam, another optimizer that did nothing, Adam again; then the rows move."""
    emb, _ = trained()
    optim.SGD(emb, momentum=0.9)
    optimizer = optim.Adam(emb, lr=0.1)
    emb(torch.arange(5)).sum().backward()
    optimizer.step()
    before = emb.table.read_state("exp_avg", range(10)).clone()
    assert bool(before.any())
    emb.table.store.relayout(emb.table.store.record)
    assert torch.equal(emb.table.read_state("exp_avg", range(10)), before)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["host", "device"])
def test_trained_tables_move_to_a_gpu_and_back(storage: str) -> None:
    emb, optimizer = trained(storage=storage)
    weight, state = emb.weight.detach().clone(), emb.table.read_state("exp_avg", range(10)).clone()
    for device in ("cuda", "cpu", "cuda"):
        emb.to(device)
        assert torch.equal(emb.weight.detach().cpu(), weight)
        assert torch.equal(emb.table.read_state("exp_avg", range(10)).cpu(), state)
    emb(torch.arange(5)).sum().backward()
    optimizer.step()
    assert emb.table.scalars() == {"step": 2.0}


def test_an_interrupted_initialisation_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    emb = Embedding(1000, 4)
    fill, calls = MemoryStorage.fill_, []

    def interrupted(self: MemoryStorage, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        fill(self, *args)

    monkeypatch.setattr(MemoryStorage, "fill_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        emb.read_rows([0])
    assert torch.equal(emb.weight, Embedding(1000, 4).weight)


def test_views_that_someone_holds_keep_their_memory() -> None:
    emb = Embedding(100_000, 4, init=1.0)
    hidden = torch.ones(2, 4, requires_grad=True)
    loss = (hidden @ emb.weight.detach().T).sum()
    shared = torch.from_dlpack(emb.weight.detach())
    storage = emb.weight.untyped_storage()
    emb.table.resize(100_001)
    loss.backward()
    assert torch.equal(hidden.grad, torch.full((2, 4), 100_000.0))
    emb.table.close()
    assert float(shared.sum()) == 400_000
    assert storage[2] == 128  # of the first 1.0


def test_a_relative_path_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    emb = Embedding(10, 4, storage="disk", path="x.bed")
    monkeypatch.chdir(tmp_path / "other")
    emb.read_rows([0])
    assert (tmp_path / "x.bed").exists()
    assert not os.listdir(".")


# ---- state of other origin


class Counting(torch.optim.Adamax):
    """A class of its own."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (torch.optim.Rprop, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.ASGD, {}),
        (Counting, {}),
    ],
)
@pytest.mark.parametrize("ours", ["from_torch", "own"])
def test_state_dicts_of_torch_go_on(kind: Any, options: dict[str, Any], ours: str) -> None:
    theirs = nn.Embedding(6, 4)
    reference = kind(theirs.parameters(), lr=0.1, **options)
    ids = torch.arange(6)
    weights = [torch.randn(6, 4) for _ in range(5)]

    def step(module: nn.Module, optimizer: Any, weight: Tensor) -> None:
        (module(ids) * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for weight in weights[:3]:
        step(theirs, reference, weight)
    emb = Embedding(6, 4)
    if ours == "own":
        if not hasattr(optim, kind.__name__):
            return
        optimizer = getattr(optim, kind.__name__)(emb, lr=0.1, **options)
    else:
        optimizer = optim.from_torch(kind, emb, lr=0.1, **options)
    emb.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    for weight in weights[3:]:
        step(theirs, reference, weight)
        step(emb, optimizer, weight)
    torch.testing.assert_close(emb.weight.detach(), theirs.weight.detach(), rtol=1e-6, atol=1e-6)


def test_state_is_not_taken_over_by_another_optimizer(tmp_path: Path) -> None:
    emb, _ = trained()
    emb.table.save(tmp_path / "t.safetensors")
    table = flatbed.load_table(tmp_path / "t.safetensors")
    with pytest.raises(FlatbedError, match="state of another optimizer than NAdam"):
        optim.NAdam([table])
    assert optim.AdamW([table]).state[table]["step"] == 1


def test_state_of_another_dtype_is_refused() -> None:
    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("half", torch.zeros_like(p, dtype=torch.bfloat16))
            return super().step(closure)

    emb = Embedding(6, 4)
    with pytest.raises(FlatbedError, match=r"'half' is torch\.bfloat16"):
        optim.from_torch(Half, emb, lr=0.1)


def test_state_dicts_fit_those_of_torch_by_order() -> None:
    ours = nn.Sequential(Embedding(8, 8), nn.Linear(8, 8, bias=False))
    theirs = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    theirs.load_state_dict(ours.state_dict())
    optimizers = optim.Adam(ours), torch.optim.Adam(theirs.parameters())
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
    mine, other = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for key in (0, 1):
        torch.testing.assert_close(mine[key]["exp_avg"], other[key]["exp_avg"], rtol=1e-5, atol=1e-6)


# ---- steps that fail


def test_a_full_disk_stops_a_step_before_anything_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleDict(
        {
            "one": Embedding(50, 4),
            "two": Embedding(50, 4, storage="disk", path=tmp_path / "t.bed"),
            "head": nn.Linear(4, 1),
        }
    )
    optimizer = optim.Adam(model, lr=0.1)

    def backward() -> None:
        ids = torch.arange(20)
        model["head"](model["one"](ids) + model["two"](ids)).sum().backward()

    backward()
    before = [
        model["one"].read_rows(range(50)),
        model["two"].read_rows(range(50)),
        model["head"].weight.clone(),
    ]
    room = DiskStorage.make_room

    def full(self: DiskStorage, ids: Tensor) -> None:
        raise FlatbedError("no space left")

    monkeypatch.setattr(DiskStorage, "make_room", full)
    with pytest.raises(FlatbedError, match="no space left"):
        optimizer.step()
    now = [model["one"].read_rows(range(50)), model["two"].read_rows(range(50)), model["head"].weight]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert model["one"].table.scalars() == model["two"].table.scalars() == {"step": 0.0}
    monkeypatch.setattr(DiskStorage, "make_room", room)
    optimizer.step()  # again, with room
    assert model["one"].table.scalars() == model["two"].table.scalars() == {"step": 1.0}
    assert not torch.equal(model["head"].weight, before[2])
    assert not torch.equal(model["two"].read_rows(range(50)), before[1])


# ---- what is not seen by others


def test_losses_of_the_weight_itself_are_refused() -> None:
    emb, _ = trained()
    for loss in (lambda: emb.weight.pow(2).sum(), lambda: (emb(torch.arange(3)) @ emb.weight.T).sum()):
        with pytest.raises(FlatbedError, match="gradients do not flow into a table that way"):
            loss().backward()
    emb.requires_grad_(False)
    assert not (emb.weight * 2).requires_grad


def test_an_optimizer_that_nobody_has_is_gone() -> None:
    emb, optimizer = trained()
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    assert emb.table.scalars() == {"step": 1.0}  # for whoever saves the table now
    emb(torch.arange(3)).sum().backward()
    with pytest.raises(FlatbedError, match="no optimizer has it"):
        emb(torch.arange(3))


def test_used_gradients_are_gone() -> None:
    emb, optimizer = trained()
    assert emb.table.grad is None
    assert optimizer.nonfinite() == []
    before = emb.weight.detach().clone()
    optimizer.step()
    assert torch.equal(emb.weight, before)


def test_groups_edited_by_hand_are_followed() -> None:
    emb, layer = Embedding(10, 4), nn.Linear(4, 1)
    optimizer = optim.SGD([{"params": layer.parameters()}, {"params": [emb.table]}], lr=0.1)
    del optimizer.param_groups[1]
    before = emb.weight.detach().clone()
    layer(emb(torch.arange(3))).sum().backward()
    optimizer.step()
    assert torch.equal(emb.weight, before)


def test_mistakes_are_named(tmp_path: Path) -> None:
    emb = Embedding(10, 4, max_norm=None, sparse=False)  # torch's defaults
    for wrong, error, message in (
        (lambda: optim.Adam(emb.parameters()), ValueError, "give the module itself, or emb.table"),
        (lambda: optim.Adam([emb.weight]), TypeError, "give emb.table instead"),
        (lambda: Embedding.from_table(torch.zeros(2, 2)), TypeError, "from_pretrained"),
        (lambda: Embedding(10, 4, storage="disk", path=tmp_path / "no" / "x"), FlatbedError, "no folder"),
        (lambda: Embedding(10**30, 128), ValueError, "larger than any memory"),
    ):
        with pytest.raises(error, match=message):
            wrong()  # type: ignore[no-untyped-call]
    assert emb.read_rows(range(3)).shape == (3, 4)


@pytest.mark.parametrize("drop", ["optimizer", "module", "grad"])
def test_dropping_gradients_hides_no_bad_ids(drop: str) -> None:
    """Ids that were on a GPU are looked at in the step."""
    emb, optimizer = trained()
    before = emb.weight.detach().clone()
    emb.table.suspect(torch.tensor([1, 99]), torch.tensor([1]))
    if drop == "optimizer":
        optimizer.zero_grad()
    elif drop == "module":
        emb.zero_grad()
    else:
        emb.table.grad = None
    with pytest.raises(IndexError, match="id 99 at position 1 is out of range for a table of 10 rows"):
        optimizer.step()
    assert torch.equal(emb.weight, before)
    emb([1]).sum().backward()
    optimizer.step()


def test_momentum_goes_on_under_from_torch(tmp_path: Path) -> None:
    options = {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}
    emb = Embedding(20, 4)
    optimizer = optim.SGD(emb, **options)  # type: ignore[arg-type]
    for _ in range(3):
        emb(torch.tensor([1, 2, 3])).square().sum().backward()
        optimizer.step()
    emb.table.save(tmp_path / "t.safetensors")
    other = Embedding.from_table(flatbed.load_table(tmp_path / "t.safetensors"))
    borrowed = optim.from_torch(torch.optim.SGD, other, **options)
    for module, stepping in ((emb, optimizer), (other, borrowed)):
        module(torch.tensor([3, 5])).square().sum().backward()
        stepping.step()
    torch.testing.assert_close(other.weight.detach(), emb.weight.detach())


@pytest.mark.parametrize("storage", ["host", "device", "disk"])
def test_growing_while_a_layout_is_due(storage: str, tmp_path: Path) -> None:
    emb = Embedding(20, 4, storage=storage, path=tmp_path / "t.bed" if storage == "disk" else None)
    before = emb.read_rows(range(20)).clone()
    optim.Adam(emb)
    emb.table.resize(30)
    assert torch.equal(emb.read_rows(range(20)), before)
    assert torch.equal(emb.read_rows(range(30)), Embedding(30, 4).read_rows(range(30)))


def test_gradients_of_frozen_tables_are_dropped() -> None:
    emb, optimizer = trained()
    before = emb.weight.detach().clone()
    emb([1]).sum().backward()
    emb.requires_grad_(False)
    optimizer.step()
    emb.requires_grad_(True)
    emb([2]).sum().backward()
    optimizer.step()
    assert torch.equal(emb.weight[1], before[1])
    assert not torch.equal(emb.weight[2], before[2])


def test_tables_put_into_groups_by_hand_are_refused() -> None:
    emb, optimizer = trained()
    other = Embedding(10, 4, seed=1)
    optimizer.param_groups[0]["params"].append(other.table)
    emb([1]).sum().backward()
    with pytest.raises(FlatbedError, match="add_param_group"):
        optimizer.step()


def test_the_weight_in_place_and_as_an_output() -> None:
    emb, _ = trained()
    before = emb.weight.detach().clone()
    emb.weight += 1
    assert torch.equal(emb.weight, before + 1)
    buffer = torch.empty(10, 4)
    assert torch.mul(emb.weight, 2, out=buffer) is buffer
    assert not buffer.requires_grad
    with pytest.raises(AttributeError, match="write into it"):
        emb.weight = torch.zeros(10, 4)  # type: ignore[misc]


def test_loaded_numbers_replace_those_of_an_optimizer_that_is_gone(tmp_path: Path) -> None:
    emb, optimizer = trained()
    emb.table.save(tmp_path / "t.safetensors")
    emb(torch.arange(3)).sum().backward()
    optimizer.step()
    del optimizer
    assert emb.table.scalars() == {"step": 2.0}
    emb.table.load(tmp_path / "t.safetensors")
    assert emb.table.scalars() == {"step": 1.0}
    assert optim.Adam(emb).state[emb.table]["step"] == 1
