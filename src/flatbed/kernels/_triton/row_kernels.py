"""Kernels on the rows of tables. Addresses are integers, since a table may be in host memory."""

from __future__ import annotations

import triton
import triton.language as tl

from flatbed.kernels._triton.step import LINE, SKIP, STEPS, load_as, load_line, load_state, update_elements


@triton.jit(do_not_specialize=["n", "n_rows"])
def narrow(ids_ptr, keys_ptr, n, n_rows, BLOCK: tl.constexpr):
    """Row ids as int32; -1 for ids out of range."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + i, mask=i < n, other=0)
    tl.store(keys_ptr + i, tl.where((row >= 0) & (row < n_rows), row, -1).to(tl.int32), mask=i < n)


@triton.jit(do_not_specialize=["n"])
def heads(
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


@triton.jit(do_not_specialize=["n", "n_rows", "lead", "n_blocks"])
def mark(
    sorted_ptr, order_ptr, counts_ptr, rank_ptr, inverse_ptr, rows_ptr, starts_ptr, bad_ptr,
    n, n_rows, lead, n_blocks, CHECKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the unique rows of sorted keys; `counts_ptr` holds how many runs begin in each block."""
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    n_before = 0
    n_distinct = 0
    for start in range(0, n_blocks, BLOCK):
        count = tl.load(counts_ptr + start + lanes, mask=start + lanes < n_blocks, other=0)
        n_distinct += tl.sum(count, 0)
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
    beyond = i >= n_distinct  # the outputs have an entry for every id
    tl.store(rows_ptr + i, tl.full([BLOCK], -1, tl.int64), mask=valid & beyond)
    tl.store(starts_ptr + i, tl.zeros([BLOCK], tl.int64) + n, mask=(i <= n) & beyond)
    if not CHECKED:
        wrong = valid & (known == 0) & (key != lead)
        place = tl.min(tl.where(wrong, at, 0x7FFFFFFFFFFFFFFF), 0)
        if place != 0x7FFFFFFFFFFFFFFF:
            tl.atomic_min(bad_ptr, place)


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
def segment_sum(
    grads_ptr, order_ptr, rank_ptr, starts_ptr, rows_ptr, kept_ptr, sums_ptr, partials_ptr,
    n, padding, n_tiles, CHUNK: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of the first chunk of each row's run, and of each further chunk.

    Chunks begin at multiples of CHUNK from the start of a run, so that a row's sum depends on its run alone.
    At most one further chunk begins in a window of CHUNK ids; its sum is the window's partial.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    if program < n_tiles:
        slot = (program * ROWS + tl.arange(0, ROWS))[:, None]
        row = tl.load(rows_ptr + slot, mask=slot < n, other=-1)
        row = tl.where(row == padding, -1, row)
        begin = tl.load(starts_ptr + slot, mask=row >= 0, other=0)
        end = tl.load(starts_ptr + slot + 1, mask=row >= 0, other=0)
        end = tl.minimum(end, begin + CHUNK)
        total = tl.zeros([ROWS, COLUMNS], WIDE)
        total = add_runs(total, grads_ptr, order_ptr, begin, end, column, DIM, WIDE, AT_ONCE)
        tl.store(kept_ptr + slot, row, mask=slot < n)
        tl.store(sums_ptr + slot * DIM + column, total, mask=(slot < n) & (column < DIM))
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
            total = add_runs(total, grads_ptr, order_ptr, begin, end, column, DIM, WIDE, AT_ONCE)
            tl.store(partials_ptr + window * DIM + column, total, mask=column < DIM)


@triton.jit(do_not_specialize=["n"])
def sum_chunks(
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


@triton.jit
def located(memory, cached, slot_of_row_ptr, dirty_ptr, row, STRIDE: tl.constexpr, CHANGES: tl.constexpr):
    """Addresses of records, in the cache or in the storage; CHANGES: mark the cache's lines as dirty.

    The address is 0 for a record that is not cached, if the storage is out of reach (`memory` is 0).
    """
    slot = tl.load(slot_of_row_ptr + row, mask=row >= 0, other=-1).to(tl.int64)
    if CHANGES:
        tl.store(dirty_ptr + slot, tl.full(slot.shape, 1, tl.int32), mask=slot >= 0)
    home = tl.where(slot * 0 + memory != 0, memory + row * STRIDE, 0)
    return tl.where(slot >= 0, cached + slot * STRIDE, home)


@triton.jit(do_not_specialize=["memory", "cached", "n"])
def move(
    memory, cached, slot_of_row_ptr, dirty_ptr, rows_ptr, buffer_ptr, n,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HOME: tl.constexpr,
    CACHED: tl.constexpr,
):  # fmt: skip
    """Copy records, or their first bytes, into a buffer; HOME: from the buffer. A word is 8 bytes."""
    column = tl.arange(0, COLUMNS)
    for first in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        i = first + tl.arange(0, ROWS).to(tl.int64)
        row = tl.load(rows_ptr + i, mask=i < n, other=-1)
        if CACHED:
            address = located(memory, cached, slot_of_row_ptr, dirty_ptr, row, STRIDE, HOME)
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
            if HOME:
                tl.store(there, tl.load(here, mask=held), mask=held)
            else:
                tl.store(here, tl.load(there, mask=held, other=0), mask=wanted)


@triton.jit
def field(record, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    """Pointers to a field of records, (rows, 1)."""
    return tl.multiple_of((record + OFFSET).to(tl.pointer_type(TYPE)), (16, 16))


@triton.jit
def count_rows(
    record, hyperparameters_ptr, there, PREPARE: tl.constexpr, N_SCALARS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Advance the scalars in the records of rows; return the rows' coefficients."""
    first_ptr = field(record, FIRST, tl.float32)
    second_ptr = field(record, SECOND, tl.float32)
    one = tl.load(first_ptr, mask=there, other=0.0).to(tl.float64)
    two = one
    if N_SCALARS > 1:
        two = tl.load(second_ptr, mask=there, other=0.0).to(tl.float64)
    tl.debug_barrier()  # several warps may share a row: all of them read before one writes
    scalars, fine = PREPARE(load_line(hyperparameters_ptr, tl.float64), (one, two))
    tl.store(first_ptr, scalars[0].to(tl.float32), mask=there)
    if N_SCALARS > 1:
        tl.store(second_ptr, scalars[1].to(tl.float32), mask=there)
    coefficients = ()
    for k in tl.static_range(len(fine)):
        coefficients = coefficients + (fine[k].to(COMPUTE),)  # noqa: RUF005
    return coefficients


@triton.jit(do_not_specialize=["memory", "cached", "weights_stride", "n", "index", "group"])
def step(
    memory, cached, slot_of_row_ptr, dirty_ptr, rows_ptr, grads_ptr, weights_ptr, weights_stride,
    coefficients_ptr, hyperparameters_ptr, stats_ptr, n, index, group,
    PREPARE: tl.constexpr, UPDATE: tl.constexpr, HAS: tl.constexpr, N_SCALARS: tl.constexpr,
    STRIDE: tl.constexpr, AT0: tl.constexpr, AT1: tl.constexpr, AT2: tl.constexpr, AT3: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, ROWWISE: tl.constexpr,
    WEIGHT: tl.constexpr, STATE: tl.constexpr, COMPUTE: tl.constexpr,
    PER_ROW: tl.constexpr, STOCHASTIC: tl.constexpr, STAGED: tl.constexpr, FETCHED: tl.constexpr,
    CACHED: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read gradient and record of a row once; write the record once.

    `AT0` … are the offsets of the tensors of state in a record, `FIRST` and `SECOND` those of its scalars.
    `STAGED`: the records are copies in the order of the gradients, not the table's own. `FETCHED`: the rows'
    weights are at `weights_ptr`, in the same order. `CACHED`: some of the records are in a cache.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    skip = tl.load(stats_ptr + SKIP)
    seed = tl.load(stats_ptr + STEPS).to(tl.int64) * 64 + index
    coefficients_ptr += index * LINE
    hyperparameters_ptr += group * LINE
    for first in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        i = (first + tl.arange(0, ROWS).to(tl.int64))[:, None]
        row = tl.load(rows_ptr + i, mask=i < n, other=-1)
        there = (tl.where(skip == 0.0, row, -1) >= 0) & (i < n)
        if STAGED:
            record = memory + i * STRIDE
        elif CACHED:
            changed = tl.where(there, row, -1)
            record = located(memory, cached, slot_of_row_ptr, dirty_ptr, changed, STRIDE, True)
            there = there & (record != 0)
        else:
            record = memory + row * STRIDE
        mask = there & (column < DIM)
        g = load_as(grads_ptr + i * DIM + column, mask, COMPUTE)
        p_ptr = field(record, 0, WEIGHT) + column
        p = load_as(weights_ptr + i * weights_stride + column if FETCHED else p_ptr, mask, COMPUTE)
        if ROWWISE:
            only = field(record, AT0, STATE)
            state_ptrs = (only, only, only, only)
            state_mask = there
        else:
            state_ptrs = (
                field(record, AT0, STATE) + column,
                field(record, AT1, STATE) + column,
                field(record, AT2, STATE) + column,
                field(record, AT3, STATE) + column,
            )
            state_mask = mask
        state = load_state(state_ptrs, p, state_mask, HAS, COMPUTE)
        if PER_ROW:
            coefficients = count_rows(
                record, hyperparameters_ptr, there, PREPARE, N_SCALARS, FIRST, SECOND, COMPUTE
            )
        else:
            coefficients = load_line(coefficients_ptr, COMPUTE)
        factor = tl.load(coefficients_ptr).to(COMPUTE)
        update_elements(
            p, g, state, coefficients, factor, p_ptr, state_ptrs, mask, state_mask, seed, row * DIM + column,
            UPDATE, HAS, WEIGHT, STATE, ROWWISE, DIM, STOCHASTIC, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "per_program"])
def squares(values_ptr, partials_ptr, n, per_program, BLOCK: tl.constexpr):
    """Partial sums of squares, in fp64."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    begin = tl.program_id(0).to(tl.int64) * per_program
    for start in range(begin, tl.minimum(begin + per_program, n), BLOCK):
        at = start + lanes
        x = tl.load(values_ptr + at, mask=at < n, other=0.0).to(tl.float64)
        total += x * x
    tl.store(partials_ptr + tl.program_id(0), tl.sum(total, 0))
