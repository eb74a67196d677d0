"""The tiers whose records all lie in memory: on the device that computes, or on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from flatbed.cuda.host_memory import HostMemory, allocate
from flatbed.errors import FlatbedError
from flatbed.tables.record import Record

CPU = torch.device("cpu")


class MemoryStorage:
    """Records in one piece of memory. Use `device_tier` or `host_tier` to make one."""

    def __init__(
        self,
        record: Record,
        n_rows: int,
        memory: Tensor,
        *,
        held: HostMemory | None,
        made_for: torch.device,
    ) -> None:
        self.record = record
        self.n_rows = n_rows
        self.device = memory.device
        self.memory: Tensor | None = memory
        self.made_for = made_for
        self.reach = made_for if held is None or held.addressable else CPU
        """The device whose kernels can address the memory."""
        self._held = held

    def check(self) -> None:
        """Memory that is gone, or that of the process this one was forked from, must not be touched."""
        if self.memory is None:
            raise FlatbedError("this table is closed: make it again to use it")
        if self._held is not None:
            self._held.check()

    def _records(self) -> Tensor:
        self.check()
        assert self.memory is not None
        return self.memory

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        return self._records()[:, :nbytes].index_select(0, ids)

    def scatter_(self, ids: Tensor, records: Tensor) -> None:
        self._records().index_copy_(0, ids, records.to(self.device))

    def read(self, start: int, stop: int) -> Tensor:
        return self._records()[start:stop].clone()

    def write_(self, start: int, records: Tensor) -> None:
        self._records()[start : start + len(records)] = records.to(self.device)

    def flush(self) -> None:
        self.check()

    def release(self) -> None:
        """Forget the memory, which goes with its last view: someone may still hold one."""
        self.memory = self._held = None

    def close(self) -> None:
        self.memory = None
        if self._held is not None:
            self._held.close()


def device_tier(record: Record, n_rows: int, device: torch.device) -> MemoryStorage:
    """Records in the memory of the device that computes."""
    try:
        memory = torch.zeros((n_rows, record.nbytes), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
        raise FlatbedError(
            f'{n_rows} rows of {record.nbytes} bytes do not fit on {device}: use storage="host" or "disk" '
            f"({error})"
        ) from error
    return MemoryStorage(record, n_rows, memory, held=None, made_for=device)


def host_tier(record: Record, n_rows: int, device: torch.device) -> MemoryStorage:
    """Records in host memory; if it can be had, in such that kernels of `device` can address."""
    held = allocate(max(1, n_rows) * record.nbytes, device=device)
    memory = held.tensor[: n_rows * record.nbytes].view(n_rows, record.nbytes)
    return MemoryStorage(record, n_rows, memory, held=held, made_for=device)
