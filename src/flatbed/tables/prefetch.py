"""Rows of batches to come, brought to where they will be used while the batch before is at work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.streams import Within, current_stream, stream_for
from flatbed.errors import FlatbedError
from flatbed.kernels.rows import narrow, unique
from flatbed.tables.cache import DeviceCache, HostCache, Reservation
from flatbed.tables.cache.reservation import version_of
from flatbed.tables.ids import as_ids, check_range
from flatbed.tables.table import Table

AT_ONCE = 1024  # rows that are read while the training thread has to wait, if it wants to read, too


@dataclass(slots=True)
class Staged:
    """One batch's lookups in one table."""

    n_ids: int
    to_read: Tensor | None = None
    """Rows that are to be read from disk into the system's memory."""
    to_bring: Sequence[Tensor] = ()
    """For each lookup the rows that are to be brought from disk into the cache."""
    tickets: list[Reservation] = field(default_factory=list)
    ready: bool = False
    """Whether lookups can make use of the tickets."""
    doubtful: Sequence[Tensor] = ()
    """Ids for which the table has no rows yet."""


class RowPrefetch:
    """Rows of one table for batches to come.

    Nothing here changes what a lookup gives: it is faster when the rows have come before it.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._side: torch.cuda.Stream | None = None  # in which batches come early
        self._source: torch.cuda.Stream | None = None  # in which their ids come

    @property
    def device(self) -> torch.device:
        """Where the table computes."""
        return self.table.store.device

    @property
    def brings(self) -> bool:
        """Whether rows are read from disk, which takes a while."""
        config = self.table.store.config
        return config.storage == "disk" and (self._only_reads or config.cache_rows != 0)

    @property
    def _only_reads(self) -> bool:
        """Into the system's memory, since no cache is to have them."""
        return self.device.type == "cpu" or not torch.is_grad_enabled()

    def stage(self, ids: list[Tensor]) -> Staged:
        """Look at ids on the host, and find the rows that `bring` is to read."""
        wanted = [as_ids(one).flatten() for one in ids]
        try:
            for one in wanted:
                check_range(one, self.table.num_embeddings)
        except IndexError:
            return Staged(0, doubtful=wanted)  # the table may have grown by then
        staged = Staged(sum(one.numel() for one in wanted))
        if staged.n_ids and self.brings:
            n_rows = self.table.num_embeddings
            if self._only_reads:
                staged.to_read = _distinct(torch.cat(wanted), n_rows)
            else:
                staged.to_bring = [_distinct(one, n_rows) for one in wanted]
        return staged

    def bring(self, staged: Staged) -> None:
        """Read from disk what must be. For one thread, batch after batch."""
        to_read, staged.to_read = staged.to_read, None
        to_bring, staged.to_bring = staged.to_bring, ()
        if to_read is not None:
            self._read(to_read)
        if to_bring:
            store = self.table.store
            cache = store.cache or store.cache_for(staged.n_ids)  # not another one: it may be in use
            if isinstance(cache, HostCache):
                with Within(stream_for(self.device, "files")):
                    self._bring(cache, to_bring, staged)

    def _read(self, rows: Tensor) -> None:
        """Into the system's memory. The file may be replaced meanwhile, which is no reason to stop."""
        for some in torch.split(rows, AT_ONCE):
            with suppress(FlatbedError):
                self.table.store.ensure_layout().gather(some)

    def _bring(self, cache: HostCache, wanted: Sequence[Tensor], staged: Staged) -> None:
        """All or nothing, since a lookup uses rows that are here without looking."""
        try:
            for rows in wanted:
                ticket = cache.come_early(rows)
                if ticket is None:
                    self.drop(staged)
                    return
                staged.tickets.append(ticket)
                ticket.done = stream_for(self.device, "files").record_event()
        except FlatbedError:
            self.drop(staged)
            if not cache.retired:  # else the file was replaced
                raise

    def waits(self, staged: Staged) -> bool:
        """Whether there is no use in `admit` before the batch is in front: graphs come through the cache, and
        do not say when they run. It is after the one launched last.
        """
        cache = self.table.store.cache
        return isinstance(cache, DeviceCache) and bool(cache.graphs) and not staged.ready

    def admit(
        self, staged: Staged, ids: list[Tensor], *, after: torch.cuda.Event | None, front: bool
    ) -> bool:
        """Bring the rows of ids on the computing device into its cache, in the current stream. They were
        made in the stream for batches, which that has waited for.

        False if that is not possible now. `after`: all that was issued for batches before.
        """
        if staged.ready:
            return True
        store = self.table.store
        if self.device.type == "cpu" or staged.n_ids == 0:
            return True
        if not torch.is_grad_enabled():
            return True  # evaluation leaves the cache as it is
        cache = store.cache_for(staged.n_ids)
        if isinstance(cache, HostCache):
            self._complete(cache, staged, ids)
        elif isinstance(cache, DeviceCache):
            if (cache.graphs and not front) or not cache.has_room(staged.n_ids):
                return False
            if self._side is None and self.device.type == "cuda":
                self._side, self._source = current_stream(self.device), stream_for(self.device, "batches")
            staged.tickets = [cache.come_early(one, after, self._side, ids_from=self._source) for one in ids]
        staged.ready = True
        return True

    def _keys(self, ids: Tensor) -> Tensor:
        return narrow(as_ids(ids).reshape(-1), self.table.num_embeddings)

    def _complete(self, cache: HostCache, staged: Staged, ids: list[Tensor]) -> None:
        """The rows are on their way; what remains is the order of the ids."""
        stream = current_stream(self.device)
        for ticket, one in zip(staged.tickets, ids, strict=False):
            assert ticket.done is not None
            stream.wait_event(ticket.done)
            ticket.ids, ticket.version, ticket.keys = one, version_of(one), self._keys(one)
            ticket.found = unique(ticket.keys, self.table.num_embeddings)
            ticket.done = stream.record_event()

    def begin(self, staged: Staged) -> None:
        """The batch is about to be handed out, to the current stream."""
        for ids in staged.doubtful:
            try:
                check_range(ids, self.table.num_embeddings)
            except IndexError as error:
                raise IndexError(f"the ids function for {self.table!r}: {error}") from None
        cache = staged.tickets[0].cache if staged.tickets else None
        if isinstance(cache, DeviceCache) and cache.graphs:
            return  # they find the rows there, and nothing else
        if staged.ready and staged.tickets:
            if self.device.type == "cuda":
                stream = current_stream(self.device)
                for ticket in staged.tickets:
                    ticket.record_stream(stream)
            self.table.tickets.extend(staged.tickets)

    def finish(self, staged: Staged, after: torch.cuda.Event | None) -> None:
        """The batch is done with: `after` this event, its rows may go."""
        for ticket in staged.tickets:
            if isinstance(ticket.cache, HostCache) and after is not None:
                ticket.cache.done_with(after)
        self.drop(staged)

    def drop(self, staged: Staged) -> None:
        """The batch will not be looked up any more."""
        gone = staged.tickets
        staged.tickets = []
        if gone and isinstance(gone[0].cache, HostCache) and self.device.type == "cuda":
            gone[0].cache.done_with(None)
        for ticket in gone:
            ticket.end()
            if ticket in self.table.tickets:
                self.table.tickets.remove(ticket)


def _distinct(ids: Tensor, n_rows: int) -> Tensor:
    """In order; numpy sorts in this thread alone, and leaves the others to the training."""
    found = np.sort(ids.numpy().astype(np.int32 if n_rows < 2**31 else np.int64))
    first = np.ones(len(found), np.bool_)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return torch.from_numpy(found[first].astype(np.int64))
