"""Kernels of the dense step: sums of squares of gradients, and the update of elements.

A parameter is a line of an int64 table of addresses, so that memory may lie anywhere; a block of `BLOCK`
elements finds its parameter in a map. Addresses of gradients have a table of their own, since they change;
0 stands for a parameter without gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flatbed.kernels._triton.coefficients import (
    COLUMNS,
    EMA,
    FIRST_BLOCK,
    LINE,
    MASTER,
    NUMEL,
    PARAM,
    SKIP,
    STATES,
    STEPS,
    pointer,
)

# Elements per program, 4 per thread: on an H200, 8 per thread were up to 10% slower, 16 up to 25%.
BLOCK = 512


@triton.jit(do_not_specialize=["partials_ptr", "n_blocks", "per_program"])
def squares_kernel(
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


@triton.jit
def round_stochastically(x, noise):
    """fp32 → bf16, up or down with probabilities that make the expectation exact; 16 bits of noise."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (noise & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # Nothing may be carried into the bits of inf and nan.
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, rounded).to(tl.bfloat16)


@triton.jit
def load_as(ptr, mask, TYPE: tl.constexpr):
    """Load elements; those that the mask leaves out are 0."""
    if mask is None:
        value = tl.load(ptr)
    else:
        value = tl.load(ptr, mask=mask, other=0.0)
    return value.to(TYPE)


@triton.jit
def load_line(line_ptr, TYPE: tl.constexpr):
    """The rule's part of a line of hyperparameters or coefficients."""
    values = ()
    for i in tl.static_range(1, LINE):
        values = values + (tl.load(line_ptr + i).to(TYPE),)  # noqa: RUF005
    return values


@triton.jit
def load_state(ptrs, absent, mask, HAS: tl.constexpr, TYPE: tl.constexpr):
    """The tensors of state that exist, by the bits of HAS; `absent` stands for the others."""
    state = ()
    for i in tl.static_range(4):
        if HAS >> i & 1:
            state = state + (load_as(ptrs[i], mask, TYPE),)  # noqa: RUF005
        else:
            state = state + (absent,)  # noqa: RUF005
    return state


