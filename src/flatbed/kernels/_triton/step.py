"""The dense step on one GPU: kernels for norm and update, tables of addresses, and launches.

A parameter is a line of an int64 table of addresses, so that memory may lie anywhere. Block i has `BLOCK`
elements of the parameter `blocks[i]`. Addresses of gradients are in a second table, which is uploaded when
they change; 0 stands for a parameter without gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from flatbed.kernels._triton.coefficients import (
    COLUMNS,
    EMA,
    FIRST_BLOCK,
    GROUP,
    LINE,
    MASTER,
    MAX_PARTIALS,
    NUMEL,
    PARAM,
    SCALARS,
    SKIP,
    STATES,
    STEPS,
    Coefficients,
    pointer,
)
from flatbed.kernels._triton.launch import TYPES, Launch, element, shared_kernel
from flatbed.kernels.step import (
    Grads,
    ParamSlot,
    Scaling,
    StepOptions,
    has_holes,
    in_order,
    squares_of,
    stride_of,
)
from flatbed.rule import Group, Rule

# ---- kernels


# Elements per program, 4 per thread: on an H200, 8 per thread were up to 10% slower, 16 up to 25%.
BLOCK = 512


@triton.jit(do_not_specialize=["partials_ptr", "n_blocks", "per_program"])
def squares_kernel(
    table_ptr, grads_ptr, blocks_ptr, partials_ptr, n_blocks, per_program,
    GRAD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sum of squares of the gradients in `per_program` consecutive blocks.

    In fp64: the order of additions depends on the dtype, and must not change the norm.
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
    """Round fp32 to bf16 by 16 bits of noise, up or down: the expected value is the exact one."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (noise & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # The sum must not change the exponent of inf and nan.
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, rounded).to(tl.bfloat16)


@triton.jit
def load_as(ptr, mask, TYPE: tl.constexpr):
    """Load elements; masked elements are 0."""
    if mask is None:
        value = tl.load(ptr)
    else:
        value = tl.load(ptr, mask=mask, other=0.0)
    return value.to(TYPE)


@triton.jit
def load_line(line_ptr, TYPE: tl.constexpr):
    """Load the rule's part of a line of hyperparameters or coefficients."""
    values = ()
    for i in tl.static_range(1, LINE):
        values = values + (tl.load(line_ptr + i).to(TYPE),)  # noqa: RUF005
    return values


