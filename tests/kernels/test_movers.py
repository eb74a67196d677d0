"""Records of all sizes between storage, cache and buffers: every shape of the movers gives the same bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from flatbed.kernels import NONE, RecordLocation
from flatbed.kernels._triton import cache
from flatbed.kernels._triton import rows as movers
from flatbed.kernels._triton.rows import MoverShape
from flatbed.kernels.cache import CacheIndex

SIZES = [16, 64, 128, 256, 384, 512, 1024, 1536, 2048, 4096, 4224]
SHAPES = [None, MoverShape(96, 4, 1), MoverShape(2, 8, 32)]
"""None stands for that of `mover_shape`."""
N_ROWS, N_SLOTS = 90, 40


def records(n: int, nbytes: int, device: str) -> Tensor:
    return torch.randint(256, (n, nbytes), dtype=torch.uint8).to(device)


def drawn(n: int, size: int, device: str) -> Tensor:
    return torch.randperm(size)[:n].to(device)


CASES = pytest.mark.parametrize(
    ("nbytes", "n", "shape"),
    [(size, n, SHAPES[i % 3]) for i, (size, n) in enumerate(itertools.product(SIZES, [0, 1, 37, N_SLOTS]))],
)


@CASES
def test_gather_and_scatter(nbytes: int, n: int, shape: MoverShape | None, kernel_device: str) -> None:
    memory, rows = records(N_ROWS, nbytes, kernel_device), drawn(n, N_ROWS, kernel_device)
    rows[1::5] = NONE
    present = rows >= 0
    expected = torch.where(present[:, None], memory[rows], 0)
    location = RecordLocation(memory)
    assert torch.equal(movers.gather(location, rows, nbytes, shape), expected)
    for beginning in (2, 12, nbytes - 6):
        assert torch.equal(movers.gather(location, rows, beginning, shape), expected[:, :beginning])
    new, after = records(n, nbytes, kernel_device), memory.clone()
    after[rows[present]] = new[present]
    movers.scatter_(location, rows, new, shape)
    assert torch.equal(memory, after)


@CASES
def test_fill_and_write_back(nbytes: int, n: int, shape: MoverShape | None, kernel_device: str) -> None:
    memory, cached = records(N_ROWS, nbytes, kernel_device), records(N_SLOTS, nbytes, kernel_device)
    chosen = drawn(2 * n, N_ROWS, kernel_device)
    missing, victims, slots = chosen[:n].clone(), chosen[n:].clone(), drawn(n, N_SLOTS, kernel_device)
    victims[1::3] = NONE  # clean slots
    slots[2::7], victims[2::7] = NONE, NONE  # rows without a slot
    n_listed = max(0, n - 2)  # the lists are longer than what they hold
    filled, written = cached.clone(), memory.clone()
    for row, slot, victim in zip(
        *(part[:n_listed].tolist() for part in (missing, slots, victims)), strict=True
    ):
        if victim >= 0:
            written[victim] = cached[slot]
        if slot >= 0:
            filled[slot] = memory[row]
    if n:
        n_missing = torch.tensor([n_listed], dtype=torch.int32, device=kernel_device)
        location = RecordLocation(memory, cached)
        cache.fill_and_write_back(location, missing, slots, victims, n_missing, shape)
    assert torch.equal(memory, written)
    assert torch.equal(cached, filled)


@CASES
def test_flush(
    nbytes: int, n: int, shape: MoverShape | None, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "FLUSH", 16)
    memory, cached = records(N_ROWS, nbytes, kernel_device), records(N_SLOTS, nbytes, kernel_device)
    index = CacheIndex(N_ROWS, N_SLOTS, policy="lru", device=torch.device(kernel_device))
    slots, rows = drawn(n, N_SLOTS, kernel_device), drawn(n, N_ROWS, kernel_device)
    index.row_of_slot[slots] = rows
    changed = torch.arange(n) % 3 != 1
    index.dirty[slots[changed]] = 1
    after = memory.clone()
    after[rows[changed]] = cached[slots[changed]]
    cache.flush(index, RecordLocation(memory, cached), shape)
    assert torch.equal(memory, after)
    assert not index.dirty.any()


def test_every_size_has_a_shape() -> None:
    for both_ways, in_clusters in itertools.product((False, True), repeat=2):
        for nbytes in (16, *SIZES, 1 << 17):
            shape = movers.mover_shape(nbytes, both_ways=both_ways, in_clusters=in_clusters)
            assert shape.programs * shape.ctas == movers.MOVERS
            assert shape.warps in (1, 2, 4, 8, 16, 32)
            assert shape.rows & (shape.rows - 1) == 0
