"""A cache that decides on the computing device, whose kernels reach all records: the host is not asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.streams import Within, current_stream
from flatbed.kernels import rows as ops
from flatbed.kernels.cache import CacheIndex
from flatbed.kernels.rows import RecordLocation, UniqueRows
from flatbed.tables.cache.admission_graph import Lease, Passages
from flatbed.tables.cache.graphs import Graphs
from flatbed.tables.cache.in_flight import InFlight
from flatbed.tables.cache.reservation import Reservation, version_of
from flatbed.tables.cache.stats import CacheStats
from flatbed.tables.ids import as_ids, check_range
from flatbed.tables.storage.base import Storage


class DeviceCache:
    """Hot records in the memory of the device that computes, over a tier that its kernels can address.

    The record of a row is in the slot that the map says, or else at home; whoever reads or writes it looks
    there first. So it does not matter for any result what is here.

    Batches come through one after the other. One that comes ahead of time does so in a stream of its own: it
    leaves alone the rows of batches with a live ticket, and everybody else waits for it.
    """

    def __init__(self, home: Storage, n_slots: int, *, policy: str, device: torch.device) -> None:
        assert home.memory is not None
        self.home = home
        self.record, self.n_rows, self.device = home.record, home.n_rows, device
        self.memory: Tensor | None = None
        self.tags = CacheIndex(home.n_rows, n_slots, policy=policy, device=device)
        self.records = torch.empty((n_slots, home.record.nbytes), dtype=torch.uint8, device=device)
        self.place = RecordLocation(home.memory, self.records, self.tags.slot_of_row, self.tags.dirty)
        self.section = 0
        """How often tickets have become void, since their rows may be gone."""
        self.under_way = InFlight()
        self.foreign: tuple[Any, torch.cuda.Event] | None = None
        """The stream of a batch that came ahead of time, and when it is done."""
        self.used = True
        """Whether rows were used outside of graphs since a batch last came ahead of time."""
        self.graphs = Graphs(device)
        self._loaded = device.type != "cuda"
        self.passages = Passages(self.tags, self.place, home.record.weight)

    @property
    def n_slots(self) -> int:
        return self.tags.n_slots

    # ---- streams

    def wait(self) -> None:
        """Let what is issued next see rows as they are: batches that came ahead of time are done then."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # graphs have their own way
        self.used = True
        self.graphs.outside()
        if self.foreign is not None:
            self._wait_for_foreign(current_stream(self.device))

    def _wait_for_foreign(self, current: torch.cuda.Stream) -> None:
        assert self.foreign is not None
        stream, done = self.foreign
        if done.query():  # type: ignore[no-untyped-call,unused-ignore]
            self.foreign = None
        elif current is not stream and current != stream:
            current.wait_event(done)

    def covers(self, ticket: Reservation | None) -> bool:
        """Whether a batch's rows stay where they are, whoever comes at the same time. Graphs do not look."""
        if ticket is None or self.graphs:
            return False
        return ticket.live and ticket.cache is self and ticket.section == self.section

    # ---- batches

    def come(self, keys: Tensor, bad: Tensor | None) -> UniqueRows:
        """Find the distinct rows of a batch, and bring them here."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._come_in_graph(keys, bad, current_stream(self.device))
        self.wait()
        self._load_for_graphs()
        window = 0
        if len(keys):
            window = self._window(len(keys))
            self.under_way.come(len(keys))
        return self._come(keys, bad, window=window)

    def _load_for_graphs(self) -> None:
        """Run what only graphs run, once: nothing can be loaded while one is captured."""
        if self._loaded:
            return
        from flatbed.kernels._triton import cache, rows

        self._loaded = True
        keys = ops.narrow(torch.zeros(1, dtype=torch.int64, device=self.device), self.n_rows)
        rows.unique(keys, self.n_rows, torch.zeros(1, dtype=torch.int64, device=self.device))
        turn = cache.AdmitScratch(self.tags, 1)
        turn.clock = torch.zeros_like(turn.clock)
        cache.begin(turn)

    def _come_in_graph(self, keys: Tensor, bad: Tensor | None, stream: torch.cuda.Stream) -> UniqueRows:
        """Batches that came early are waited for as late as can be, when the rows are known."""
        from flatbed.kernels._triton import cache, rows

        turn = cache.AdmitScratch(self.tags, len(keys))
        found = rows.unique(keys, self.n_rows, bad)
        self.graphs.enter(stream, len(keys))
        cache.begin(turn)
        cache.admit(self.tags, found.rows, turn, self.place, window=0)
        self.graphs.leave(stream)
        return found

    def _come(self, keys: Tensor, bad: Tensor | None, *, window: int) -> UniqueRows:
        from flatbed.kernels._triton import cache, rows

        try:
            turn = cache.AdmitScratch(self.tags, len(keys))
            found = rows.unique(keys, self.n_rows, bad, turn)
            cache.admit(self.tags, found.rows, turn, self.place, window=window)
        except BaseException:
            self.section += 1  # who knows how far it came
            raise
        return found

    def _window(self, n_ids: int) -> int:
        """How many batches back rows stay, for a batch that does not come early: all that have a ticket, or
        else none, and the tickets are void.
        """
        if not self.under_way.tickets:
            return 0
        if self.has_room(n_ids):
            return self.under_way.window
        self.section += 1
        return 0

    def pass_through(self, ids: Tensor) -> tuple[Lease, Tensor | None] | None:
        """The same in one launch, if there is one for so many ids. Those from the host are checked, and bring
        their weights, (n, dim).
        """
        n, from_host = ids.numel(), ids.device.type == "cpu"
        window = self.under_way.window if self.under_way.tickets and self.has_room(n) else 0
        lease = self.passages.lease(n, window=window, from_host=from_host, checked=from_host)
        if lease is None:
            return None
        if from_host:
            lease.take(ids.flatten())
            check_range(ids, self.n_rows)  # in half the time, now that they are in the processor's cache
        self.wait()
        self._load_for_graphs()
        self._window(n)
        self.under_way.come(n)
        if from_host:
            return lease, lease.look()
        lease.run(ids.flatten())
        return lease, None

    def has_room(self, n_ids: int) -> bool:
        """Whether a batch may come beside those that are under way: all fit together."""
        if self.graphs and not self.graphs.told:
            return False
        return self.tags.direct or self.under_way.n_rows + self.graphs.n_rows + n_ids <= self.n_slots

    def come_early(
        self,
        ids: Tensor,
        after: torch.cuda.Event | None,
        stream: torch.cuda.Stream | None = None,
        *,
        ids_from: torch.cuda.Stream | None = None,
    ) -> Reservation:
        """The same ahead of time, in the current stream, which is not the training's; ids were checked.

        `ids_from`: the stream that the ids were made in, which the current one has waited for.
        """
        n = ids.numel()
        window = self.under_way.window
        tick = self.under_way.come(n) if n else self.under_way.tick
        if stream is None and self.device.type == "cuda":
            stream = current_stream(self.device)
        beside_graphs, self.used = bool(self.graphs) and not self.used, False
        if stream is not None and beside_graphs:
            keys, found, lease = self._come_beside_graphs(ids, window, stream, ids_from)
        else:
            if stream is not None:
                if self.foreign is not None:
                    self._wait_for_foreign(stream)
                if after is not None:
                    stream.wait_event(after)
            keys, found, lease = self._come_at_once(_flat(ids), window)
        done = None
        if stream is not None:
            done = stream.record_event()
            self.foreign = (stream, done)
            self.graphs.tell(stream)
        ticket = Reservation(self, ids, version_of(ids), keys, found, self.section, tick, done, lease=lease)
        self.under_way.begin(ticket, n)
        return ticket

    def _come_at_once(self, ids: Tensor, window: int) -> tuple[Tensor, UniqueRows, Lease | None]:
        lease = self.passages.lease(len(ids), window=window, from_host=False, checked=True)
        if lease is not None:
            lease.run(ids)
            return lease.keys, lease.found, lease
        keys = ops.narrow(ids, self.n_rows)
        return keys, self._come(keys, None, window=window), None

    def _come_beside_graphs(
        self, ids: Tensor, window: int, stream: torch.cuda.Stream, ids_from: torch.cuda.Stream | None
    ) -> tuple[Tensor, UniqueRows, Lease | None]:
        """Rows are found while batches before are on their way, and come when the graph's own, which stay,
        have come.
        """
        window = max(window, self.graphs.n_batches)
        lease = self.passages.lease(ids.numel(), window=window, from_host=False, checked=True, early=True)
        if lease is not None:
            with Within(ids_from):
                lease.find(_flat(ids))
        if self.foreign is not None:
            self._wait_for_foreign(stream)
        self.graphs.wait(stream)
        if lease is not None:
            lease.bring()
            return lease.keys, lease.found, lease
        keys = ops.narrow(_flat(ids), self.n_rows)
        return keys, self._come(keys, None, window=window), None

    # ---- rows

    def look(self, keys: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
        """The weights of ids, (n,) → (n, dim). Whoever calls has waited, or has a ticket."""
        from flatbed.kernels._triton import cache

        return cache.look(self.place, keys, dim, dtype, self.n_rows)

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        """Copies of records, or of their first bytes; of zeros for the row -1."""
        self.wait()
        return ops.gather(self.place, ids, self.record.nbytes if nbytes is None else nbytes)

    def scatter_(self, ids: Tensor, records: Tensor) -> None:
        """Replace records, or their beginnings, where they are."""
        self.wait()
        ops.scatter_(self.place, ids, records)

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of consecutive records."""
        self.flush()
        return self.home.read(start, stop)

    def write_(self, start: int, records: Tensor) -> None:
        """Replace consecutive records."""
        self.drop()
        self.home.write_(start, records)

    def flush(self) -> None:
        """Write home what has changed, and wait until it is there."""
        from flatbed.kernels._triton import cache

        self.wait()
        if self.device.type == "cuda":  # whoever is at work, in whichever stream
            torch.cuda.synchronize(self.device)
        cache.flush(self.tags, self.place)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def drop(self) -> None:
        """Write home what has changed, and be empty."""
        self.flush()
        self.section += 1
        self.tags.forget()

    n_unsaved = 0

    @property
    def in_graphs(self) -> bool:
        """Whether CUDA graphs use this cache."""
        return bool(self.graphs)

    retire = abandon = drop

    # ---- what it has done, what it shall begin with

    def stats(self) -> CacheStats:
        """Counts so far. Waits for the device."""
        return CacheStats.of(self.tags.counts.tolist(), rows=self.n_slots, nbytes=self.record.nbytes)

    def warm(self, rows: Tensor, counts: Tensor) -> None:
        """Bring rows here, the most used last; `counts` says how often each is used."""
        for start in range(0, len(rows), 1 << 16):
            some = rows[start : start + (1 << 16)].to(self.device)
            self.come(some, None)
            if self.tags.policy == "lfu":
                slots = self.tags.slot_of_row[some].long()
                weight = counts[start : start + (1 << 16)].to(self.device).float().log2()
                here = slots >= 0
                self.tags.frequency[slots[here]] += weight[here]


def _flat(ids: Tensor) -> Tensor:
    """(n,) of int64."""
    return (ids if ids.dtype == torch.int64 else as_ids(ids)).reshape(-1)
