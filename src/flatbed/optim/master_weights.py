"""Parameters that were written to, and the fp32 masters that have to follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from flatbed.errors import FlatbedError
from flatbed.kernels.step import ParamSlot


class MasterWeights:
    """The rows that have a master, and their parameters' versions after the last step."""

    def __init__(self, rows: Sequence[ParamSlot]) -> None:
        self.rows = [row for row in rows if row.master is not None]
        self.versions: list[int] = []

    def note(self) -> None:
        """From here on, a parameter of another version has been written to."""
        self.versions = [row.param._version for row in self.rows]

    def follow(self) -> None:
        """A parameter that was written to since the last step has the last word."""
        written = [
            row
            for row, version in zip(self.rows, self.versions, strict=True)
            # A flat parameter's version tells nothing of writes to its views.
            if row.param._version != version or type(row.param) not in (Tensor, nn.Parameter)
        ]
        if not written:
            return
        if any(row.param.is_cuda for row in written) and torch.cuda.is_current_stream_capturing():
            raise FlatbedError(
                "parameters were written to since the last step, and their fp32 masters would follow at "
                "every replay: call optimizer.refresh_masters() before the capture"
            )
        _take_over(written)

    def take_over(self) -> None:
        """Let all masters follow."""
        _take_over(self.rows)


def _take_over(rows: list[ParamSlot]) -> None:
    """Where a parameter is not its master, rounded, the parameter counts."""
    for row in rows:
        master = cast(Tensor, row.master)
        master.copy_(torch.where(master.to(row.param.dtype) == row.param, master, row.param.float()))
