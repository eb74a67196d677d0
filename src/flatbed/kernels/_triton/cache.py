"""Kernels of row caches and their launches: probe, select victims, move records both ways in one pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from flatbed.kernels import NONE, RecordLocation, UniqueRows
from flatbed.kernels._triton.launch import TYPES, Kernel
from flatbed.kernels._triton.rows import (
    MAX_COLUMNS,
    MoverShape,
    as_results,
    even,
    field,
    has_clusters,
    mover_shape,
    result_sizes,
    unique,
)
from flatbed.kernels.cache import ROUNDS, CacheIndex, Placement

PROBE, SELECT = 512, 128  # rows per program
FLUSH = 1 << 20  # slots whose changed records are listed at a time


@triton.jit
def add_use(frequency, now):
    """Add one use to a decayed count: log2(2**frequency + 2**now). Time is counted in misses."""
    more = tl.maximum(frequency, now)
    return more + tl.log2(1.0 + tl.exp2(-tl.abs(frequency - now)))


@triton.jit(do_not_specialize=["n", "n_rows", "ageing"])
def probe_kernel(
    rows_ptr, missing_ptr, n_missing_ptr, slot_of_row_ptr, stamp_ptr, frequency_ptr, clock_ptr, counts_ptr,
    n, n_rows, ageing, FREQUENCY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stamp the slots of cached rows and list the missing rows. Counts missing and cached rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + i, mask=i < n, other=-1)
    known = (row >= 0) & (row < n_rows)
    slot = tl.load(slot_of_row_ptr + row, mask=known, other=-1)
    hit = known & (slot >= 0)
    tick = tl.load(clock_ptr)
    tl.store(stamp_ptr + slot, tl.zeros([BLOCK], tl.int64) + tick, mask=hit)
    if FREQUENCY:
        frequency = tl.load(frequency_ptr + slot, mask=hit, other=0.0)
        now = tl.load(counts_ptr + 1).to(tl.float32) * ageing
        tl.store(frequency_ptr + slot, add_use(frequency, now), mask=hit)
    miss = known & (slot < 0)
    n_here = tl.sum(miss.to(tl.int32), 0)
    n_hits = tl.sum(hit.to(tl.int32), 0)
    if n_hits > 0:
        tl.atomic_add(counts_ptr, n_hits.to(tl.int64))
        tl.atomic_add(n_missing_ptr + 1, n_hits)
    if n_here > 0:
        first = tl.atomic_add(n_missing_ptr, n_here)
        tl.atomic_add(counts_ptr + 1, n_here.to(tl.int64))
        at = first + tl.cumsum(miss.to(tl.int32), 0) - 1
        tl.store(missing_ptr + at, row, mask=miss)


@triton.jit(do_not_specialize=["n"])
def keep_kernel(rows_ptr, slot_of_row_ptr, stamp_ptr, clock_ptr, n, BLOCK: tl.constexpr):
    """Stamp the slots of cached rows with the next tick of the clock."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + i, mask=i < n, other=-1)
    slot = tl.load(slot_of_row_ptr + row, mask=row >= 0, other=-1)
    tick = tl.load(clock_ptr) + 1
    tl.store(stamp_ptr + slot, tl.zeros([BLOCK], tl.int64) + tick, mask=slot >= 0)


@triton.jit
def sample_victim(
    best, least, offset, tick, floor, open_, n_slots, stamp_ptr, frequency_ptr, FREQUENCY: tl.constexpr,
):  # fmt: skip
    """Return the slot with the lowest score among four random ones and `best`, and its score.

    Slots that are kept are no candidates: `best` is -1 if there was none so far.
    """
    drawn = tl.randint4x(tick, offset)
    for k in tl.static_range(4):
        slot = (drawn[k].to(tl.uint32, bitcast=True).to(tl.int64)) % n_slots
        stamp = tl.load(stamp_ptr + slot, mask=open_, other=0)
        if FREQUENCY:
            score = tl.load(frequency_ptr + slot, mask=open_, other=0.0)
        else:
            score = stamp
        better = open_ & (stamp < floor) & (score < least)
        best = tl.where(better, slot, best)
        least = tl.where(better, score, least)
    return best, least


