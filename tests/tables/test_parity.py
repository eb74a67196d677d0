"""Tables against torch's optimizers on dense copies of the touched rows, bitwise on a CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
import flatbed.optim
from flatbed.errors import FlatbedError
from tests.cases import DEVICES
from tests.optim.optimizers import Case
from tests.tables.tables import (
    ALL_CASES,
    BY_NAME,
    COUNTING,
    DIM,
    N_ROWS,
    PADDING,
    PATTERNS,
    STORAGES,
    Setup,
    assert_close,
    assert_same,
    backward,
    diagonal,
    paired,
    reference,
    train,
    upstream,
    weights,
)

STEPS = 6

# The interpreter computes with numpy, which remarks on log(0); exp(-inf) is 0, as it should be.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),  # torch's own, in SparseAdam
]


def check(
    case: Case,
    pattern: str,
    place: Setup,
    *,
    dim: int = DIM,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    per_row: bool = False,
) -> None:
    padding_idx = PADDING if pattern == "padding" else None
    weight = weights(dim=dim, dtype=dtype)
    emb = place.embedding(weight, padding_idx)
    expected = reference(case, weight, padding_idx=padding_idx, per_row=per_row)
    optimizer = case.ours([emb.table], per_row_steps=per_row)
    train(emb, optimizer, expected, [PATTERNS[pattern](step) for step in range(steps)])
    assert_same(emb, expected, place.device)


@pytest.mark.parametrize(
    ("case", "pattern", "storage"), [*diagonal(ALL_CASES), *diagonal(ALL_CASES, 2), *diagonal(ALL_CASES, 5)]
)
def test_rules(case: Case, pattern: str, storage: str, tmp_path: Path) -> None:
    check(case, pattern, Setup(storage, "cpu", tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "pattern", "storage"), paired(ALL_CASES))
def test_rules_on_the_gpu(case: Case, pattern: str, storage: str, tmp_path: Path) -> None:
    check(case, pattern, Setup(storage, "cuda", tmp_path))


@pytest.mark.parametrize(("case", "pattern", "storage"), diagonal(ALL_CASES))
def test_rules_by_kernels(case: Case, pattern: str, storage: str, tmp_path: Path, kernel_device: str) -> None:
    steps = STEPS if "radam" in case.name else 4  # RAdam rectifies from the sixth on
    check(case, pattern, Setup(storage, kernel_device, tmp_path), dim=5, steps=steps)


DTYPES = [torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("case", "pattern", "storage"), diagonal(ALL_CASES, 3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(case: Case, pattern: str, storage: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """State is fp32, or fp64 with weights of that; the step is computed in it, and the weight rounded."""
    check(case, pattern, Setup(storage, "cpu", tmp_path), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["adam", "nadam", "sgd-dampening", "rowwise"])
def test_dtypes_by_kernels(name: str, dtype: torch.dtype, tmp_path: Path, kernel_device: str) -> None:
    check(BY_NAME[name], "late", Setup("host", kernel_device, tmp_path), dtype=dtype, dim=7)


@pytest.mark.parametrize(
    ("name", "dim"),
    [("adam", 1), ("sparseadam", 3), ("adagrad", 130), ("rowwise-initial", 130), ("adam", 130)],
)
def test_dims(name: str, dim: int, where: str) -> None:
    """Those of which torch has no kernel that rounds by place."""
    check(BY_NAME[name], "duplicates", Setup("host", where), dim=dim, steps=3)


# ---- steps counted per row: every row as if an optimizer of torch's had it to itself


RECTIFIED = 8  # steps: RAdam rectifies from the sixth on


@pytest.mark.parametrize(("case", "pattern", "storage"), diagonal(ALL_CASES, 5))
def test_counts_per_row(case: Case, pattern: str, storage: str, tmp_path: Path) -> None:
    dtype = [torch.float32, *DTYPES][ALL_CASES.index(case) % 4]
    check(case, pattern, Setup(storage, "cpu", tmp_path), dtype=dtype, steps=RECTIFIED, per_row=True)


@pytest.mark.parametrize("case", {case.kind: case for case in COUNTING}.values(), ids=lambda c: c.name)
def test_counts_per_row_by_kernels(case: Case, kernel_device: str, tmp_path: Path) -> None:
    storage = STORAGES[COUNTING.index(case) % 3]
    check(case, "late", Setup(storage, kernel_device, tmp_path), dim=5, steps=RECTIFIED, per_row=True)


@pytest.mark.parametrize("name", ["adam", "nadam", "sgd-dampening"])
def test_only_steps_with_a_row_count_for_it(name: str, where: str) -> None:
    """Padding and empty batches count for no row."""
    weight = weights()
    emb = Setup("host", where).embedding(weight, padding_idx=1)
    optimizer = BY_NAME[name].ours([emb.table], per_row_steps=True)
    for ids in ([0, 0, 1], [], [1], [0, 5]):
        emb(torch.tensor(ids, dtype=torch.long)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert emb.table.scalars() == {}
    count = "_seen" if name == "sgd-dampening" else "step"
    expected = torch.zeros(N_ROWS, 1)
    expected[0], expected[5] = (2.0, 1.0) if count == "step" else (1.0, 1.0)
    assert torch.equal(emb.table.read_state(count, torch.arange(N_ROWS)).cpu(), expected)
    assert torch.equal(emb.read_rows([1]).cpu()[0], weight[1])


# ---- nn.Embedding(sparse=True)


SPARSE: list[tuple[Any, Any, dict[str, float]]] = [
    (torch.optim.SparseAdam, flatbed.optim.SparseAdam, {"lr": 0.05, "eps": 1e-2}),
    (torch.optim.SGD, flatbed.optim.SGD, {"lr": 0.05}),
    (torch.optim.Adagrad, flatbed.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
    (torch.optim.Adagrad, flatbed.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.2}),
]


@DEVICES
@pytest.mark.parametrize("pattern", ["duplicates", "late", "padding", "lookups"])
@pytest.mark.parametrize(("torchs", "ours", "options"), SPARSE)
def test_sparse_embedding(torchs: Any, ours: Any, options: Any, pattern: str, device: str) -> None:
    """Torch adds up the gradients of repeated ids, and takes Adagrad's step, in another order."""
    padding_idx = PADDING if pattern == "padding" else None
    weight = weights()
    theirs = nn.Embedding.from_pretrained(weight.clone(), False, padding_idx, sparse=True)
    emb = Setup("host", device).embedding(weight, padding_idx)
    optimizers = [torchs(theirs.parameters(), **options), ours([emb.table], **options)]
    for step in range(STEPS):
        lookups = PATTERNS[pattern](step)
        grads = upstream(lookups, DIM, torch.float32)
        for module, optimizer in zip((theirs, emb), optimizers, strict=True):
            backward(module, lookups, grads)
            optimizer.step()
            optimizer.zero_grad()
    found, expected = emb.read_rows(torch.arange(N_ROWS)).cpu(), theirs.weight.detach()
    if pattern == "late" and torchs is not torch.optim.Adagrad:
        assert_close(found, expected, device, "weight")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# ---- options


