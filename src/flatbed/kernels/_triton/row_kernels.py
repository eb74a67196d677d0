"""Kernels on the rows of tables. Addresses come as numbers: a table may lie in host memory."""

from __future__ import annotations

import triton
import triton.language as tl

from flatbed.kernels._triton.step import SKIP, STEPS, round_stochastically


@triton.jit(do_not_specialize=["n", "n_rows"])
def narrow(ids_ptr, keys_ptr, n, n_rows, BLOCK: tl.constexpr):
    """Ids of rows as int32, and -1 for those that are none."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + i, mask=i < n, other=0)
    tl.store(keys_ptr + i, tl.where((row >= 0) & (row < n_rows), row, -1).to(tl.int32), mask=i < n)


@triton.jit(do_not_specialize=["host", "n"])
def bring(host, keys_ptr, n, BLOCK: tl.constexpr):
    """Keys from pinned memory of the host: as part of a CUDA graph cheaper to launch than a copy."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(keys_ptr + i, tl.load(host.to(tl.pointer_type(tl.int32)) + i, mask=i < n), mask=i < n)


@triton.jit(do_not_specialize=["n"])
def heads(
    sorted_ptr, counts_ptr, clock_ptr, n_missing_ptr, n, TICKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many runs of sorted keys begin in each block. With TICKS, a section of a cache begins, too."""
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
    """From sorted keys to distinct rows; `counts_ptr` says how many begin in each block."""
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
    beyond = i >= n_distinct  # as many places as there may be rows
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
    """Add gradients one after the other, in the order of the ids; several are on their way at a time."""
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
    """The sum of the gradients of each row's run, as far as its first chunk goes; and of each further chunk.

    Chunks begin at multiples of CHUNK from where a run begins, so that a row's sum depends on nothing else.
    At most one further chunk begins in a window of as many ids: it is summed into the window's partial.
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
    """Add the further chunks of long runs to the first ones, in order: they are in consecutive windows.

    In a window of CHUNK ids at most one run begins that is longer than that.
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
    """Where the records of rows are: at home, or in a cache, which is to know if they change. 0 if they are
    not in the cache, and home cannot be reached (`memory` is 0).
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
    """Records (or their beginnings) into a buffer, or with HOME from it; a word is 8 bytes."""
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
    """Where a field of records, (rows, 1), begins."""
    return tl.multiple_of((record + OFFSET).to(tl.pointer_type(TYPE)), (16, 16))


@triton.jit(do_not_specialize=["memory", "cached", "weights_stride", "n", "index", "group"])
def step(
    memory, cached, slot_of_row_ptr, dirty_ptr, rows_ptr, grads_ptr, weights_ptr, weights_stride,
    coefficients_ptr, numbers_ptr, shared_ptr, n, index, group,
    PREPARE: tl.constexpr, UPDATE: tl.constexpr, HAS: tl.constexpr, N_SCALARS: tl.constexpr,
    STRIDE: tl.constexpr, AT0: tl.constexpr, AT1: tl.constexpr, AT2: tl.constexpr, AT3: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, ROWWISE: tl.constexpr,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, COMPUTE: tl.constexpr,
    PER_ROW: tl.constexpr, STOCHASTIC: tl.constexpr, STAGED: tl.constexpr, FETCHED: tl.constexpr,
    CACHED: tl.constexpr, LINE: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read gradient and record of a row once; write the record once.

    `AT0` … say where tensors of state lie in a record, `FIRST` and `SECOND` where its numbers of state do.
    `STAGED`: the records are not the table's but copies in the order of the gradients. `FETCHED`: weights are
    at hand, in the same order. `CACHED`: some of the records are in a cache.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < DIM
    skip = tl.load(shared_ptr + SKIP)
    coefficients_ptr += index * LINE
    numbers_ptr += group * LINE
    for first in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        i = (first + tl.arange(0, ROWS).to(tl.int64))[:, None]
        row = tl.load(rows_ptr + i, mask=i < n, other=-1)
        there = (tl.where(skip == 0.0, row, -1) >= 0) & (i < n)
        mask = there & inside
        if STAGED:
            record = memory + i * STRIDE
        elif CACHED:
            changed = tl.where(there, row, -1)
            record = located(memory, cached, slot_of_row_ptr, dirty_ptr, changed, STRIDE, True)
            there = there & (record != 0)
            mask = there & inside
        else:
            record = memory + row * STRIDE
        g = tl.load(grads_ptr + i * DIM + column, mask=mask, other=0.0).to(COMPUTE)
        p_ptr = field(record, 0, WEIGHT) + column
        if FETCHED:
            p = tl.load(weights_ptr + i * weights_stride + column, mask=mask, other=0.0).to(COMPUTE)
        else:
            p = tl.load(p_ptr, mask=mask, other=0.0).to(COMPUTE)
        s0 = p
        s1 = p
        s2 = p
        s3 = p
        if ROWWISE:
            s0_ptr = field(record, AT0, STATE)
            s0 = tl.load(s0_ptr, mask=there, other=0.0).to(COMPUTE)
        else:
            s0_ptr = field(record, AT0, STATE) + column
            s1_ptr = field(record, AT1, STATE) + column
            s2_ptr = field(record, AT2, STATE) + column
            s3_ptr = field(record, AT3, STATE) + column
            if HAS & 1:
                s0 = tl.load(s0_ptr, mask=mask, other=0.0).to(COMPUTE)
            if HAS & 2:
                s1 = tl.load(s1_ptr, mask=mask, other=0.0).to(COMPUTE)
            if HAS & 4:
                s2 = tl.load(s2_ptr, mask=mask, other=0.0).to(COMPUTE)
            if HAS & 8:
                s3 = tl.load(s3_ptr, mask=mask, other=0.0).to(COMPUTE)
        if PER_ROW:
            h = (
                tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3),
                tl.load(numbers_ptr + 4), tl.load(numbers_ptr + 5), tl.load(numbers_ptr + 6),
                tl.load(numbers_ptr + 7), tl.load(numbers_ptr + 8),
            )  # fmt: skip
            first_ptr = field(record, FIRST, tl.float32)
            second_ptr = field(record, SECOND, tl.float32)
            one = tl.load(first_ptr, mask=there, other=0.0).to(tl.float64)
            two = one
            if N_SCALARS > 1:
                two = tl.load(second_ptr, mask=there, other=0.0).to(tl.float64)
            tl.debug_barrier()  # a row may be several warps': all have read before one writes
            scalars, fine = PREPARE(h, (one, two))
            tl.store(first_ptr, scalars[0].to(tl.float32), mask=there)
            if N_SCALARS > 1:
                tl.store(second_ptr, scalars[1].to(tl.float32), mask=there)
            c = ()
            for k in tl.static_range(len(fine)):
                c = c + (fine[k].to(COMPUTE),)  # noqa: RUF005
        else:
            c = (
                tl.load(coefficients_ptr + 1).to(COMPUTE), tl.load(coefficients_ptr + 2).to(COMPUTE),
                tl.load(coefficients_ptr + 3).to(COMPUTE), tl.load(coefficients_ptr + 4).to(COMPUTE),
                tl.load(coefficients_ptr + 5).to(COMPUTE), tl.load(coefficients_ptr + 6).to(COMPUTE),
                tl.load(coefficients_ptr + 7).to(COMPUTE), tl.load(coefficients_ptr + 8).to(COMPUTE),
            )  # fmt: skip
        g *= tl.load(coefficients_ptr).to(COMPUTE)
        if ROWWISE:
            s1 = (tl.sum(g * g, 1) / DIM)[:, None]  # beyond the last column they are zero
        p, state = UPDATE(p, g, (s0, s1, s2, s3), c, HAS)
        if STOCHASTIC:
            seed = tl.load(shared_ptr + STEPS).to(tl.int64) * 64 + index
            noise = tl.randint(seed, row * DIM + column).to(tl.uint32, bitcast=True)
            tl.store(p_ptr, round_stochastically(p, noise), mask=mask)
        else:
            tl.store(p_ptr, p.to(WEIGHT), mask=mask)
        if ROWWISE:
            tl.store(s0_ptr, state[0].to(STATE), mask=there)
        else:
            if HAS & 1:
                tl.store(s0_ptr, state[0].to(STATE), mask=mask)
            if HAS & 2:
                tl.store(s1_ptr, state[1].to(STATE), mask=mask)
            if HAS & 4:
                tl.store(s2_ptr, state[2].to(STATE), mask=mask)
            if HAS & 8:
                tl.store(s3_ptr, state[3].to(STATE), mask=mask)


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


@triton.jit(do_not_specialize=["n", "target", "value"])
def fill_bytes(n, target, value, BLOCK: tl.constexpr):
    """The same byte everywhere, from an address on."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + i, value.to(tl.uint8), mask=i < n)


@triton.jit(do_not_specialize=["n", "source", "target"])
def copy_bytes(n, source, target, BLOCK: tl.constexpr):
    """Bytes from one address to another."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(source.to(tl.pointer_type(tl.uint8)) + i, mask=i < n)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + i, found, mask=i < n)