@triton.jit(do_not_specialize=["window", "n_slots", "ageing"])
def select_victims_kernel(
    missing_ptr, n_missing_ptr, slots_ptr, victims_ptr,
    slot_of_row_ptr, row_of_slot_ptr, stamp_ptr, frequency_ptr, dirty_ptr, clock_ptr, counts_ptr,
    window, n_slots, ageing,
    DIRECT: tl.constexpr, FREQUENCY: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give each missing row a slot; `victims` are the changed rows that these slots held, -1 for none.

    Slots of this batch carry the current tick; those of the last `window` admissions carry a tick that is at
    most `window` older. Both are kept. The program that raises a slot's stamp first owns the slot. A row
    gets the slot -1, and stays in storage, if every slot is kept.
    """
    first = tl.program_id(0) * BLOCK
    n = tl.load(n_missing_ptr)
    if first < n:
        i = first + tl.arange(0, BLOCK)
        open_ = i < n
        row = tl.load(missing_ptr + i, mask=open_, other=0)
        tick = tl.load(clock_ptr)
        now = tl.load(counts_ptr + 1).to(tl.float32) * ageing
        floor = tick - window
        slot = tl.zeros([BLOCK], tl.int64) - 1
        if DIRECT:  # every row has its own slot
            slot = tl.where(open_, row, slot)
            tl.store(stamp_ptr + slot, tl.zeros([BLOCK], tl.int64) + tick, mask=open_)
            open_ = open_ & (i < 0)
        if FREQUENCY:
            none = tl.full([BLOCK], float("inf"), tl.float32)
        else:
            none = tl.full([BLOCK], 0x7FFFFFFFFFFFFFFF, tl.int64)
        turn = 0
        left = tl.sum(open_.to(tl.int32), 0)
        while (left > 0) & (turn < ROUNDS):
            best = tl.zeros([BLOCK], tl.int64) - 1
            least = none
            offset = row * (2 * ROUNDS) + 2 * turn
            for half in tl.static_range(2):
                best, least = sample_victim(
                    best, least, offset + half, tick, floor, open_,
                    n_slots, stamp_ptr, frequency_ptr, FREQUENCY,
                )  # fmt: skip
            wanted = open_ & (best >= 0)
            before = tl.atomic_max(stamp_ptr + best, tl.zeros([BLOCK], tl.int64) + tick, mask=wanted)
            won = wanted & (before < floor)
            slot = tl.where(won, best, slot)
            open_ = open_ & (won == 0)
            left = tl.sum(open_.to(tl.int32), 0)
            turn += 1
        # Nearly all slots are kept: look at every one, a block at a time. Few rows are left.
        at = tl.zeros([], tl.int64) + first
        while (left > 0) & (at < first + n_slots):
            seen = at + tl.arange(0, BLOCK)
            stamp = tl.load(stamp_ptr + seen % n_slots)
            free = (seen < first + n_slots) & (stamp < floor)
            n_free = tl.sum(free.to(tl.int32), 0)
            while (left > 0) & (n_free > 0):
                chosen = tl.max(tl.where(free, seen, -1), 0)
                before = tl.atomic_max(stamp_ptr + chosen % n_slots, tick)
                won = (i == tl.max(tl.where(open_, i, -1), 0)) & (before < floor)
                slot = tl.where(won, chosen % n_slots, slot)
                open_ = open_ & (won == 0)
                left = tl.sum(open_.to(tl.int32), 0)
                free = free & (seen != chosen)
                n_free -= 1
            at += BLOCK
        taken = (i < n) & (slot >= 0)
        old = tl.load(row_of_slot_ptr + slot, mask=taken, other=-1)
        dirty = tl.load(dirty_ptr + slot, mask=taken, other=0)
        gone = taken & (old >= 0)
        if not DIRECT:
            tl.store(slot_of_row_ptr + old, tl.zeros([BLOCK], tl.int32) - 1, mask=gone)
        tl.store(slot_of_row_ptr + row, slot.to(tl.int32), mask=taken)
        tl.store(row_of_slot_ptr + slot, row, mask=taken)
        tl.store(dirty_ptr + slot, tl.zeros([BLOCK], tl.int32), mask=taken)
        if FREQUENCY:
            tl.store(frequency_ptr + slot, tl.zeros([BLOCK], tl.float32) + now, mask=taken)
        written = gone & (dirty != 0)
        tl.store(slots_ptr + i, slot, mask=i < n)
        tl.store(victims_ptr + i, tl.where(written, old, -1), mask=i < n)
        n_gone = tl.sum(gone.to(tl.int32), 0)
        n_written = tl.sum(written.to(tl.int32), 0)
        n_over = tl.sum(((i < n) & (slot < 0)).to(tl.int32), 0)
        if n_gone > 0:
            tl.atomic_add(counts_ptr + 2, n_gone.to(tl.int64))
        if n_written > 0:
            tl.atomic_add(counts_ptr + 3, n_written.to(tl.int64))
        if n_over > 0:
            tl.atomic_add(counts_ptr + 4, n_over.to(tl.int64))


@triton.jit(do_not_specialize=["memory", "cached"])
def fill_and_write_back_kernel(
    memory, cached, missing_ptr, slots_ptr, victims_ptr, n_missing_ptr,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read each missing record from storage and write back the record that it replaces; a word is 8 bytes.

    A row, slot or victim of -1 stands for none.
    """
    n = tl.load(n_missing_ptr)
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        i = (first + tl.arange(0, ROWS))[:, None]
        row = tl.load(missing_ptr + i, mask=i < n, other=-1)
        slot = tl.load(slots_ptr + i, mask=i < n, other=-1)
        victim = tl.load(victims_ptr + i, mask=i < n, other=-1)
        here = field(cached + slot * STRIDE, 0, tl.int64)
        stored = field(memory + row * STRIDE, 0, tl.int64)
        victim_record = field(memory + victim * STRIDE, 0, tl.int64)
        for start in tl.static_range(0, WORDS, COLUMNS):
            inside = start + column < WORDS
            fills = (row >= 0) & (slot >= 0) & inside
            evicts = (victim >= 0) & inside
            new = tl.load(stored + start + column, mask=fills)
            old = tl.load(here + start + column, mask=evicts)
            # The victim is stored first: the read of the new record is still in flight. The same thread reads
            # and replaces a word of a slot, so that no barrier is needed.
            tl.store(victim_record + start + column, old, mask=evicts)
            tl.store(here + start + column, new, mask=fills)


@triton.jit(do_not_specialize=["memory", "cached", "n", "n_rows"])
def lookup_kernel(
    memory, cached, slot_of_row_ptr, ids_ptr, out_ptr, n, n_rows,
    STRIDE: tl.constexpr, TYPE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read the weights of ids from the cache or from storage; zeros for an id that is no row."""
    column = tl.arange(0, COLUMNS)[None, :]
    i = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    row = tl.load(ids_ptr + i, mask=i < n, other=-1).to(tl.int64)
    known = (row >= 0) & (row < n_rows)
    slot = tl.load(slot_of_row_ptr + row, mask=known, other=-1).to(tl.int64)
    known = known & ((slot >= 0) | (slot * 0 + memory != 0))
    record = tl.where(slot >= 0, cached + slot * STRIDE, memory + row * STRIDE)
    weight = tl.load(field(record, 0, TYPE) + column, mask=known & (column < DIM), other=0.0)
    tl.store(out_ptr + i * DIM + column, weight, mask=(i < n) & (column < DIM))


def move(decided: Decisions, location: RecordLocation, stream: torch.cuda.Stream | None = None) -> None:
    """Move the records of decisions in the current stream, or in another one."""
    fill_and_write_back(
        location, decided.missing, decided.slots, decided.victims, decided.n_missing, stream=stream
    )


# ---- decisions


_KEEP = Kernel(keep_kernel, PROBE)


def keep(index: CacheIndex, rows: Tensor) -> None:
    """Stamp the slots of cached rows with the next tick, so that the next `decide` evicts none of them."""
    n = rows.numel()
    if n:
        _KEEP(-(-n // PROBE), rows.device, rows, index.slot_of_row, index.stamp, index.clock, n)


class Decisions(NamedTuple):
    """The unique rows of keys, the missing ones among them, and the slots that these get."""

    memory: Tensor
    """One allocation; the other tensors are views of it."""
    unique: UniqueRows
    missing: Tensor
    slots: Tensor
    victims: Tensor
    """Changed rows that the slots held before, and that are written back; -1 for none."""
    n_missing: Tensor
    """The number of missing rows, and that of cached ones."""
    keys: Tensor | None = None
    """The keys; None if the caller has them."""

    @property
    def placed(self) -> Tensor:
        """Missing rows, slots, victims and numbers, for `placement_of`: one piece of the memory."""
        first = self.missing.storage_offset() - self.memory.storage_offset()
        return self.memory[first : first + 3 * len(self.missing) + 2]

    @classmethod
    def allocate(cls, n: int, device: torch.device, key_dtype: torch.dtype | None = None) -> Decisions:
        """Allocate memory for the decisions on n keys, and for the keys, if their dtype is given."""
        size = sum(result_sizes(n)) + 3 * even(n) + 2 + _key_words(n, key_dtype)
        return cls.of(torch.empty(size, dtype=torch.int64, device=device), n, key_dtype)

    @classmethod
    def of(cls, memory: Tensor, n: int, key_dtype: torch.dtype | None = None) -> Decisions:
        """Divide memory for the decisions on n keys. All addresses are multiples of 16."""
        parts = torch.split(memory, [*result_sizes(n), *[even(n)] * 3, 2, _key_words(n, key_dtype)])
        *_, missing, slots, victims, n_missing, last = parts
        keys = None if key_dtype is None else last.view(key_dtype)[:n]
        return cls(
            memory, as_results(parts[:5], n), missing, slots, victims, n_missing.view(torch.int32), keys
        )


def placement_of(placed: NDArray[np.int64]) -> Placement:
    """Return the placement of decisions whose `placed`, filled with -1 before, was copied to the host."""
    n_missing, n_hits = (max(0, n) for n in placed[-2:].view(np.int32)[:2].tolist())
    missing, slots, victims = (part[:n_missing] for part in placed[:-2].reshape(3, -1))
    taken = slots >= 0
    n_taken = int(taken.sum())
    if n_taken < n_missing:
        missing, slots, victims = missing[taken], slots[taken], victims[taken]
    return Placement(missing, slots, victims, n_hits + n_taken, n_taken == n_missing)


def _key_words(n: int, dtype: torch.dtype | None) -> int:
    """Return how many int64 the keys take."""
    return 0 if dtype is None else even(-(-n * dtype.itemsize // 8))


def decide(
    index: CacheIndex,
    keys: Tensor,
    window: int,
    *,
    first_error: Tensor | None = None,
    on_checked: Callable[[], None] | None = None,
    out: Decisions | None = None,
) -> Decisions:
    """Find the unique rows of keys, and give a slot to each missing one. Writes the index, moves no record.

    Slots of this and of the last `window` admissions are not evicted. Rows without a slot stay in storage.
    Sets `index.moving`, unless there are no keys. `GpuCache` resets it once the moves are issued, or queued.
    `HostCopyCache` never reads it.
    """
    n, device, n_rows = keys.numel(), keys.device, index.slot_of_row.numel()
    out = out or Decisions.allocate(n, device)
    unique(keys, n_rows, first_error, ticks=(index.clock, out.n_missing), out=out.unique)
    if on_checked is not None:
        on_checked()
    if n == 0:
        return out
    by_frequency = index.policy == "lfu"
    frequency = index.frequency if by_frequency else index.stamp  # not read with "lru"
    probe, select_victims = _decision_kernels(index.direct, by_frequency)
    probe(
        -(-n // PROBE), device, out.unique.rows, out.missing, out.n_missing,
        index.slot_of_row, index.stamp, frequency, index.clock, index.counts, n, n_rows, index.ageing,
    )  # fmt: skip
    index.moving = True
    select_victims(
        -(-n // SELECT), device, out.missing, out.n_missing, out.slots, out.victims,
        index.slot_of_row, index.row_of_slot, index.stamp, frequency, index.dirty, index.clock, index.counts,
        window, index.n_slots, index.ageing,
    )  # fmt: skip
    return out


@functools.cache
def _decision_kernels(direct: bool, by_frequency: bool) -> tuple[Kernel, Kernel]:
    probe = Kernel(probe_kernel, by_frequency, PROBE)
    return probe, Kernel(select_victims_kernel, direct, by_frequency, ROUNDS, SELECT)


def fill_and_write_back(
    location: RecordLocation,
    missing: Tensor,
    slots: Tensor,
    victims: Tensor,
    n_missing: Tensor,
    shape: MoverShape | None = None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Read missing records into slots, and write back the changed ones that they replace."""
    device = missing.device
    shape, launch = _fill_kernel(location.stride, device, shape)
    n_programs = min(shape.programs, -(-missing.numel() // shape.rows))
    args = *location.addresses, missing, slots, victims, n_missing
    launch(n_programs, device, *args, stream=stream)


@functools.cache
def _fill_kernel(stride: int, device: torch.device, shape: MoverShape | None) -> tuple[MoverShape, Kernel]:
    in_clusters = device.type == "cuda" and has_clusters(device)
    shape = shape or mover_shape(stride, both_ways=True, in_clusters=in_clusters)
    words = stride // 8
    constants = stride, words, min(triton.next_power_of_2(words), MAX_COLUMNS), shape.rows
    kernel = Kernel(fill_and_write_back_kernel, *constants, num_warps=shape.warps, num_ctas=shape.ctas)
    return shape, kernel


def flush(index: CacheIndex, location: RecordLocation, shape: MoverShape | None = None) -> None:
    """Write changed records back; they stay in the cache. Waits for lists of slots, not for all writes."""
    shape = shape or mover_shape(location.stride)
    for first in range(0, index.n_slots, FLUSH):
        slots = index.dirty[first : first + FLUSH].nonzero().flatten() + first
        if len(slots):
            fills = torch.full_like(slots, NONE)
            n_slots = torch.full_like(slots[:1], len(slots), dtype=torch.int32)
            fill_and_write_back(location, fills, slots, index.row_of_slot[slots], n_slots, shape)
    index.dirty.zero_()


def lookup(location: RecordLocation, ids: Tensor, dim: int, dtype: torch.dtype, n_rows: int) -> Tensor:
    """Read the weights of ids, (n,) → (n, dim)."""
    ids, n = ids.contiguous(), ids.numel()
    out = torch.empty((n, dim), dtype=dtype, device=ids.device)
    if n:
        at_once, launch = _lookup(location.stride, dtype, dim)
        launch(-(-n // at_once), ids.device, *location.addresses, location.slot_of_row, ids, out, n, n_rows)
    return out


@functools.cache
def _lookup(stride: int, dtype: torch.dtype, dim: int) -> tuple[int, Kernel]:
    at_once = max(1, 1024 // triton.next_power_of_2(dim))
    return at_once, Kernel(lookup_kernel, stride, TYPES[dtype], dim, triton.next_power_of_2(dim), at_once)
