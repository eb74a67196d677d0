"""Writers of evicted records: to a table's file in another thread, or to memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.cuda.streams import OrderedLock, relaxed_capture
from flatbed.kernels.cache import CacheIndex
from flatbed.tables.storage.base import Storage
from flatbed.tables.storage.disk import DiskStorage

MANY = 1 << 12  # rows from which another thread pays off

Read = Callable[[], tuple[Tensor, NDArray[np.int64]]]
"""Returns records and, for each, its position among the rows that were asked for."""


@dataclass(slots=True)
class HostCopies:
    """Records on the host, complete after an event."""

    records: Tensor
    complete: torch.cuda.Event | None = None
    device: torch.device | None = None
    """Where they are copied from."""

    def wait(self) -> None:
        """Wait until the records are complete. Allowed in any thread, also while another captures a graph."""
        if self.complete is not None:
            with relaxed_capture(), torch.cuda.device(self.device):
                self.complete.synchronize()


@dataclass(slots=True)
class PendingWrite:
    """Changed records between the cache and the journal."""

    rows: Tensor
    copies: HostCopies
    n_unjournaled: int
    done: Future[None]


class WriteThrough:
    """Writes evicted records to a storage in memory, in the calling thread."""

    def __init__(self, storage: Storage, index: CacheIndex) -> None:
        self.storage, self._index = storage, index

    @contextmanager
    def reading(self, rows: Tensor, *, pin: bool) -> Iterator[Read]:
        yield lambda: (self.storage.gather(rows), np.arange(len(rows)))

    def write(self, rows: Tensor, copies: HostCopies) -> None:
        copies.wait()
        self.storage.scatter_(rows, copies.records)

    def mark_changed(self, rows: Tensor, slots: NDArray[np.int64]) -> None:
        self._index.dirty.numpy()[slots] = 1

    def reserve_space(self, rows: Tensor, lock: AbstractContextManager[Any]) -> None:
        """Do nothing: memory has room for every row."""

    def finish(self) -> None:
        """Do nothing: `write` has waited."""

    abandon = clear = finish


class CachedChanges:
    """Rows that changed in a cache, and the pending write.

    It refers to neither cache nor storage: the storage's finalizer counts the rows that are lost with both.
    """

    def __init__(self, index: CacheIndex) -> None:
        self._index = index
        self.pending: PendingWrite | None = None

    def rows(self) -> NDArray[np.int64]:
        """Return changed rows, of which the journal may have some. Waits for the pending write."""
        rows: NDArray[np.int64] = self._index.row_of_slot.numpy()[self._index.dirty.numpy() != 0]
        pending = self.pending
        if pending is not None:
            wait([pending.done])
            if pending.done.exception() is not None:
                rows = np.union1d(rows, pending.rows.numpy())
        return rows


class WriteBehind:
    """Writes evicted records to the journal of a table's file, in the file's writer thread.

    One write is in flight at a time. The count of changed rows without room in the journal is kept exact, so
    that a full disk stops a step before the step changes anything.

    All methods but `mark_changed` and `reserve_space` are called with the cache's lock held.
    """

    def __init__(self, storage: DiskStorage, index: CacheIndex) -> None:
        self.storage, self._index = storage, index
        self._changes = CachedChanges(index)
        self._n_unjournaled = 0  # changed rows that the journal has no room for, those pending included
        self._lock = OrderedLock("write-behind")  # for this count
        storage.count_also(self._changes.rows)

    @contextmanager
    def reading(self, rows: Tensor, *, pin: bool) -> Iterator[Read]:
        """Yield a function that returns the records of rows; many rows are read during the body."""
        shape = (len(rows), self.storage.record.nbytes)
        memory = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=pin)
        if len(rows) < MANY:
            yield lambda: (memory, self.storage.collect(rows, memory))
            return
        order = self.storage.submit(self.storage.collect, rows, memory)
        try:
            yield lambda: (memory, order.result())
        finally:
            wait([order])

    def write(self, rows: Tensor, copies: HostCopies) -> None:
        """Queue the records of rows that are evicted or flushed."""
        self.finish()
        n = self.storage.count_unjournaled(rows.numpy())
        done = self.storage.submit(self._write, rows, copies, in_order=True)
        self._changes.pending = PendingWrite(rows, copies, n, done)

    def _write(self, rows: Tensor, copies: HostCopies) -> None:
        copies.wait()
        self.storage.scatter_(rows, copies.records)

    def finish(self) -> None:
        """Wait for the pending write. A write that failed is tried again here, and raises here."""
        pending = self._changes.pending
        if pending is None:
            return
        wait([pending.done])
        if pending.done.exception() is not None:
            self._write(pending.rows, pending.copies)
        with self._lock:
            self._changes.pending = None
            self._n_unjournaled -= pending.n_unjournaled

    def abandon(self) -> None:
        """Wait for the pending write, and drop it if it failed."""
        pending, self._changes.pending = self._changes.pending, None
        if pending is not None:
            wait([pending.done])

    def mark_changed(self, rows: Tensor, slots: NDArray[np.int64]) -> None:
        """Mark the slots of rows that are about to change, and count those without room in the journal."""
        dirty = self._index.dirty.numpy()
        with self._lock:
            clean = np.flatnonzero(dirty[slots] == 0)
            self._n_unjournaled += self.storage.count_unjournaled(rows.numpy()[clean])
            dirty[slots[clean]] = 1

    def reserve_space(self, rows: Tensor, lock: AbstractContextManager[Any]) -> None:
        """Raise if the disk has no room for changes of these rows. Takes the cache's lock only if needed."""
        pending = self._changes.pending
        has_failed = pending is not None and pending.done.done() and pending.done.exception() is not None
        if not has_failed and self.storage.has_room(self._n_unjournaled + len(rows)):
            return
        with lock:
            self.finish()
            slots = self._index.slot_of_row.numpy()[rows.numpy()]
            is_counted = (slots >= 0) & (self._index.dirty.numpy()[slots] != 0)
            self.storage.make_room(rows[torch.from_numpy(~is_counted)], also=self._n_unjournaled)

    def clear(self) -> None:
        """Forget the count: every changed row is in the journal, or dropped."""
        with self._lock:
            self._n_unjournaled = 0
