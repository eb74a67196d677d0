"""Kernels on rows, interpreted or on a GPU, against their references in torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flatbed.kernels import rows as ops
from flatbed.kernels.records import NONE, SENTINEL, RecordLocation, UniqueRows
from flatbed.kernels.rows import gather, scatter_, unique

ROOT = Path(__file__).parents[2]
NO_ERROR = (1 << 63) - 1
N_ROWS = 30
KEYS = {
    "empty": torch.empty(0, dtype=torch.int64),
    "one": torch.tensor([5]),
    "equal": torch.full((9,), 29),
    "ascending": torch.arange(N_ROWS),
    "duplicates": torch.tensor([3, 3, 0, 29, 3, 7, 0, 0, 11]),
    "lead": torch.tensor([SENTINEL, 4, SENTINEL, 2, 4]),
    "out of range": torch.tensor([4, 30, -1, 4, 1 << 40, -(1 << 40), 0]),
    "many": torch.arange(2500).mul_(7919) % N_ROWS,
}


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operations use their torch reference."""
    monkeypatch.setattr(ops, "use_triton", lambda device: False)


def found_by_torch(keys: Tensor, bad: Tensor | None = None) -> UniqueRows:
    """The reference, on the CPU and without kernels."""
    rows, inverse = torch.unique(keys, return_inverse=True)
    return UniqueRows(torch.where((rows >= 0) & (rows < N_ROWS), rows, NONE), inverse)


@pytest.mark.parametrize("name", KEYS)
def test_unique(name: str, kernel_device: str) -> None:
    keys = KEYS[name]
    bad = torch.full((1,), NO_ERROR, device=kernel_device)
    found, expected = unique(keys.to(kernel_device), N_ROWS, bad), found_by_torch(keys)
    n = len(expected.rows)
    assert torch.equal(found.rows[:n].cpu(), expected.rows)
    assert (found.rows[n:] == NONE).all()
    assert torch.equal(found.inverse.cpu(), expected.inverse)
    wrong = ((keys < 0) | (keys >= N_ROWS)) & (keys != SENTINEL)
    assert int(bad) == (int(wrong.nonzero()[0]) if wrong.any() else NO_ERROR)
    assert found.order is not None
    assert found.starts is not None
    assert torch.equal(keys[found.order.cpu()], keys.sort().values)
    for slot in range(n):
        run = found.order[int(found.starts[slot]) : int(found.starts[slot + 1])].cpu()
        assert torch.equal(run, (expected.inverse == slot).nonzero().flatten())  # in the order of the ids


@pytest.mark.parametrize("name", KEYS)
def test_both_forms_agree(name: str, kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KEYS[name].to(kernel_device)
    marks = [torch.full((1,), start, device=kernel_device) for start in (NO_ERROR, NO_ERROR, 3, 3)]
    found = unique(keys, N_ROWS, marks[0])
    unique(keys, N_ROWS, marks[2])
    by_torch(monkeypatch)
    expected = unique(keys, N_ROWS, marks[1])
    unique(keys, N_ROWS, marks[3])
    assert torch.equal(found.rows[: len(expected.rows)], expected.rows)
    assert torch.equal(found.inverse, expected.inverse)
    assert torch.equal(marks[0], marks[1])
    assert torch.equal(marks[2], marks[3])  # an earlier position stays


@pytest.mark.parametrize("nbytes", [16, 32, 64, 128, 384, 1536])
def test_gather_and_scatter(nbytes: int, kernel_device: str) -> None:
    memory = torch.randint(256, (N_ROWS, nbytes), dtype=torch.uint8)
    held = memory.to(kernel_device, copy=True)
    for listed in ([], [3], [NONE], [0, NONE, 29, 7, NONE], list(range(N_ROWS))[::-1]):
        rows = torch.tensor(listed, dtype=torch.int64, device=kernel_device)
        expected = torch.where(rows.cpu()[:, None] < 0, 0, memory[rows.cpu()])
        for beginning in (nbytes, 2, 12, nbytes - 6):
            assert torch.equal(gather(RecordLocation(held), rows, beginning).cpu(), expected[:, :beginning])
        new = torch.randint(256, (len(rows), nbytes), dtype=torch.uint8)
        scatter_(RecordLocation(held), rows, new.to(kernel_device))
        memory[rows.cpu()[rows.cpu() >= 0]] = new[rows.cpu() >= 0]
        assert torch.equal(held.cpu(), memory)


def test_rows_that_are_not_contiguous(kernel_device: str) -> None:
    memory = torch.randint(256, (N_ROWS, 64), dtype=torch.uint8, device=kernel_device)
    rows = torch.tensor([[3, 9], [7, 9], [1, 9]], device=kernel_device)[:, 0]
    assert torch.equal(gather(RecordLocation(memory), rows, 64), memory[[3, 7, 1]])
    scatter_(RecordLocation(memory), rows, torch.zeros(3, 64, dtype=torch.uint8, device=kernel_device))
    assert not memory[[3, 7, 1]].any()
    assert unique(rows, N_ROWS).rows[:3].tolist() == [1, 3, 7]


def test_more_rows_than_programs(kernel_device: str) -> None:
    memory = torch.randint(256, (700, 1536), dtype=torch.uint8, device=kernel_device)
    rows = torch.randperm(700, device=kernel_device)
    found = gather(RecordLocation(memory), rows, 1536)
    assert torch.equal(found, memory[rows])
    scatter_(RecordLocation(memory), rows.flip(0), found)
    assert torch.equal(memory[rows.flip(0)], found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 1024, 70_000])
def test_squares(n: int, dtype: torch.dtype, kernel_device: str) -> None:
    from flatbed.kernels._triton.rows import squares

    values = torch.randn(n, dtype=dtype, device=kernel_device)
    torch.testing.assert_close(squares(values).sum(), values.double().square().sum())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests compile and run the same kernels")
def test_every_rule_compiles() -> None:
    # In another process: in this one Triton interprets, and accepts code that the compiler refuses.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_rows.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == {}
    assert len(found["compiled"]) == 12
