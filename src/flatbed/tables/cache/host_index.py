"""Cache whose index is on the host: over table files, and over memory that kernels cannot address.

The host decides here, since kernels cannot read a file. Records are in the memory of the computing device.

A `Reservation` keeps the rows of a prefetched batch in their slots until it is released. Training on reserved
rows takes no lock: another thread may hold the lock for as long as the disk takes. Every other access holds
the lock, and is ordered after the one before on the device, too, since threads use different streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.cuda.streams import OrderedLock, synchronize
from flatbed.kernels import RecordLocation, UniqueRows, use_triton
from flatbed.kernels import rows as ops
from flatbed.kernels.cache import (
    CacheIndex,
    Placement,
    ProbeResult,
    evict,
    insert,
    probe,
    select_victims,
)
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.cache.write_behind import HostCopies, WriteBehind, WriteThrough
from flatbed.tables.storage.base import Storage

CPU = torch.device("cpu")
FLUSH_BYTES = 1 << 26  # of records that are written at once


@dataclass(eq=False, slots=True)
class Reservation:
    """Rows that stay in their slots until `HostIndexCache.release`."""

    rows: Tensor
    """Unique rows, on the host."""
    slots: NDArray[np.int64]
    tick: int
    """Of the index, when the slots were reserved."""
    epoch: int
    """Of the cache: after a change of epoch the slots are others."""
    ready: torch.cuda.Event | None
    """Recorded when the records have been copied to the device."""
    is_released: bool = False


class HostIndexCache:
    """Records of hot rows on `device`, their index on the host, and live reservations.

    Methods that `GpuCache` has, too, are described there.
    """

    def __init__(
        self,
        storage: Storage,
        index: CacheIndex,
        *,
        device: torch.device,
        writer: WriteBehind | WriteThrough,
    ) -> None:
        """Use an index on the host, which the writer shares."""
        self.storage, self.index, self.writer, self.device = storage, index, writer, device
        self.record, self.n_rows = storage.record, storage.n_rows
        self.n_slots = n_slots = index.n_slots
        self.in_graphs = False
        self.records = torch.empty((n_slots, storage.record.nbytes), dtype=torch.uint8, device=device)
        self.lock = OrderedLock("cache")
        self.epoch = 0
        self.retired = False
        """True once the table has another cache."""
        self._live: set[Reservation] = set()
        self._reserved_at = np.zeros(n_slots, np.int64)  # tick of the last reservation of each slot
        self._released: deque[tuple[Reservation, torch.cuda.Event | None]] = deque()
        self._last: torch.cuda.Event | None = None  # end of the last access
        self.location: RecordLocation | None = None
        """For kernels, which are given cached rows only; None if there are none."""
        if device.type == "cuda" and use_triton(device):
            maps = self.index.slot_of_row.to(device), self.index.dirty.to(device)
            self.location = RecordLocation(None, self.records, *maps)

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """Order the current stream after the access before.

        The caller takes the lock itself: Ctrl-C as this ends could leave the lock taken.
        """
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if on_gpu else None
        if stream is not None and self._last is not None:
            stream.wait_event(self._last)
        self._end_released(stream)
        try:
            yield
        finally:
            if stream is not None:
                self._last = stream.record_event()

    # ---- admission and reservations

    def admit(
        self,
        keys: Tensor,
        first_error: Tensor | None = None,
        on_checked: Callable[[], None] | None = None,
    ) -> tuple[UniqueRows, None]:
        """Waits for the device: the host decides."""
        unique = ops.unique(keys, self.n_rows, first_error)
        if on_checked is not None:
            on_checked()
        rows = unique.rows.to(CPU)
        with self.lock, self._ordered():
            self._admit(rows[rows >= 0])
        return unique, None

    def reserve(self, rows: Tensor) -> Reservation | None:
        """Admit unique rows, which are on the host, and keep them in their slots.

        Returns None if they do not fit in addition to other reservations.
        """
        with self.lock, self._ordered():
            slots = None if self.retired else self._admit(rows, all_or_nothing=True)
            if slots is None:
                return None
            tick = int(self.index.clock)
            self._reserved_at[slots] = tick
            on_gpu = self.device.type == "cuda"
            ready = torch.cuda.current_stream(self.device).record_event() if on_gpu else None
            reservation = Reservation(rows, slots, tick, self.epoch, ready)
            self._live.add(reservation)
            return reservation

    def release(self, reservation: Reservation, after: torch.cuda.Event | None) -> None:
        """Let the rows be evicted after an event. Takes no lock: the garbage collector may call this."""
        reservation.is_released = True
        self._released.append((reservation, after))

    def _end_released(self, stream: torch.cuda.Stream | None) -> None:
        while self._released:
            reservation, after = self._released[0]
            if stream is not None and after is not None:
                stream.wait_event(after)
            self._live.discard(reservation)
            if any(one.tick < reservation.tick for one in self._live):  # which would keep these slots, too
                reserved_at = np.zeros_like(self._reserved_at)
                for one in sorted(self._live, key=lambda one: one.tick):
                    reserved_at[one.slots] = one.tick
                self._reserved_at = reserved_at
            self._released.popleft()  # last: a reservation that stays live would keep all later ones

    def protects(self, batch: LookupBatch | None) -> bool:
        if batch is None or batch.cache is not self or batch.admission is None:
            return False
        return bool(batch.admission.epoch == self.epoch) and not batch.admission.is_released

    def prefetch(
        self, ids: Tensor, *, window: int, reservation: Reservation | None
    ) -> tuple[Tensor, UniqueRows, Reservation] | None:
        """Find the unique rows of a batch whose rows are reserved; None without a reservation."""
        if reservation is None or reservation.epoch != self.epoch:
            return None
        if reservation.ready is not None:
            torch.cuda.current_stream(self.device.index).wait_event(reservation.ready)
        keys = ids.to(ops.key_dtype(self.n_rows, ids.device))
        return keys, ops.unique(keys, self.n_rows), reservation

    def issue_moves(self) -> None:
        """Do nothing: `reserve` has moved the records."""

    def oldest(self, batches: list[LookupBatch]) -> LookupBatch | None:
        """Return None: a reservation is for the rows of one batch."""
        return None

    def _admit(self, rows: Tensor, *, all_or_nothing: bool = False) -> NDArray[np.int64] | None:
        """Admit rows. Returns their slots if all of them are cached now."""
        probed = probe(self.index, rows)
        if not len(probed.missing):
            return probed.slots
        # Slots are kept that were reserved since the oldest reservation that is live.
        oldest = min((one.tick for one in self._live), default=probed.tick)
        n_kept = len(probed.hits) + sum(len(one.slots) for one in self._live)
        if n_kept + len(probed.missing) > self.n_slots:  # some may be counted twice
            kept = self._reserved_at >= oldest
            kept[probed.hits] = True
            n_kept = int(kept.sum())
        n_free = self.n_slots - n_kept
        if all_or_nothing and len(probed.missing) > n_free:
            return None
        placement = self._fill(probed, n_free, oldest)
        if len(placement.rows) < len(probed.missing):
            return None
        probed.slots[probed.slots < 0] = placement.slots
        return probed.slots

    def _fill(self, probed: ProbeResult, n_free: int, oldest: int) -> Placement:
        """Read missing rows, n_free at most; meanwhile select slots and write their changed records back."""
        self.writer.finish()
        missing = torch.from_numpy(probed.missing[:n_free])
        with self.writer.reading(missing, pin=self.device.type == "cuda") as read:
            placement = select_victims(self.index, probed, self._reserved_at if self._live else None, oldest)
            changed = placement.victims >= 0
            slots = placement.slots[changed]
            if len(slots):
                copies = self._copy_to_host(*self._to_device(slots))
                self.writer.write(torch.from_numpy(placement.victims[changed]), copies)
            records, order = read()
        n = len(placement.rows)
        if n < len(order):
            records, order = records[torch.from_numpy(order < n)], order[order < n]
        self._replace(placement, records, order)
        return placement

    def _replace(self, placement: Placement, records: Tensor, order: NDArray[np.int64]) -> None:
        """Copy records, in this order, into slots. An interruption leaves no record in another row's slot."""
        old = placement.old[placement.old >= 0]
        slots, rows, evicted = self._to_device(placement.slots[order], placement.rows[order], old)
        records = self._copy_to_device(records)
        evict(self.index, placement)
        _words(self.records).index_copy_(0, slots, _words(records))
        if self.location is not None:
            assert self.location.slot_of_row is not None
            self.location.slot_of_row.index_fill_(0, evicted, -1)
            self.location.slot_of_row.index_copy_(0, rows, slots.to(torch.int32))
        insert(self.index, placement)

    # ---- copies between host and device

    def _copy_to_host(self, slots: Tensor) -> HostCopies:
        """Copy records of slots, which are on the device."""
        found = _words(self.records).index_select(0, slots).view(torch.uint8)
        if not found.is_cuda:
            return HostCopies(found)
        pinned = torch.empty(found.shape, dtype=torch.uint8, device=CPU, pin_memory=True)
        pinned.copy_(found, non_blocking=True)
        done = torch.cuda.current_stream(self.device).record_event()
        return HostCopies(pinned, done, self.device)

    def _copy_to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type != "cuda" or not tensor.numel():
            return tensor.to(self.device)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def _to_device(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        """Copy arrays to the device, all in one copy."""
        if self.device.type != "cuda":
            return [torch.from_numpy(array) for array in arrays]
        lengths = [len(array) for array in arrays]
        pinned = torch.empty(sum(lengths), dtype=torch.int64, device=CPU, pin_memory=True)
        np.concatenate(arrays, out=pinned.numpy())
        return [*torch.split(pinned.to(self.device, non_blocking=True), lengths)]

    # ---- rows

    def location_for(self, batch: LookupBatch | None, *, update: bool) -> RecordLocation | None:
        """Return where kernels find the rows of a reserved batch; None for other rows."""
        if batch is None or not self.protects(batch) or self.location is None:
            return None
        if update:
            self.writer.mark_changed(batch.admission.rows, batch.admission.slots)
        return self.location

    def reserve_space(self, rows: Tensor, batch: LookupBatch | None) -> None:
        """Raise if a full disk has no room for changes of rows, before a step begins to change them."""
        if batch is not None and self.protects(batch):  # the host knows its rows without asking the device
            rows = batch.admission.rows
        else:
            rows = rows.to(CPU)
            rows = rows[rows >= 0]
        self.writer.reserve_space(rows, self.lock)

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        """Read records, or their first bytes, to the computing device; ids are on the host."""
        nbytes = self.record.nbytes if nbytes is None else nbytes
        with self.lock, self._ordered():
            self.writer.finish()
            slots = self.index.slot_of_row[ids].long()
            cached = slots >= 0
            held = self.records[:, :nbytes]
            if bool(cached.all()):
                return held.index_select(0, self._copy_to_device(slots))
            out = torch.empty((len(ids), nbytes), dtype=torch.uint8, device=self.device)
            inside, outside = cached.nonzero().flatten(), (~cached).nonzero().flatten()
            found = held.index_select(0, self._copy_to_device(slots[cached]))
            out.index_copy_(0, self._copy_to_device(inside), found)
            stored = self.storage.gather(ids[outside], nbytes)
            return out.index_copy_(0, self._copy_to_device(outside), self._copy_to_device(stored))

    def scatter_(self, ids: Tensor, records: Tensor) -> None:
        """Replace records; those in storage first, since that may fail."""
        with self.lock, self._ordered():
            self.writer.finish()
            self.reserve_space(ids, None)
            slots = self.index.slot_of_row[ids].long()
            cached = slots >= 0
            records = records.to(self.device)
            if not bool(cached.all()):
                outside = (~cached).nonzero().flatten()
                self.storage.scatter_(ids[outside], records[self._copy_to_device(outside)].to(CPU))
            inside = cached.nonzero().flatten()
            at = self._copy_to_device(slots[inside])
            changed = records.index_select(0, self._copy_to_device(inside))
            # Marked first: after an interruption, a record that has changed is written back.
            self.writer.mark_changed(ids[inside], slots[inside].numpy())
            self.records.index_copy_(0, at, changed)

    def flush(self) -> None:
        with self.lock:
            if self.device.type == "cuda":
                synchronize(self.device)
            dirty = self.index.dirty.nonzero().flatten()
            for slots in torch.split(dirty, max(1, FLUSH_BYTES // self.record.nbytes)):
                copies = self._copy_to_host(self._copy_to_device(slots))
                self.writer.write(self.index.row_of_slot[slots], copies)
                self.writer.finish()
                self.index.dirty[slots] = 0
            self.writer.finish()
            self.writer.clear()

    def drop(self) -> None:
        with self.lock, self._ordered():
            self.flush()
            self._clear()

    def retire(self) -> None:
        """Drop the cache for good: the table is about to have another one."""
        with self.lock:
            self.drop()
            self.retired = True

    def abandon(self) -> None:
        with self.lock, self._ordered():
            if self.device.type == "cuda":
                synchronize(self.device)
            self.writer.abandon()
            self._clear()
            self.writer.clear()
            self.retired = True

    def _clear(self) -> None:
        self.epoch += 1
        self._live.clear()
        self.index.clear()
        if self.location is not None:
            assert self.location.slot_of_row is not None
            self.location.slot_of_row.fill_(-1)


def _words(records: Tensor) -> Tensor:
    """View records as int64: torch takes as long for a byte as for eight."""
    return records.view(torch.int64)
