"""Sums of the gradients of equal ids: long segments are summed in chunks that depend on nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatbed.kernels import NONE, SENTINEL
from flatbed.kernels.rows import segment_sum, unique

N_ROWS = 50
CHUNK = 64
BATCHES: dict[str, list[int]] = {
    "thousand among others": [10, 1000, 3],
    "lengths about that of a chunk": [1, 63, 64, 65, 128, 129],
    "long after short": [5, 129, 1, 1, 200, 64, 2],
    "at the ends of windows": [64, 64, 65, 63, 192, 1],
    "short ones alone": [3] * 30,
    "none": [],
}
"""Number of occurrences of each row, by name of the batch."""


def keys_of(lengths: list[int], draw: torch.Generator) -> Tensor:
    """Shuffled ids of rows that are not consecutive."""
    rows = torch.randperm(N_ROWS, generator=draw)[: len(lengths)].sort().values
    keys = rows.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return keys[torch.randperm(len(keys), generator=draw)]


def expected(grads: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sum in the order of the ids, in chunks that are then summed in order."""
    wide = torch.promote_types(grads.dtype, torch.float32)
    rows, sums = torch.unique(keys), []
    for row in rows:
        total = torch.zeros(grads.shape[1], dtype=wide)
        for number, chunk in enumerate(torch.split(grads[keys == row].to(wide), CHUNK)):
            part = torch.zeros_like(total)
            for grad in chunk:
                part = part + grad
            total = part if number == 0 else total + part
        sums.append(total)
    return rows, torch.stack(sums) if sums else grads.new_zeros((0, grads.shape[1]))


def check(keys: Tensor, dim: int, dtype: torch.dtype, device: str, padding_idx: int | None = None) -> None:
    draw = torch.Generator().manual_seed(1)
    sizes = 10 ** (4 * torch.rand(len(keys), 1, generator=draw) - 2)  # every order of adding has its own bits
    grads = (torch.randn(len(keys), dim, generator=draw) * sizes).to(dtype)
    found = unique(keys.to(device), N_ROWS)
    with_holes = grads.repeat(1, 2)[:, :dim].to(device)
    rows, sums = segment_sum(with_holes, found, padding_idx)
    wanted_rows, wanted = expected(grads, keys)
    if padding_idx is not None:
        wanted[wanted_rows == padding_idx] = 0
        wanted_rows = torch.where(wanted_rows == padding_idx, NONE, wanted_rows)
    n = len(wanted_rows)
    assert sums.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(rows[:n].cpu(), wanted_rows)
    assert (rows[n:] == NONE).all()
    assert torch.equal(sums[:n].cpu(), wanted)
    assert not sums[n:].any()


@pytest.mark.parametrize("name", BATCHES)
def test_segments(name: str, kernel_device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    check(keys_of(BATCHES[name], draw), 3, torch.float32, kernel_device)


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.bfloat16, 5), (torch.float64, 8), (torch.float16, 1), (torch.float32, 130)],
    ids=str,
)
def test_dtypes_and_dims(dtype: torch.dtype, dim: int, kernel_device: str) -> None:
    draw = torch.Generator().manual_seed(3)
    check(keys_of([2, 130, 1, 64], draw), dim, dtype, kernel_device)


@pytest.mark.parametrize("padding", ["long", "short", "absent"])
def test_padding_row(padding: str, kernel_device: str) -> None:
    draw = torch.Generator().manual_seed(4)
    keys = keys_of([65, 200, 1, 70], draw)
    rows = torch.unique(keys)
    padding_idx = {"long": int(rows[1]), "short": int(rows[2]), "absent": N_ROWS - 1}[padding]
    assert padding != "absent" or padding_idx not in rows
    check(keys, 3, torch.float32, kernel_device, padding_idx)


def test_keys_of_no_row(kernel_device: str) -> None:
    """A long segment of the sentinel has no sum, and does not disturb later rows."""
    keys = torch.cat([torch.full((100,), SENTINEL), torch.full((70,), 3), torch.full((2,), 9)])
    keys = keys[torch.randperm(len(keys), generator=torch.Generator().manual_seed(5))]
    grads = torch.randn(len(keys), 2)
    found = unique(keys.to(kernel_device), N_ROWS)
    rows, sums = segment_sum(grads.to(kernel_device), found, None)
    _, wanted = expected(grads, keys)
    assert rows[:3].tolist() == [NONE, 3, 9]
    assert torch.equal(sums[1:3].cpu(), wanted[1:])
    assert not sums[0].any()


def test_reference_adds_in_the_order_of_ids() -> None:
    """torch's own, on a CPU, does so without chunks: short segments have the same bits."""
    check(keys_of([1, 63, 64, 7], torch.Generator().manual_seed(6)), 3, torch.float32, "cpu")
