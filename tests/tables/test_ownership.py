"""Ownership of tables by optimizers, and the use of their gradients."""

from __future__ import annotations

import gc
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from flatbed.errors import FlatbedError
from tests.tables.models import DIM, EVERY, ROWS, Model, assert_same, pair


def made(**options: Any) -> flatbed.Embedding:
    return flatbed.Embedding(ROWS, DIM, **options)


def backward(emb: Any, ids: Any = (1, 2)) -> None:
    emb(torch.tensor(ids)).pow(2).sum().backward()


# ---- tables without an optimizer


def test_gradients_without_an_optimizer_are_an_error_at_the_next_training_lookup() -> None:
    emb = made()
    bag = flatbed.EmbeddingBag.from_table(emb.table)
    backward(emb)
    for use in (lambda: emb([1]), lambda: bag([[1]])):
        with pytest.raises(flatbed.FlatbedError, match=r"no optimizer has it.*flatbed\.optim\.Adam\(model"):
            use()
    assert emb.eval()([1]).shape == (1, DIM)
    with torch.no_grad():
        emb.train()([1])
    with torch.inference_mode():
        bag([[1]])
    emb.read_rows([1])
    assert emb.table.grad is not None


def test_optimizer_that_comes_later_uses_the_gradients() -> None:
    emb = made(init="zeros")
    emb([1]).sum().backward()
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    emb([2]).sum().backward()
    optimizer.step()
    assert emb.weight[:4, 0].tolist() == [0, -1, -1, 0]


def test_dropped_gradients_need_no_optimizer() -> None:
    """Training by hand."""
    emb = made(init="zeros")
    for _ in range(3):
        emb([1, 1]).sum().backward()
        rows, grad = emb.table.grad_rows, emb.table.grad
        assert rows is not None
        assert grad is not None
        emb.write_rows(rows, emb.read_rows(rows) - grad)
        emb.zero_grad()
    assert emb.weight[1].tolist() == [-6.0] * DIM


def test_deleted_optimizer_no_longer_owns_the_table() -> None:
    emb = made()
    optimizer = flatbed.optim.Adam(emb)
    backward(emb)
    optimizer.step()
    del optimizer
    gc.collect()
    assert emb.table._owner is None
    backward(emb)
    with pytest.raises(flatbed.FlatbedError, match="no optimizer has it"):
        emb([1])


# ---- another optimizer


def test_second_optimizer_takes_over_with_state_of_its_own() -> None:
    ours, theirs = pair()
    first = flatbed.optim.Adam(ours, lr=0.1)
    ours([1, 2]).sum().backward()
    first.step()
    first.zero_grad()
    theirs.load_state_dict(ours.state_dict())
    second = flatbed.optim.Adam(ours, lr=0.1)
    before = ours.state_dict()
    with pytest.raises(flatbed.FlatbedError, match=r"'emb\.weight' has been given to another optimizer"):
        first.step()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, before[name])
    assert not ours.emb.table.read_state("exp_avg", EVERY).any()  # type: ignore[union-attr,operator]
    reference = torch.optim.Adam(theirs.parameters(), lr=0.1)
    for model, optimizer in ((ours, second), (theirs, reference)):
        model(EVERY).pow(2).sum().backward()
        optimizer.step()
    assert_same(ours, theirs)


def test_another_kind_of_optimizer_takes_over() -> None:
    emb = made()
    before = emb.weight.clone()
    for make in (flatbed.optim.Adam, flatbed.optim.SGD, flatbed.optim.Adagrad, flatbed.optim.Adam):
        optimizer = make(emb, lr=0.0)
        backward(emb)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(emb.weight, before)
    assert emb.table.state_names == ("exp_avg", "exp_avg_sq")


TORCHS = [
    (name, more)
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    for more in ({}, {"foreach": True}, {"fused": True})
    if set(more) <= set(inspect.signature(kind).parameters)
]


@pytest.mark.parametrize(("name", "more"), TORCHS, ids=str)
def test_torchs_own_optimizers_say_what_to_use_instead(name: str, more: dict[str, bool]) -> None:
    emb = made()
    before = emb.weight.clone()

    def train() -> None:
        optimizer = getattr(torch.optim, name)([emb.table], lr=0.1, **more)
        backward(emb)
        optimizer.step(lambda: torch.zeros(())) if name == "LBFGS" else optimizer.step()

    if name == "SparseAdam":  # it looks at the layout of gradients first
        with pytest.raises(RuntimeError, match="dense gradients"):
            train()
    else:
        with pytest.raises(flatbed.FlatbedError, match=r"was called on a table.*flatbed\.optim"):
            train()
    assert torch.equal(emb.weight, before)


# ---- groups


