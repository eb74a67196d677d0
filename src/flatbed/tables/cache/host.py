"""A cache that decides on the host: over files, and wherever there are no kernels."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.cuda.streams import relaxed_capture
from flatbed.kernels.cache import (
    CacheIndex,
    Placement,
    ProbeResult,
    count_uses,
    evict,
    insert,
    probe,
    select_victims,
)
from flatbed.kernels.dispatch import use_triton
from flatbed.kernels.rows import RecordLocation
from flatbed.tables.cache.in_flight import InFlight
from flatbed.tables.cache.reservation import Reservation
from flatbed.tables.cache.stats import CacheStats
from flatbed.tables.storage.base import Storage
from flatbed.tables.storage.disk import DiskStorage

CPU = torch.device("cpu")
MANY = 1 << 12  # rows for which it pays to ask another thread
WRITE_BYTES = 1 << 26  # of records on their way home at once


@dataclass(slots=True)
class Copies:
    """Records on the host, complete after an event."""

    records: Tensor
    complete: torch.cuda.Event | None = None
    device: torch.device = CPU
    """Where they are copied from."""

    def wait(self) -> None:
        """Until they are complete. In any thread, whoever captures a graph meanwhile."""
        if self.complete is not None:
            with relaxed_capture(), torch.cuda.device(self.device):
                self.complete.synchronize()


@dataclass(slots=True)
class Leaving:
    """Changed records on their way home, in host memory. They are here until they have arrived there."""

    rows: Tensor
    copies: Copies
    n_owed: int
    there: Future[None]


class HostCache:
    """Hot records in the memory of the device that computes, over any tier; which they are, the host knows.

    Threads may come at the same time: whoever moves rows holds the lock. Rows of a live ticket do not move,
    and who trains them takes no notice of it, since it may be held as long as the disk takes.
    """

    def __init__(self, home: Storage, n_slots: int, *, policy: str, device: torch.device) -> None:
        self.home = home
        self.record, self.n_rows, self.device = home.record, home.n_rows, CPU
        self.computes_on = device
        self.memory: Tensor | None = None
        self.tags = CacheIndex(home.n_rows, n_slots, policy=policy, device=CPU)
        self.records = torch.empty((n_slots, home.record.nbytes), dtype=torch.uint8, device=device)
        self.lock = threading.RLock()
        self.owed = torch.zeros(n_slots, dtype=torch.bool, device=CPU)
        """Whether the row in a slot has changed, and has no place in the file of changes yet."""
        self.n_owed = 0
        """How many have, those on their way there included: so much room is kept for them."""
        self._owing = threading.Lock()  # held for these two alone
        self._leaving: Leaving | None = None
        self._process = os.getpid()
        self.section = 0
        self._last: torch.cuda.Event | None = None  # when what was issued last is done
        self._after: list[torch.cuda.Event] = []  # steps with rows that may go
        self.retired = False
        """Whether the table has another cache by now."""
        self.under_way = InFlight()
        self.place = self._place() if device.type == "cuda" else None
        if isinstance(home, DiskStorage):
            home.count_also(_waiting(weakref.ref(self)))

    def _place(self) -> RecordLocation:
        """For kernels, which are asked for rows that are here, and for no others."""
        maps = self.tags.slot_of_row.to(self.computes_on), self.tags.dirty.to(self.computes_on)
        return RecordLocation(None, self.records, *maps)

    @property
    def n_slots(self) -> int:
        return self.tags.n_slots

    def covers(self, ticket: Reservation | None) -> bool:
        """Whether a batch's rows are here and stay, whoever comes at the same time."""
        return ticket is not None and ticket.live and ticket.cache is self and ticket.section == self.section

    # ---- batches

    def come(self, rows: Tensor) -> None:
        """Bring rows here, which are distinct and on the host."""
        with self._turn():
            window = self.under_way.window if self.has_room(len(rows)) else 0
            if self.under_way.tickets and not window:
                self.section += 1  # their rows may have to go
            self._come(rows, window=window)

    def has_room(self, n_ids: int) -> bool:
        """Whether a batch may come ahead of time: all that are under way fit together."""
        return self.tags.direct or self.under_way.n_rows + n_ids <= self.n_slots

    def come_early(self, rows: Tensor) -> Reservation | None:
        """The same ahead of time; None if there is no room for all. The ids are yet to come."""
        with self._turn(early=True):
            if self.retired or not self.has_room(len(rows)):
                return None
            tick, slots = self._come(rows, window=self.under_way.window)
            if slots is None:
                return None
            ticket = Reservation(self, rows, -1, rows, None, self.section, tick, None, rows=rows, slots=slots)
            self.under_way.begin(ticket, len(rows))
            return ticket

    def done_with(self, after: torch.cuda.Event | None) -> None:
        """A ticket is about to end; its rows may go after this event, or after all of the current stream."""
        if self.place is None:
            return
        if after is None:
            if torch.cuda.is_current_stream_capturing():
                return
            after = torch.cuda.current_stream(self.computes_on).record_event()
        self._after.append(after)

    def _come(self, rows: Tensor, *, window: int) -> tuple[int, NDArray[np.int64] | None]:
        """Which batch it is, and the slots of its rows, if all of them are here now."""
        tick = self.under_way.come(len(rows))
        sought = probe(self.tags, rows)
        with self._counting(sought):
            if not len(sought.missing):
                return tick, sought.slots
            arrivals = self._move(sought, window)
        if len(arrivals.rows) < len(sought.missing):
            return tick, None
        sought.slots[sought.slots < 0] = arrivals.slots
        return tick, sought.slots

    def _move(self, sought: ProbeResult, window: int) -> Placement:
        """Read what is missing; meanwhile, find room for it, and send home what has changed there."""
        self.arrive()
        most = self.n_slots - len(sought.hits)  # that can come: no more are to be read
        with self._reading(sought.missing[:most]) as read:
            arrivals = select_victims(self.tags, sought, window=window)
            self._send_changed(arrivals)
            records, order = read()
        n = len(arrivals.rows)
        if n < len(order):
            records, order = records[torch.from_numpy(order < n)], order[order < n]
        self._replace(arrivals, records, order)
        return arrivals

    @contextmanager
    def _reading(
        self, missing: NDArray[np.int64]
    ) -> Iterator[Callable[[], tuple[Tensor, NDArray[np.int64]]]]:
        """Records from home, and which rows they are, by the time they are asked for: many of a file by
        threads of the disk's, which have time to spare.
        """
        rows, home = torch.from_numpy(missing), self.home
        if not isinstance(home, DiskStorage):
            yield lambda: (home.gather(rows), np.arange(len(rows)))
            return
        shape, pin = (len(rows), self.record.nbytes), self.computes_on.type == "cuda"
        memory = torch.empty(shape, dtype=torch.uint8, device=CPU, pin_memory=pin)
        if len(rows) < MANY:
            yield lambda: (memory, home.collect(rows, memory))
            return
        order = home.aside(home.collect, rows, memory)
        try:
            yield lambda: (memory, order.result())
        finally:
            wait([order])

    @contextmanager
    def _counting(self, sought: ProbeResult) -> Iterator[None]:
        """Count uses by the time this ends: many by a thread of the disk's, too."""
        if not isinstance(self.home, DiskStorage) or len(sought.hits) < MANY:
            count_uses(self.tags, sought)
            yield
            return
        counted = self.home.aside(count_uses, self.tags, sought)
        try:
            yield
        finally:
            counted.result()

    def _send_changed(self, arrivals: Placement) -> None:
        """Copies of what has changed in slots that others come to, home."""
        goes = arrivals.victims >= 0
        slots = arrivals.slots[goes]
        if len(slots):
            copies = self._copies(*self._at_once(slots))
            self._send_home(torch.from_numpy(slots), torch.from_numpy(arrivals.victims[goes]), copies)

    def _replace(self, arrivals: Placement, records: Tensor, order: NDArray[np.int64]) -> None:
        """Put records, in this order, into slots. Interrupted, no slot has one that is not its row's."""
        gone = arrivals.old[arrivals.old >= 0]
        slots, rows, old = self._at_once(arrivals.slots[order], arrivals.rows[order], gone)
        records = self._there(records)
        evict(self.tags, arrivals)
        _words(self.records).index_copy_(0, slots, _words(records))
        if self.place is not None:
            assert self.place.slot_of_row is not None
            self.place.slot_of_row.index_fill_(0, old, -1)
            self.place.slot_of_row.index_copy_(0, rows, slots.to(torch.int32))
        insert(self.tags, arrivals)

    # ---- changed rows on their way home

    def _copies(self, slots: Tensor) -> Copies:
        """Of records, on the host; slots are there."""
        found = _words(self.records).index_select(0, slots).view(torch.uint8)
        if not found.is_cuda:
            return Copies(found)
        pinned = torch.empty(found.shape, dtype=torch.uint8, device=CPU, pin_memory=True)
        pinned.copy_(found, non_blocking=True)
        done = torch.cuda.current_stream(self.computes_on).record_event()
        return Copies(pinned, done, self.computes_on)

    def _send_home(self, slots: Tensor, rows: Tensor, copies: Copies) -> None:
        """Write copies home, for a file beside what comes next."""
        if not isinstance(self.home, DiskStorage):
            copies.wait()
            self.home.scatter_(rows, copies.records)
            return
        self.arrive()
        owed, at = self.owed.numpy(), slots.numpy()
        with self._owing:
            n_owed = int(owed[at].sum()) if self.n_owed else 0
            # In this order, here and in `arrive`: interrupted, there is more room than need be.
            owed[at] = False  # they are others' now
            there = self.home.send(rows, copies.records, after=copies.wait)
            self._leaving = Leaving(rows, copies, n_owed, there)

    def arrive(self) -> None:
        """Wait until nothing is on its way home. What could not be written is tried again, whoever asks."""
        with self.lock:
            leaving = self._leaving
            if leaving is None:
                return
            wait([leaving.there])
            if leaving.there.exception() is not None:
                leaving.copies.wait()
                self.home.scatter_(leaving.rows, leaving.copies.records)
            with self._owing:
                self._leaving = None
                self.n_owed -= leaving.n_owed

    in_graphs = False

    @property
    def n_unsaved(self) -> int:
        """How many rows have changed and have no place in the file of changes."""
        leaving = self._leaving
        if os.getpid() != self._process:
            return 0  # the parent's, as are the threads that write them
        if leaving is not None:
            wait([leaving.there])
        arrived = leaving is not None and leaving.there.exception() is None
        return self.n_owed - (leaving.n_owed if leaving is not None and arrived else 0)

    @contextmanager
    def _turn(self, *, early: bool = False) -> Iterator[None]:
        """One after the other, on the device as well: each may be in a stream of its own. Batches that come
        early wait for the steps of those whose tickets have ended, whose rows may go now.
        """
        with self.lock:
            if self.computes_on.type != "cuda":
                yield
                return
            stream = torch.cuda.current_stream(self.computes_on)
            if self._last is not None:
                stream.wait_event(self._last)
            if early:
                while self._after:
                    stream.wait_event(self._after.pop())
            try:
                yield
            finally:
                self._last = stream.record_event()

    def _there(self, tensor: Tensor) -> Tensor:
        """On the computing device."""
        if self.computes_on.type != "cuda" or not tensor.numel():
            return tensor.to(self.computes_on)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.computes_on, non_blocking=True)

    def _at_once(self, *numbers: NDArray[np.int64]) -> list[Tensor]:
        """On the computing device, by one copy."""
        if self.computes_on.type != "cuda":
            return [torch.from_numpy(some) for some in numbers]
        lengths = [len(some) for some in numbers]
        pinned = torch.empty(sum(lengths), dtype=torch.int64, device=CPU, pin_memory=True)
        np.concatenate(numbers, out=pinned.numpy())
        return [*torch.split(pinned.to(self.computes_on, non_blocking=True), lengths)]

    # ---- rows

    def make_room(self, rows: Tensor) -> None:
        """Raise now if a full disk has no room for changes of these rows beside those that wait here."""
        # In this order: what is on its way home is counted there before it is not counted here any more.
        if not isinstance(self.home, DiskStorage):
            return
        if self.home.has_room(self.n_owed + len(rows)) and not self._failed():
            return
        with self.lock:
            self.arrive()
            slots = self.tags.slot_of_row[rows].long()
            counted = self.owed[slots] & (slots >= 0)
            self.home.make_room(rows[~counted], also=self.n_owed)

    def _failed(self) -> bool:
        """Whether rows could not be written home: better heard of before a step than in it."""
        leaving = self._leaving
        return leaving is not None and leaving.there.done() and leaving.there.exception() is not None

    def changed(self, ticket: Reservation) -> None:
        """Kernels are about to write to a ticket's rows, which are here and stay, and have their room."""
        assert ticket.rows is not None
        assert ticket.slots is not None
        self._changed(ticket.rows, ticket.slots)

    def _changed(self, rows: Tensor, at: NDArray[np.int64]) -> None:
        """Remember to write these home, and for which of them there must be room until then."""
        dirty = self.tags.dirty.numpy()
        clean = np.flatnonzero(dirty[at] == 0)
        at = at[clean]
        if isinstance(self.home, DiskStorage):
            owed = at[self.home.unchanged(torch.from_numpy(rows.numpy()[clean])).numpy()]
            with self._owing:
                self.n_owed += len(owed)
                self.owed.numpy()[owed] = True
        dirty[at] = 1

    def look(self, keys: Tensor, ticket: Reservation | None, dtype: torch.dtype, dim: int) -> Tensor | None:
        """The weights of a ticket's ids, (n,) → (n, dim), if kernels are at hand."""
        if self.place is None or not use_triton(self.computes_on):
            return None
        from flatbed.kernels._triton import cache

        if ticket is not None and ticket.done is not None:
            torch.cuda.current_stream(self.computes_on).wait_event(ticket.done)
        return cache.look(self.place, keys, dim, dtype, self.n_rows)

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        """Copies of records, or of their first bytes, on the computing device; ids are on the host."""
        nbytes = self.record.nbytes if nbytes is None else nbytes
        with self._turn():
            self.arrive()
            slots = self.tags.slot_of_row[ids].long()
            here = slots >= 0
            held = self.records[:, :nbytes]
            if not len(ids):
                return torch.empty((0, nbytes), dtype=torch.uint8, device=self.computes_on)
            if bool(here.all()):
                return held.index_select(0, self._there(slots))
            out = torch.empty((len(ids), nbytes), dtype=torch.uint8, device=self.computes_on)
            inside, outside = here.nonzero().flatten(), (~here).nonzero().flatten()
            out.index_copy_(0, self._there(inside), held.index_select(0, self._there(slots[here])))
            away = self.home.gather(ids[outside], nbytes)
            return out.index_copy_(0, self._there(outside), self._there(away))

    def scatter_(self, ids: Tensor, records: Tensor) -> None:
        """Replace records where they are: those at home first, since that may fail."""
        with self._turn():
            self.arrive()
            self.make_room(ids)
            slots = self.tags.slot_of_row[ids].long()
            here = slots >= 0
            records = records.to(self.computes_on)
            if not bool(here.all()):
                away = (~here).nonzero().flatten()
                self.home.scatter_(ids[away], records[self._there(away)].to(CPU))
            at = here.nonzero().flatten()
            self.records.index_copy_(0, self._there(slots[at]), records.index_select(0, self._there(at)))
            self._changed(ids[at], slots[at].numpy())

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of consecutive records."""
        with self.lock:
            self.flush()
            return self.home.read(start, stop)

    def write_(self, start: int, records: Tensor) -> None:
        """Replace consecutive records."""
        with self.lock:
            self.drop()
            self.home.write_(start, records)

    def flush(self) -> None:
        """Write home what has changed."""
        with self.lock:
            if self.computes_on.type == "cuda":
                torch.cuda.synchronize(self.computes_on)
            dirty = self.tags.dirty.nonzero().flatten()
            for slots in torch.split(dirty, max(1, WRITE_BYTES // self.record.nbytes)):
                self._send_home(slots, self.tags.row_of_slot[slots], self._copies(self._there(slots)))
                self.arrive()
                self.tags.dirty[slots] = 0
            self.arrive()
            self._owe_nothing()

    def drop(self) -> None:
        """Write home what has changed, and be empty."""
        with self._turn():
            self.flush()
            self._forget()

    def retire(self) -> None:
        """The same for good: the table is about to have another cache."""
        with self.lock:
            self.drop()
            self.retired = True

    def abandon(self) -> None:
        """The same, but drop what has changed."""
        with self._turn():
            if self.computes_on.type == "cuda":
                torch.cuda.synchronize(self.computes_on)
            self._let_leave()
            self._forget()
            self._owe_nothing()
            self.retired = True

    def _forget(self) -> None:
        self.section += 1
        self.tags.forget()
        if self.place is not None:
            assert self.place.slot_of_row is not None
            self.place.slot_of_row.fill_(-1)

    def _owe_nothing(self) -> None:
        with self._owing:
            self.owed.zero_()
            self.n_owed = 0

    def _let_leave(self) -> None:
        """Whether or not they arrive."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and os.getpid() == self._process:
            wait([leaving.there])

    def close(self) -> None:
        """Give the memory back, and the home's."""
        self._let_leave()
        self.home.close()

    # ---- what it has done, what it shall begin with

    def stats(self) -> CacheStats:
        """Counts so far."""
        return CacheStats.of(self.tags.counts.tolist(), rows=self.n_slots, nbytes=self.record.nbytes)

    def warm(self, rows: Tensor, counts: Tensor) -> None:
        """Bring rows here, the most used last; `counts` says how often each is used."""
        for start in range(0, len(rows), 1 << 16):
            some = rows[start : start + (1 << 16)]
            self.come(some)
            if self.tags.policy == "lfu":
                slots = self.tags.slot_of_row[some].long()
                here = slots >= 0
                self.tags.frequency[slots[here]] += counts[start : start + (1 << 16)][here].float().log2()


def _waiting(cache: weakref.ref[HostCache]) -> Callable[[], int]:
    """How many changed rows wait in a cache, if it is still there."""

    def count() -> int:
        found = cache()
        return 0 if found is None else found.n_unsaved

    return count


def _words(records: Tensor) -> Tensor:
    """Records as what is copied at a time: torch moves elements, and a byte takes it as long as eight."""
    return records.view(torch.int64)