@pytest.mark.parametrize("name", ["adam", "sgd-dampening", "adagrad-decay", "rowwise"])
def test_groups_and_schedulers(name: str, where: str) -> None:
    """Two tables with learning rates of their own, which a scheduler changes."""
    case = BY_NAME[name]
    tables = [Setup("host", where).embedding(weights()) for _ in range(2)]
    expected = [reference(case, emb.read_rows(torch.arange(N_ROWS)).cpu()) for emb in tables]
    optimizer = case.ours([{"params": [emb.table], "lr": 0.1 / (n + 1)} for n, emb in enumerate(tables)])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        for n, (emb, wanted) in enumerate(zip(tables, expected, strict=True)):
            lookups = PATTERNS["late"](step + n)
            grads = upstream(lookups, DIM, torch.float32)
            backward(emb, lookups, grads)
            lr = optimizer.param_groups[n]["lr"]
            wanted.changes = lambda made, lr=lr: made.param_groups[0].update(lr=lr)
            wanted.step(lookups, grads)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for emb, wanted in zip(tables, expected, strict=True):
        assert_same(emb, wanted, where)


@pytest.mark.parametrize("name", ["adamw", "sgd-nesterov", "nadam"])
@pytest.mark.parametrize("dim", [5, 16])
def test_pieces_of_a_large_batch(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are updated some at a time; no bit tells where one piece ends."""
    monkeypatch.setattr("flatbed.optim.table_step.CHUNK_BYTES", 64)
    case, weight = BY_NAME[name], weights(200, dim)
    emb, expected = Setup().embedding(weight), reference(case, weight)
    optimizer = case.ours(emb)
    batches = [[torch.arange(200)], [torch.randperm(200)[:90]], [torch.randperm(200)[:150]]]
    if dim % 8 and name == "sgd-nesterov":
        batches = batches[:1]  # rows that are new are no longer in one piece with the others in torch's step
    train(emb, optimizer, expected, batches)
    assert_same(emb, expected, "cpu")


@pytest.mark.parametrize("steps", [(0.9, 0.0, 0.9), (0.9, 0.9, 0.0, 0.0)], ids=str)
def test_momentum_that_goes_and_comes_back(steps: tuple[float, ...], where: str) -> None:
    """The buffer stays as it is meanwhile."""
    case = Case("", flatbed.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1})
    weight = weights()
    emb, expected = Setup("host", where).embedding(weight), reference(case, weight)
    optimizer = case.ours(emb)
    for step, momentum in enumerate(steps):
        optimizer.param_groups[0]["momentum"] = momentum
        expected.changes = lambda made, momentum=momentum: made.param_groups[0].update(momentum=momentum)
        train(emb, optimizer, expected, [PATTERNS["late"](step)])
    assert_same(emb, expected, where)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    ("make", "state", "option", "value"),
    [
        (flatbed.optim.SGD, "momentum_buffer", "momentum", 0.9),
        (partial(flatbed.optim.SGD, momentum=0.9), "_seen", "dampening", 0.5),
        (flatbed.optim.Adam, "max_exp_avg_sq", "amsgrad", True),
    ],
)
def test_state_that_rows_have_no_room_for(
    make: Any, state: str, option: str, value: Any, steps_before: int, where: str
) -> None:
    emb = Setup("host", where).embedding(weights())
    optimizer = make(emb)
    emb(torch.tensor([1])).sum().backward()
    for _ in range(steps_before):
        optimizer.step()
    before = emb.read_rows([1])
    optimizer.param_groups[0][option] = value
    with pytest.raises(FlatbedError, match=rf"\({state}\).*build the optimizer with the option set"):
        optimizer.step()
    assert torch.equal(emb.read_rows([1]), before)
    optimizer.param_groups[0][option] = type(value)()
    optimizer.step()
    assert not torch.equal(emb.read_rows([1]), before)


def test_groups_in_another_order(where: str) -> None:
    """A table keeps its own learning rate."""
    tables = [Setup("host", where).embedding(weights()) for _ in range(2)]
    groups = [{"params": [emb.table], "lr": lr} for emb, lr in zip(tables, (0.5, 0.0), strict=True)]
    optimizer = flatbed.optim.SGD(groups)
    before = [emb.read_rows([1]).clone() for emb in tables]
    for _ in range(2):
        (tables[0]([1]) + tables[1]([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups.reverse()
    torch.testing.assert_close(tables[0].read_rows([1]), before[0] - 1.0)
    assert torch.equal(tables[1].read_rows([1]), before[1])


def test_groups_that_are_replaced(where: str) -> None:
    """The learning rate is that of the present groups."""
    emb = Setup("host", where).embedding(weights())
    optimizer = flatbed.optim.SGD(emb, lr=0.5)
    emb([1]).sum().backward()
    optimizer.step()
    before = emb.read_rows([1]).clone()
    optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    optimizer.step()
    assert torch.equal(emb.read_rows([1]), before)


@pytest.mark.parametrize("load", ["state dict", "file"])
def test_steps_after_a_load_count_on(load: str, where: str, tmp_path: Path) -> None:
    emb = Setup("host", where).embedding(weights())
    optimizer = flatbed.optim.Adam(emb)
    for _ in range(2):
        emb([1]).sum().backward()
        optimizer.step()
        if load == "file":
            emb.table.save(tmp_path / "rows.safetensors")
            emb.table.load(tmp_path / "rows.safetensors")
        else:
            optimizer.load_state_dict(optimizer.state_dict())
    assert emb.table.scalars() == {"step": 2.0}


def test_tables_without_gradient_are_left_alone(where: str) -> None:
    tables = [Setup("host", where).embedding(weights()) for _ in range(2)]
    before = tables[1].read_rows(torch.arange(N_ROWS)).clone()
    optimizer = BY_NAME["adamw"].ours(nn.ModuleList(tables))
    for _ in range(2):
        tables[0](torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.step()
    assert tables[0].table.scalars() == {"step": 2.0}
    assert tables[1].table.scalars() == {"step": 0.0}
    assert torch.equal(tables[1].read_rows(torch.arange(N_ROWS)), before)


# ---- stochastic rounding


def trials(where: str, storage: str, folder: Path, *, n_rows: int = 200, seed_steps: int = 0) -> Tensor:
    """Rows of 1.0 after a step of 2⁻¹⁰: the two neighbours in bf16 are 1 - 2⁻⁸ and 1."""
    emb = Setup(storage, where, folder).embedding(torch.ones(n_rows, 8, dtype=torch.bfloat16))
    optimizer = flatbed.optim.SGD(emb, lr=2.0**-10, stochastic_rounding=True)
    for _ in range(seed_steps):
        emb(torch.empty(0, dtype=torch.long)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    emb(torch.arange(n_rows)).sum().backward()
    optimizer.step()
    return emb.read_rows(torch.arange(n_rows)).cpu().float()


@pytest.mark.parametrize("storage", STORAGES)
def test_stochastic_rounding(storage: str, where: str, tmp_path: Path) -> None:
    found = trials(where, storage, tmp_path)
    assert set(found.unique().tolist()) == {1 - 2.0**-8, 1.0}
    assert abs(found.mean().item() - (1 - 2.0**-10)) < 1.7e-4  # 4 standard deviations
    assert torch.equal(found, trials(where, "host", tmp_path))  # reproducible, wherever the rows live
    assert not torch.equal(found, trials(where, "host", tmp_path, seed_steps=1))
    columns = (found < 1).float().mean(0)
    assert columns.min() > 0.1  # no column always goes the same way
    assert columns.max() < 0.4


def test_stochastic_rounding_differs_between_tables_and_counts(where: str) -> None:
    """Rows with different counts of steps are updated apart, and not with the same noise."""
    tables = [Setup("host", where).embedding(torch.ones(200, 8, dtype=torch.bfloat16)) for _ in range(2)]
    options = {"lr": 0.0, "stochastic_rounding": True, "per_row_steps": True}
    optimizer = flatbed.optim.Adam(nn.ModuleList(tables), **options)
    for lr, n_rows in ((0.0, 100), (2.0**-10, 200)):
        optimizer.param_groups[0]["lr"] = lr
        for emb in tables:
            emb(torch.arange(n_rows)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    one, two = (emb.read_rows(torch.arange(200)) for emb in tables)
    assert len(one.unique()) == 2
    assert not torch.equal(one[:100], one[100:])
    assert not torch.equal(one, two)
