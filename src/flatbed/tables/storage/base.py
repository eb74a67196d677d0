"""The protocol of storages, where the records of a table are kept, and the storages in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from flatbed.cuda.host_memory import HostMemory, allocate
from flatbed.errors import FlatbedError
from flatbed.progress import progress
from flatbed.tables import initializers
from flatbed.tables.config import Config
from flatbed.tables.record import WEIGHT, Record

CPU = torch.device("cpu")
CHUNK_BYTES = 1 << 26  # of rows copied at a time, in memory besides the table

Fill = Callable[[int, int, Tensor], None]
"""fill(start, stop, records) writes rows into zeroed memory, (stop - start, nbytes) of uint8."""


class Storage(Protocol):
    """All records of a table: in GPU memory, in host memory or in a file.

    Ids are int64 on `device`, in range and, for `scatter_`, unique. The caller checks this.
    """

    record: Record
    n_rows: int
    device: torch.device
    """Device of the tensors that `gather` and `read` return: the CPU for host memory and files."""
    memory: Tensor | None
    """All records, (n_rows, nbytes) of uint8 on `device`; None for a file."""
    reach: torch.device | None
    """Device whose kernels can address `memory`."""

    def serves(self, device: torch.device) -> bool:
        """True if `device` can compute with these records where they are."""

    def check(self) -> None:
        """Raise if the storage is closed, or if this process was forked from the one that made it."""

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        """Copy records of rows, (n, nbytes) of uint8, or their first `nbytes` bytes."""

    def scatter_(self, ids: Tensor, records: Tensor) -> None:
        """Replace the records of rows."""

    def read(self, start: int, stop: int) -> Tensor:
        """Copy consecutive records."""

    def write_(self, start: int, records: Tensor) -> None:
        """Replace consecutive records."""

    def rebuilt(
        self, record: Record, *, fill: Fill, device: torch.device = CPU, meta: Mapping[str, Any] | None = None
    ) -> Storage:
        """Make a storage with other records, or for another device, that replaces this one.

        `fill` may read from this storage, which is closed afterwards. After an error it stays as it was.
        """

    def resize(self, n_rows: int, *, fill: Fill, meta: Mapping[str, Any] | None = None) -> Storage:
        """Add rows at the end. Returns this storage, or one that replaces it."""

    def close(self) -> None:
        """Release memory and files; a second call does nothing."""


def row_blocks(start: int, stop: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of consecutive blocks of rows of about `CHUNK_BYTES`."""
    step = max(1, CHUNK_BYTES // row_bytes)
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


# ---- first contents of records


def fill_state(record: Record, records: Tensor) -> None:
    """Write the first values of optimizer state."""
    for field in record.state:
        record.view(records, field.name).fill_(field.initial)


def initial_rows(config: Config, record: Record) -> Fill:
    """Fill rows with their first weights, drawn from (seed, row), and their first state."""

    def fill(start: int, stop: int, records: Tensor) -> None:
        weights = record.view(records, WEIGHT)
        initializers.fill_(
            weights,
            first_row=config.shard_rank + start * config.n_shards,
            stride=config.n_shards,
            init=config.init,
            seed=config.seed,
            padding_idx=config.padding_idx,
        )
        fill_state(record, records)

    return fill


def begins_at_zero(config: Config, record: Record) -> bool:
    """Return True if all first values are zero, so that new memory need not be written."""
    return config.init.kind == "zeros" and not any(field.initial for field in record.state)


def kept_rows(old: Storage, record: Record, *, with_state: bool) -> Fill:
    """Fill rows from another storage. Fields that it lacks, and state without `with_state`, begin again."""
    kept = [field.name for field in record.fields if field.name in old.record]
    kept = kept if with_state else kept[:1]

    def fill(start: int, stop: int, records: Tensor) -> None:
        fill_state(record, records)
        before = old.read(start, stop).cpu()
        for name in kept:
            record.view(records, name).copy_(old.record.view(before, name))

    return fill


@contextmanager
def reported(description: str, n_rows: int, fill: Fill) -> Iterator[Fill]:
    """Show a progress bar while a storage calls `fill`."""
    with progress(description, n_rows, "rows") as advance:

        def filling(start: int, stop: int, records: Tensor) -> None:
            fill(start, stop, records)
            advance(stop - start)

        yield filling


def in_turn(*fills: Fill) -> Fill:
    """Fill rows by several functions, one after the other."""

    def fill(start: int, stop: int, records: Tensor) -> None:
        for one in fills:
            one(start, stop, records)

    return fill


# ---- memory of the computing device, or of the host


class MemoryStorage:
    """Records in one tensor. Made by `device_storage` or `host_storage`."""

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
