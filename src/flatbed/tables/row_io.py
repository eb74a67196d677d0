"""Rows by number, wherever they are: in a cache, or at home, within reach of kernels or read by the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatbed.kernels import rows as ops
from flatbed.kernels.dispatch import use_triton
from flatbed.kernels.rows import RecordLocation
from flatbed.tables.cache import Cache, DeviceCache, HostCache, Reservation
from flatbed.tables.grads import RowGrads
from flatbed.tables.record import WEIGHT
from flatbed.tables.storage.base import Storage
from flatbed.tables.storage.table_storage import TableStorage


class RowIO:
    """The way of lookups and steps to the rows of a store, on the computing device.

    It knows the store, not the other way round: a table that goes takes its memory along at once.
    """

    def __init__(self, store: TableStorage) -> None:
        self.store = store

    # ---- where they are

    @property
    def place(self) -> RecordLocation | None:
        """Where kernels and operations of the computing device find all records, if they can."""
        store = self.store
        storage, cache = store.ensure_layout(), store.cache
        if isinstance(cache, DeviceCache):
            return cache.place
        if cache is not None or storage.memory is None:
            return None
        storage.check()
        if storage.device == store.device or (storage.reach == store.device and use_triton(store.device)):
            return RecordLocation(storage.memory)
        return None

    def place_of(self, pack: RowGrads) -> RecordLocation | None:
        """Where kernels find these rows to change them; None if they cannot."""
        cache = self.store.cache
        if cache is None or not cache.covers(pack.ticket):
            self.wait()
            return self.place
        if isinstance(cache, HostCache):
            assert pack.ticket is not None
            cache.changed(pack.ticket)
        return cache.place

    def wait(self) -> None:
        """Let what is issued next see rows as they are: see `DeviceCache.wait`."""
        cache = self.store.cache
        if isinstance(cache, DeviceCache):
            cache.wait()

    @property
    def _front(self) -> Storage | Cache:
        """The cache if there is one, otherwise the storage."""
        storage, cache = self.store.ensure_layout(), self.store.cache
        return storage if cache is None else cache

    # ---- reading

    def look(self, keys: Tensor, ticket: Reservation | None, cache: Cache | None) -> Tensor | None:
        """The weights of ids whose rows have come through the cache, (n,) → (n, dim), if kernels can."""
        store = self.store
        field = store.config.weight
        if isinstance(cache, DeviceCache) and cache is store.cache:
            if not cache.covers(ticket):
                cache.wait()
            elif ticket is not None and ticket.done is not None:
                torch.cuda.current_stream(store.device).wait_event(ticket.done)
            return cache.look(keys, field.dtype, field.count)
        if isinstance(cache, HostCache) and cache is store.cache and cache.covers(ticket):
            return cache.look(keys, ticket, field.dtype, field.count)
        return None

    def weights(self, rows: Tensor) -> Tensor:
        """The weights of rows: (n,) → (n, dim), on the computing device."""
        field = self.store.config.weight
        return self.gather(rows, field.nbytes).view(field.dtype)

    def gather(self, rows: Tensor, nbytes: int | None = None) -> Tensor:
        """Records on the computing device; zeros for the row -1."""
        store = self.store
        nbytes = store.record.nbytes if nbytes is None else nbytes
        place = self.place
        if place is not None:
            self.wait()
            return ops.gather(place, rows, nbytes)
        if not len(rows):
            return torch.empty((0, nbytes), dtype=torch.uint8, device=store.device)
        front = self._front
        wanted = rows.to(front.device)
        present = wanted >= 0
        records = front.gather(wanted if bool(present.all()) else wanted[present], nbytes)
        if len(records) < len(rows):
            whole = torch.zeros((len(rows), nbytes), dtype=torch.uint8, device=records.device)
            records = whole.index_copy_(0, present.nonzero().flatten().to(records.device), records)
        if records.device == store.device:
            return records
        return records.pin_memory().to(store.device, non_blocking=True)

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """All fields of rows that exist, as tensors of their own on the computing device."""
        store = self.store
        storage = store.ensure_layout()
        if store.cache is None and storage.memory is not None and storage.device == store.device:
            storage.check()
            views = {f.name: store.record.view(storage.memory, f.name) for f in store.record.fields}
            return {name: view.index_select(0, rows) for name, view in views.items()}
        records = self.gather(rows)
        return {f.name: store.record.view(records, f.name).contiguous() for f in store.record.fields}

    # ---- writing

    def make_room(self, rows: Tensor, ticket: Reservation | None = None) -> None:
        """See that these rows can be written: a full disk is to stop a step before it has begun.

        With the ticket of a batch that came ahead of time, the host need not ask the GPU which they are.
        """
        if self.store.config.storage != "disk":
            return
        cache = self.store.cache
        known = ticket.rows if ticket is not None and cache is not None and cache.covers(ticket) else None
        if known is None:
            known = rows.cpu()
            known = known[known >= 0]
        if isinstance(cache, HostCache):
            cache.make_room(known)
        else:
            self.store.make_room(known)

    def scatter_(self, rows: Tensor, records: Tensor) -> None:
        """Replace records; those of the row -1 go nowhere."""
        self.store.writes += 1
        place = self.place
        if place is not None:
            self.wait()
            ops.scatter_(place, rows, records)
            return
        front = self._front
        wanted = rows.to(front.device)
        present = wanted >= 0
        if bool(present.all()):
            front.scatter_(wanted, records)
        else:
            front.scatter_(wanted[present], records[present.to(records.device)])

    def put_(self, rows: Tensor, fields: Mapping[str, Tensor]) -> None:
        """The inverse of `take`."""
        store = self.store
        store.writes += 1
        storage = store.ensure_layout()
        if store.cache is None and storage.memory is not None and storage.device == store.device:
            for name, values in fields.items():
                store.record.view(storage.memory, name).index_copy_(0, rows, values)
            return
        records = torch.zeros((len(rows), store.record.nbytes), dtype=torch.uint8, device=store.device)
        for name, values in fields.items():
            store.record.view(records, name).copy_(values)
        self.scatter_(rows, records)

    def put_weights_(self, rows: Tensor, values: Tensor) -> None:
        """Replace the weights of rows, which are distinct; their state stays."""
        store = self.store
        store.writes += 1
        place, field = self.place, store.config.weight
        if place is None:
            self.put_(rows, self.take(rows) | {WEIGHT: values})
            return
        self.wait()
        # The bytes between a weight and what comes next are nobody's.
        beginnings = torch.zeros((len(rows), store.record.padded), dtype=torch.uint8, device=store.device)
        beginnings[:, : field.nbytes].view(field.dtype).copy_(values)
        ops.scatter_(place, rows, beginnings)
