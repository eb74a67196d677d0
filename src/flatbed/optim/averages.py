"""Averaged weights in the model for a while, in place of the trained ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flatbed.distributed.dtensor import reshard
from flatbed.distributed.shard_state import exchange
from flatbed.errors import FlatbedError
from flatbed.optim.plan import Plan


def put_averages(plan: Plan, model: nn.Module | None) -> list[Tensor]:
    """Write the averages into the parameters, and return the trained weights."""
    if plan.has_dtensors and model is None:
        raise FlatbedError(
            "ema_weights() does not know the model whose shards it changes: call ema_weights(model)"
        )
    averages = [slot.ema for slot in plan.slots if slot.ema is not None]
    trained = [slot.param.detach().clone() for slot in plan.slots if slot.ema is not None]
    put_weights(plan, model, averages)
    return trained


def put_weights(plan: Plan, model: nn.Module | None, values: Sequence[Tensor]) -> None:
    """Write a value into each parameter that has an average; modules of FSDP2 gather their weights again."""
    averaged = [slot.param for slot in plan.slots if slot.ema is not None]
    for param, value in zip(averaged, values, strict=True):
        param.copy_(value)
    exchange(plan.pieces)
    if plan.has_dtensors and model is not None:
        reshard(model)
