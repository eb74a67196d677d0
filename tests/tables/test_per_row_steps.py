"""Steps counted per row: every row as if an optimizer of torch's had it to itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.optim.optimizers import Case
from tests.tables.tables import (
    ALL_CASES,
    BY_NAME,
    COUNTING,
    DIM,
    N_ROWS,
    PATTERNS,
    STORAGES,
    Setup,
    assert_close,
    assert_same,
    backward,
    reference,
    same_rounding,
    train,
    upstream,
    weights,
)

STEPS = 8  # RAdam rectifies from the sixth on

# The interpreter computes with numpy, which remarks on log(0); exp(-inf) is 0, as it should be.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),  # torch's own, in SparseAdam
]


class Alone:
    """Rows as parameters with an optimizer each."""

    def __init__(self, case: Case, weight: Tensor) -> None:
        self.params = [nn.Parameter(row[None].clone()) for row in weight]
        self.optimizers = [case.theirs([p], **same_rounding(case)) for p in self.params]

    def step(self, rows: Tensor, grad: Tensor) -> None:
        for row in rows.tolist():
            p, optimizer = self.params[row], self.optimizers[row]
            p.grad = grad[row][None].contiguous()
            if isinstance(optimizer, optim.SparseAdam):
                p.grad = p.grad.to_sparse(1)
            optimizer.step()

    def state(self, row: int) -> dict[str, Any]:
        return dict(self.optimizers[row].state[self.params[row]])


def check(case: Case, pattern: str, where: str, storage: str, tmp_path: Any) -> None:
    weight = weights()
    emb, alone = Setup(storage, where, tmp_path).embedding(weight), Alone(case, weight)
    optimizer = case.ours([emb.table], per_row_steps=True)
    dense = reference(case, weight)
    for step in range(STEPS):
        lookups = PATTERNS[pattern](step)
        grads = upstream(lookups, DIM, torch.float32)
        backward(emb, lookups, grads)
        optimizer.step()
        optimizer.zero_grad()
        alone.step(dense.rows(lookups), dense.gradients(lookups, grads))
    for row, param in enumerate(alone.params):
        assert_close(emb.read_rows([row]).cpu(), param.detach(), where, f"row {row}")
        for name, value in alone.state(row).items():
            held = emb.table.read_state(name, [row]).cpu()
            assert_close(held, torch.as_tensor(value, dtype=held.dtype).expand_as(held), where, name)
    assert emb.table.scalars() == {}


@pytest.mark.parametrize(
    ("case", "pattern", "storage"),
    [
        pytest.param(case, pattern, STORAGES[i % 3], id=f"{case.name}-{pattern}")
        for i, case in enumerate(ALL_CASES)
        for pattern in ("late", "duplicates")
    ],
)
def test_rows_alone(case: Case, pattern: str, storage: str, tmp_path: Any) -> None:
    check(case, pattern, "cpu", storage, tmp_path)


@pytest.mark.parametrize("case", COUNTING, ids=lambda c: c.name)
def test_rows_alone_by_kernels(case: Case, kernel_device: str, tmp_path: Any) -> None:
    check(case, "late", kernel_device, STORAGES[COUNTING.index(case) % 3], tmp_path)


@pytest.mark.parametrize("name", ["adam", "nadam-decay", "radam", "sparseadam"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes(name: str, dtype: torch.dtype, where: str) -> None:
    weight = weights(dtype=dtype)
    emb, expected = (
        Setup("host", where).embedding(weight),
        reference(BY_NAME[name], weight, per_row=True),
    )
    optimizer = BY_NAME[name].ours([emb.table], per_row_steps=True)
    train(emb, optimizer, expected, [PATTERNS["lookups"](step) for step in range(4)])
    assert_same(emb, expected, where)


@pytest.mark.parametrize("name", ["adam", "nadam", "sgd-dampening"])
def test_counts(name: str, where: str) -> None:
    """Only the steps in which a row occurs count for it; padding and empty batches count for none."""
    weight = weights()
    emb = Setup("host", where).embedding(weight, padding_idx=1)
    optimizer = BY_NAME[name].ours([emb.table], per_row_steps=True)
    for ids in ([0, 0, 1], [], [1], [0, 5]):
        emb(torch.tensor(ids, dtype=torch.long)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    count = "step" if "step" in optimizer._rule.scalars else "_seen"
    expected = torch.zeros(N_ROWS, 1)
    expected[0], expected[5] = (2.0, 1.0) if count == "step" else (1.0, 1.0)
    assert torch.equal(emb.table.read_state(count, torch.arange(N_ROWS)).cpu(), expected)
    assert torch.equal(emb.read_rows([1]).cpu()[0], weight[1])


def test_one_count_per_table_differs(where: str) -> None:
    """The two ways agree on rows of the first step, and not on rows that come late."""
    weight, case = weights(), BY_NAME["adam"]
    tables = [Setup("host", where).embedding(weight) for _ in range(2)]
    optimizers = [case.ours([emb.table], per_row_steps=n == 1) for n, emb in enumerate(tables)]
    for step in range(3):
        for emb, optimizer in zip(tables, optimizers, strict=True):
            emb(torch.tensor([0] if step < 2 else [0, 7])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    one, two = (emb.read_rows(torch.arange(N_ROWS)) for emb in tables)
    torch.testing.assert_close(one[:7], two[:7])
    assert (one[7] - two[7]).abs().min() > 1e-4


def test_rules_that_count_are_all_there() -> None:
    others = {case.kind.__name__ for case in ALL_CASES} - {case.kind.__name__ for case in COUNTING}
    assert others == {"SGD", "Lion", "RowwiseAdagrad"}
