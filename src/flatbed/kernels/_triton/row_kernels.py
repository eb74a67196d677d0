"""Kernels on the rows of tables. Addresses come as numbers: a table may lie in host memory."""

from __future__ import annotations

import triton
import triton.language as tl

from flatbed.kernels._triton.step import SKIP, STEPS, round_stochastically


@triton.jit(do_not_specialize=["n", "n_rows", "lead"])
def mark(
    sorted_ptr, order_ptr, rank_ptr, inverse_ptr, rows_ptr, starts_ptr, bad_ptr, n, n_rows, lead,
    CHECKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From sorted keys to distinct rows; `rank_ptr` counts the changes from the second key on."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < n
    key = tl.load(sorted_ptr + i, mask=valid, other=0).to(tl.int64)
    before = tl.load(sorted_ptr + i - 1, mask=valid & (i > 0), other=0).to(tl.int64)
    rank = tl.load(rank_ptr + i - 1, mask=valid & (i > 0), other=0)
    at = tl.load(order_ptr + i, mask=valid, other=0)
    tl.store(inverse_ptr + at, rank, mask=valid)
    head = valid & ((i == 0) | (key != before))
    known = (key >= 0) & (key < n_rows)
    tl.store(rows_ptr + rank, tl.where(known, key, -1), mask=head)
    tl.store(starts_ptr + rank, i.to(tl.int64), mask=head)
    last = tl.load(rank_ptr + n - 2, mask=n > 1, other=0)
    beyond = i > last  # as many places as there may be rows
    tl.store(rows_ptr + i, tl.full([BLOCK], -1, tl.int64), mask=valid & beyond)
    tl.store(starts_ptr + i, tl.zeros([BLOCK], tl.int64) + n, mask=(i <= n) & beyond)
    if not CHECKED:
        wrong = valid & (known == 0) & (key != lead)
        place = tl.min(tl.where(wrong, at, 0x7FFFFFFFFFFFFFFF), 0)
        if place != 0x7FFFFFFFFFFFFFFF:
            tl.atomic_min(bad_ptr, place)


@triton.jit(do_not_specialize=["n", "padding"])
def sum_runs(
    grads_ptr, order_ptr, starts_ptr, rows_ptr, kept_ptr, sums_ptr, n, padding,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sum of the gradients of each row's run, one after the other."""
    slot = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < DIM
    row = tl.load(rows_ptr + slot)
    total = tl.zeros([COLUMNS], WIDE)
    if row == padding:
        row = tl.full([], -1, tl.int64)
    if row >= 0:
        begin = tl.load(starts_ptr + slot)
        end = tl.load(starts_ptr + slot + 1)
        for i in range(begin, end):
            at = tl.load(order_ptr + i)
            total += tl.load(grads_ptr + at * DIM + column, mask=inside, other=0.0).to(WIDE)
    tl.store(kept_ptr + slot, row)
    tl.store(sums_ptr + slot * DIM + column, total, mask=inside)


@triton.jit(do_not_specialize=["memory", "n"])
def move(
    memory, rows_ptr, buffer_ptr, n,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HOME: tl.constexpr,
):  # fmt: skip
    """Records (or their beginnings) into a buffer, or with HOME from it; a word is 8 bytes."""
    column = tl.arange(0, COLUMNS)
    for first in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        i = first + tl.arange(0, ROWS).to(tl.int64)
        row = tl.load(rows_ptr + i, mask=i < n, other=-1)
        record = tl.multiple_of((memory + row * STRIDE).to(tl.pointer_type(tl.int64)), 16)
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


@triton.jit(do_not_specialize=["memory", "n", "salt"])
def step(
    memory, rows_ptr, grads_ptr, weights_ptr, weights_stride,
    coefficients_ptr, numbers_ptr, shared_ptr, n, salt,
    PREPARE: tl.constexpr, UPDATE: tl.constexpr, HAS: tl.constexpr, N_SCALARS: tl.constexpr,
    STRIDE: tl.constexpr, AT0: tl.constexpr, AT1: tl.constexpr, AT2: tl.constexpr, AT3: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, ROWWISE: tl.constexpr,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, COMPUTE: tl.constexpr,
    PER_ROW: tl.constexpr, STOCHASTIC: tl.constexpr, STAGED: tl.constexpr, FETCHED: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read gradient and record of a row once; write the record once.

    `AT0` … say where tensors of state lie in a record, `FIRST` and `SECOND` where its numbers of state do.
    `STAGED`: the records are not the table's but copies in the order of the gradients. `FETCHED`: weights are
    at hand, in the same order.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < DIM
    skip = tl.load(shared_ptr + SKIP)
    for first in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        i = (first + tl.arange(0, ROWS).to(tl.int64))[:, None]
        row = tl.load(rows_ptr + i, mask=i < n, other=-1)
        there = (tl.where(skip == 0.0, row, -1) >= 0) & (i < n)
        mask = there & inside
        if STAGED:
            record = memory + i * STRIDE
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
            seed = tl.load(shared_ptr + STEPS).to(tl.int64) * 64 + salt
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
