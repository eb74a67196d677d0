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
from flatbed.errors import FlatbedError
from flatbed.tables import grads
from tests.tables.tables import (
    BY_NAME,
    DIM,
    N_ROWS,
    PADDING,
    PATTERNS,
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
    _kept = flatbed.optim.SGD(emb)
    touched: list[Tensor] = []
    for step in range(3):
        lookups = PATTERNS[pattern](step)
        grads = upstream(lookups, DIM, torch.float32)
        backward(emb, lookups, grads)
        backward(theirs, lookups, grads)
        touched += [ids.flatten() for ids in lookups]
    rows = torch.cat(touched).unique()
    assert_gradients(emb, theirs.weight.grad, rows[rows != padding_idx] if padding_idx else rows, where)


@pytest.mark.parametrize("counts", [(20, 1), (3, 17, 18), (1,) * 40], ids=str)
def test_many_lookups_are_added_in_torch_s_order(counts: tuple[int, ...]) -> None:
    """First within a backward pass, then over passes."""
    weight = weights()
    emb, theirs = Setup().embedding(weight), nn.Embedding.from_pretrained(weight.clone(), freeze=False)
    _kept = flatbed.optim.SGD(emb)
    for count in counts:
        lookups = [torch.randint(N_ROWS, (5,)) for _ in range(count)]
        grads = upstream(lookups, DIM, torch.float32)
        backward(emb, lookups, grads)
        backward(theirs, lookups, grads)
    assert torch.equal(dense_grad(emb.table), theirs.weight.grad)


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


@settings(max_examples=60)
@given(
    name=st.sampled_from(["adam", "sgd-dampening"]),
    batches=st.lists(batch, min_size=1, max_size=4),
    seed=st.integers(0, 99),
    padding=st.sampled_from([None, 3]),
)
def test_any_ids(name: str, batches: list[list[list[int]]], seed: int, padding: int | None) -> None:
    torch.manual_seed(seed)
    weight = weights()
    emb, expected = Setup().embedding(weight, padding), reference(BY_NAME[name], weight, padding_idx=padding)
    lookups = [[torch.tensor(ids, dtype=torch.long) for ids in step] for step in batches]
    train(emb, BY_NAME[name].ours(emb), expected, lookups)
    assert_same(emb, expected, "cpu")


SEVENS = torch.full((10, 4), 7.0)


def load_file(emb: Any, folder: Path) -> None:
    flatbed.Embedding.from_pretrained(SEVENS).table.save(folder / "sevens.safetensors")
    emb.table.load(folder / "sevens.safetensors")


def take_a_step(emb: Any, folder: Path) -> None:
    """With a gradient that makes all looked-up rows 7."""
    emb.table.grad = emb.table.grad * 0 + emb.read_rows(emb.table.grad_rows) - 7
    emb.table._owner.step()
    emb.table._owner.zero_grad()


CHANGES: dict[str, Callable[[Any, Path], object]] = {
    "write_rows": lambda emb, folder: emb.write_rows(torch.arange(10), SEVENS),
    "weight": lambda emb, folder: emb.weight.copy_(SEVENS),
    "load_state_dict": lambda emb, folder: emb.load_state_dict({"weight": SEVENS}),
    "load": load_file,
    "step": take_a_step,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("storage", ["host", "device"])
def test_rows_written_between_lookup_and_step_count(
    storage: str, change: str, where: str, tmp_path: Path
) -> None:
    """A step uses the weights that the lookup has read, but only if they are still the table's."""
    emb = flatbed.Embedding(10, 4, storage=storage, device=where)
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    first, second = (emb(torch.tensor([2, 5, 5], device=where)).sum() for _ in range(2))
    if change == "step":
        first.backward()
    CHANGES[change](emb, tmp_path)
    before = emb.read_rows([2, 5]).clone()
    assert before.eq(7).all()
    second.backward()
    optimizer.step()
    assert torch.equal(emb.read_rows([2, 5]), before - torch.tensor([[1.0], [2.0]], device=where))


@pytest.mark.parametrize("captured", [[True], [True, False], [False, True]])
def test_gradients_of_a_graph_are_refused_outside_of_it(
    captured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after they were read, and summed with others."""
    emb = flatbed.Embedding(N_ROWS, DIM, padding_idx=0)
    optimizer = flatbed.optim.Adam(emb.parameters())
    for is_captured in captured:
        with monkeypatch.context() as patched:
            patched.setattr(grads, "is_capturing", lambda device, found=is_captured: found)
            emb(torch.tensor([0, 3, 3])).sum().backward()
    assert emb.table.grad_rows.tolist() == [3]  # the padding row is left out
    with pytest.raises(FlatbedError, match="in one CUDA graph"):
        optimizer.step()


# ---- ways to compute a loss


def checkpointed(emb: Any, *, reentrant: bool) -> Tensor:
    def part(scale: Tensor) -> Tensor:
        return torch.tanh(emb(torch.tensor([1, 2, 2])) * scale)

    scale = torch.ones(1, requires_grad=True)
    out: Any = torch.utils.checkpoint.checkpoint(part, scale, use_reentrant=reentrant)
    return out.pow(2).sum() + emb(torch.tensor([2])).sum()


def penalized(emb: Any) -> Tensor:
    rows = emb(torch.tensor([1, 2, 2]))
    loss = rows.pow(3).sum()
    loss.backward(retain_graph=True)
    (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
    return loss + slope.pow(2).sum()


def autocast(emb: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = emb(torch.tensor([1, 2, 2]))
        assert out.dtype == torch.float32
        return (out @ torch.full((DIM, 2), 0.5)).float().pow(2).sum()


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "checkpointed": lambda emb: checkpointed(emb, reentrant=False),
    "checkpointed reentrant": lambda emb: checkpointed(emb, reentrant=True),
    "retained graph and gradient penalty": penalized,
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


def test_backward_for_other_inputs_only() -> None:
    emb, head = Setup().embedding(weights()), nn.Linear(DIM, 1)
    _kept = flatbed.optim.SGD(emb)
    head(emb([1])).sum().backward(inputs=[head.weight])
    torch.autograd.grad(head(emb([1])).sum(), head.weight)
    assert emb.table.grad is None
    head(emb([1])).sum().backward(inputs=[emb.table])
    assert emb.table.grad is not None
    assert head.bias.grad is None
    with pytest.warns(UserWarning, match="Using backward"):
        head(emb([1])).pow(3).sum().backward(create_graph=True)
    assert not emb.table.grad.requires_grad


# ---- clipping, scaling, skipping


class Pair:
    """A table and a layer under Adam, with the reference of the table and torch's of the layer."""

    def __init__(self, where: str, **options: Any) -> None:
        case, weight = BY_NAME["adam"], weights()
        self.where, self.expected = where, reference(case, weight)
        self.emb, self.layer = Setup("host", where).embedding(weight), nn.Linear(DIM, 3).to(where)
        self.theirs = nn.Linear(DIM, 3)
        self.theirs.load_state_dict(self.layer.state_dict())
        self.ours = case.ours(nn.ModuleList([self.emb, self.layer]), **options)
        self.torchs = case.theirs(self.theirs.parameters(), **case.same_rounding())

    def backward(self, scale: float = 1.0) -> None:
        """Backward passes on both sides."""
        ids, target = torch.randint(N_ROWS, (9,)), torch.randn(9, 3)
        (self.layer(self.emb(ids)).sub(target.to(self.where)).square().sum() * scale).backward()
        self.rows, self.dense = ids.unique(), nn.Parameter(self.expected.weight.clone())
        self.theirs(nn.functional.embedding(ids, self.dense)).sub(target).square().sum().backward()

    def torchs_step(self, max_norm: float | None) -> Tensor | None:
        """A step of torch's; the norm."""
        norm = None
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_([*self.theirs.parameters(), self.dense], max_norm)
        self.torchs.step()
        self.torchs.zero_grad()
        self.expected.apply(self.rows, self.dense.grad)
        return norm

    def check(self) -> None:
        near(self.emb.read_rows(torch.arange(N_ROWS)), self.expected.weight)
        near(self.layer.weight, self.theirs.weight)
        assert self.emb.table.scalars() == {"step": 4.0}


def near(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipped_with_dense_parameters(max_norm: float, where: str) -> None:
    pair = Pair(where, max_norm=max_norm)
    for _ in range(4):
        pair.backward()
        pair.ours.step()
        pair.ours.zero_grad()
        near(pair.ours.grad_norm, pair.torchs_step(max_norm))
    pair.check()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(norm_type: float, where: str) -> None:
    pair = Pair(where)
    pair.backward()
    table = pair.emb.table
    norms = [
        nn.utils.clip_grad_norm_(params, 0.3, norm_type)
        for params in ([*pair.layer.parameters(), table], [*pair.theirs.parameters(), pair.dense])
    ]
    near(norms[0], norms[1])
    near(table.grad, pair.dense.grad[pair.rows])
    nn.utils.clip_grad_value_([table], 2**-10)
    assert float(table.grad.abs().max()) <= 2**-10


@pytest.mark.parametrize(("bad", "alone"), [("table", False), ("layer", False), ("table", True)])
def test_steps_that_are_not_finite_are_skipped(bad: str, alone: bool, where: str) -> None:
    emb, layer = Setup("host", where).embedding(weights()), nn.Linear(DIM, 3).to(where)
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
    pair = Pair(where, max_norm=max_norm)
    emb, ours = pair.emb, pair.ours
    scaler = torch.amp.GradScaler(where, init_scale=1024.0, growth_interval=100)
    for step in range(4):
        if step == 2:  # an overflow in the table alone
            held = emb.read_rows(torch.arange(N_ROWS)).clone()
            scaler.scale((emb(torch.tensor([1])) * 1e38).sum()).backward()
            scaler.step(ours)
            scaler.update()
            ours.zero_grad()
            assert torch.equal(emb.read_rows(torch.arange(N_ROWS)), held)
            assert scaler.get_scale() == 512.0
        scaler.scale(torch.zeros(1, device=where))  # as a loss of this step
        pair.backward(scaler.get_scale())
        if unscaled:
            scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        pair.torchs_step(max_norm)
    pair.check()


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


def test_a_gradient_that_was_dropped_is_not_that_of_later_passes() -> None:
    emb = made()
    _kept = flatbed.optim.SGD(emb)
    emb([1]).sum().backward()
    held = emb.table.grad
    emb.table.grad = None
    emb([2]).sum().backward()
    with pytest.raises(flatbed.FlatbedError, match=r"was dropped .zero_grad.*read table\.grad again"):
        held.mul_(2)
    assert emb.table.grad[:, 0].tolist() == [1]


ZERO: dict[str, Callable[[Any, Any], object]] = {
    "neither": lambda model, optimizer: None,
    "model": lambda model, optimizer: model.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "grad": lambda model, optimizer: setattr(model[0].table, "grad", None),
}


@pytest.mark.parametrize("zero", ZERO)
def test_gradients_add_up_until_zero_grad(zero: str) -> None:
    """Rows whose gradients were dropped do not move: zeros for a gradient would still decay."""
    model = nn.Sequential(made(init=1.0))
    emb: Any = model[0]
    optimizer = flatbed.optim.SGD(model, lr=0.5, weight_decay=0.5, momentum=0.5)
    emb([2]).sum().backward()
    emb([1]).sum().backward()
    optimizer.step()
    ZERO[zero](model, optimizer)
    assert (emb.table.grad is None) == (zero != "neither")
    before = emb.weight.clone()
    optimizer.step()
    assert torch.equal(emb.weight, before) == (zero != "neither")
    emb([1]).sum().backward()
    assert dense_grad(emb.table)[1:3, 0].tolist() == ([2, 1] if zero == "neither" else [1, 0])


def test_a_frozen_table_steps_with_the_gradients_it_has() -> None:
    """As a parameter of torch's optimizers."""
    ours = made()
    theirs = torch.nn.Embedding.from_pretrained(ours.weight.detach().clone(), freeze=False)
    for emb, optim in ((ours, flatbed.optim.SGD), (theirs, torch.optim.SGD)):
        optimizer = optim(emb.parameters(), lr=0.1)
        emb(torch.tensor([1])).sum().backward()
        emb.requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
        emb(torch.tensor([1]))
        optimizer.step()
        emb.requires_grad_(True)
        emb(torch.tensor([2])).sum().backward()
        optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)


def test_a_table_that_is_frozen_before_backward_has_no_gradient() -> None:
    """As a parameter of torch."""
    ours = made()
    theirs = torch.nn.Embedding.from_pretrained(ours.weight.detach().clone(), freeze=False)
    for emb, optim in ((ours, flatbed.optim.SGD), (theirs, torch.optim.SGD)):
        optimizer = optim(emb.parameters(), lr=0.1)
        rows = emb(torch.tensor([1, 2]))
        emb.requires_grad_(False)
        rows.sum().backward()
        assert emb.weight.grad is None
        optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)


def test_an_optimizer_of_ones_own_over_a_table_raises() -> None:
    """The gradient of one row would be added to all of them, by broadcasting."""
    emb = made()
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    before = emb.read_rows([0, 1, 2])
    for ids in ([1], [1, 2]):
        emb(ids).sum().backward()
        for update in (lambda p: p.data.add_(p.grad.data), lambda p: p.data.sub_(p.grad, alpha=0.1)):
            with pytest.raises(flatbed.FlatbedError, match=r"flatbed\.optim.*grad_rows"):
                update(emb.table)
        assert torch.equal(emb.read_rows([0, 1, 2]), before)
    with torch.no_grad():
        emb.weight[emb.table.grad_rows] -= 0.5 * emb.table.grad
    optimizer.zero_grad()
    assert torch.equal(emb.read_rows([1, 2]), before[1:] - torch.tensor([[1.0], [0.5]]))


def test_data_of_a_gradient_is_the_gradient() -> None:
    emb = made()
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    before = emb.read_rows([1, 2])
    emb([1]).sum().backward()
    emb.table.grad.data.mul_(0.5)
    assert (emb.table.grad == 0.5).all()
    emb.table.grad.data.zero_()  # drops it: the row is not updated
    optimizer.step()
    assert torch.equal(emb.read_rows([1, 2]), before)