def test_add_param_group_in_mid_training() -> None:
    ours, theirs = pair()
    a, b = (
        flatbed.optim.SGD(ours.head.parameters(), lr=0.1),
        torch.optim.SGD(theirs.head.parameters(), lr=0.1),
    )
    for model, optimizer in ((ours, a), (theirs, b)):
        model.emb.requires_grad_(False)
        model([1, 2]).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.emb.requires_grad_(True)
    a.add_param_group({"params": ours.emb.table, "lr": 0.3, "momentum": 0.5})
    b.add_param_group({"params": theirs.emb.parameters(), "lr": 0.3, "momentum": 0.5})
    for _ in range(3):
        for model, optimizer in ((ours, a), (theirs, b)):
            model(EVERY).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours, theirs)


def test_table_given_twice_raises() -> None:
    emb = made()
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        flatbed.optim.Adam([{"params": [emb.table]}, {"params": [emb.table]}])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        flatbed.optim.Adam([emb.table, emb.table])


def test_ways_to_name_a_table() -> None:
    model = Model(made())
    table = model.emb.table
    by_module = flatbed.optim.Adam(model)
    assert by_module.param_groups[0]["param_names"] == ["emb.weight", "head.weight", "head.bias"]
    assert flatbed.optim.Adam([table]).param_groups[0]["params"] == [table]
    assert flatbed.optim.Adam([("items", table)]).param_groups[0]["param_names"] == ["items"]  # type: ignore[list-item]
    assert flatbed.optim.Adam({"params": table} for _ in range(1)).param_groups[0]["params"] == [table]
    with pytest.raises(TypeError, match=r"iterable of Tensors or dicts, but got flatbed\.Table"):
        flatbed.optim.Adam(table)  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("wrong", ["option", "state", "dtype"])
def test_failed_optimizer_changes_nothing(groups: int, wrong: str, tmp_path: Path) -> None:
    """Neither of two tables leaves its optimizer if one cannot come along."""
    first = made()
    second = made(dtype=torch.bfloat16) if wrong == "dtype" else made()
    owner = flatbed.optim.Adam([first.table, second.table])
    backward(first)
    backward(second)
    owner.step()
    state = first.table.read_state("exp_avg", EVERY)
    last: dict[str, Any] = {"params": [second.table]}
    options: dict[str, Any] = {"lr": 0.1}
    if wrong == "option":
        last["lr"] = -1.0
    elif wrong == "state":  # as if it had come from a file
        second.table._storage.state_owned = False
    else:
        options["master_weights"] = True
    together = [{**last, "params": [first.table, second.table]}]
    given = together if groups == 1 else [{"params": [first.table]}, last]
    with pytest.raises((ValueError, flatbed.FlatbedError)):
        flatbed.optim.SGD(given, momentum=0.9, **options)
    gc.collect()
    assert first.table._owner is owner
    assert second.table._owner is owner
    assert torch.equal(first.table.read_state("exp_avg", EVERY), state)
    backward(first)
    owner.step()


def test_state_of_its_own_needs_an_optimizer_of_its_kind() -> None:
    emb = made()
    optimizer = flatbed.optim.Adam(emb)
    backward(emb)
    optimizer.step()
    emb.table._storage.state_owned = False  # as if it had come from a file
    with pytest.raises(flatbed.FlatbedError, match=r"exp_avg, exp_avg_sq.*SGD keeps other.*drop_state\(\)"):
        flatbed.optim.SGD(emb, momentum=0.9)
    emb.table.drop_state()
    flatbed.optim.SGD(emb, momentum=0.9)


# ---- gradients


