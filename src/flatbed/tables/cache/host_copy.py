"""Cache over table files, and over memory that kernels cannot address: the host copies the records.

Kernels decide which rows get which slots, as in `gpu`, if the computing device has kernels; otherwise numpy
does. The index is on the device that decides. Records are in the memory of the computing device. The host
waits for the decisions, reads missing records, gives the writer copies of changed ones that they replace, and
fills the slots.

A `Reservation` keeps the rows of a prefetched batch in their slots until it is released. Lookups and updates
of reserved rows take no lock, because the thread that reads the file holds it for as long as the disk takes;
`reserve_space` takes it only if the journal must grow, after a checkpoint, or if a write has failed. Every
other access takes the lock. Threads use different streams, so that each access also waits for the event of
the one before (`_ordered`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.cuda.streams import OrderedLock, is_capturing, synchronize
from flatbed.kernels import NONE, RecordLocation, UniqueRows, use_triton
from flatbed.kernels import rows as ops
from flatbed.kernels.cache import CacheIndex, Placement, assign, decide, keep, take_back
from flatbed.tables.cache.base import Cache, LookupBatch
from flatbed.tables.cache.write_behind import MemoryWriter, PendingCopy, WriteBehind
from flatbed.tables.storage.base import Storage

if TYPE_CHECKING:
    from flatbed.kernels._triton.cache import Decisions

CPU = torch.device("cpu")
FLUSH_BYTES = 1 << 26  # of records that are written at once


@dataclass(eq=False, slots=True)
class Reservation:
    """Rows that stay in their slots until `HostCopyCache.release`."""

    keys: Tensor
    unique: UniqueRows
    rows: Tensor
    """The unique rows on the index's device; kernels pad them with -1."""
    n_rows: int
    ready: torch.cuda.Event | None
    """Recorded when the records have been copied to the device."""
    is_live: bool = True
    """False once it is released, or the cache was emptied."""


@dataclass(slots=True)
class Unmoved:
    """An admission whose records are not in their slots yet."""

    decided: Decisions | Placement
    is_overwritten: bool = False
    """True once records in the slots may have been replaced."""


