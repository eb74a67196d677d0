"""The update of one step: loss scaling, the norm of all gradients, parameters and tables of all devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.distributed.dtensor import local_of
from flatbed.distributed.shard_state import exchange_pieces
from flatbed.kernels.step import NORM, Scaling, Stepper
from flatbed.optim.plan import Plan, StepGrads
from flatbed.tables.grads import RowGrads
from flatbed.tables.sharding import any_replica

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer


def update(optimizer: Optimizer, plan: Plan, found: StepGrads, packs: list[RowGrads | None]) -> None:
    """Update parameters and, if there are `packs`, tables; all are clipped by the norm of all."""
    options, tables = optimizer._options, optimizer._tables
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    has_scaling = scale is not None or found_inf is not None
    scaling = Scaling(scale, _found_by_any_rank(optimizer, plan, found_inf)) if has_scaling else None
    if plan.masters.slots:
        plan.masters.sync_written()
    steppers: list[Stepper] = []
    if packs:  # first, since files may fail
        steppers += tables.steppers_for(optimizer, packs)
    plan.set_grads(found)
    steppers += plan.steppers
    squares: Tensor | None = None  # a single stepper has its own
    if options.needs_norm:
        by_class = [stepper.squares(options) for stepper in steppers]
        if plan.shard_groups.many:
            squares = plan.shard_groups.total(by_class)
        elif packs or len(steppers) > 1:
            held = [values for of_stepper in by_class for values in of_stepper.values()]
            squares = torch.cat([values.to(held[0].device) for values in held])
    if not steppers and squares is not None:  # only other ranks have gradients
        optimizer._stats.of("params", [squares.device])[squares.device][NORM] = squares.sum().sqrt()
    for stepper in steppers:
        of_all = None if squares is None else squares.to(stepper.device)
        stepper.update(options, None if scaling is None else scaling.to(stepper.device), of_all)
    if plan.pieces:
        exchange_pieces(plan.pieces, optimizer._peers)
    if found.owners:
        torch.autograd.graph.increment_version(found.owners)
    if plan.masters.slots:
        plan.masters.record_versions()
    if scaling is not None and scaling.scale is not None:
        rows = [slot.table.grad for slot, pack in zip(tables.slots, packs, strict=False) if pack is not None]
        grads: list[Any] = [p.grad for p in found.owners]
        _unscale_(scaling, [*map(local_of, grads), *rows])


def _found_by_any_rank(optimizer: Optimizer, plan: Plan, found_inf: Tensor | None) -> Tensor | None:
    """Return the overflow flag of a GradScaler; an overflow of one rank is one of all."""
    if tables := [slot.table for slot in optimizer._tables.slots]:
        found_inf = any_replica(found_inf, tables)
    if found_inf is not None and plan.shard_groups.many:
        found_inf = plan.shard_groups.any(found_inf)
    return found_inf


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
