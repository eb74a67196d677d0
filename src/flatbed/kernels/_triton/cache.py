"""Launches of the GPU cache's kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flatbed.kernels._triton import cache_kernels
from flatbed.kernels._triton.launch import TYPES, Bound
from flatbed.kernels._triton.rows import WRITERS, addresses, power, tile, unique
from flatbed.kernels.cache import ROUNDS, CacheIndex
from flatbed.kernels.records import RecordLocation, UniqueRows

MOVERS = 96  # programs at most, for both ways over the bus at once; one record of 1,536 bytes at a time
PROBE, SELECT = 512, 128  # rows per program


class AdmitScratch:
    """Temporary memory of one admission, and the clock that the admission advances."""

    def __init__(self, index: CacheIndex, n: int) -> None:
        device = index.clock.device
        self.clock = index.clock
        self.n_missing = torch.empty(1, dtype=torch.int32, device=device)
        self.missing, self.slots, self.victims = (
            torch.empty(n, dtype=torch.int64, device=device) for _ in range(3)
        )


def admit(
    index: CacheIndex,
    keys: Tensor,
    location: RecordLocation,
    *,
    window: int = 0,
    error_slot: Tensor | None = None,
    on_checked: Callable[[], None] | None = None,
) -> UniqueRows:
    """Find the unique rows of keys and bring them into the cache: unique, probe, select victims, move.

    Slots of this and of the last `window` admissions are not evicted. Rows without a slot stay in storage.
    """
    n = len(keys)
    scratch = AdmitScratch(index, n)
    found = unique(keys, len(index.slot_of_row), error_slot, scratch)
    if on_checked is not None:
        on_checked()
    if n == 0:
        return found
    by_frequency = index.policy == "lfu"
    frequency = index.frequency if by_frequency else index.stamp  # not read with "lru"
    probe, select_victims = _decisions(index.direct, by_frequency)
    probe(
        -(-n // PROBE), keys.device,
        found.rows, scratch.missing, scratch.n_missing,
        index.slot_of_row, index.stamp, frequency, index.clock, index.counts,
        n, len(index.slot_of_row), index.ageing,
    )  # fmt: skip
    index.moving = True
    select_victims(
        -(-n // SELECT), keys.device,
        scratch.missing, scratch.n_missing, scratch.slots, scratch.victims,
        index.slot_of_row, index.row_of_slot, index.stamp, frequency, index.dirty, index.clock, index.counts,
        window, index.n_slots, index.ageing,
    )  # fmt: skip
    fill_and_write_back(location, scratch, n)
    index.moving = False
    return found


def fill_and_write_back(location: RecordLocation, scratch: AdmitScratch, n: int) -> None:
    """Read the missing records, `n` at most, and write back the changed ones that they replace."""
    words = location.stride // 8
    columns = min(power(words), 256)
    n_rows = tile(columns, 256)
    memory, cached, *_ = addresses(location, scratch.missing)
    _mover(location.stride, words, columns, n_rows)(
        min(MOVERS, -(-n // n_rows)), scratch.missing.device,
        memory, cached, scratch.missing, scratch.slots, scratch.victims, scratch.n_missing,
    )  # fmt: skip


@functools.cache
def _decisions(direct: bool, by_frequency: bool) -> tuple[Bound, Bound]:
    probe = Bound(cache_kernels.probe, (by_frequency, PROBE))
    return probe, Bound(cache_kernels.select_victims, (direct, by_frequency, ROUNDS, SELECT))


@functools.cache
def _mover(stride: int, words: int, columns: int, n_rows: int) -> Bound:
    return Bound(cache_kernels.fill_and_write_back, (stride, words, columns, n_rows))


def flush(index: CacheIndex, location: RecordLocation) -> None:
    """Write changed records back; they stay in the cache."""
    words = location.stride // 8
    columns = min(power(words), 64)
    n_rows = tile(columns, 512)
    memory, cached, *_ = addresses(location, index.row_of_slot)
    cache_kernels.flush[(min(WRITERS, -(-index.n_slots // n_rows)),)](
        memory, cached, index.row_of_slot, index.dirty, index.n_slots,
        STRIDE=location.stride, WORDS=words, COLUMNS=columns, ROWS=n_rows, num_warps=4,
    )  # fmt: skip
    index.dirty.zero_()


def lookup(location: RecordLocation, ids: Tensor, dim: int, dtype: torch.dtype, n_rows: int) -> Tensor:
    """Read the weights of ids, (n,) → (n, dim)."""
    ids, n = ids.contiguous(), len(ids)
    out = torch.empty((n, dim), dtype=dtype, device=ids.device)
    if n:
        memory, cached, slot_of_row, _ = addresses(location, ids)
        at_once = max(1, 1024 // power(dim))
        launch = _lookup(location.stride, dtype, dim, at_once)
        launch(-(-n // at_once), ids.device, memory, cached, slot_of_row, ids, out, n, n_rows)
    return out


@functools.cache
def _lookup(stride: int, dtype: torch.dtype, dim: int, at_once: int) -> Bound:
    return Bound(cache_kernels.lookup, (stride, TYPES[dtype], dim, power(dim), at_once))
