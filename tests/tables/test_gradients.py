"""Gradients of tables: equal ids, several lookups, passes and threads, clipping, scaling, dropping."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flatbed
import flatbed.optim
from tests.tables.tables import (
    BY_NAME,
    DIM,
    N_ROWS,
    PADDING,
    PATTERNS,
    STORAGES,
    Setup,
    assert_gradients,
    assert_same,
    backward,
    dense_grad,
    reference,
    train,
    upstream,
    weights,
)

# ---- lookups and passes


@pytest.mark.parametrize("pattern", PATTERNS)
def test_accumulated_over_backward_passes(pattern: str, where: str) -> None:
    weight, padding_idx = weights(), PADDING if pattern == "padding" else None
    emb = Setup("host", where).embedding(weight, padding_idx)
    theirs = nn.Embedding.from_pretrained(weight.clone(), False, padding_idx)
    optimizer = flatbed.optim.SGD(emb)
    touched: list[Tensor] = []
    for step in range(3):
        lookups = PATTERNS[pattern](step)
        grads = upstream(lookups, DIM, torch.float32)
        backward(emb, lookups, grads)
        torch.autograd.backward([theirs(ids) for ids in lookups], grads)
        touched += [ids.flatten() for ids in lookups]
    rows = torch.cat(touched).unique()
    assert emb.table._owner is optimizer
    assert_gradients(emb, theirs.weight.grad, rows[rows != padding_idx] if padding_idx else rows, where)


@pytest.mark.parametrize("counts", [(1, 20), (20, 1), (3, 17, 18), (40,), (1,) * 40], ids=str)
def test_many_lookups_are_added_in_torch_s_order(counts: tuple[int, ...]) -> None:
    """First within a backward pass, then over passes."""
    weight = weights()
    emb, theirs = (Setup().embedding(weight), nn.Embedding.from_pretrained(weight.clone(), freeze=False))
    optimizer = flatbed.optim.SGD(emb)
    for count in counts:
        lookups = [torch.randint(N_ROWS, (5,)) for _ in range(count)]
        grads = upstream(lookups, DIM, torch.float32)
        backward(emb, lookups, grads)
        torch.autograd.backward([theirs(ids) for ids in lookups], grads)
    assert emb.table._owner is optimizer
    assert torch.equal(emb.table.grad, theirs.weight.grad[emb.table.grad_rows])
    assert not theirs.weight.grad[~torch.isin(torch.arange(N_ROWS), emb.table.grad_rows)].any()


@pytest.mark.parametrize("storage", STORAGES)
def test_accumulated_steps(storage: str, where: str, tmp_path: Path) -> None:
    """A step with the gradients of three passes is one step."""
    case, weight = BY_NAME["adam"], weights()
    emb, expected = (Setup(storage, where, tmp_path).embedding(weight), reference(BY_NAME["adam"], weight))
    optimizer = case.ours(emb)
    for step in range(3):
        total, touched = torch.zeros_like(weight), []
        for n in range(3):
            lookups = PATTERNS["lookups" if n else "late"](step)
            grads = upstream(lookups, DIM, torch.float32)
            backward(emb, lookups, grads)
            found = expected.gradients(lookups, grads)
            total = found if n == 0 else total + found
            touched += lookups
        optimizer.step()
        optimizer.zero_grad()
        expected.apply(expected.rows(touched), total)
    assert_same(emb, expected, where)


@pytest.mark.parametrize("n_lookups", [1, 8])
def test_backward_passes_in_several_threads(n_lookups: int) -> None:
    """No gradient is lost, and none counts twice: whole numbers add up in any order."""
    weight = torch.randint(-9, 9, (N_ROWS, DIM)).float()
    emb, theirs = Setup().embedding(weight), nn.Embedding.from_pretrained(weight.clone(), freeze=False)
    optimizers = flatbed.optim.SGD(emb, lr=1.0), torch.optim.SGD(theirs.parameters(), lr=1.0)
    barrier = threading.Barrier(4)

    def run(module: Any, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        lookups = [module(torch.randint(N_ROWS, (5,), generator=draw)) for _ in range(n_lookups)]
        barrier.wait()
        for out in lookups[1:]:
            out.sum().backward()
        lookups[0].sum().backward()

    with ThreadPoolExecutor(4) as pool:
        for step in range(60):
            for module, optimizer in zip((emb, theirs), optimizers, strict=True):
                for done in [pool.submit(run, module, 4 * step + n) for n in range(4)]:
                    done.result()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(emb.weight, theirs.weight.detach()), step


batch = st.lists(st.lists(st.integers(0, N_ROWS - 1), max_size=12), min_size=1, max_size=3)


@pytest.mark.parametrize("name", ["adam", "sgd-dampening"])
@settings(max_examples=40)
@given(
    batches=st.lists(batch, min_size=1, max_size=4),
    seed=st.integers(0, 99),
    padding=st.sampled_from([None, 3]),
)
def test_any_ids(name: str, batches: list[list[list[int]]], seed: int, padding: int | None) -> None:
    torch.manual_seed(seed)
    weight = weights()
    emb, expected = (
        Setup().embedding(weight, padding),
        reference(BY_NAME[name], weight, padding_idx=padding),
    )
    lookups = [[torch.tensor(ids, dtype=torch.long) for ids in step] for step in batches]
    optimizer = BY_NAME[name].ours(emb)
    train(emb, optimizer, expected, lookups)
    assert_same(emb, expected, "cpu")


@pytest.mark.parametrize("how", ["write_rows", "weight", "load_state_dict", "step"])
@pytest.mark.parametrize("storage", ["host", "device"])
def test_rows_written_between_lookup_and_step_count(storage: str, how: str, where: str) -> None:
    """A step uses the weights that the lookup has read, but only if they are still the table's."""
    emb = flatbed.Embedding(10, 4, storage=storage, device=where)
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    ids = torch.tensor([2, 5, 5], device=where)
    if how == "step":
        first = emb(ids).sum()
        second = emb(ids).sum()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = emb.read_rows([2, 5]).clone()
        second.backward()
    else:
        loss = emb(ids).sum()
        if how == "write_rows":
            emb.write_rows(torch.arange(10), torch.full((10, 4), 7.0))
        elif how == "weight":
            emb.weight.fill_(7.0)
        else:
            emb.load_state_dict({"weight": torch.full((10, 4), 7.0)})
        before = torch.full((2, 4), 7.0, device=where)
        loss.backward()
    optimizer.step()
    expected = before - torch.tensor([[1.0], [2.0]], device=where)
    assert torch.equal(emb.read_rows([2, 5]), expected)