@triton.jit
def load_state(ptrs, absent, mask, HAS: tl.constexpr, TYPE: tl.constexpr):
    """Load the tensors of state that exist, by the bits of HAS; `absent` stands for the others."""
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
        noise = tl.randint(seed + 1, position).to(tl.uint32, bitcast=True)  # 32 bits: noise for two tensors
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
    """Update elements of parameters or rows: scale the gradient, apply the rule, round, store.

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

    `GRAD_VECTOR` is 1 for gradients that are not aligned, for example the views of one buffer of FSDP2.
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


# ---- tables of addresses and launches


class LaunchKey(NamedTuple):
    """The properties that the parameters of one launch share."""

    has: int
    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    master: bool
    ema: bool
    norm_class: int

    @staticmethod
    def of(slot: ParamSlot, rule: Rule) -> LaunchKey:
        has = sum(1 << bit for bit, name in enumerate(rule.state) if name in slot.state)
        master, ema = slot.master is not None, slot.ema is not None
        dtypes = slot.param.dtype, slot.grad_dtype, slot.state_dtype
        return LaunchKey(has, *dtypes, master, ema, slot.norm_class)

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.param, torch.float32)

    @property
    def vector(self) -> int:
        """Elements that a thread loads at once: 16 bytes of the widest dtype."""
        used = [self.param, self.grad]
        used += [self.state] if self.has else []
        used += [self.compute] if self.master or self.ema else []
        return 16 // max(dtype.itemsize for dtype in used)


@dataclass(frozen=True, slots=True)
class LaunchGroup:
    """The blocks of all parameters with one launch key."""

    key: LaunchKey
    blocks: Tensor  # int32: the slot of each block
    partials: Tensor  # output of `squares`
    blocks_per_partial: int
    salt: int


class TritonStepper:
    """Applies a rule to parameters on one GPU, or on the CPU under Triton's interpreter."""

    def __init__(
        self, rule: Rule, groups: Sequence[Group], slots: list[ParamSlot], step_stats: Tensor
    ) -> None:
        self.rule = rule
        self.slots = slots
        self.device = slots[0].param.device
        # A parameter with holes is updated in a dense copy.
        self._copies = {i: _dense(slot.param) for i, slot in enumerate(slots) if has_holes(slot.param)}
        self._empty = [i for i, slot in enumerate(slots) if slot.param.numel() == 0]
        self._table, self._groups, self._partials = self._build()
        also_used = [*self._copies.values(), *(group.blocks for group in self._groups)]
        self._coefficients = Coefficients(
            rule, groups, self._table, step_stats=step_stats, partials=self._partials, also_used=also_used
        )
        sizes: dict[int, int] = {}
        for group in self._groups:  # sorted by norm class, so that each class is one piece
            sizes[group.key.norm_class] = sizes.get(group.key.norm_class, 0) + len(group.partials)
        pieces = torch.split(self._partials, [*sizes.values()])
        self._squares_by_class = dict(zip(sizes, pieces, strict=True))
        self.whole_grads: Grads | None = None
        """The gradients that the norm measures, if slots are parts of whole parameters."""
        self._squares: list[Launch] = []
        self._updates: list[Launch] = []
        self._ordered: list[Tensor] = []

    def _build(self) -> tuple[Tensor, list[LaunchGroup], Tensor]:
        keys: dict[LaunchKey, list[int]] = {}
        for i, slot in enumerate(self.slots):
            keys.setdefault(LaunchKey.of(slot, self.rule), []).append(i)
        keys = dict(sorted(keys.items(), key=lambda item: item[0].norm_class))
        table = np.zeros((len(self.slots), COLUMNS), np.int64)
        found = []
        for key, indices in keys.items():
            counts = np.array([-(-self.slots[i].param.numel() // BLOCK) for i in indices])
            for i, first in zip(indices, np.cumsum(counts) - counts, strict=True):
                self._fill(table[i], i, int(first))
            blocks = torch.from_numpy(np.repeat(np.array(indices, np.int32), counts)).to(self.device)
            per_partial = max(1, -(-len(blocks) // MAX_PARTIALS))
            found.append((key, blocks, per_partial, -(-len(blocks) // per_partial)))
        sizes = [n_partials for *_, n_partials in found]
        partials = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        groups = [
            LaunchGroup(key, blocks, piece, per_partial, salt)
            for salt, ((key, blocks, per_partial, _), piece) in enumerate(
                zip(found, torch.split(partials, sizes), strict=True)
            )
        ]
        return torch.from_numpy(table).to(self.device), groups, partials

    def _fill(self, line: np.ndarray[Any, Any], i: int, first_block: int) -> None:
        slot = self.slots[i]
        line[FIRST_BLOCK] = first_block
        line[NUMEL] = slot.param.numel()
        line[GROUP] = slot.group
        line[PARAM] = self._copies.get(i, slot.param).data_ptr()
        line[MASTER] = 0 if slot.master is None else slot.master.data_ptr()
        line[EMA] = 0 if slot.ema is None else slot.ema.data_ptr()
        for column, name in enumerate(self.rule.scalars):
            line[SCALARS + column] = slot.scalars[name].data_ptr()
        for column, name in enumerate(self.rule.state):
            line[STATES + column] = slot.state[name].data_ptr() if name in slot.state else 0

    # ---- a step

    @property
    def captured(self) -> bool:
        return self._coefficients.captured

    def set_grads(self, grads: Grads, addresses: list[int], unordered: frozenset[int]) -> None:
        """Take one gradient per slot. Those in `unordered` differ from their parameter in element order."""
        # Copies must live until the kernels have read them.
        copies = {i: in_order(self.slots[i].param, cast(Tensor, grads[i])) for i in unordered}
        self._ordered = list(copies.values())
        if copies or self._empty:
            addresses = list(addresses)
        for i, copy in copies.items():
            addresses[i] = copy.data_ptr()
        for i in self._empty:
            # An empty gradient has no address. Kernels only test that the address is not 0.
            addresses[i] = 0 if grads[i] is None else self._table.data_ptr()
        self._coefficients.begin_step(addresses)

    def squares(self) -> dict[int, Tensor]:
        if self.whole_grads is not None:
            return squares_of(self.slots, self.whole_grads)
        launches = self._squares
        if not launches or self._coefficients.capturing:
            launches = self._bind_squares()
        for launch in launches:
            launch()
        return self._squares_by_class

    def update(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        self._coefficients.prepare(options, scaling, squares)
        for i, copy in self._copies.items():
            copy.copy_(self.slots[i].param)
        launches = self._updates
        if not launches or self._coefficients.capturing:
            launches = self._bind_updates(options)
        for launch in launches:
            launch()
        for i, copy in self._copies.items():
            self.slots[i].param.copy_(copy)
        self._ordered, self.whole_grads = [], None

    # Launches of a captured step are not kept, since the step has tables of its own.

    def _bind_squares(self) -> list[Launch]:
        launches = []
        for group in self._groups:
            grad = group.key.grad
            kernel = shared_kernel(squares_kernel, TYPES[grad], 16 // grad.itemsize, BLOCK, num_warps=2)
            memory = self._table, self._coefficients.arguments.grads, group.blocks, group.partials
            sizes = len(group.blocks), group.blocks_per_partial
            launches.append(kernel.bind(len(group.partials), (*memory, *sizes)))
        if not self._coefficients.capturing:
            self._squares = launches
        return launches

    def _bind_updates(self, options: StepOptions) -> list[Launch]:
        launches, coefficients = [], self._coefficients
        for group in self._groups:
            key = group.key
            stochastic = options.stochastic_rounding and key.param == torch.bfloat16 and not key.master
            stochastic_state = options.stochastic_state and key.state == torch.bfloat16
            types = (TYPES[dtype] for dtype in (key.param, key.grad, key.state, key.compute))
            flags = key.master, key.ema, stochastic, stochastic_state
            constants = (element(self.rule.update), key.has, *types, *flags, key.vector, BLOCK)
            memory = self._table, coefficients.arguments.grads, coefficients.values, coefficients.step_stats
            numbers = 1.0 - (options.ema_decay or 0.0), group.salt
            kernel = shared_kernel(update_kernel, *constants)
            launches.append(kernel.bind(len(group.blocks), (*memory, group.blocks, *numbers)))
        if not coefficients.capturing:
            self._updates = launches
        return launches


def _dense(param: Tensor) -> Tensor:
    return torch.empty_strided(tuple(param.shape), stride_of(param), dtype=param.dtype, device=param.device)
