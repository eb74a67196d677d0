"""Loss scaling: who unscales gradients, a GradScaler or the step, and overflows that any rank has found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatbed.distributed.dtensor import ShardGroups
from flatbed.kernels.step import Scaling
from flatbed.rule import Group
from flatbed.tables.sharding import any_replica
from flatbed.tables.table import Table


def belongs_to_step(groups: Sequence[Group]) -> bool:
    """Tell if the step has to unscale gradients and skip overflows itself.

    As in torch, `fused=True` asks for that: the host then does not wait for the GPU. Without it,
    frameworks that clip gradients or count skipped steps work as with torch's default. A GradScaler
    cannot wait inside of a CUDA graph, and it refuses fp16 gradients.
    """
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call,unused-ignore]
    return (
        any(group.get("fused") for group in groups)
        or (has_cuda and torch.cuda.is_current_stream_capturing())
        or any(p.dtype == torch.float16 for group in groups for p in group["params"])
    )


def scaling_of(optimizer: Any, tables: Sequence[Table], shard_groups: ShardGroups) -> Scaling | None:
    """Return what a GradScaler has given to an optimizer; an overflow of one rank is one of all."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and found_inf is None:
        return None
    if tables:
        found_inf = any_replica(found_inf, tables)
    if found_inf is not None and shard_groups.many:
        found_inf = shard_groups.any(found_inf)
    return Scaling(scale, found_inf)


def unscale_(scaling: Scaling, grads: list[Any]) -> None:
    """Unscale gradients as torch's fused steps do; after an overflow they stay scaled."""
    divisor: Any = scaling.scale
    if scaling.found_inf is not None:
        divisor = torch.where(scaling.found_inf.to(divisor.device) == 0, divisor, 1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    for device, held in by_device.items():
        torch._foreach_div_(held, divisor.squeeze().to(device))
