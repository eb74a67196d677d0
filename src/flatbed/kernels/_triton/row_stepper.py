"""A rule over the rows of tables, on a GPU or under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.kernels._triton import row_kernels
from flatbed.kernels._triton.launch import TYPES, Bound, element
from flatbed.kernels._triton.rows import UPDATERS, addresses, power, programs, squares, tile
from flatbed.kernels._triton.stepper import EMPTY, TritonStepper
from flatbed.kernels.rows import RecordLocation
from flatbed.kernels.step import ParamSlot, Scaling, Settings
from flatbed.rule import MAX_NUMBERS, Group, Rule


@dataclass(frozen=True, slots=True)
class Plan:
    """How a table's records are read."""

    dim: int
    weight: torch.dtype
    state: torch.dtype
    stride: int
    offsets: tuple[int, ...]
    """Of the tensors of state, by the rule's order; 0 for one that there is not."""
    numbers: tuple[int, ...]
    """Of the numbers of state, if every row has its own."""
    has: int


class TritonRows:
    """Runs a rule over the rows of the tables of one device.

    What is the same for all rows of a table (step count, clipping, coefficients) is prepared as for any other
    parameter: each table is a parameter without elements there.
    """

    def __init__(
        self,
        rule: Rule,
        groups: Sequence[Group],
        heads: list[ParamSlot],
        *,
        plans: list[Plan],
        shared: Tensor,
    ) -> None:
        self.rule = rule
        self.plans = plans
        self.heads = TritonStepper(rule, groups, heads, shared)
        self._present: list[bool] = []
        self._launches: dict[Any, Bound] = {}

    def squares(self, grads: list[Tensor]) -> Tensor:
        """Partial sums of squares of the gradients as they are."""
        parts = [squares(g) for g in grads if g.numel()]
        return torch.cat(parts) if parts else self.heads._zeros(1)

    def prepare(
        self, present: list[bool], settings: Settings, scaling: Scaling | None, squares: Tensor | None
    ) -> None:
        """Count the step, and find the coefficients."""
        addresses = None if present == self._present else [EMPTY if there else 0 for there in present]
        empty = self.heads.rows[0].param
        self.heads.place([empty if there else None for there in present], frozenset(), addresses)
        self.heads.update(settings, scaling, squares)
        self._present = present

    def update(
        self,
        index: int,
        rows: Tensor,
        grads: Tensor,
        place: RecordLocation,
        settings: Settings,
        *,
        staged: bool = False,
        weights: Tensor | None = None,
    ) -> None:
        """Update the rows of one table in their records: where all are, or staged copies in their order.

        `weights`: the rows' weights, if they are on the device already: they are not read again then.
        """
        plan, n = self.plans[index], len(rows)
        if n == 0:
            return
        stochastic = settings.stochastic_rounding and plan.weight == torch.bfloat16
        cached, read = place.cached is not None, weights is None
        kind = (index, grads.dtype, stochastic, staged, read, cached)
        launch = self._launches.get(kind)
        if launch is None:
            launch = self._launches[kind] = self._bound(plan, *kind[1:])
        weights = rows if weights is None else weights  # some memory, if it is not read
        launch(
            programs(-(-n // tile(power(plan.dim), 512)), UPDATERS, place), rows.device,
            *addresses(place, rows), rows, grads.contiguous(), weights, weights.stride(0),
            self.heads._coefficients, self.heads.tables.numbers, self.heads.shared,
            n, index, self.heads.rows[index].group,
        )  # fmt: skip

    def _bound(
        self, plan: Plan, grad: torch.dtype, stochastic: bool, staged: bool, read: bool, cached: bool
    ) -> Bound:
        rule, columns = self.rule, power(plan.dim)
        compute = torch.promote_types(plan.weight, torch.float32)
        offsets = (*plan.offsets, 0, 0, 0, 0)[:4]
        first, second = (*plan.numbers, 0, 0)[:2]
        assert rule.prepare is not None
        assert rule.update is not None
        constants = (
            element(rule.prepare), element(rule.update), plan.has, len(rule.scalars),
            plan.stride, *offsets, first, second, rule.rowwise,
            TYPES[plan.weight], TYPES[grad], TYPES[plan.state], TYPES[compute],
            bool(plan.numbers), stochastic, staged, not read,
            cached, 1 + MAX_NUMBERS, plan.dim, columns, tile(columns, 512),
        )  # fmt: skip
        return Bound(row_kernels.step, constants, num_warps=2 if columns <= 256 else 4)
