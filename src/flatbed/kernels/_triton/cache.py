"""Launches of the row cache's kernels."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from flatbed.kernels._triton import cache_kernels
from flatbed.kernels._triton.launch import TYPES, Bound
from flatbed.kernels._triton.rows import WRITERS, addresses, power, tile
from flatbed.kernels.cache import ROUNDS, CacheIndex
from flatbed.kernels.rows import RecordLocation

SWAPPERS = 96  # programs at most, for both ways over the bus at once; one record of 1,536 bytes at a time
TOUCH, CLAIM = 512, 128  # rows per program


class AdmitScratch:
    """What one batch's passage through a cache needs beside its rows."""

    def __init__(self, tags: CacheIndex, n: int) -> None:
        device = tags.clock.device
        self.clock = tags.clock
        self.n_missing = torch.empty(1, dtype=torch.int32, device=device)
        self.missing, self.slots, self.victims = (
            torch.empty(n, dtype=torch.int64, device=device) for _ in range(3)
        )


def begin(turn: AdmitScratch) -> None:
    """Let the clock tick, if finding the rows has not."""
    cache_kernels.begin[(1,)](turn.clock, turn.n_missing)


def admit(tags: CacheIndex, rows: Tensor, turn: AdmitScratch, place: RecordLocation, *, window: int) -> None:
    """Bring rows into the cache; the clock has ticked, and -1 is no row."""
    n = len(rows)
    if n == 0:
        return
    by_frequency = tags.policy == "lfu"
    frequency = tags.frequency if by_frequency else tags.stamp  # some memory
    cache_kernels.touch[(-(-n // TOUCH),)](
        rows, turn.missing, turn.n_missing, tags.slot_of_row, tags.stamp, frequency, tags.clock, tags.counts,
        n, len(tags.slot_of_row), tags.ageing, FREQUENCY=by_frequency, BLOCK=TOUCH,
    )  # fmt: skip
    cache_kernels.claim[(-(-n // CLAIM),)](
        turn.missing, turn.n_missing, turn.slots, turn.victims,
        tags.slot_of_row, tags.row_of_slot, tags.stamp, frequency, tags.dirty, tags.clock, tags.counts,
        window, tags.n_slots, tags.ageing,
        DIRECT=tags.direct, FREQUENCY=by_frequency, ROUNDS=ROUNDS, BLOCK=CLAIM, num_warps=4,
    )  # fmt: skip
    swap(place, turn, n)


class Lists(Protocol):
    """Rows that come, the slots that they get, and the rows that leave these; -1: none."""

    @property
    def missing(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...
    @property
    def victims(self) -> Tensor: ...
    @property
    def n_missing(self) -> Tensor: ...


def swap(place: RecordLocation, lists: Lists, n: int) -> None:
    """Read the records that are missing, `n` at most, and write home those that they replace."""
    words = place.stride // 8
    columns = min(power(words), 256)
    n_rows = tile(columns, 256)
    assert place.memory is not None
    assert place.cached is not None
    cache_kernels.swap[(min(SWAPPERS, -(-n // n_rows)),)](
        place.memory.data_ptr(), place.cached.data_ptr(), lists.missing, lists.slots, lists.victims,
        lists.n_missing, STRIDE=place.stride, WORDS=words, COLUMNS=columns, ROWS=n_rows, num_warps=4,
    )  # fmt: skip


def flush(tags: CacheIndex, place: RecordLocation) -> None:
    """Write home what has changed."""
    words = place.stride // 8
    columns = min(power(words), 64)
    n_rows = tile(columns, 512)
    assert place.memory is not None
    assert place.cached is not None
    cache_kernels.flush[(min(WRITERS, -(-tags.n_slots // n_rows)),)](
        place.memory.data_ptr(), place.cached.data_ptr(), tags.row_of_slot, tags.dirty, tags.n_slots,
        STRIDE=place.stride, WORDS=words, COLUMNS=columns, ROWS=n_rows, num_warps=4,
    )  # fmt: skip
    tags.dirty.zero_()


def look(place: RecordLocation, ids: Tensor, dim: int, dtype: torch.dtype, n_rows: int) -> Tensor:
    """The weights of ids, (n,) → (n, dim)."""
    n = len(ids)
    out = torch.empty((n, dim), dtype=dtype, device=ids.device)
    if n == 0:
        return out
    memory, cached, slot_of_row, _ = addresses(place, ids)
    at_once = max(1, 1024 // power(dim))
    launch = _look(place.stride, dtype, dim, at_once)
    launch(-(-n // at_once), ids.device, memory, cached, slot_of_row, ids, out, n, n_rows, 0)
    return out


def look_there(
    place: RecordLocation, ids: Tensor, told: Tensor, seen: Tensor, dim: int, dtype: torch.dtype, n_rows: int
) -> None:
    """The same into memory that is known when it runs: its address is in `told`, (2,) of int64, and so is a
    number that goes to `seen`, (1,), in memory of the host that kernels reach.
    """
    memory, cached, slot_of_row, _ = addresses(place, ids)
    at_once = max(1, 1024 // power(dim))
    cache_kernels.look[(-(-len(ids) // at_once),)](
        memory, cached, slot_of_row, ids, told, len(ids), n_rows, seen.data_ptr(),
        STRIDE=place.stride, TYPE=TYPES[dtype], DIM=dim, COLUMNS=power(dim), ROWS=at_once, TOLD=True,
    )  # fmt: skip


@functools.cache
def _look(stride: int, dtype: torch.dtype, dim: int, at_once: int) -> Bound:
    return Bound(cache_kernels.look, (stride, TYPES[dtype], dim, power(dim), at_once, False))
