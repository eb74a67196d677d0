"""One step of an optimizer: loss scaling, the norm of all gradients, the update of parameters and rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing
from flatbed.distributed.dense_shards import local_of
from flatbed.distributed.state_shards import exchange_pieces
from flatbed.errors import FlatbedError
from flatbed.kernels.step import NORM, SKIP, SKIPPED, STEPS, Scaling, Stepper, begin_step
from flatbed.optim.plan import GRAD, Plan
from flatbed.optim.table_step import TableStepper
from flatbed.tables.grad_exchange import any_replica

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer


class StepStats:
    """The vectors of step statistics, for each kind of step ("params", "tables") and device.

    They outlive plans.
    """

    def __init__(self) -> None:
        self._vectors: dict[str, dict[torch.device, Tensor]] = {}
        self._first_step = 0

    def of(self, kind: str, devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
        """Return the statistics of these devices. A new device continues those of a former one."""
        held = self._vectors.get(kind, {})
        start = torch.zeros(4, dtype=torch.float64, device="cpu")
        start[STEPS] = self._first_step
        known = next(iter(held.values()), start)
        found = {device: held.get(device, known.to(device, copy=True)) for device in devices}
        if found:
            self._vectors[kind] = found
        return found

    def _all(self) -> list[Tensor]:
        """Return all vectors, first the vectors of parameters."""
        return [vector for kind in sorted(self._vectors) for vector in self._vectors[kind].values()]

    def count_without_params(self, vector: Tensor) -> None:
        """Count a step that only updated tables in the statistics of parameters, which users read.

        Statistics on another device stay as they are: a step would have to wait for that device.
        """
        held = self._vectors.get("params", {}).get(vector.device)
        if held is not None:
            held[NORM] = vector[NORM]
            held[STEPS] += 1
            held[SKIPPED] += vector[SKIP]

    @property
    def latest(self) -> Tensor | None:
        """The statistics of the last step: of parameters if the plan has any, otherwise of tables."""
        return next(iter(self._all()), None)

    @property
    def n_steps(self) -> int:
        """The number of steps so far, which chooses the noise of stochastic rounding. Waits for the GPU."""
        return max((int(vector[STEPS]) for vector in self._all()), default=self._first_step)

    def set_steps(self, n_steps: int) -> None:
        """Continue from this number of steps."""
        self._first_step = n_steps
        for vector in self._all():
            vector[STEPS] = n_steps

    def __getstate__(self) -> dict[str, Any]:
        """Return the number of steps, from which a copy continues on any device."""
        return {"_vectors": {}, "_first_step": self.n_steps}


def update_all(optimizer: Optimizer, plan: Plan, table_steppers: list[TableStepper]) -> None:
    """Collect the gradients of parameters, clip all gradients, and update parameters and rows that have one.

    The steppers of tables have their gradients already.
    """
    options = optimizer._options
    if plan.masters.slots:
        plan.masters.sync_written()
    owners = plan.collect_grads() if plan.slots else []
    if owners is None:  # gradients of another kind: building a plan checks them
        plan = optimizer._rebuild()
        owners = plan.collect_grads()
        assert owners is not None
    if not (owners or table_steppers):
        optimizer._refuse_replaced_params()
    steppers: list[Stepper] = [*table_steppers, *plan.steppers]
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    has_scaling = scale is not None or found_inf is not None
    if not steppers and not (plan.shard_groups.many and (options.needs_norm or has_scaling)):
        return
    scaling = Scaling(scale, _found_by_any_rank(optimizer, plan, found_inf)) if has_scaling else None
    squares: Tensor | None = None  # None: a single stepper with one norm class uses its own
    if options.needs_norm:
        by_class = [stepper.squares() for stepper in steppers]
        held = [values for of_stepper in by_class for values in of_stepper.values()]
        if plan.shard_groups.many:
            squares = plan.shard_groups.total(by_class)
        elif table_steppers or len(held) > 1:
            squares = torch.cat([values.to(held[0].device) for values in held])
    if not steppers and squares is not None:  # only other ranks have gradients, and wait for the norm
        stats = optimizer._stats.of("params", [squares.device])[squares.device]
        here = None if scaling is None else scaling.to(squares.device)
        begin_step(options, here, squares.sum().sqrt().float(), stats)
    # A capture changes nothing, also if it fails.
    optimizer._has_partial_step = not any(is_capturing(stepper.device) for stepper in steppers)
    for stepper in steppers:
        of_all = None if squares is None else squares.to(stepper.device)
        stepper.update(options, None if scaling is None else scaling.to(stepper.device), of_all)
    if table_steppers and not plan.steppers:
        optimizer._stats.count_without_params(table_steppers[0].step_stats)
    if plan.pieces:
        exchange_pieces(plan.pieces)
    optimizer._has_partial_step = False
    if owners:
        torch.autograd.graph.increment_version(plan.counters if owners is plan.owners else owners)
    if plan.masters.slots:
        plan.masters.record_versions()
    if scaling is not None and scaling.scale is not None:
        tables = [owned.table for stepper in table_steppers for owned in stepper.tables]
        grads: list[Any] = [*map(local_of, map(GRAD, owners))]
        _unscale_(scaling, grads + [table.grad for table in tables if table._grads.parts])


def _found_by_any_rank(optimizer: Optimizer, plan: Plan, found_inf: Tensor | None) -> Tensor | None:
    """Return the overflow flag of a GradScaler. It is set if gradients overflow on any rank."""
    if tables := [owned.table for owned in optimizer._tables.owned]:
        found_inf = any_replica(found_inf, tables)
    if found_inf is None or not plan.shard_groups.many:
        return found_inf
    found = plan.shard_groups.any(found_inf)
    # If pipeline stages share a norm, this rank's meshes do not decide: other stages may have more or fewer.
    if plan.has_several_meshes or optimizer._norm_group is not None:
        found_by_all = 1 - plan.shard_groups.any(1 - found_inf)
        if bool(found != found_by_all):
            raise FlatbedError(
                "gradients overflowed on some ranks only. torch's GradScaler tells the ranks of one mesh, "
                "and would scale differently on the others: train parameters on several meshes in bfloat16"
            )
    return found


def _unscale_(scaling: Scaling, grads: list[Any]) -> None:
    """Unscale gradients as torch's fused steps do; after an overflow they stay scaled."""
    divisor: Any = scaling.scale
    if scaling.found_inf is not None:
        divisor = torch.where(scaling.found_inf.to(divisor.device) == 0, divisor, 1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    for device, held in by_device.items():
        torch._foreach_div_(held, divisor.squeeze().to(device))