def test_grad_holds_each_row_once() -> None:
    emb = made()
    table = emb.table
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    assert table.grad is None
    assert table.grad_rows is None
    emb([[5, 1], [1, 5]]).sum().backward()
    emb([7]).sum().backward()
    assert table.grad_rows.tolist() == [1, 5, 7]  # type: ignore[union-attr]
    assert table.grad[:, 0].tolist() == [2, 2, 1]  # type: ignore[index]
    table.grad.mul_(2)  # type: ignore[union-attr]
    table.grad = table.grad + 1  # type: ignore[operator]
    assert table.grad[:, 0].tolist() == [5, 5, 3]  # type: ignore[index]
    with pytest.raises(flatbed.FlatbedError, match=r"same shape \(3, 4\); found \(16, 4\)"):
        table.grad = torch.zeros(ROWS, DIM)
    before = emb.weight.clone()
    optimizer.step()
    torch.testing.assert_close((before - emb.weight)[[1, 5, 7], 0], torch.tensor([0.5, 0.5, 0.3]))
    del table.grad
    assert table.grad is None
    with pytest.raises(flatbed.FlatbedError, match=r"same shape \(0, 4\)"):
        table.grad = torch.zeros(1, DIM)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grad_norm(norm_type: float, foreach: bool) -> None:
    ours, theirs = pair()
    norms = []
    for model in (ours, theirs):
        model([1, 2, 2, 9]).pow(2).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach))
    torch.testing.assert_close(norms[0], norms[1])
    table = ours.emb.table
    torch.testing.assert_close(table.grad, theirs.emb.weight.grad[table.grad_rows])  # type: ignore[index,union-attr]
    nn.utils.clip_grad_value_(table, 2**-10)  # type: ignore[arg-type]
    assert float(table.grad.abs().max()) <= 2**-10  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_grad_scaler(unscale: bool, kind: str) -> None:
    ours, theirs = pair()
    a = getattr(flatbed.optim, kind)(ours, lr=0.1)
    b = getattr(torch.optim, kind)(theirs.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for model, optimizer, scaler in zip((ours, theirs), (a, b), scalers, strict=True):
            loss = model(EVERY).pow(2).sum()
            if step == 2:  # an overflow in the rows alone
                loss = loss + model.emb(torch.tensor([3])).sum() * torch.tensor(float("inf"))
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 128.0
    assert_same(ours, theirs)


# ---- dropping gradients


def test_zero_grad_variants() -> None:
    model = Model(made())
    table: Any = model.emb.table
    optimizer = flatbed.optim.SGD(model, lr=0.1)
    for drop in (
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        model.emb.zero_grad,
        model.zero_grad,
        lambda: setattr(table, "grad", None),
    ):
        model([1]).sum().backward()
        assert table.grad is not None
        drop()
        assert table.grad is None


def test_rows_that_were_dropped_do_not_move() -> None:
    """Zeros for a gradient would still decay, or move by momentum."""
    emb = made()
    optimizer = flatbed.optim.SGD(emb, lr=0.1, weight_decay=0.1, momentum=0.9)
    for _ in range(2):
        backward(emb, [1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    before = emb.weight.clone()
    optimizer.step()
    assert torch.equal(emb.weight, before)


@pytest.mark.parametrize("zero", ["model", "optimizer", "neither"])
def test_gradients_add_up_until_zero_grad(zero: str) -> None:
    model = Model(made(init="zeros"))
    emb: Any = model.emb
    optimizer = flatbed.optim.SGD(model, lr=1.0)
    for _ in range(3):
        emb([1]).sum().backward()
        optimizer.step()
        if zero != "neither":
            (model if zero == "model" else optimizer).zero_grad()
    assert emb.weight[1].tolist() == [-6.0 if zero == "neither" else -3.0] * DIM


def test_step_without_gradients_does_nothing() -> None:
    model = Model(made())
    optimizer = flatbed.optim.Adam(model)
    before = model.state_dict()
    optimizer.step()
    model.emb([])
    model.emb([]).sum().backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def model_on_disk(folder: Path) -> nn.Sequential:
    return nn.Sequential(flatbed.Embedding(50, 4, storage="disk", path=folder / "rows.bed"))


def one_step(model: nn.Module, optimizer: flatbed.optim.Optimizer) -> None:
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("other", [flatbed.optim.SGD, partial(flatbed.optim.Adam, amsgrad=True)])
def test_file_is_not_rewritten_for_another_optimizer(other: Any, tmp_path: Path) -> None:
    """In a living process as in a new one: what was saved would be gone."""
    model = model_on_disk(tmp_path)
    optimizer = flatbed.optim.Adam(model, lr=0.1)
    one_step(model, optimizer)
    flatbed.save_checkpoint(tmp_path / "saved", model, optimizer)
    expected = model[0].read_rows(range(50)).clone()
    with pytest.raises(FlatbedError, match=r"holds optimizer state of its own .*drop_state"):
        other(model, lr=0.1)
    one_step(model, optimizer)  # the first one still trains
    again = flatbed.optim.Adam(model, lr=0.1)  # the same kind of state, from zero
    one_step(model, again)
    model[0].table.close(discard=True)
    model = model_on_disk(tmp_path)
    optimizer = flatbed.optim.Adam(model, lr=0.1)
    flatbed.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert torch.equal(model[0].read_rows(range(50)), expected)
    model[0].table.drop_state()
    one_step(model, other(model, lr=0.1))
    model[0].table.close(discard=True)


def test_optimizer_that_was_never_used_does_not_matter(tmp_path: Path) -> None:
    model = model_on_disk(tmp_path)
    flatbed.optim.Adam(model, lr=0.1)
    one_step(model, flatbed.optim.SGD(model, lr=0.1))
    assert model[0].table.state_names == ()
    model[0].table.close(discard=True)
