"""The step of the rows of tables, on a GPU or under Triton's interpreter: one kernel per table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from flatbed.kernels import RecordLocation
from flatbed.kernels._triton.coefficients import COLUMNS, GROUP, LINE, SCALARS, SKIP, STEPS, Coefficients
from flatbed.kernels._triton.launch import TYPES, Kernel, element
from flatbed.kernels._triton.rows import field, located, sum_squares, tile
from flatbed.kernels._triton.step import load_as, load_line, load_state, update_elements
from flatbed.kernels.step import StepOptions
from flatbed.rule import Group, Rule

# Programs at most for records behind the bus, of two to four warps: one per SM of an H200 saturates the bus.
PROGRAMS = 132


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


@triton.jit(do_not_specialize=["memory", "cached", "n", "index", "group"])
def step_rows_kernel(
    memory, cached, slot_of_row_ptr, dirty_ptr, rows_ptr, grads_ptr, weights_ptr,
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
        p = load_as(weights_ptr + i * DIM + column if FETCHED else p_ptr, mask, COMPUTE)
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


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table as the row kernel sees it."""

    group: int
    has: int
    scalars: Mapping[str, Tensor]
    """The scalars that are one per table, by the rule's names."""
    row_scalars: tuple[str, ...]
    """The names of the scalars that each row has."""
    record: Any
    """The layout of a row: its fields by name, with their offsets."""


class TritonRows:
    """Applies a rule to the rows of the tables of one device."""

    def __init__(
        self, rule: Rule, groups: Sequence[Group], layouts: list[TableLayout], step_stats: Tensor
    ) -> None:
        self.rule = rule
        self.layouts = layouts
        self.device = step_stats.device
        table = np.zeros((len(layouts), COLUMNS), np.int64)
        unused = torch.zeros((), device=self.device)  # stands for scalars that are in the records
        for line, layout in zip(table, layouts, strict=True):
            line[GROUP] = layout.group
            for column, name in enumerate(rule.scalars):
                line[SCALARS + column] = layout.scalars.get(name, unused).data_ptr()
        also_used = [unused, *(scalar for layout in layouts for scalar in layout.scalars.values())]
        lines = torch.from_numpy(table).to(self.device)
        self.coefficients = Coefficients(rule, groups, lines, step_stats=step_stats, also_used=also_used)
        self.sum_squares = sum_squares
        self._kernels: dict[Any, tuple[int, Kernel]] = {}

    def update_rows(
        self,
        index: int,
        rows: Tensor,
        grads: Tensor,
        location: RecordLocation,
        options: StepOptions,
        *,
        staged: bool = False,
        weights: Tensor | None = None,
    ) -> None:
        """Update rows of one table in their records.

        `staged`: the location holds copies of the records, in the order of `rows`. `weights`: the rows'
        weights, if they are on the device already; the kernel does not read them again.
        """
        layout, n, rows = self.layouts[index], len(rows), rows.contiguous()
        if n == 0:
            return
        stochastic = options.stochastic_rounding and layout.record.weight.dtype == torch.bfloat16
        cached = location.cached is not None
        key = (index, stochastic, staged, weights is not None, cached)
        if key not in self._kernels:
            self._kernels[key] = _step_kernel(self.rule, layout, *key[1:])
        rows_at_once, launch = self._kernels[key]
        most = 1 << 16 if location.is_near else PROGRAMS
        slots = (location.slot_of_row, location.dirty) if cached else (rows, rows)
        # Any memory, if the kernel does not read it.
        weights = rows if weights is None else weights.contiguous()
        launch(
            min(-(-n // rows_at_once), most), rows.device,
            *location.addresses, *slots, rows, grads.contiguous(), weights,
            self.coefficients.values, self.coefficients.arguments.hyperparameters,
            self.coefficients.step_stats, n, index, layout.group,
        )  # fmt: skip


def _step_kernel(
    rule: Rule, layout: TableLayout, stochastic: bool, staged: bool, fetched: bool, cached: bool
) -> tuple[int, Kernel]:
    record, weight = layout.record, layout.record.weight
    columns = triton.next_power_of_2(weight.count)
    n_rows = tile(columns, 512)
    compute = torch.promote_types(weight.dtype, torch.float32)
    state = next((record[name].dtype for name in rule.state if name in record), weight.dtype)
    state_offsets = [record.offsets.get(name, 0) for name in rule.state]  # 0 for an absent one
    scalar_offsets = [record.offsets[name] for name in layout.row_scalars]
    kernel = Kernel(
        step_rows_kernel, element(rule.prepare), element(rule.update), layout.has, len(rule.scalars),
        record.nbytes, *(*state_offsets, 0, 0, 0, 0)[:4], *(*scalar_offsets, 0, 0)[:2],
        rule.rowwise, TYPES[weight.dtype], TYPES[state], TYPES[compute],
        bool(scalar_offsets), stochastic, staged, fetched, cached, weight.count, columns, n_rows,
        num_warps=2 if columns <= 256 else 4,
    )  # fmt: skip
    return n_rows, kernel
