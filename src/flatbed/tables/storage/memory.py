"""Storages whose records are in memory: of the computing device, or of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.host_memory import HostMemory, allocate
from flatbed.errors import FlatbedError
from flatbed.tables.record import Record
from flatbed.tables.storage.base import CPU, Fill, row_blocks


class MemoryStorage:
    """Records in one tensor. Made by `device_storage` or `host_storage`."""

    unsaved_rows = 0

    def __init__(
        self, record: Record, memory: Tensor, *, allocation: HostMemory | None, made_for: torch.device
    ) -> None:
        self.record = record
        self.n_rows = len(memory)
        self.device = memory.device
        self.memory: Tensor | None = memory
        self.reach: torch.device | None = made_for if allocation is None or allocation.addressable else CPU
        self._made_for = made_for
        self._allocation = allocation
        self._make: Callable[..., MemoryStorage] = device_storage if allocation is None else host_storage

    def serves(self, device: torch.device) -> bool:
        if self._allocation is None:
            return device == self.device
        return device.type == "cpu" or device == self._made_for

    def check(self) -> None:
        self._records()

    def _records(self) -> Tensor:
        if self.memory is None:
            raise FlatbedError("this table is closed: make it again to use it")
        if self._allocation is not None:
            self._allocation.check()
        return self.memory

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        return self._records()[:, :nbytes].index_select(0, ids)

    def scatter_(self, ids: Tensor, records: Tensor) -> None:
        self._records().index_copy_(0, ids, records.to(self.device))

    def read(self, start: int, stop: int) -> Tensor:
        return self._records()[start:stop].clone()

    def write_(self, start: int, records: Tensor) -> None:
        self._records()[start : start + len(records)] = records.to(self.device)

    def fill_(self, start: int, stop: int, fill: Fill) -> None:
        """Write the first values of new rows, which are zero, block by block."""
        is_on_host = self.device.type == "cpu"
        for first, last in row_blocks(start, stop, self.record.nbytes):
            block = self._records()[first:last]
            records = block if is_on_host else torch.zeros_like(block, device=CPU)
            fill(first, last, records)
            if not is_on_host:
                block.copy_(records)

    def rebuilt(
        self, record: Record, *, fill: Fill, device: torch.device = CPU, meta: Mapping[str, Any] | None = None
    ) -> MemoryStorage:
        new = self._make(record, self.n_rows, device)
        new.fill_(0, self.n_rows, fill)
        self.close()
        return new

    def resize(self, n_rows: int, *, fill: Fill, meta: Mapping[str, Any] | None = None) -> MemoryStorage:
        new = self._make(self.record, n_rows, self._made_for)
        new.fill_(self.n_rows, n_rows, fill)
        for first, last in row_blocks(0, self.n_rows, self.record.nbytes):
            new.write_(first, self.read(first, last))
        self.close()
        return new

    def close(self) -> None:
        """Drop the memory, which is freed with its last view: the user may still hold one."""
        self.memory = self._allocation = None


def device_storage(record: Record, n_rows: int, device: torch.device) -> MemoryStorage:
    """Allocate zeroed records in the memory of the computing device."""
    try:
        with torch.inference_mode(False):  # inference tensors could not be trained later
            memory = torch.zeros((n_rows, record.nbytes), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
        raise FlatbedError(
            f'{n_rows} rows of {record.nbytes} bytes do not fit on {device}: use storage="host" or "disk" '
            f"({error})"
        ) from error
    return MemoryStorage(record, memory, allocation=None, made_for=device)


def host_storage(record: Record, n_rows: int, device: torch.device) -> MemoryStorage:
    """Allocate zeroed records in host memory that kernels of `device` can address, where possible."""
    with torch.inference_mode(False):
        allocation = allocate(max(1, n_rows) * record.nbytes, device=device)
        memory = allocation.tensor[: n_rows * record.nbytes].view(n_rows, record.nbytes)
    return MemoryStorage(record, memory, allocation=allocation, made_for=device)
