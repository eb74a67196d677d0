"""Readers of missing records and writers of evicted ones: a file and its journal, in threads; or memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.cuda.streams import relaxed_capture, synchronize
from flatbed.kernels.cache import CacheIndex
from flatbed.tables.files import NoSpace
from flatbed.tables.storage.base import Storage
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.disk.checked_records import device_row_sums
from flatbed.tables.workers import Call

MANY = 1 << 12  # rows from which another thread, or the GPU, pays off

Read = Callable[[], tuple[Tensor, NDArray[np.int64]]]
"""Returns records and, for each, its position among the rows that were asked for."""


@dataclass(slots=True)
class PendingCopy:
    """A tensor that is copied to the host, complete after an event."""

    tensor: Tensor
    complete: torch.cuda.Event | None = None
    device: torch.device | None = None
    """Where it is copied from."""
    sums: Tensor | None = None
    """The checksums of records, if they were computed there."""

    def wait(self) -> None:
        """Wait until the copy is complete. Allowed in any thread, also while another captures a graph."""
        if self.complete is not None:
            with relaxed_capture(), torch.cuda.device(self.device):
                self.complete.synchronize()


@dataclass(slots=True)
class PendingWrite:
    """Changed records between the cache and the journal."""

    rows: Tensor
    copies: PendingCopy
    done: Call[None]


class MemoryWriter:
    """Reads missing records of a storage in memory, and writes evicted ones, in the calling thread."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @contextmanager
    def reading(self, rows: Tensor, *, pin: bool) -> Iterator[Read]:
        yield lambda: (self.storage.gather(rows), np.arange(len(rows)))

    def row_sums(self, records: Tensor) -> None:
        """Return None: memory has no checksums."""

    def write(self, rows: Tensor, copies: PendingCopy) -> None:
        copies.wait()
        self.storage.scatter_(rows, copies.tensor)

    def claim_room(self, n_rows: int) -> bool:
        """Return True: memory has room for every row."""
        return True

    def make_room(self, rows: Tensor) -> None:
        """Do nothing."""

    def count_unsaved(self) -> int:
        """Return 0: memory has no checkpoints."""
        return 0

    def finish(self) -> None:
        """Do nothing: `write` has waited."""

    abandon = clear = finish


class WriteBehind:
    """Writes evicted records to the journal of a table's file, in the file's writer thread.

    One write is in flight at a time. The journal has room for all changed rows, so that a full disk stops a
    step before the step changes anything. All public methods but `claim_room` are called with the lock of the
    cache held.
    """

    def __init__(self, storage: DiskStorage, index: CacheIndex) -> None:
        self.storage, self.index = storage, index
        self._pending: PendingWrite | None = None
        # Upper bounds, since the last `clear`. A row that changes in several steps counts in each.
        self._n_changed = 0
        self._n_cached = 0

    @contextmanager
    def reading(self, rows: Tensor, *, pin: bool) -> Iterator[Read]:
        """Yield a function that returns the records of rows. From `MANY` rows on, a thread reads at once."""
        self._n_cached += len(rows)
        shape = (len(rows), self.storage.record.nbytes)
        memory = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=pin)
        if len(rows) < MANY:
            yield lambda: (memory, self.storage.collect(rows, memory))
            return
        order = self.storage.submit(self.storage.collect, rows, memory)
        try:
            yield lambda: (memory, order.result())
        finally:
            order.cancel()

    def row_sums(self, records: Tensor) -> Tensor | None:
        """Return the checksums of many records on a GPU, which takes less time for it than the host."""
        return device_row_sums(records) if records.is_cuda and len(records) >= MANY else None

    def write(self, rows: Tensor, copies: PendingCopy) -> None:
        """Queue the records of rows that are evicted or flushed."""
        self.finish()
        done = self.storage.submit(self._write, rows, copies, in_order=True)
        self._pending = PendingWrite(rows, copies, done)

    def _write(self, rows: Tensor, copies: PendingCopy) -> None:
        copies.wait()
        self.storage.scatter_(rows, copies.tensor, copies.sums)

    def finish(self) -> None:
        """Wait for the pending write. A write that failed is tried again here, and raises here."""
        pending = self._pending
        if pending is None:
            return
        pending.done.wait()
        if pending.done.error is not None:
            self._write(pending.rows, pending.copies)
        self._pending = None

    def abandon(self) -> None:
        """Wait for the pending write, and drop it if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.done.wait()

    def claim_room(self, n_rows: int) -> bool:
        """Count changes of n_rows, and return True, if the journal has room for them. Needs no lock."""
        pending = self._pending
        has_failed = pending is not None and pending.done.error is not None
        if has_failed or not self.storage.has_room(self._n_unjournaled + n_rows):
            return False
        self._count(self._n_changed + n_rows)
        return True

    def make_room(self, rows: Tensor) -> None:
        """Let the journal grow, or raise if the disk has no room for changes of these rows; -1 is none.

        Only if the disk is nearly full, changed rows are counted one by one, which waits for the device.
        """
        self.finish()
        n = len(rows)
        try:
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            self.storage.make_room(none, also=self._n_unjournaled + n)
        except NoSpace:
            held = self._changed_rows()
            self._n_changed = len(held)
            self.storage.make_room(torch.unique(torch.cat([held, rows[rows >= 0].cpu()])))
        self._count(self._n_changed + n)

    def count_unsaved(self) -> int:
        """Count the rows that changed since the last checkpoint. Waits for the device."""
        return self.storage.count_unsaved(self._changed_rows())

    def _changed_rows(self) -> Tensor:
        """Return the changed rows of the cache; the journal may have some of them. Waits for the device."""
        index, pending = self.index, self._pending
        if index.clock.is_cuda:
            synchronize(index.clock.device)
        with relaxed_capture():
            rows = index.row_of_slot[index.dirty != 0].cpu()
        if pending is not None:
            pending.done.wait()
            if pending.done.error is not None:
                rows = torch.unique(torch.cat([rows, pending.rows]))
        return rows

    @property
    def _n_unjournaled(self) -> int:
        """Upper bound of changed rows that are not in the journal: one per slot, and those of one write."""
        return min(self._n_changed, self._n_cached, 2 * self.index.n_slots)

    def _count(self, n_changed: int) -> None:
        self._n_changed = n_changed
        self.storage.expect_changes(self._n_unjournaled)

    def clear(self) -> None:
        """Count again: every changed row is in the journal, or dropped. Rows may still be in the cache."""
        self._n_cached = min(self._n_cached, self.index.n_slots)
        self._count(0)
