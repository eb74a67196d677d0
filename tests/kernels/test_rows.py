"""Kernels on rows, interpreted or on a GPU, against their references in torch."""

from __future__ import annotations

import pytest
import torch

from flatbed.kernels import NONE, SENTINEL, RecordLocation
from flatbed.kernels import rows as ops
from flatbed.kernels._triton.rows import sum_squares
from flatbed.kernels.rows import gather, scatter_, unique

NO_ERROR = (1 << 63) - 1
N_ROWS = 30
KEYS = {
    "empty": torch.empty(0, dtype=torch.int64),
    "one": torch.tensor([5]),
    "equal": torch.full((9,), 29),
    "ascending": torch.arange(N_ROWS),
    "duplicates": torch.tensor([3, 3, 0, 29, 3, 7, 0, 0, 11]),
    "sentinel": torch.tensor([SENTINEL, 4, SENTINEL, 2, 4]),
    "out of range": torch.tensor([4, 30, -1, 4, 1 << 40, -(1 << 40), 0]),
    "many": torch.arange(2500).mul_(7919) % N_ROWS,
}


@pytest.mark.parametrize("name", KEYS)
def test_unique(name: str, kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and torch reference agree, and sort the ids of a row in order."""
    keys = KEYS[name].to(kernel_device)
    marks = [torch.full((1,), start, device=kernel_device) for start in (NO_ERROR, 3, NO_ERROR, 3)]
    found, _ = (unique(keys, N_ROWS, mark) for mark in marks[:2])
    monkeypatch.setattr(ops, "use_triton", lambda device: False)
    expected, _ = (unique(keys, N_ROWS, mark) for mark in marks[2:])
    n = len(expected.rows)
    assert torch.equal(found.rows[:n], expected.rows)
    assert (found.rows[n:] == NONE).all()
    assert torch.equal(found.inverse, expected.inverse)
    wrong = ((keys < 0) | (keys >= N_ROWS)) & (keys != SENTINEL)
    first = int(wrong.nonzero()[0]) if wrong.any() else NO_ERROR
    assert [int(mark) for mark in marks] == [first, min(first, 3)] * 2  # an earlier position stays
    assert found.order is not None
    assert found.starts is not None
    assert torch.equal(keys[found.order], keys.sort().values)
    for slot in range(n):
        run = found.order[int(found.starts[slot]) : int(found.starts[slot + 1])]
        assert torch.equal(run, (expected.inverse == slot).nonzero().flatten())


def test_more_rows_than_programs(kernel_device: str) -> None:
    memory = torch.randint(256, (700, 1536), dtype=torch.uint8, device=kernel_device)
    rows = torch.randperm(700, device=kernel_device)
    found = gather(RecordLocation(memory), rows, 1536)
    assert torch.equal(found, memory[rows])
    scatter_(RecordLocation(memory), rows.flip(0), found)
    assert torch.equal(memory[rows.flip(0)], found)


@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (1024, torch.float64), (70_000, torch.float32)])
def test_squares(n: int, dtype: torch.dtype, kernel_device: str) -> None:
    values = torch.randn(n, dtype=dtype, device=kernel_device)
    torch.testing.assert_close(sum_squares(values).sum(), values.double().square().sum())
