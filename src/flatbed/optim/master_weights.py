"""fp32 master weights of low-precision parameters, and how they learn of writes to the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from flatbed.cuda.streams import is_capturing
from flatbed.errors import FlatbedError
from flatbed.kernels.step import ParamSlot


class MasterWeights:
    """The slots that have a master, and their parameters' versions after the last step."""

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        self.slots = [slot for slot in slots if slot.master is not None]
        self.versions: list[int] = []

    def record_versions(self) -> None:
        """Record that masters and parameters agree: a parameter of another version has been written to."""
        self.versions = [slot.param._version for slot in self.slots]

    def sync_from_params(self) -> None:
        """Update the masters of parameters that were written to since the last step."""
        if not self.slots:
            return
        written = [
            slot
            for slot, version in zip(self.slots, self.versions, strict=True)
            # A flat parameter's version does not count writes to its views.
            if slot.param._version != version or type(slot.param) not in (Tensor, nn.Parameter)
        ]
        if any(is_capturing(slot.param.device) for slot in written):
            raise FlatbedError(
                "parameters were written to since the last step, and every replay would update their fp32 "
                "masters: call optimizer.refresh_masters() before the capture"
            )
        _sync(written)

    def sync_all(self) -> None:
        """Update all masters."""
        _sync(self.slots)


def _sync(slots: list[ParamSlot]) -> None:
    """Set a master to its parameter wherever the parameter is not the rounded master."""
    for slot in slots:
        master = cast(Tensor, slot.master)
        master.copy_(torch.where(master.to(slot.param.dtype) == slot.param, master, slot.param.float()))
