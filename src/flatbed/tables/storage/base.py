"""Where records live: one protocol for GPU memory, host memory and files."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flatbed.tables.record import Record


class Storage(Protocol):
    """The records of a table. Knows nothing of autograd, of optimizers or of other tiers.

    Ids are int64 on `device`, in range and, for `scatter_`, distinct: whoever calls has seen to it.
    """

    record: Record
    n_rows: int
    device: torch.device
    """Where records are handed out: the CPU for host memory and files."""
    memory: Tensor | None
    """All records, (n_rows, nbytes) of uint8, if they can be addressed: by torch on `device`, and by
    kernels on the device that the tier was made for."""

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        """Copies of the records of these rows, (n, nbytes) of uint8; or of their first `nbytes` bytes."""

    def scatter_(self, ids: Tensor, records: Tensor) -> None:
        """Replace the records of these rows."""

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of consecutive records."""

    def write_(self, start: int, records: Tensor) -> None:
        """Replace consecutive records."""

    def flush(self) -> None:
        """Let everything written so far arrive at home."""

    def close(self) -> None:
        """Give memory and files back. The tier cannot be used any more; closing twice is allowed."""