@triton.jit
def store_state(
    ptrs, state, mask, seed, position, HAS: tl.constexpr, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Store the tensors of state that exist; STOCHASTIC: fp32 is rounded to bf16 stochastically."""
    if STOCHASTIC:
        noise = tl.randint(seed + 1, position).to(tl.uint32, bitcast=True)  # enough for two
        more = noise
        if HAS & 12:
            more = tl.randint(seed + 2, position).to(tl.uint32, bitcast=True)
        noises = (noise, noise >> 16, more, more >> 16)
    for i in tl.static_range(4):
        if HAS >> i & 1:
            if STOCHASTIC:
                tl.store(ptrs[i], round_stochastically(state[i], noises[i]), mask=mask)
            else:
                tl.store(ptrs[i], state[i].to(TYPE), mask=mask)


@triton.jit
def update_elements(
    p, g, state, coefficients, factor, p_ptr, state_ptrs, mask, state_mask, seed, position,
    RULE: tl.constexpr, HAS: tl.constexpr, PARAM_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr,
    ROWWISE: tl.constexpr, DIM: tl.constexpr, STOCHASTIC: tl.constexpr, STOCHASTIC_STATE: tl.constexpr,
):  # fmt: skip
    """The update of parameters and of rows: scale the gradient, apply the rule, round, store.

    `factor` unscales, clips and negates the gradient. `seed` and `position` choose the noise of an element.
    ROWWISE: state has one value per row, and the rule gets the mean of the row's squared gradients.
    Returns the parameter before and after rounding.
    """
    g *= factor
    if ROWWISE:
        mean = (tl.sum(g * g, 1) / DIM)[:, None]  # masked elements are 0
        state = (state[0], mean, state[2], state[3])
    p, state = RULE(p, g, state, coefficients, HAS)
    store_state(state_ptrs, state, state_mask, seed, position, HAS, STATE_TYPE, STOCHASTIC_STATE)
    if STOCHASTIC:
        rounded = round_stochastically(p, tl.randint(seed, position).to(tl.uint32, bitcast=True))
    else:
        rounded = p.to(PARAM_TYPE)
    tl.store(p_ptr, rounded, mask=mask)
    return p, rounded


@triton.jit
def update_block(
    row_ptr, grad, coefficient_ptr, stats_ptr, start, numel, ema_weight, salt,
    RULE: tl.constexpr, HAS: tl.constexpr,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_MASTER: tl.constexpr, HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, STOCHASTIC_STATE: tl.constexpr,
    FULL: tl.constexpr, GRAD_VECTOR: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block; `FULL`: all of its elements exist and the parameter is aligned to 16 bytes.

    `GRAD_VECTOR` is 1 for gradients that are not aligned: FSDP2 shows them as views of one buffer.
    """
    at = start + tl.arange(0, BLOCK)
    mask = None if FULL else at < numel
    p_ptr = pointer(tl.load(row_ptr + PARAM), PARAM_TYPE, VECTOR if FULL else 1) + at
    master_ptr = pointer(tl.load(row_ptr + MASTER), COMPUTE, VECTOR) + at
    ema_ptr = pointer(tl.load(row_ptr + EMA), COMPUTE, VECTOR) + at
    state_ptrs = ()
    for i in tl.static_range(4):
        state_ptrs = state_ptrs + (pointer(tl.load(row_ptr + (STATES + i)), STATE_TYPE, VECTOR) + at,)  # noqa: RUF005
    g = load_as(pointer(grad, GRAD_TYPE, GRAD_VECTOR) + at, mask, COMPUTE)
    p = load_as(master_ptr if HAS_MASTER else p_ptr, mask, COMPUTE)
    state = load_state(state_ptrs, p, mask, HAS, COMPUTE)
    coefficients = load_line(coefficient_ptr, COMPUTE)
    factor = tl.load(coefficient_ptr).to(COMPUTE)
    seed = (tl.load(stats_ptr + STEPS).to(tl.int64) * 64 + salt) * 4
    position = tl.load(row_ptr + FIRST_BLOCK) * BLOCK + at
    p, rounded = update_elements(
        p, g, state, coefficients, factor, p_ptr, state_ptrs, mask, mask, seed, position,
        RULE, HAS, PARAM_TYPE, STATE_TYPE, False, BLOCK, STOCHASTIC, STOCHASTIC_STATE,
    )  # fmt: skip
    if HAS_MASTER:
        tl.store(master_ptr, p, mask=mask)
    if HAS_EMA:
        average_to(ema_ptr, p if HAS_MASTER else rounded.to(COMPUTE), mask, ema_weight)


@triton.jit
def average_to(ema_ptr, now, mask, ema_weight):
    """Move an average towards the present value."""
    average = tl.load(ema_ptr, mask=mask)
    tl.store(ema_ptr, average + ema_weight * (now - average), mask=mask)


@triton.jit
def average_block(
    row_ptr, start, numel, ema_weight,
    PARAM_TYPE: tl.constexpr, COMPUTE: tl.constexpr, HAS_MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the average of a parameter that has no gradient towards the parameter."""
    at = start + tl.arange(0, BLOCK)
    mask = at < numel
    source_ptr = pointer(
        tl.load(row_ptr + (MASTER if HAS_MASTER else PARAM)), COMPUTE if HAS_MASTER else PARAM_TYPE, 1
    )
    now = tl.load(source_ptr + at, mask=mask).to(COMPUTE)
    average_to(pointer(tl.load(row_ptr + EMA), COMPUTE, 1) + at, now, mask, ema_weight)


@triton.jit(do_not_specialize=["salt"])
def update_kernel(
    table_ptr, grads_ptr, coefficients_ptr, stats_ptr, blocks_ptr, ema_weight, salt,
    RULE: tl.constexpr, HAS: tl.constexpr,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_MASTER: tl.constexpr, HAS_EMA: tl.constexpr, STOCHASTIC: tl.constexpr, STOCHASTIC_STATE: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read gradient, parameter and state once; write parameter and state once."""
    block = tl.program_id(0)
    parameter = tl.load(blocks_ptr + block).to(tl.int64)
    skip = tl.load(stats_ptr + SKIP)
    row_ptr = table_ptr + parameter * COLUMNS
    coefficient_ptr = coefficients_ptr + parameter * LINE
    grad = tl.load(grads_ptr + parameter)
    start = (block - tl.load(row_ptr + FIRST_BLOCK)) * BLOCK
    numel = tl.load(row_ptr + NUMEL)
    if skip == 0.0:
        if grad != 0:
            is_full = (tl.load(row_ptr + PARAM) % 16 == 0) & (start + BLOCK <= numel)
            if is_full & (grad % 16 == 0):
                update_block(
                    row_ptr, grad, coefficient_ptr, stats_ptr, start, numel, ema_weight, salt,
                    RULE, HAS, PARAM_TYPE, GRAD_TYPE, STATE_TYPE, COMPUTE,
                    HAS_MASTER, HAS_EMA, STOCHASTIC, STOCHASTIC_STATE, True, VECTOR, VECTOR, BLOCK,
                )  # fmt: skip
            elif is_full:
                update_block(
                    row_ptr, grad, coefficient_ptr, stats_ptr, start, numel, ema_weight, salt,
                    RULE, HAS, PARAM_TYPE, GRAD_TYPE, STATE_TYPE, COMPUTE,
                    HAS_MASTER, HAS_EMA, STOCHASTIC, STOCHASTIC_STATE, True, 1, VECTOR, BLOCK,
                )  # fmt: skip
            else:
                update_block(
                    row_ptr, grad, coefficient_ptr, stats_ptr, start, numel, ema_weight, salt,
                    RULE, HAS, PARAM_TYPE, GRAD_TYPE, STATE_TYPE, COMPUTE,
                    HAS_MASTER, HAS_EMA, STOCHASTIC, STOCHASTIC_STATE, False, 1, VECTOR, BLOCK,
                )  # fmt: skip
        elif HAS_EMA:
            average_block(row_ptr, start, numel, ema_weight, PARAM_TYPE, COMPUTE, HAS_MASTER, BLOCK)