# ---- ways to compute a loss


def retained(emb: Any) -> Tensor:
    loss: Tensor = emb(torch.tensor([1, 2, 2])).pow(2).sum()
    loss.backward(retain_graph=True)
    return loss


def checkpointed(emb: Any, *, reentrant: bool) -> Tensor:
    def part(scale: Tensor) -> Tensor:
        return torch.tanh(emb(torch.tensor([1, 2, 2])) * scale)

    scale = torch.ones(1, requires_grad=True)
    out: Any = torch.utils.checkpoint.checkpoint(part, scale, use_reentrant=reentrant)
    return out.pow(2).sum() + emb(torch.tensor([2])).sum()


def penalized(emb: Any) -> Tensor:
    rows = emb(torch.tensor([1, 2, 2]))
    loss = rows.pow(3).sum()
    (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
    return loss + slope.pow(2).sum()


def autocast(emb: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = emb(torch.tensor([1, 2, 2]))
        assert out.dtype == torch.float32
        return (out @ torch.full((DIM, 2), 0.5)).float().pow(2).sum()


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "retain_graph": retained,
    "checkpointed": lambda emb: checkpointed(emb, reentrant=False),
    "checkpointed reentrant": lambda emb: checkpointed(emb, reentrant=True),
    "gradient penalty": penalized,
    "strided": lambda emb: emb(torch.randint(N_ROWS, (3, 4))).transpose(0, 2)[::2].sum(),
    "autocast": autocast,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    weight = weights()
    ours, theirs = Setup().embedding(weight), nn.Embedding.from_pretrained(weight.clone(), freeze=False)
    optimizers = flatbed.optim.SGD(ours, lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for seed in range(2):
        for emb, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            LOSSES[name](emb).backward()
        assert torch.equal(dense_grad(ours.table), theirs.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(ours.weight, theirs.weight.detach())


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_leaves_no_graph_behind() -> None:
    emb = Setup().embedding(weights())
    emb([1, 1]).pow(3).sum().backward(create_graph=True)
    assert not emb.table.grad.requires_grad


def test_backward_for_other_inputs_only() -> None:
    emb, head = Setup().embedding(weights()), nn.Linear(DIM, 1)
    head(emb([1])).sum().backward(inputs=[head.weight])
    torch.autograd.grad(head(emb([1])).sum(), head.weight)
    assert emb.table.grad is None
    head(emb([1])).sum().backward(inputs=[emb.table])
    assert emb.table.grad is not None
    assert head.bias.grad is None


def test_gradients_of_low_precision_are_summed_in_single() -> None:
    emb = Setup().embedding(torch.zeros(N_ROWS, DIM, dtype=torch.bfloat16))
    out = emb([1] * 1000)
    out.backward(torch.full_like(out, 1.0078125))
    assert emb.table.grad.dtype == torch.float32
    assert float(emb.table.grad[0, 0]) == 1007.8125


# ---- clipping, scaling, skipping


def both(where: str) -> tuple[Any, nn.Linear, nn.Linear, Any]:
    """A table and a layer; the same layer, and the reference of the table."""
    weight = weights()
    emb, layer = Setup("host", where).embedding(weight), nn.Linear(DIM, 3).to(where)
    theirs = nn.Linear(DIM, 3)
    theirs.load_state_dict(layer.state_dict())
    return emb, layer, theirs, reference(BY_NAME["adam"], weight)


def run_both(emb: Any, layer: nn.Linear, theirs: nn.Linear, expected: Any, scale: float = 1.0) -> Tensor:
    """Backward on both sides; the rows."""
    ids, target = torch.randint(N_ROWS, (9,)), torch.randn(9, 3)
    (layer(emb(ids)).sub(target.to(layer.weight.device)).square().sum() * scale).backward()
    weight = nn.Parameter(expected.weight.clone())
    theirs(nn.functional.embedding(ids, weight)).sub(target).square().sum().backward()
    expected.dense = weight
    return ids.unique()


def near(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipped_with_dense_parameters(max_norm: float, where: str) -> None:
    case = BY_NAME["adam"]
    emb, layer, theirs, expected = both(where)
    ours = case.ours(nn.ModuleList([emb, layer]), max_norm=max_norm)
    dense = case.theirs(theirs.parameters(), **case.same_rounding())
    for _ in range(4):
        rows = run_both(emb, layer, theirs, expected)
        packed = expected.dense
        norm = nn.utils.clip_grad_norm_([*theirs.parameters(), packed], max_norm)
        ours.step()
        ours.zero_grad()
        near(ours.grad_norm, norm)
        dense.step()
        dense.zero_grad()
        expected.apply(rows, packed.grad)
    near(emb.read_rows(torch.arange(N_ROWS)), expected.weight)
    near(layer.weight, theirs.weight)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(norm_type: float, where: str) -> None:
    emb, layer, theirs, expected = both(where)
    ours = flatbed.optim.SGD(nn.ModuleList([emb, layer]), lr=0.1)
    rows = run_both(emb, layer, theirs, expected)
    norms = [
        nn.utils.clip_grad_norm_(params, 0.3, norm_type)
        for params in ([*layer.parameters(), emb.table], [*theirs.parameters(), expected.dense])
    ]
    near(norms[0], norms[1])
    near(emb.table.grad, expected.dense.grad[rows])
    ours.step()
    near(emb.read_rows(rows), expected.weight[rows] - 0.1 * expected.dense.grad[rows])
    nn.utils.clip_grad_value_([emb.table], 2**-10)
    assert float(emb.table.grad.abs().max()) <= 2**-10


@pytest.mark.parametrize(("bad", "alone"), [("table", False), ("layer", False), ("table", True)])
def test_steps_that_are_not_finite_are_skipped(bad: str, alone: bool, where: str) -> None:
    emb, layer = both(where)[:2]
    ours = flatbed.optim.Adam(emb if alone else nn.ModuleList([emb, layer]), skip_nonfinite=True)
    ids = torch.tensor([1, 5, 5])
    for step in range(3):
        held = emb.read_rows(torch.arange(N_ROWS)).clone(), layer.weight.detach().clone()
        factor = torch.ones(3, DIM, device=layer.weight.device)
        if step == 1 and bad == "table":
            factor[1, 1] = torch.inf
        out = (emb(ids) * factor).sum()
        if not alone:
            out = out + layer.weight.sum() * (torch.nan if step == 1 and bad == "layer" else 1.0)
        out.backward()
        names = {"table": "weight" if alone else "0.weight", "layer": "1.weight"}
        assert ours.nonfinite() == ([names[bad]] if step == 1 else [])
        ours.step()
        ours.zero_grad()
        assert torch.equal(emb.read_rows(torch.arange(N_ROWS)), held[0]) == (step == 1)
        assert torch.equal(layer.weight, held[1]) == (step == 1 or alone)
    assert int(ours.skipped_steps) == 1
    assert emb.table.scalars() == {"step": 2.0}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("unscaled", [False, True])
def test_grad_scaler(max_norm: float | None, unscaled: bool, where: str) -> None:
    case = BY_NAME["adam"]
    emb, layer, theirs, expected = both(where)
    ours = case.ours(nn.ModuleList([emb, layer]), max_norm=max_norm)
    dense = case.theirs(theirs.parameters(), **case.same_rounding())
    scaler = torch.amp.GradScaler(where, init_scale=1024.0, growth_interval=100)
    for step in range(4):
        state = torch.get_rng_state()
        if step == 2:  # an overflow in the table alone
            held = emb.read_rows(torch.arange(N_ROWS)).clone()
            scaler.scale((emb(torch.tensor([1])) * 1e38).sum()).backward()
            scaler.step(ours)
            scaler.update()
            ours.zero_grad()
            assert torch.equal(emb.read_rows(torch.arange(N_ROWS)), held)
            assert scaler.get_scale() == 512.0
        torch.set_rng_state(state)
        rows = run_both(emb, layer, theirs, expected, scale=scaler.get_scale())
        if unscaled:
            scaler.scale(torch.zeros(1, device=where))
            scaler.unscale_(ours)
        scaler.scale(torch.zeros(1, device=where))
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        if max_norm is not None:
            nn.utils.clip_grad_norm_([*theirs.parameters(), expected.dense], max_norm)
        dense.step()
        dense.zero_grad()
        expected.apply(rows, expected.dense.grad)
    near(emb.read_rows(torch.arange(N_ROWS)), expected.weight)
    near(layer.weight, theirs.weight)
    assert emb.table.scalars() == {"step": 4.0}


# ---- reading, replacing and dropping


def made(**options: Any) -> Any:
    return flatbed.Embedding(N_ROWS, 4, **options)


def test_grad_holds_each_row_once() -> None:
    emb = made()
    table = emb.table
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    assert table.grad is None
    assert table.grad_rows is None
    emb([[5, 1], [1, 5]]).sum().backward()
    emb([7]).sum().backward()
    assert table.grad_rows.tolist() == [1, 5, 7]
    assert table.grad[:, 0].tolist() == [2, 2, 1]
    table.grad.mul_(2)
    table.grad = table.grad + 1
    assert table.grad[:, 0].tolist() == [5, 5, 3]
    with pytest.raises(flatbed.FlatbedError, match=r"same shape \(3, 4\); found \(12, 4\)"):
        table.grad = torch.zeros(N_ROWS, 4)
    before = emb.weight.clone()
    optimizer.step()
    torch.testing.assert_close((before - emb.weight)[[1, 5, 7], 0], torch.tensor([0.5, 0.5, 0.3]))
    del table.grad
    assert table.grad is None
    with pytest.raises(flatbed.FlatbedError, match=r"same shape \(0, 4\)"):
        table.grad = torch.zeros(1, 4)


def test_rows_that_were_dropped_do_not_move() -> None:
    """Zeros for a gradient would still decay, or move by momentum."""
    emb = made()
    optimizer = flatbed.optim.SGD(emb, lr=0.1, weight_decay=0.1, momentum=0.9)
    for _ in range(2):
        emb(torch.tensor([1])).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    before = emb.weight.clone()
    optimizer.step()
    assert torch.equal(emb.weight, before)


ZERO: dict[str, Callable[[Any, Any], object]] = {
    "neither": lambda model, optimizer: None,
    "model": lambda model, optimizer: model.zero_grad(),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "grad": lambda model, optimizer: setattr(model[0].table, "grad", None),
}


@pytest.mark.parametrize("zero", ZERO)
def test_gradients_add_up_until_zero_grad(zero: str) -> None:
    model = nn.Sequential(made(init="zeros"))
    emb: Any = model[0]
    optimizer = flatbed.optim.SGD(model, lr=1.0)
    for _ in range(3):
        emb([1]).sum().backward()
        optimizer.step()
        ZERO[zero](model, optimizer)
        assert (emb.table.grad is None) == (zero != "neither")
    assert emb.weight[1].tolist() == [-6.0 if zero == "neither" else -3.0] * 4


def test_step_without_gradients_does_nothing() -> None:
    model = nn.Sequential(made(), nn.Linear(4, 2))
    optimizer = flatbed.optim.Adam(model)
    before = model.state_dict()
    optimizer.step()
    model[0]([])
    model[0]([]).sum().backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_gradients_of_frozen_tables_are_dropped() -> None:
    emb = made()
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    before = emb.weight.detach().clone()
    emb([1]).sum().backward()
    emb.requires_grad_(False)
    optimizer.step()
    emb.requires_grad_(True)
    emb([2]).sum().backward()
    optimizer.step()
    assert torch.equal(emb.weight[1], before[1])
    assert not torch.equal(emb.weight[2], before[2])
