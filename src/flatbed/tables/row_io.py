"""Rows by number: read and written on the computing device, in the cache or in storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from flatbed.kernels import rows as ops
from flatbed.kernels.records import RecordLocation
from flatbed.tables.cache import location_of
from flatbed.tables.cache.disk import DiskCache
from flatbed.tables.grads import RowGrads
from flatbed.tables.lookup_batch import LookupBatch
from flatbed.tables.record import WEIGHT
from flatbed.tables.storage.base import Storage
from flatbed.tables.storage.table_storage import TableStorage


class RowIO:
    """Access of lookups and steps to the rows of a `TableStorage`.

    It refers to the storage, and not the other way round: a table that is deleted frees its memory at once.
    """

    def __init__(self, store: TableStorage) -> None:
        self.store = store

    # ---- locations

    @property
    def location(self) -> RecordLocation | None:
        """Where kernels and operations find the records of all rows; None if they do not reach them."""
        storage, cache = self.store.ensure_layout(), self.store.cache
        if cache is None:
            return location_of(storage, self.store.device)
        return None if cache.location is None or cache.location.memory is None else cache.location

    def location_for_update(self, grads: RowGrads) -> RecordLocation | None:
        """Return where kernels find these rows to change them; None if the host must move the records."""
        cache = self.store.cache
        return self.location if cache is None else cache.location_for_update(grads.batch)

    def _ordered_location(self, batch: LookupBatch | None = None) -> RecordLocation | None:
        """Return `location`, with the current stream ordered after prefetches that may move the rows."""
        location, cache = self.location, self.store.cache
        return location if location is None or cache is None else cache.location_for_update(batch)

    def _host_access(self) -> Storage | DiskCache:
        """Return what reads and writes records that kernels do not reach."""
        return self.store.ensure_layout() if self.store.cache is None else cast(DiskCache, self.store.cache)

    # ---- reading

    def lookup(self, batch: LookupBatch) -> Tensor | None:
        """Read the weights of a batch's ids, (n,) → (n, dim), in one kernel; None if there is none for it."""
        cache = self.store.cache
        return None if cache is None or batch.cache is not cache else cache.lookup(batch)

    def weights(self, rows: Tensor, batch: LookupBatch | None = None) -> Tensor:
        """Read the weights of rows, (n,) → (n, dim), on the computing device; `batch` is theirs, if any."""
        field = self.store.config.weight
        return self.gather(rows, field.nbytes, batch=batch).view(field.dtype)

    def gather(self, rows: Tensor, nbytes: int | None = None, *, batch: LookupBatch | None = None) -> Tensor:
        """Read records, or their first bytes, to the computing device; zeros for the row -1."""
        store = self.store
        nbytes = store.record.nbytes if nbytes is None else nbytes
        location = self._ordered_location(batch)
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
        location = None if self.store.cache is not None else self.location
        memory = None if location is None else location.memory
        return memory if memory is not None and memory.device == self.store.device else None

    # ---- writing

    def reserve_space(self, grads: RowGrads) -> None:
        """Raise if a full disk has no room for changes of these rows, before a step begins."""
        if self.store.config.storage != "disk":
            return
        if self.store.cache is not None:
            self.store.cache.reserve_space(grads.rows, grads.batch)
            return
        rows = grads.rows.cpu()
        self.store.make_room(rows[rows >= 0])

    def scatter_(self, rows: Tensor, records: Tensor) -> None:
        """Replace the records of unique rows; the row -1 is skipped."""
        self.store.writes += 1
        location = self._ordered_location()
        if location is not None:
            ops.scatter_(location, rows, records)
            return
        target, wanted = self._host_access(), rows.to("cpu")
        present = wanted >= 0
        if bool(present.all()):
            target.scatter_(wanted, records)
        else:
            target.scatter_(wanted[present], records[present.to(records.device)])

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
        location, field = self._ordered_location(), store.config.weight
        if location is None:
            self.write_fields_(rows, self.read_fields(rows) | {WEIGHT: values})
            return
        # The bytes between the weight and the next field are padding.
        beginnings = torch.zeros((len(rows), store.record.padded), dtype=torch.uint8, device=store.device)
        beginnings[:, : field.nbytes].view(field.dtype).copy_(values)
        ops.scatter_(location, rows, beginnings)
