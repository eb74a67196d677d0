"""A rule applied to the rows of tables, on a GPU or under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.kernels._triton import row_kernels
from flatbed.kernels._triton.coefficients import COLUMNS, GROUP, SCALARS, Coefficients, on_its_device
from flatbed.kernels._triton.launch import TYPES, Bound, element
from flatbed.kernels._triton.rows import UPDATERS, addresses, power, programs, squares, tile
from flatbed.kernels.records import RecordLocation
from flatbed.kernels.step import Scaling, StepOptions
from flatbed.rule import Group, Rule


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table as the row kernel sees it: its scalars, and the layout of its records."""

    group: int
    scalars: Mapping[str, Tensor]
    """The scalars that are one per table, by the rule's names."""
    dim: int
    weight: torch.dtype
    state: torch.dtype
    stride: int
    state_offsets: tuple[int, ...]
    """Of the tensors of state, in the rule's order; 0 for an absent one."""
    scalar_offsets: tuple[int, ...]
    """Of the scalars, if each row has its own."""
    has: int


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
        self.coefficients = Coefficients(
            rule,
            groups,
            torch.from_numpy(table).to(self.device),
            step_stats=step_stats,
            also_used=[unused, *(scalar for layout in layouts for scalar in layout.scalars.values())],
        )
        self._launches: dict[Any, Bound] = {}

    def squares(self, grads: list[Tensor]) -> Tensor:
        """Partial sums of squares of the gradients, still scaled."""
        parts = [squares(g) for g in grads if g.numel()]
        return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64, device=self.device)

    @on_its_device
    def prepare_coefficients(
        self, present: list[bool], options: StepOptions, scaling: Scaling | None, squares: Tensor | None
    ) -> None:
        """Count the step of the tables that have a gradient, and compute their coefficients."""
        self.coefficients.enter_stream()
        self.coefficients.set_grads([int(has_grad) for has_grad in present])
        self.coefficients.prepare(options, scaling, squares)

    def update(
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
        layout, n = self.layouts[index], len(rows)
        if n == 0:
            return
        stochastic = options.stochastic_rounding and layout.weight == torch.bfloat16
        key = (index, stochastic, staged, weights is not None, location.cached is not None)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._bind(layout, *key[1:])
        weights = rows if weights is None else weights  # any memory, if the kernel does not read it
        arguments = self.coefficients.arguments
        launch(
            programs(-(-n // tile(power(layout.dim), 512)), UPDATERS, location), rows.device,
            *addresses(location, rows), rows, grads.contiguous(), weights, weights.stride(0),
            self.coefficients.values, arguments.hyperparameters, self.coefficients.step_stats,
            n, index, layout.group,
        )  # fmt: skip

    def _bind(
        self, layout: TableLayout, stochastic: bool, staged: bool, fetched: bool, cached: bool
    ) -> Bound:
        rule, columns = self.rule, power(layout.dim)
        assert rule.prepare is not None
        assert rule.update is not None
        compute = torch.promote_types(layout.weight, torch.float32)
        constants = (
            element(rule.prepare), element(rule.update), layout.has, len(rule.scalars),
            layout.stride, *(*layout.state_offsets, 0, 0, 0, 0)[:4], *(*layout.scalar_offsets, 0, 0)[:2],
            rule.rowwise, TYPES[layout.weight], TYPES[layout.state], TYPES[compute],
            bool(layout.scalar_offsets), stochastic, staged, fetched, cached,
            layout.dim, columns, tile(columns, 512),
        )  # fmt: skip
        return Bound(row_kernels.step, constants, num_warps=2 if columns <= 256 else 4)
