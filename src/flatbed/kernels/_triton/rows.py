"""Kernels on rows and their launches. Addresses are integers, since a table may be in host memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatbed.kernels import RecordLocation, UniqueRows
from flatbed.kernels._triton.launch import TYPES, Kernel

SQUARES = 65536  # elements per partial sum
BLOCK = 1024  # keys per program
CHUNK = 64  # ids of a segment that one program adds up
CHUNKS_AT_ONCE = 16  # sums of chunks that are in flight at a time


class MoverShape(NamedTuple):
    """Programs that move records over the bus, warps of each, and records that each has in flight."""

    programs: int
    warps: int
    """Of each CTA."""
    rows: int
    ctas: int = 1
    """CTAs of each program; more than one are a thread block cluster."""


MOVERS = 4  # CTAs of all programs
MOST_BYTES, MOST_ROWS = 1 << 16, 256  # that a CTA has in flight
MAX_COLUMNS = 512  # words of a record in flight; longer records are moved in several parts


def tile(columns: int, elements: int) -> int:
    """Return how many rows a program has in flight at once."""
    return max(1, min(32, elements // columns))


@functools.cache
def mover_shape(nbytes: int, *, both_ways: bool = False, in_clusters: bool = False) -> MoverShape:
    """Return the shape for records of so many bytes, which are read, written, or both at once.

    A few programs with many records in flight saturate the bus, and leave the other SMs to the model. On an
    H200, those that move both ways have 0.96 to 1.01 of the speed of 96 and more programs of 4 warps, for
    records of 64 B to 4 KB (`python -m tests.scripts.measure_movers`, commit 5f83ae1). cuBLAS is not told to
    leave SMs to them: it would choose other kernels, which round differently, and steps were not measurably
    faster.

    `in_clusters`: each program is a cluster of two CTAs, unless records are small and soon moved. Matrix
    products and convolutions of an H200 run in clusters of two, too: four single CTAs take eight SMs from
    them, and two clusters take four.
    """
    size = min(triton.next_power_of_2(nbytes), 8 * MAX_COLUMNS)
    n_rows = min(MOST_ROWS, MOST_BYTES // size)
    warps, ctas = 16 if both_ways else 32, 2 if in_clusters and size >= 512 else 1
    return MoverShape(MOVERS // ctas, warps, n_rows * ctas, ctas)


@functools.cache
def has_clusters(device: torch.device) -> bool:
    """Return True for GPUs with thread block clusters: those of NVIDIA since Hopper."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


# ---- unique rows


@triton.jit(do_not_specialize=["n", "n_rows"])
def to_int32_keys_kernel(ids_ptr, keys_ptr, n, n_rows, BLOCK: tl.constexpr):
    """Row ids as int32; -1 for ids out of range."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + i, mask=i < n, other=0)
    tl.store(keys_ptr + i, tl.where((row >= 0) & (row < n_rows), row, -1).to(tl.int32), mask=i < n)


@triton.jit(do_not_specialize=["n"])
def heads_kernel(
    sorted_ptr, counts_ptr, clock_ptr, n_missing_ptr, n, TICKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count the runs of sorted keys that begin in each block. TICKS: also advance the clock of a cache."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(sorted_ptr + i, mask=i < n, other=0)
    before = tl.load(sorted_ptr + i - 1, mask=(i < n) & (i > 0), other=0)
    head = (i < n) & ((i == 0) | (key != before))
    tl.store(counts_ptr + tl.program_id(0), tl.sum(head.to(tl.int32), 0))
    if TICKS:
        if tl.program_id(0) == 0:
            tl.store(clock_ptr, tl.load(clock_ptr) + 1)
            tl.store(n_missing_ptr, 0)
            tl.store(n_missing_ptr + 1, 0)


@triton.jit(do_not_specialize=["n", "n_rows", "sentinel", "n_blocks"])
def mark_kernel(
    sorted_ptr, order_ptr, counts_ptr, rank_ptr, inverse_ptr, rows_ptr, starts_ptr, first_error_ptr,
    n, n_rows, sentinel, n_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the unique rows of sorted keys; `counts_ptr` holds how many runs begin in each block."""
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    n_before = 0
    n_unique = 0
    for start in range(0, n_blocks, BLOCK):
        count = tl.load(counts_ptr + start + lanes, mask=start + lanes < n_blocks, other=0)
        n_unique += tl.sum(count, 0)
        n_before += tl.sum(tl.where(start + lanes < block, count, 0), 0)
    i = block * BLOCK + lanes
    valid = i < n
    key = tl.load(sorted_ptr + i, mask=valid, other=0).to(tl.int64)
    before = tl.load(sorted_ptr + i - 1, mask=valid & (i > 0), other=0).to(tl.int64)
    head = valid & ((i == 0) | (key != before))
    rank = n_before + tl.cumsum(head.to(tl.int32), 0) - 1
    at = tl.load(order_ptr + i, mask=valid, other=0)
    tl.store(rank_ptr + i, rank, mask=valid)
    tl.store(inverse_ptr + at, rank.to(tl.int64), mask=valid)
    known = (key >= 0) & (key < n_rows)
    tl.store(rows_ptr + rank, tl.where(known, key, -1), mask=head)
    tl.store(starts_ptr + rank, i.to(tl.int64), mask=head)
    beyond = i >= n_unique  # the outputs have an entry for every id
    tl.store(rows_ptr + i, tl.full([BLOCK], -1, tl.int64), mask=valid & beyond)
    tl.store(starts_ptr + i, tl.zeros([BLOCK], tl.int64) + n, mask=(i <= n) & beyond)
    wrong = valid & (known == 0) & (key != sentinel)
    position = tl.min(tl.where(wrong, at, 0x7FFFFFFFFFFFFFFF), 0)
    if position != 0x7FFFFFFFFFFFFFFF:
        tl.atomic_min(first_error_ptr, position)


