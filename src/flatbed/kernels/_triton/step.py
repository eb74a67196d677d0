"""The three kernels of a step: partial sums of squares, one number after another, one element after another.

A parameter is a row of an int64 table of addresses, so that memory may lie anywhere; a block of `BLOCK`
elements finds its parameter in a map. Gradients' addresses lie in a table of their own, since they move;
0 stands for a parameter without gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table.
FIRST_BLOCK = tl.constexpr(0)  # of this parameter, counted within its launch
NUMEL = tl.constexpr(1)
GROUP = tl.constexpr(2)
PARAM = tl.constexpr(3)
MASTER = tl.constexpr(4)
EMA = tl.constexpr(5)
SCALARS = tl.constexpr(6)  # two
STATES = tl.constexpr(8)  # four
COLUMNS = tl.constexpr(12)

# Entries of the vector that steps of one device share.
SKIP = tl.constexpr(0)
NORM = tl.constexpr(1)
SKIPPED = tl.constexpr(2)  # steps so far
STEPS = tl.constexpr(3)  # so far, the skipped ones too

NUMBERS = tl.constexpr(
    9
)  # per row of the tables of hyperparameters and coefficients: one common, then the rule's


@triton.jit
def pointer(address, dtype: tl.constexpr, VECTOR: tl.constexpr):
    """An address as a pointer. Without a hint of its alignment, loads are not vectorized; with one, each
    thread gets `VECTOR` elements at a time, which has to be the same for all that are computed together.
    """
    if VECTOR > 1:
        result = tl.multiple_of(address.to(tl.pointer_type(dtype)), VECTOR * (dtype.primitive_bitwidth // 8))
    else:
        result = address.to(tl.pointer_type(dtype))
    return result


@triton.jit(do_not_specialize=["partials_ptr", "n_blocks", "per_program"])
def squares(
    table_ptr, grads_ptr, blocks_ptr, partials_ptr, n_blocks, per_program,
    GRAD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of squares of the gradients in `per_program` consecutive blocks.

    In fp64, so that the order of additions, which depends on the dtype, does not show in the norm.
    """
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    begin = program * per_program
    for block in range(begin, tl.minimum(begin + per_program, n_blocks)):
        parameter = tl.load(blocks_ptr + block).to(tl.int64)
        address = tl.load(grads_ptr + parameter)
        row_ptr = table_ptr + parameter * COLUMNS
        start = (block - tl.load(row_ptr + FIRST_BLOCK)) * BLOCK
        numel = tl.load(row_ptr + NUMEL)
        if address != 0:
            if (address % 16 == 0) & (start + BLOCK <= numel):
                g = tl.load(pointer(address, GRAD, VECTOR) + (start + lanes)).to(tl.float64)
                total += g * g
            else:
                at = start + lanes
                g = tl.load(pointer(address, GRAD, 1) + at, mask=at < numel, other=0.0).to(tl.float64)
                total += g * g
    tl.store(partials_ptr + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["n_parameters", "partials_ptr", "n_partials", "scale_ptr", "found_inf_ptr"])