class HostCopyCache(Cache):
    """A cache whose records the host copies, and its live reservations."""

    def __init__(
        self,
        storage: Storage,
        index: CacheIndex,
        *,
        device: torch.device,
        writer: WriteBehind | MemoryWriter,
    ) -> None:
        """Use an index, which the writer shares, on `device` if it has kernels, otherwise on the host."""
        self.storage, self.index, self.writer, self.device = storage, index, writer, device
        self.record, self.n_rows = storage.record, storage.n_rows
        self.n_slots = n_slots = index.n_slots
        self.records = torch.empty((n_slots, storage.record.nbytes), dtype=torch.uint8, device=device)
        self.lock = OrderedLock("cache")
        self.retired = False
        """True once the table has another cache."""
        self._live: set[Reservation] = set()
        self._released: deque[tuple[Reservation, torch.cuda.Event | None]] = deque()
        self._last: torch.cuda.Event | None = None  # end of the last access
        self._streams: set[torch.cuda.Stream] = set()  # those of all accesses
        self._unmoved: Unmoved | None = None
        self._kernels: ModuleType | None = None
        self.location: RecordLocation | None = None  # without a memory: kernels get cached rows only
        if use_triton(device):
            from flatbed.kernels._triton import cache as kernels
            from flatbed.kernels._triton.decision_graphs import DecisionGraphs

            self._kernels = kernels
            self._graphs = DecisionGraphs(index, ops.key_dtype(self.n_rows, device), "files")
            self.location = RecordLocation(None, self.records, index.slot_of_row, index.dirty)

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """Make the current stream wait for the access before, and take back an admission that did not end.

        The caller takes the lock: if this did, Ctrl-C at its end could leave the lock taken.
        """
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if on_gpu else None
        if stream is not None and self._last is not None:
            stream.wait_event(self._last)
        if stream is not None and stream not in self._streams:
            self._keep_memory(stream)
        try:
            if self.index.is_clearing:
                self._clear()
            self._end_released(stream)
            self._take_back_unmoved()
            yield
        finally:
            if stream is not None:
                self._last = stream.record_event()

    def _keep_memory(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of a cache that is deleted until a stream has used it."""
        self._streams.add(stream)
        index = self.index
        maps = index.slot_of_row, index.row_of_slot, index.stamp, index.frequency, index.dirty
        on_device = () if self._kernels is None else (*maps, index.clock, index.counts)
        for tensor in (self.records, *on_device):
            tensor.record_stream(stream)  # type: ignore[arg-type,unused-ignore]

    # ---- admission and reservations

    def admit(
        self,
        keys: Tensor,
        first_error: Tensor | None = None,
        on_checked: Callable[[], None] | None = None,
    ) -> tuple[UniqueRows, None]:
        """Waits for the device: the host reads the records."""
        with self.lock, self._ordered():
            _, found, _ = self._admit(keys, first_error)
        if on_checked is not None:
            on_checked()
        return found, None

    def reserve(self, ids: Tensor) -> Reservation | None:
        """Admit the rows of ids, and keep them in their slots.

        The ids are on the computing device, and in range. Returns None if they do not fit in addition to
        other reservations, or if the table has another cache. On a GPU, the current stream is "files".
        """
        with self.lock, self._ordered():
            ids = ids.flatten()
            if self.retired or not self._has_room(ids):
                return None
            keys, unique, placement = self._admit(ids, is_ahead=True)
            if not placement.is_whole:
                return None
            on_gpu = self.device.type == "cuda"
            rows = unique.rows.to(self.index.clock.device)
            ready = torch.cuda.current_stream(self.device).record_event() if on_gpu else None
            reservation = Reservation(keys, unique, rows, placement.n_rows, ready)
            self._live.add(reservation)
            return reservation

    def _has_room(self, ids: Tensor) -> bool:
        """Return True if the rows of ids fit in addition to those of live reservations."""
        n_kept = sum(one.n_rows for one in self._live)
        if self.index.direct or n_kept + ids.numel() <= self.n_slots:
            return True
        # Rows that are in several batches, or repeated in this one, count once. Waits for the device.
        index = self.index
        self._keep_reserved()
        index.clock += 1
        rows = ops.unique(self._keys(ids), self.n_rows).rows.to(index.clock.device)
        slots = index.slot_of_row[rows[rows >= 0]].long()
        is_kept = index.stamp >= index.clock
        n_others = is_kept.sum() - is_kept[slots[slots >= 0]].sum()
        return int(n_others) + len(slots) <= self.n_slots

    def _keep_reserved(self) -> None:
        """Keep the slots of live reservations at the next tick of the clock, which the caller advances."""
        for one in self._live:
            if self._kernels is not None:
                self._kernels.keep(self.index, one.rows)
            else:
                keep(self.index, one.rows.numpy())

    def release(self, reservation: Reservation, after: torch.cuda.Event | None) -> None:
        """Let the rows be evicted after an event. Takes no lock: the garbage collector may call this."""
        reservation.is_live = False
        self._released.append((reservation, after))

    def _end_released(self, stream: torch.cuda.Stream | None) -> None:
        while self._released:
            reservation, after = self._released[0]
            if stream is not None and after is not None:
                stream.wait_event(after)
            self._live.discard(reservation)
            self._released.popleft()  # last: an interruption would keep the rows for good

    def protects(self, batch: LookupBatch | None) -> bool:
        if batch is None or batch.cache is not self or batch.admission is None:
            return False
        return all(reservation.is_live for reservation in batch.admission)

    def prefetch(
        self, ids: Tensor, *, window: int, reservation: Reservation | None
    ) -> tuple[Tensor, UniqueRows, list[Reservation]] | None:
        """Make the current stream wait for the records of a reservation; None if there is none."""
        if self._kernels is not None and not is_capturing(self.device):
            self._graphs.capture_wanted()  # here, since another thread calls `reserve`
        if reservation is None or not reservation.is_live:
            return None
        if reservation.ready is not None:
            torch.cuda.current_stream(self.device.index).wait_event(reservation.ready)
        return reservation.keys, reservation.unique, [reservation]

    def covering(self, batches: list[LookupBatch]) -> LookupBatch | None:
        if not all(map(self.protects, batches)):
            return None  # and keeps no memory of reservations that have ended
        return replace(batches[0], admission=[one for batch in batches for one in batch.admission])

    def _admit(
        self, ids: Tensor, first_error: Tensor | None = None, *, is_ahead: bool = False
    ) -> tuple[Tensor, UniqueRows, Placement]:
        """Find the unique rows of ids, and admit them; fewer, if there are not enough slots.

        Also returns the keys of the ids. With `is_ahead`, the ids are in range, of any integer dtype.
        Otherwise they are keys.
        """
        if not ids.numel():
            none, keys = np.empty(0, np.int64), self._keys(ids) if is_ahead else ids
            return keys, ops.unique(keys, self.n_rows), Placement(none, none, none, 0, is_whole=True)
        try:
            self._keep_reserved()
            found = self._decide_by_graph(ids) if is_ahead and self._kernels is not None else None
            if found is None:
                keys = self._keys(ids) if is_ahead else ids
                found = keys, *self._decide(keys, first_error)
            self._move_records(found[-1])
            self._unmoved = None
        except BaseException:
            self._take_back_unmoved()
            self.index.clock += 1  # in case that it was not advanced: the slots would be kept for longer
            raise
        return found

    def _keys(self, ids: Tensor) -> Tensor:
        """Return ids in range as keys."""
        return ids.to(ops.key_dtype(self.n_rows, ids.device))

    def _decide_by_graph(self, ids: Tensor) -> tuple[Tensor, UniqueRows, Placement] | None:
        """Decide as `_decide` does, if a CUDA graph of the kernels is at hand. Also returns the keys."""
        graph = self._graphs.find(ids.numel(), window=0, captures=False)
        if graph is None:
            return None
        self._begin_decision(graph.out)
        if not self._graphs.replay(graph, ids):
            return None
        copied = graph.copied()
        assert copied.keys is not None
        return copied.keys, copied.unique, self._on_host(graph.out)

    def _decide(self, keys: Tensor, first_error: Tensor | None) -> tuple[UniqueRows, Placement]:
        """Find the unique rows of keys, and give slots to missing ones."""
        if self._kernels is not None:
            decided = self._kernels.Decisions.allocate(keys.numel(), self.device)
            self._begin_decision(decided)
            self._kernels.decide(self.index, keys, 0, first_error=first_error, out=decided)
            return decided.unique, self._on_host(decided)
        unique = ops.unique(keys, self.n_rows, first_error)
        rows = unique.rows.to(CPU)
        placement = decide(self.index, rows[rows >= 0].numpy())
        self._unmoved = Unmoved(placement)
        assign(self.index, placement)
        return unique, placement

    def _begin_decision(self, decided: Decisions) -> None:
        """Fill a placement with -1 and keep it, so that an interrupted decision can be taken back."""
        decided.placed.fill_(NONE)
        self._unmoved = Unmoved(decided)

    def _on_host(self, decided: Decisions | Placement) -> Placement:
        """Return decisions of kernels on the host. Waits for the device."""
        if isinstance(decided, Placement):
            return decided
        assert self._kernels is not None
        placed = self._copied(decided.placed)
        placed.wait()
        placement: Placement = self._kernels.placement_of(placed.tensor.numpy())
        return placement

    def _move_records(self, placement: Placement) -> None:
        """Read missing records into their slots, and queue the changed ones that they replace for writing."""
        if not len(placement.rows):
            return
        rows, victims = torch.from_numpy(placement.rows), placement.victims
        # Wait for the previous write: this batch may read rows that it evicted. This batch evicts no row
        # that it reads, so that its own read and write overlap.
        self.writer.finish()
        with self.writer.reading(rows, pin=self.device.type == "cuda") as read:
            changed = victims >= 0
            if changed.any():
                copies = self._copy_to_host(self._to_device(placement.slots[changed]))
                self.writer.write(torch.from_numpy(victims[changed]), copies)
            records, order = read()
        slots, records = self._to_device(placement.slots[order]), self._copy_to_device(records)
        assert self._unmoved is not None
        self._unmoved.is_overwritten = True
        _words(self.records).index_copy_(0, slots, _words(records))

    def _take_back_unmoved(self) -> None:
        """Take an admission back whose records are not in their slots, after an error or an interruption."""
        unmoved = self._unmoved
        if unmoved is not None:
            placement = self._on_host(unmoved.decided)
            take_back(self.index, placement, is_overwritten=unmoved.is_overwritten)
            self._unmoved = None

    # ---- copies between host and device

    def _copy_to_host(self, slots: Tensor) -> PendingCopy:
        """Copy records of slots, which are on the device."""
        records = _words(self.records).index_select(0, slots).view(torch.uint8)
        return self._copied(records, self.writer.row_sums(records))

    def _copied(self, tensor: Tensor, sums: Tensor | None = None) -> PendingCopy:
        """Copy a tensor, and its checksums, to the host. Does not wait."""
        if not tensor.is_cuda:
            return PendingCopy(tensor, sums=sums)
        pinned, pinned_sums = _pinned_copy(tensor), None if sums is None else _pinned_copy(sums)
        done = torch.cuda.current_stream(self.device).record_event()
        return PendingCopy(pinned, done, self.device, pinned_sums)

    def _copy_to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type != "cuda" or not tensor.numel():
            return tensor.to(self.device)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        return self._copy_to_device(torch.from_numpy(array))

    # ---- rows

    def location_for(self, batch: LookupBatch | None) -> RecordLocation | None:
        """Return where kernels find the rows of a reserved batch; None for other rows."""
        return self.location if self.protects(batch) else None

    def reserve_space(self, rows: Tensor) -> None:
        """Raise if a full disk has no room for changes of rows, before a step begins to change them."""
        if not self.writer.claim_room(len(rows)):
            with self.lock, self._ordered():
                self.writer.make_room(rows)

    def _slots(self, ids: Tensor) -> Tensor:
        """Return the slots of rows, on the host; -1 for rows that are not cached."""
        return self.index.slot_of_row[ids.to(self.index.clock.device)].to(CPU, torch.int64)

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        """Read records, or their first bytes, to the computing device; ids are on the host."""
        nbytes = self.record.nbytes if nbytes is None else nbytes
        with self.lock, self._ordered():
            self.writer.finish()
            slots = self._slots(ids)
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
            self.reserve_space(ids)
            slots = self._slots(ids)
            cached = slots >= 0
            records = records.to(self.device)
            if not bool(cached.all()):
                outside = (~cached).nonzero().flatten()
                self.storage.scatter_(ids[outside], records[self._copy_to_device(outside)].to(CPU))
            inside = cached.nonzero().flatten()
            at = self._copy_to_device(slots[inside])
            changed = records.index_select(0, self._copy_to_device(inside))
            # Marked first: after an interruption, a record that has changed is written back.
            self.index.dirty.index_fill_(0, at.to(self.index.clock.device), 1)
            self.records.index_copy_(0, at, changed)

    def flush(self) -> None:
        with self.lock, self._ordered():
            if self.device.type == "cuda":
                synchronize(self.device)
            dirty = self.index.dirty.nonzero().flatten()
            for slots in torch.split(dirty, max(1, FLUSH_BYTES // self.record.nbytes)):
                copies = self._copy_to_host(slots.to(self.device))
                self.writer.write(self.index.row_of_slot[slots].to(CPU), copies)
                self.writer.finish()
                self.index.dirty.index_fill_(0, slots, 0)
            self.writer.finish()
            self.writer.clear()

    def drop(self) -> None:
        with self.lock, self._ordered():
            self.flush()
            self._clear()

    def retire(self) -> None:
        self.retired = True

    def count_unsaved(self) -> int:
        """Count rows that changed since the last checkpoint, here or in the storage. Waits for the device."""
        with self.lock, self._ordered():
            return self.writer.count_unsaved()

    def abandon(self) -> None:
        with self.lock:
            if self.device.type == "cuda":
                synchronize(self.device)
            self.writer.abandon()
            self._clear()
            self.writer.clear()
            self.retire()

    def _clear(self) -> None:
        for reservation in self._live:
            reservation.is_live = False
        self._live.clear()
        self._unmoved = None
        self.index.clear()


def _pinned_copy(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _words(records: Tensor) -> Tensor:
    """View records as int64: torch takes as long for a byte as for eight."""
    return records.view(torch.int64)
