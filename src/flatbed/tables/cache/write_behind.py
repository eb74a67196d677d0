"""Writers of evicted records: to a table's file in another thread, or to memory at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.cuda.streams import OrderedLock, relaxed_capture
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

    n_unsaved = 0

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @contextmanager
    def reading(self, rows: Tensor, *, pin: bool) -> Iterator[Read]:
        """Yield a function that returns the records of rows."""
        yield lambda: (self.storage.gather(rows), np.arange(len(rows)))

    def write(self, slots: NDArray[np.int64], rows: Tensor, copies: HostCopies) -> None:
        """Write the records of evicted rows."""
        copies.wait()
        self.storage.scatter_(rows, copies.records)

    def mark_changed(self, rows: Tensor, slots: NDArray[np.int64]) -> None:
        """Do nothing: memory has room for every row."""

    def has_space(self, n_rows: int) -> bool:
        return True

    def reserve_space(self, rows: Tensor, slots: NDArray[np.int64]) -> None:
        """Do nothing: memory has room for every row."""

    def finish(self) -> None:
        """Do nothing: `write` has waited."""

    def abandon(self) -> None:
        """Do nothing: `write` has waited."""

    def clear(self) -> None:
        """Do nothing."""


class CachedChanges:
    """Changed rows of a cache that the journal has no room for, counted, and the pending write.

    A storage that was garbage collected with its cache counts the rows that are lost with it.
    """

    def __init__(self) -> None:
        self.n_rows = 0  # those of the pending write included
        self.pending: PendingWrite | None = None
        self.process = os.getpid()

    def n_unsaved(self) -> int:
        """Return the number of rows that are not in the journal; waits for the pending write."""
        if os.getpid() != self.process:
            return 0  # they are the parent's, as is the thread that writes them
        pending = self.pending
        if pending is None:
            return self.n_rows
        wait([pending.done])
        return self.n_rows - (0 if pending.done.exception() is not None else pending.n_unjournaled)


class WriteBehind:
    """Writes evicted records to the journal of a table's file, in the file's writer thread.

    One write is in flight at a time. The count of changed rows without room in the journal is kept exact, so
    that a full disk stops a step before the step changes anything.

    All methods but `mark_changed`, `has_space` and `n_unsaved` are called with the cache's lock held.
    """

    def __init__(self, storage: DiskStorage, n_slots: int) -> None:
        self.storage = storage
        self._unjournaled = np.zeros(n_slots, np.bool_)
        """For each slot, True if its row has changed and has no room in the journal yet."""
        self._changes = CachedChanges()
        self._lock = OrderedLock("write-behind")  # for these two
        storage.count_also(self._changes.n_unsaved)

    # ---- reading, while evicted records are written

    @contextmanager
    def reading(self, rows: Tensor, *, pin: bool) -> Iterator[Read]:
        """Yield a function that returns the records of rows; many rows are read during the body."""
        shape = (len(rows), self.storage.record.nbytes)
        memory = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=pin)
        if len(rows) < MANY:
            yield lambda: (memory, self.storage.collect(rows, memory))
            return
        order = self.storage.aside(self.storage.collect, rows, memory)
        try:
            yield lambda: (memory, order.result())
        finally:
            wait([order])

    # ---- writing

    def write(self, slots: NDArray[np.int64], rows: Tensor, copies: HostCopies) -> None:
        """Queue the records of evicted rows, which leave these slots."""
        self.finish()
        with self._lock:
            n = int(self._unjournaled[slots].sum()) if self._changes.n_rows else 0
            # In this order: after an interruption, more room is kept than needed.
            self._unjournaled[slots] = False
            done = self.storage.send(rows, copies.records, after=copies.wait)
            self._changes.pending = PendingWrite(rows, copies, n, done)

    def finish(self) -> None:
        """Wait for the pending write. A write that failed is tried again here, and raises here."""
        pending = self._changes.pending
        if pending is None:
            return
        wait([pending.done])
        if pending.done.exception() is not None:
            pending.copies.wait()
            self.storage.scatter_(pending.rows, pending.copies.records)
        with self._lock:
            self._changes.pending = None
            self._changes.n_rows -= pending.n_unjournaled

    def abandon(self) -> None:
        """Wait for the pending write, and drop it if it failed."""
        pending, self._changes.pending = self._changes.pending, None
        if pending is not None and os.getpid() == self._changes.process:
            wait([pending.done])

    # ---- room in the journal

    def mark_changed(self, rows: Tensor, slots: NDArray[np.int64]) -> None:
        """Count rows that are about to change, as far as the journal has no room for them yet."""
        slots = slots[self.storage.unchanged(rows).numpy()]
        with self._lock:
            self._changes.n_rows += len(slots)
            self._unjournaled[slots] = True

    def has_space(self, n_rows: int) -> bool:
        """Return True if n more rows certainly fit into the journal, and no write has failed."""
        pending = self._changes.pending
        failed = pending is not None and pending.done.done() and pending.done.exception() is not None
        return not failed and self.storage.has_room(self._changes.n_rows + n_rows)

    def reserve_space(self, rows: Tensor, slots: NDArray[np.int64]) -> None:
        """Raise if the disk has no room for changes of these rows; slots are -1 for rows not in the cache."""
        self.finish()
        counted = torch.from_numpy(self._unjournaled[slots] & (slots >= 0))
        self.storage.make_room(rows[~counted], also=self._changes.n_rows)

    @property
    def n_unsaved(self) -> int:
        """Changed rows that are not in the journal."""
        return self._changes.n_unsaved()

    def clear(self) -> None:
        """Forget all counts: every changed row is in the journal, or dropped."""
        with self._lock:
            self._unjournaled[:] = False
            self._changes.n_rows = 0
