"""Readers of missing records and writers of evicted ones: a file and its journal, in threads; or memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.cuda.streams import relaxed_capture, stream_for, synchronize
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

    def finish(self) -> None:
        """Do nothing: `write` has waited."""

    abandon = clear = retire = finish


class CachedChanges:
    """Rows that changed in a cache, and the pending write.

    It refers to neither cache nor storage: the storage's finalizer counts the rows that are lost with both.
    """

    def __init__(self, index: CacheIndex) -> None:
        self.index: CacheIndex | None = index
        """None once the table has another cache."""
        self.pending: PendingWrite | None = None

    def rows(self) -> NDArray[np.int64]:
        """Return the changed rows of the cache; the journal may have some of them.

        Waits for the pending write, but not for work on the GPU, which may never end at exit: its changes
        are left out. The garbage collector may call this in any thread, also while a CUDA graph is captured.
        """
        index, rows = self.index, np.empty(0, np.int64)
        if index is not None:
            device = index.clock.device
            stream = stream_for(device, "counts") if device.type == "cuda" else None
            with relaxed_capture(), torch.cuda.stream(stream):
                rows = index.row_of_slot[index.dirty != 0].cpu().numpy()
        pending = self.pending
        if pending is not None:
            pending.done.wait()
            if pending.done.error is not None:
                rows = np.union1d(rows, pending.rows.numpy())
        return rows


class WriteBehind:
    """Writes evicted records to the journal of a table's file, in the file's writer thread.

    One write is in flight at a time. The journal has room for all changed rows, so that a full disk stops a
    step before the step changes anything. All public methods but `claim_room` and `retire` are called with
    the lock of the cache held.
    """

    def __init__(self, storage: DiskStorage, index: CacheIndex) -> None:
        self.storage = storage
        self._changes = CachedChanges(index)
        self._n_slots = index.n_slots
        # Upper bounds, since the last `clear`. A row that changes in several steps counts in each.
        self._n_changed = 0
        self._n_cached = 0
        storage.count_also(self._changes.rows)

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
        self._changes.pending = PendingWrite(rows, copies, done)

    def _write(self, rows: Tensor, copies: PendingCopy) -> None:
        copies.wait()
        self.storage.scatter_(rows, copies.tensor, copies.sums)

    def finish(self) -> None:
        """Wait for the pending write. A write that failed is tried again here, and raises here."""
        pending = self._changes.pending
        if pending is None:
            return
        pending.done.wait()
        if pending.done.error is not None:
            self._write(pending.rows, pending.copies)
        self._changes.pending = None

    def abandon(self) -> None:
        """Wait for the pending write, and drop it if it failed."""
        pending, self._changes.pending = self._changes.pending, None
        if pending is not None:
            pending.done.wait()

    def claim_room(self, n_rows: int) -> bool:
        """Count changes of n_rows, and return True, if the journal has room for them. Needs no lock."""
        pending = self._changes.pending
        has_failed = pending is not None and pending.done.error is not None
        if has_failed or not self.storage.has_room(self._n_unjournaled + n_rows):
            return False
        self._n_changed += n_rows
        return True

    def make_room(self, rows: Tensor) -> None:
        """Let the journal grow, or raise if the disk has no room for changes of these rows; -1 is none.

        Only if the disk is nearly full, changed rows are counted one by one, which waits for the device.
        """
        self.finish()
        n, index = len(rows), self._changes.index
        assert index is not None
        try:
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            self.storage.make_room(none, also=self._n_unjournaled + n)
        except NoSpace:
            if index.clock.is_cuda:
                synchronize(index.clock.device)
            held = torch.from_numpy(self._changes.rows())
            self._n_changed = len(held)
            self.storage.make_room(torch.unique(torch.cat([held, rows[rows >= 0].cpu()])))
        self._n_changed += n

    @property
    def _n_unjournaled(self) -> int:
        """Upper bound of changed rows that are not in the journal: one per slot, and those of one write."""
        return min(self._n_changed, self._n_cached, 2 * self._n_slots)

    def clear(self) -> None:
        """Count again: every changed row is in the journal, or dropped. Rows may still be in the cache."""
        self._n_changed, self._n_cached = 0, min(self._n_cached, self._n_slots)

    def retire(self) -> None:
        """Free the index: the storage, which counts changed rows, outlives the cache."""
        self._changes.index = None
