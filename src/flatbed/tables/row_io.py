"""Rows by number: read and written on the computing device, in the cache or in storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from flatbed.kernels import RecordLocation
from flatbed.kernels import rows as ops
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.cache.host_index import HostIndexCache
from flatbed.tables.factory import location_of
from flatbed.tables.grads import RowGrads
from flatbed.tables.record import WEIGHT
from flatbed.tables.row_store import RowStore
from flatbed.tables.storage.base import Storage


class RowIO:
    """Access of lookups and steps to the rows of a `RowStore`.

    It refers to the storage, and not the other way round: a table that is deleted frees its memory at once.
    """

    def __init__(self, store: RowStore) -> None:
        self.store = store

    # ---- locations

    def location_for(
        self, batch: LookupBatch | None = None, *, update: bool = False
    ) -> RecordLocation | None:
        """Return where kernels and operations find rows; None if the host must move the records.

        The current stream is ordered after prefetches that may move the rows. `batch` is the one that the
        rows are of, if any. `update`: the rows will change.
        """
        storage = self.store.ensure_layout()
        cache = self.store.cache  # after the layout, which may replace it
        if cache is None:
            return location_of(storage, self.store.device)
        return cache.location_for(batch, update=update)

    def _host_access(self) -> Storage | HostIndexCache:
        """Return what reads and writes records that kernels do not reach."""
        cache = self.store.cache
        return self.store.ensure_layout() if cache is None else cast(HostIndexCache, cache)

    # ---- reading

    def batch_weights(self, batch: LookupBatch) -> Tensor:
        """Read the weights of a batch's unique rows."""
        return self.weights(batch.unique.rows, batch)

    def weights(self, rows: Tensor, batch: LookupBatch | None = None) -> Tensor:
        """Read the weights of rows, (n,) → (n, dim), on the computing device; `batch` is theirs, if any."""
        field = self.store.config.weight
        return self.gather(rows, field.nbytes, batch=batch).view(field.dtype)

    def gather(self, rows: Tensor, nbytes: int | None = None, *, batch: LookupBatch | None = None) -> Tensor:
        """Read records, or their first bytes, to the computing device; zeros for the row -1."""
        store = self.store
        nbytes = store.record.nbytes if nbytes is None else nbytes
        location = self.location_for(batch)
        if location is not None:
            return ops.gather(location, rows, nbytes)
        if not len(rows):
            return torch.empty((0, nbytes), dtype=torch.uint8, device=store.device)
        source, wanted = self._host_access(), rows.to("cpu")
        present = wanted >= 0
        records = source.gather(wanted if bool(present.all()) else wanted[present], nbytes)
        if len(records) < len(rows):
            whole = torch.zeros((len(rows), nbytes), dtype=torch.uint8, device=records.device)
            records = whole.index_copy_(0, present.nonzero().flatten().to(records.device), records)
        if records.device == store.device:
            return records
        return records.pin_memory().to(store.device, non_blocking=True)

    def read_fields(self, rows: Tensor) -> dict[str, Tensor]:
        """Read all fields of rows in range, as tensors of their own on the computing device."""
        record, memory = self.store.record, self._torch_memory()
        if memory is not None:
            views = {f.name: record.view(memory, f.name) for f in record.fields}
            return {name: view.index_select(0, rows) for name, view in views.items()}
        records = self.gather(rows)
        return {f.name: record.view(records, f.name).contiguous() for f in record.fields}

    def _torch_memory(self) -> Tensor | None:
        """Return the storage's memory if it is on the computing device and no cache is in front of it."""
        location = None if self.store.cache is not None else self.location_for()
        memory = None if location is None else location.memory
        return memory if memory is not None and memory.device == self.store.device else None

    # ---- writing

    def reserve_space(self, grads: RowGrads) -> None:
        """Raise if the disk has no room for changes of these rows of a file, before a step begins."""
        if self.store.cache is not None:
            self.store.cache.reserve_space(grads.rows, grads.batch)
            return
        rows = grads.rows.cpu()
        self.store.disk_storage().make_room(rows[rows >= 0])

    def scatter_(self, rows: Tensor, records: Tensor) -> None:
        """Replace the records of unique rows; the row -1 is skipped."""
        self.store.writes += 1
        location = self.location_for(update=True)
        if location is not None:
            ops.scatter_(location, rows, records)
            return
        wanted = rows.to("cpu")
        present = wanted >= 0
        if not bool(present.all()):
            wanted, records = wanted[present], records[present.to(records.device)]
        self._host_access().scatter_(wanted, records)

    def write_fields_(self, rows: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Replace fields of unique rows: the inverse of `read_fields`."""
        store, memory = self.store, self._torch_memory()
        store.writes += 1
        if memory is not None:
            for name, values in fields.items():
                store.record.view(memory, name).index_copy_(0, rows, values)
            return
        records = torch.zeros((len(rows), store.record.nbytes), dtype=torch.uint8, device=store.device)
        for name, values in fields.items():
            store.record.view(records, name).copy_(values)
        self.scatter_(rows, records)

    def write_weights_(self, rows: Tensor, values: Tensor) -> None:
        """Replace the weights of unique rows; their state stays."""
        store = self.store
        store.writes += 1
        location, field = self.location_for(update=True), store.config.weight
        if location is None:
            self.write_fields_(rows, self.read_fields(rows) | {WEIGHT: values})
            return
        # The bytes between the weight and the next field are padding.
        beginnings = torch.zeros((len(rows), store.record.padded), dtype=torch.uint8, device=store.device)
        beginnings[:, : field.nbytes].view(field.dtype).copy_(values)
        ops.scatter_(location, rows, beginnings)


def last_of_each(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return unique rows and their values; of several values for a row, the last one."""
    unique, inverse = torch.unique(rows, return_inverse=True)
    if len(unique) == len(rows):
        return rows, values
    positions = torch.arange(len(rows), device=rows.device)
    last = torch.zeros_like(unique).scatter_reduce_(0, inverse, positions, "amax")
    return unique, values[last.to(values.device)]