TO_INT32_KEYS = Kernel(to_int32_keys_kernel, BLOCK)
_HEADS = [Kernel(heads_kernel, advances_clock, BLOCK) for advances_clock in (False, True)]
_MARK = Kernel(mark_kernel, BLOCK)


def unique(
    keys: Tensor,
    n_rows: int,
    first_error: Tensor | None,
    ticks: tuple[Tensor, Tensor] | None = None,
    out: UniqueRows | None = None,
) -> UniqueRows:
    """Find the unique rows.

    `ticks`, for the first kernel of `decide`: the cache's clock, which it advances, and the numbers of
    missing and cached rows, which it sets to 0. `out`: memory for the results.
    """
    n, device = keys.numel(), keys.device
    n_blocks = -(-(n + 1) // BLOCK)
    out = out or empty_results(n, device)
    if n == 0:
        out.starts.zero_()  # type: ignore[union-attr]
        return out
    in_order = torch.empty_like(keys, memory_format=torch.contiguous_format)
    torch.sort(keys.contiguous(), stable=True, out=(in_order, out.order))  # type: ignore[arg-type]
    counts = torch.empty(n_blocks, dtype=torch.int32, device=device)
    _HEADS[ticks is not None](n_blocks, device, in_order, counts, *(ticks or (counts, counts)), n)
    # Always with a place for errors: a captured lookup must not need a kernel that no eager one has loaded.
    first_error = torch.empty(1, dtype=torch.int64, device=device) if first_error is None else first_error
    _MARK(
        n_blocks, device, in_order, out.order, counts, out.rank, out.inverse, out.rows, out.starts,
        first_error, n, n_rows, torch.iinfo(keys.dtype).min, n_blocks,
    )  # fmt: skip
    return out


def result_sizes(n: int) -> list[int]:
    """Return how many int64 each result for n keys takes, so that all addresses are multiples of 16."""
    return [even(n), even(n), even(n), even(n) + 2, even(-(-n // 2))]


def as_results(parts: Sequence[Tensor], n: int) -> UniqueRows:
    """Return parts of memory, of these sizes, as the results for n keys."""
    rows, inverse, order, starts, rank = parts
    if len(rows) != n:
        rows, inverse, order = rows[:n], inverse[:n], order[:n]
    return UniqueRows(rows, inverse, order, starts, rank.view(torch.int32))


def empty_results(n: int, device: torch.device) -> UniqueRows:
    """Allocate memory for the results for n keys."""
    sizes = result_sizes(n)
    return as_results(torch.split(torch.empty(sum(sizes), dtype=torch.int64, device=device), sizes), n)


@triton.jit(do_not_specialize=["n"])
def copy_words_kernel(source_ptr, target_ptr, n, BLOCK: tl.constexpr):
    """Copy words of 8 bytes."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + i, tl.load(source_ptr + i, mask=i < n), mask=i < n)


_COPY_WORDS = Kernel(copy_words_kernel, BLOCK)


def copy_results_(to: UniqueRows, found: UniqueRows) -> None:
    """Copy the results of `unique` or `decide` into memory for as many keys, in one kernel.

    On an H200, with 65,536 keys, a copy by torch takes 10 µs instead of 3: it uses the copy engine, which
    moves the next batch at that time.
    """
    if not len(found.rows):  # no memory, and nothing to copy
        return
    n = sum(result_sizes(len(found.rows)))
    _COPY_WORDS(-(-n // BLOCK), to.rows.device, found.rows, to.rows, n)


def even(n: int) -> int:
    """Round up to an even number."""
    return n + n % 2


# ---- sums of gradients


@triton.jit
def add_runs(
    total, grads_ptr, order_ptr, begin, end, column,
    DIM: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add gradients one after the other, in the order of the ids; AT_ONCE loads are in flight."""
    longest = tl.max(end - begin)
    for first in range(0, longest, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            there = begin + first + k < end
            at = tl.load(order_ptr + begin + first + k, mask=there, other=0)
            wanted = there & (column < DIM)
            total += tl.load(grads_ptr + at * DIM + column, mask=wanted, other=0.0).to(WIDE)
    return total


@triton.jit(do_not_specialize=["n", "padding", "n_tiles"])
def segment_sum_kernel(
    grads_ptr, order_ptr, rank_ptr, starts_ptr, rows_ptr, kept_ptr, sums_ptr, partials_ptr,
    n, padding, n_tiles, CHUNK: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, AT_ONCE: tl.constexpr, CHUNK_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of the first chunk of each row's run, and of each further chunk.

    Chunks begin at multiples of CHUNK from the start of a run, so that a row's sum depends on its run alone.
    At most one further chunk begins in a window of CHUNK ids; its sum is the window's partial.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    if program < n_tiles:
        at_row = (program * ROWS + tl.arange(0, ROWS))[:, None]
        row = tl.load(rows_ptr + at_row, mask=at_row < n, other=-1)
        row = tl.where(row == padding, -1, row)
        begin = tl.load(starts_ptr + at_row, mask=row >= 0, other=0)
        end = tl.load(starts_ptr + at_row + 1, mask=row >= 0, other=0)
        end = tl.minimum(end, begin + CHUNK)
        total = tl.zeros([ROWS, COLUMNS], WIDE)
        total = add_runs(total, grads_ptr, order_ptr, begin, end, column, DIM, WIDE, AT_ONCE)
        tl.store(kept_ptr + at_row, row, mask=at_row < n)
        tl.store(sums_ptr + at_row * DIM + column, total, mask=(at_row < n) & (column < DIM))
    else:
        window = program - n_tiles
        i = window * CHUNK + tl.arange(0, CHUNK)
        rank = tl.load(rank_ptr + i, mask=i < n, other=0)
        start = tl.load(starts_ptr + rank, mask=i < n, other=0)
        begins = (i < n) & (i > start) & ((i - start) % CHUNK == 0)
        at = tl.max(tl.where(begins, i, -1), 0)
        if at >= 0:
            begin = tl.zeros([1, 1], tl.int64) + at
            end = tl.zeros([1, 1], tl.int64) + tl.load(starts_ptr + tl.load(rank_ptr + at) + 1)
            end = tl.minimum(end, begin + CHUNK)
            total = tl.zeros([1, COLUMNS], WIDE)
            total = add_runs(total, grads_ptr, order_ptr, begin, end, column, DIM, WIDE, CHUNK_AT_ONCE)
            tl.store(partials_ptr + window * DIM + column, total, mask=column < DIM)


@triton.jit(do_not_specialize=["n"])
def sum_chunks_kernel(
    rank_ptr, starts_ptr, kept_ptr, sums_ptr, partials_ptr, n,
    CHUNK: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add the further chunks of long runs to the first chunk, in order; they are in consecutive windows.

    At most one run longer than CHUNK begins in a window of CHUNK ids.
    """
    window = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < DIM
    i = window * CHUNK + tl.arange(0, CHUNK)
    rank = tl.load(rank_ptr + i, mask=i < n, other=0)
    start = tl.load(starts_ptr + rank, mask=i < n, other=-1)
    length = tl.load(starts_ptr + rank + 1, mask=i < n, other=0) - start
    long = tl.max(tl.where((start == i) & (length > CHUNK), rank, -1), 0)
    if long >= 0:
        if tl.load(kept_ptr + long) >= 0:
            begin = tl.load(starts_ptr + long)
            n_chunks = (tl.load(starts_ptr + long + 1) - begin + CHUNK - 1) // CHUNK
            first = begin // CHUNK
            sums = sums_ptr + long.to(tl.int64) * DIM + column
            total = tl.load(sums, mask=inside, other=0.0)
            for c in range(1, n_chunks, AT_ONCE):
                for k in tl.static_range(AT_ONCE):
                    part = partials_ptr + (first + c + k) * DIM + column
                    wanted = column < tl.where(c + k < n_chunks, DIM, 0)
                    total += tl.load(part, mask=wanted, other=0.0)
            tl.store(sums, total, mask=inside)


def segment_sum(grads: Tensor, found: UniqueRows, padding: int) -> tuple[Tensor, Tensor]:
    n, dim = found.rows.numel(), grads.shape[1]
    wide, rows_at_once, sum_segments, sum_chunks = _sum_kernels(grads.dtype, dim)
    kept, sums = torch.empty_like(found.rows), torch.empty((n, dim), dtype=wide, device=grads.device)
    if n == 0:
        return kept, sums
    n_windows, n_tiles = -(-n // CHUNK), -(-n // rows_at_once)
    partials = torch.empty((n_windows, dim), dtype=wide, device=grads.device)
    sum_segments(
        n_tiles + n_windows, grads.device,
        grads.contiguous(), found.order, found.rank, found.starts, found.rows, kept, sums, partials,
        n, padding, n_tiles,
    )  # fmt: skip
    sum_chunks(n_windows, grads.device, found.rank, found.starts, kept, sums, partials, n)
    return kept, sums


@functools.cache
def _sum_kernels(dtype: torch.dtype, dim: int) -> tuple[torch.dtype, int, Kernel, Kernel]:
    wide, columns = torch.promote_types(dtype, torch.float32), triton.next_power_of_2(dim)
    n_rows = tile(columns, 512)
    # Gradients of a row that are in flight; 8 of a further chunk. More are loads in vain: most rows have few.
    # On an H200, with 65,536 ids, 8 instead of 2 take 41 instead of 31 µs (uniform), 42 instead of 38 (Zipf).
    at_once = 2 if columns <= 256 else 4
    segments = Kernel(segment_sum_kernel, CHUNK, dim, columns, n_rows, TYPES[wide], at_once, 8)
    warps = min(4, max(1, columns // 128))
    chunks = Kernel(sum_chunks_kernel, CHUNK, dim, columns, CHUNKS_AT_ONCE, num_warps=warps)
    return wide, n_rows, segments, chunks


@triton.jit(do_not_specialize=["n", "per_program"])
def sum_squares_kernel(values_ptr, partials_ptr, n, per_program, BLOCK: tl.constexpr):
    """Partial sums of squares, in fp64."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    begin = tl.program_id(0).to(tl.int64) * per_program
    for start in range(begin, tl.minimum(begin + per_program, n), BLOCK):
        at = start + lanes
        x = tl.load(values_ptr + at, mask=at < n, other=0.0).to(tl.float64)
        total += x * x
    tl.store(partials_ptr + tl.program_id(0), tl.sum(total, 0))


_SUM_SQUARES = Kernel(sum_squares_kernel, BLOCK)


def sum_squares(values: Tensor) -> Tensor:
    """Return partial sums of squares in fp64."""
    values, n = values.contiguous(), values.numel()
    partials = torch.empty(max(1, -(-n // SQUARES)), dtype=torch.float64, device=values.device)
    _SUM_SQUARES(len(partials), values.device, values, partials, n, SQUARES)
    return partials


# ---- records


@triton.jit
def field(record, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    """Pointers to a field of records, (rows, 1)."""
    return tl.multiple_of((record + OFFSET).to(tl.pointer_type(TYPE)), (16, 16))


@triton.jit
def located(memory, cached, slot_of_row_ptr, dirty_ptr, row, STRIDE: tl.constexpr, CHANGES: tl.constexpr):
    """Addresses of records, in the cache or in the storage; CHANGES: mark the slots as dirty.

    The address is 0 for a record that is not cached, if the storage is out of reach (`memory` is 0).
    """
    slot = tl.load(slot_of_row_ptr + row, mask=row >= 0, other=-1).to(tl.int64)
    if CHANGES:
        tl.store(dirty_ptr + slot, tl.full(slot.shape, 1, tl.int32), mask=slot >= 0)
    stored = tl.where(slot * 0 + memory != 0, memory + row * STRIDE, 0)
    return tl.where(slot >= 0, cached + slot * STRIDE, stored)


@triton.jit(do_not_specialize=["memory", "cached", "n"])
def move_kernel(
    memory, cached, slot_of_row_ptr, dirty_ptr, rows_ptr, buffer_ptr, n,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    WRITES: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """Copy records, or their first bytes, into a buffer; WRITES: from the buffer. A word is 8 bytes."""
    column = tl.arange(0, COLUMNS)
    for first in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        i = first + tl.arange(0, ROWS).to(tl.int64)
        row = tl.load(rows_ptr + i, mask=i < n, other=-1)
        if CACHED:
            address = located(memory, cached, slot_of_row_ptr, dirty_ptr, row, STRIDE, WRITES)
        else:
            address = memory + row * STRIDE
        record = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
        for start in tl.static_range(0, WORDS, COLUMNS):
            there = record[:, None] + (start + column)[None, :]
            here = buffer_ptr + (i * WORDS)[:, None] + (start + column)[None, :]
            held = (row >= 0)[:, None]
            wanted = (i < n)[:, None]
            if WORDS % COLUMNS != 0:
                held = held & (start + column < WORDS)[None, :]
                wanted = wanted & (start + column < WORDS)[None, :]
            if WRITES:
                tl.store(there, tl.load(here, mask=held), mask=held)
            else:
                tl.store(here, tl.load(there, mask=held, other=0), mask=wanted)


def gather(location: RecordLocation, rows: Tensor, nbytes: int, shape: MoverShape | None = None) -> Tensor:
    words = -(-nbytes // 8)
    words += words % 2
    buffer = torch.empty((len(rows), words * 8), dtype=torch.uint8, device=rows.device)
    _move(location, rows, buffer, shape, direction="read")
    return buffer[:, :nbytes]


def scatter_(
    location: RecordLocation, rows: Tensor, records: Tensor, shape: MoverShape | None = None
) -> None:
    _move(location, rows, records.contiguous(), shape, direction="write")


def _move(
    location: RecordLocation, rows: Tensor, buffer: Tensor, shape: MoverShape | None, *, direction: str
) -> None:
    rows, n, words = rows.contiguous(), rows.numel(), buffer.shape[1] // 8
    if n == 0:
        return
    if shape is None and location.is_near:  # the GPU's own memory: as many programs as there are rows for
        shape = MoverShape(1 << 16, 4, tile(min(triton.next_power_of_2(words), MAX_COLUMNS), 1024))
    elif shape is None:
        shape = mover_shape(words * 8)
    is_cached = location.cached is not None
    index = (location.slot_of_row, location.dirty) if is_cached else (rows, rows)
    launch = _move_kernel(location.stride, words, shape, direction == "write", is_cached)
    n_programs = min(shape.programs, -(-n // shape.rows))
    launch(n_programs, rows.device, *location.addresses, *index, rows, buffer.view(torch.int64), n)


@functools.cache
def _move_kernel(stride: int, words: int, shape: MoverShape, writes: bool, is_cached: bool) -> Kernel:
    columns = min(triton.next_power_of_2(words), MAX_COLUMNS)
    constants = stride, words, columns, shape.rows, writes, is_cached
    return Kernel(move_kernel, *constants, num_warps=shape.warps)