def prepare(
    table_ptr, grads_ptr, numbers_ptr, coefficients_ptr, shared_ptr, n_parameters,
    partials_ptr, scale_ptr, found_inf_ptr, n_partials, max_norm,
    RULE: tl.constexpr, N_SCALARS: tl.constexpr, N_COEFFICIENTS: tl.constexpr,
    CLIP: tl.constexpr, NORMED: tl.constexpr, SKIPPING: tl.constexpr, SCALED: tl.constexpr,
    LANES: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """What is the same for all elements of a parameter: factor of the gradient, coefficients, step count.

    Every program sums up all partial sums for itself, in the same order.
    """
    lanes = tl.arange(0, LANES)
    parameter = (tl.program_id(0) * LANES + lanes).to(tl.int64)
    valid = parameter < n_parameters
    row_ptr = table_ptr + parameter * COLUMNS
    grad = tl.load(grads_ptr + parameter, mask=valid, other=0)
    number_ptr = numbers_ptr + tl.load(row_ptr + GROUP, mask=valid, other=0) * NUMBERS
    h = (
        tl.load(number_ptr + 1, mask=valid, other=0.5),
        tl.load(number_ptr + 2, mask=valid, other=0.5),
        tl.load(number_ptr + 3, mask=valid, other=0.5),
        tl.load(number_ptr + 4, mask=valid, other=0.5),
        tl.load(number_ptr + 5, mask=valid, other=0.5),
        tl.load(number_ptr + 6, mask=valid, other=0.5),
        tl.load(number_ptr + 7, mask=valid, other=0.5),
        tl.load(number_ptr + 8, mask=valid, other=0.5),
    )
    first_ptr = pointer(tl.load(row_ptr + SCALARS, mask=valid, other=0), tl.float32, 1)
    second_ptr = pointer(tl.load(row_ptr + (SCALARS + 1), mask=valid, other=0), tl.float32, 1)
    first = tl.zeros([LANES], tl.float64)
    second = tl.zeros([LANES], tl.float64)
    if N_SCALARS > 0:
        first = tl.load(first_ptr, mask=valid, other=0.0).to(tl.float64)
    if N_SCALARS > 1:
        second = tl.load(second_ptr, mask=valid, other=0.0).to(tl.float64)
    scalars, coefficients = RULE(h, (first, second))

    # After the loads above, which need not wait for it.
    factor = tl.full([], 1.0, tl.float64)
    skip = tl.full([], 0.0, tl.float64)
    norm = tl.full([], 0.0, tl.float64)
    if SCALED:
        factor = 1.0 / tl.load(scale_ptr).to(tl.float64)
        skip = tl.load(found_inf_ptr).to(tl.float64)
    if NORMED:
        many = tl.arange(0, PARTIALS)  # as many as one launch of `squares` makes at most
        total = tl.load(partials_ptr + many, mask=many < n_partials, other=0.0)
        for begin in range(PARTIALS, n_partials, PARTIALS):
            total += tl.load(partials_ptr + begin + many, mask=begin + many < n_partials, other=0.0)
        norm = tl.sqrt(tl.sum(total, 0)) * factor
        if SKIPPING:
            skip = tl.where(norm < float("inf"), skip, 1.0)  # nan too
        if CLIP:
            ratio = max_norm / (norm + 1e-6)
            factor *= tl.where(ratio > 1.0, 1.0, ratio)  # nan stays nan, as in torch

    if tl.program_id(0) == 0:
        tl.store(shared_ptr + SKIP, skip)
        tl.store(shared_ptr + NORM, norm)
        tl.store(shared_ptr + SKIPPED, tl.load(shared_ptr + SKIPPED) + tl.where(skip != 0.0, 1.0, 0.0))
        tl.store(shared_ptr + STEPS, tl.load(shared_ptr + STEPS) + 1.0)

    moves = valid & (tl.where(skip == 0.0, grad, 0) != 0)
    if N_SCALARS > 0:
        tl.store(first_ptr, scalars[0].to(tl.float32), mask=moves)
    if N_SCALARS > 1:
        tl.store(second_ptr, scalars[1].to(tl.float32), mask=moves)
    coefficient_ptr = coefficients_ptr + parameter * NUMBERS
    sign = tl.load(number_ptr, mask=valid, other=1.0)
    tl.store(coefficient_ptr, factor * sign, mask=valid)
    for i in tl.static_range(N_COEFFICIENTS):
        tl.store(coefficient_ptr + 1 + i, coefficients[i], mask=valid)


@triton.jit
def round_stochastically(x, noise):
    """fp32 → bf16, up or down with probabilities that make the expectation exact; 16 bits of noise."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (noise & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # Nothing may be carried into the bits of inf and nan.
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, rounded).to(tl.bfloat16)


@triton.jit
def update_block(
    row_ptr, grad, coefficient_ptr, shared_ptr, start, numel, ema_weight, salt,
    RULE: tl.constexpr, HAS: tl.constexpr,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_MASTER: tl.constexpr, HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, STOCHASTIC_STATE: tl.constexpr,
    FULL: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block; `FULL`: all of its elements exist and addresses are multiples of 16 bytes."""
    at = start + tl.arange(0, BLOCK)
    mask = None if FULL else at < numel
    p_ptr = pointer(tl.load(row_ptr + PARAM), PARAM_TYPE, VECTOR if FULL else 1) + at
    g_ptr = pointer(grad, GRAD_TYPE, VECTOR if FULL else 1) + at
    master_ptr = pointer(tl.load(row_ptr + MASTER), COMPUTE, VECTOR) + at
    ema_ptr = pointer(tl.load(row_ptr + EMA), COMPUTE, VECTOR) + at
    s0_ptr = pointer(tl.load(row_ptr + STATES), STATE_TYPE, VECTOR) + at
    s1_ptr = pointer(tl.load(row_ptr + (STATES + 1)), STATE_TYPE, VECTOR) + at
    s2_ptr = pointer(tl.load(row_ptr + (STATES + 2)), STATE_TYPE, VECTOR) + at
    s3_ptr = pointer(tl.load(row_ptr + (STATES + 3)), STATE_TYPE, VECTOR) + at

    g = tl.load(g_ptr, mask=mask).to(COMPUTE)
    if HAS_MASTER:
        p = tl.load(master_ptr, mask=mask)
    else:
        p = tl.load(p_ptr, mask=mask).to(COMPUTE)
    s0 = p
    s1 = p
    s2 = p
    s3 = p
    if HAS & 1:
        s0 = tl.load(s0_ptr, mask=mask).to(COMPUTE)
    if HAS & 2:
        s1 = tl.load(s1_ptr, mask=mask).to(COMPUTE)
    if HAS & 4:
        s2 = tl.load(s2_ptr, mask=mask).to(COMPUTE)
    if HAS & 8:
        s3 = tl.load(s3_ptr, mask=mask).to(COMPUTE)
    c = (
        tl.load(coefficient_ptr + 1).to(COMPUTE),
        tl.load(coefficient_ptr + 2).to(COMPUTE),
        tl.load(coefficient_ptr + 3).to(COMPUTE),
        tl.load(coefficient_ptr + 4).to(COMPUTE),
        tl.load(coefficient_ptr + 5).to(COMPUTE),
        tl.load(coefficient_ptr + 6).to(COMPUTE),
        tl.load(coefficient_ptr + 7).to(COMPUTE),
        tl.load(coefficient_ptr + 8).to(COMPUTE),
    )
    g *= tl.load(coefficient_ptr).to(COMPUTE)
    p, state = RULE(p, g, (s0, s1, s2, s3), c, HAS)

    if STOCHASTIC or STOCHASTIC_STATE:
        place = tl.load(row_ptr + FIRST_BLOCK) * BLOCK + at
        seed = (tl.load(shared_ptr + STEPS).to(tl.int64) * 64 + salt) * 4
    if STOCHASTIC_STATE:
        noise = tl.randint(seed + 1, place).to(tl.uint32, bitcast=True)  # enough for two
        more = noise
        if HAS & 12:
            more = tl.randint(seed + 2, place).to(tl.uint32, bitcast=True)
        if HAS & 1:
            tl.store(s0_ptr, round_stochastically(state[0], noise), mask=mask)
        if HAS & 2:
            tl.store(s1_ptr, round_stochastically(state[1], noise >> 16), mask=mask)
        if HAS & 4:
            tl.store(s2_ptr, round_stochastically(state[2], more), mask=mask)
        if HAS & 8:
            tl.store(s3_ptr, round_stochastically(state[3], more >> 16), mask=mask)
    else:
        if HAS & 1:
            tl.store(s0_ptr, state[0].to(STATE_TYPE), mask=mask)
        if HAS & 2:
            tl.store(s1_ptr, state[1].to(STATE_TYPE), mask=mask)
        if HAS & 4:
            tl.store(s2_ptr, state[2].to(STATE_TYPE), mask=mask)
        if HAS & 8:
            tl.store(s3_ptr, state[3].to(STATE_TYPE), mask=mask)
    if STOCHASTIC:
        rounded = round_stochastically(p, tl.randint(seed, place).to(tl.uint32, bitcast=True))
    else:
        rounded = p.to(PARAM_TYPE)
    tl.store(p_ptr, rounded, mask=mask)
    if HAS_MASTER:
        tl.store(master_ptr, p, mask=mask)
    if HAS_EMA:
        now = p if HAS_MASTER else rounded.to(COMPUTE)
        average = tl.load(ema_ptr, mask=mask)
        tl.store(ema_ptr, average + ema_weight * (now - average), mask=mask)


@triton.jit
def average_block(
    row_ptr, start, numel, ema_weight,
    PARAM_TYPE: tl.constexpr, COMPUTE: tl.constexpr, HAS_MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The average of a parameter without gradient goes on towards it."""
    at = start + tl.arange(0, BLOCK)
    mask = at < numel
    ema_ptr = pointer(tl.load(row_ptr + EMA), COMPUTE, 1) + at
    if HAS_MASTER:
        now = tl.load(pointer(tl.load(row_ptr + MASTER), COMPUTE, 1) + at, mask=mask)
    else:
        now = tl.load(pointer(tl.load(row_ptr + PARAM), PARAM_TYPE, 1) + at, mask=mask).to(COMPUTE)
    average = tl.load(ema_ptr, mask=mask)
    tl.store(ema_ptr, average + ema_weight * (now - average), mask=mask)


@triton.jit(do_not_specialize=["salt"])
def update(
    table_ptr, grads_ptr, coefficients_ptr, shared_ptr, blocks_ptr, ema_weight, salt,
    RULE: tl.constexpr, HAS: tl.constexpr,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_MASTER: tl.constexpr, HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, STOCHASTIC_STATE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read gradient, parameter and state once; write parameter and state once."""
    block = tl.program_id(0)
    parameter = tl.load(blocks_ptr + block).to(tl.int64)
    skip = tl.load(shared_ptr + SKIP)
    row_ptr = table_ptr + parameter * COLUMNS
    coefficient_ptr = coefficients_ptr + parameter * NUMBERS
    grad = tl.load(grads_ptr + parameter)
    start = (block - tl.load(row_ptr + FIRST_BLOCK)) * BLOCK
    numel = tl.load(row_ptr + NUMEL)
    if skip == 0.0:
        if grad != 0:
            if ((grad | tl.load(row_ptr + PARAM)) % 16 == 0) & (start + BLOCK <= numel):
                update_block(
                    row_ptr, grad, coefficient_ptr, shared_ptr, start, numel, ema_weight, salt,
                    RULE, HAS, PARAM_TYPE, GRAD_TYPE, STATE_TYPE, COMPUTE,
                    HAS_MASTER, HAS_EMA, STOCHASTIC, STOCHASTIC_STATE, True, VECTOR, BLOCK,
                )  # fmt: skip
            else:
                update_block(
                    row_ptr, grad, coefficient_ptr, shared_ptr, start, numel, ema_weight, salt,
                    RULE, HAS, PARAM_TYPE, GRAD_TYPE, STATE_TYPE, COMPUTE,
                    HAS_MASTER, HAS_EMA, STOCHASTIC, STOCHASTIC_STATE, False, VECTOR, BLOCK,
                )  # fmt: skip
        elif HAS_EMA:
            average_block(row_ptr, start, numel, ema_weight, PARAM_TYPE, COMPUTE, HAS_MASTER, BLOCK)
