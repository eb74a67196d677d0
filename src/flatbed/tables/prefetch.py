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
    begun: bool = False
    doubtful: Sequence[Tensor] = ()
    """Ids for which the table has no rows yet."""


class RowPrefetch:
    """Rows of one table for batches to come.

    Nothing here changes what a lookup gives: it is faster when the rows have come before it.
    """

    def __init__(self, table: Table, depth: int = 2) -> None:
        self.table = table
        self.depth = depth
        self._training: torch.cuda.Stream | None = None
        self._side: torch.cuda.Stream | None = None  # in which batches come early
        self._source: torch.cuda.Stream | None = None  # in which their ids come

    @property
    def device(self) -> torch.device:
        """Where the table computes."""
        return self.table.store.device

    @property
    def reads_disk(self) -> bool:
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
        if staged.n_ids and self.reads_disk:
            n_rows = self.table.num_embeddings
            if self._only_reads:
                staged.to_read = _distinct(torch.cat(wanted), n_rows)
            else:
                staged.to_bring = [_distinct(one, n_rows) for one in wanted]
        return staged

    def read(self, staged: Staged) -> None:
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

    def admit(self, staged: Staged, ids: list[Tensor]) -> None:
        """Bring the rows of ids on the computing device into its cache, in the current stream."""
        store = self.table.store
        if staged.ready or self.device.type == "cpu" or staged.n_ids == 0 or not torch.is_grad_enabled():
            return
        cache = store.cache_for(staged.n_ids)
        if isinstance(cache, HostCache):
            self._complete(cache, staged, ids)
        elif isinstance(cache, DeviceCache):
            if cache.graphs or not cache.has_room(staged.n_ids):
                return
            if self._side is None and self.device.type == "cuda":
                self._side, self._source = current_stream(self.device), stream_for(self.device, "batches")
            after = None
            if self.device.type == "cuda":
                training = self._training or torch.cuda.default_stream(self.device)
                after = training.record_event()
            staged.tickets = [cache.come_early(one, after, self._side, ids_from=self._source) for one in ids]
        staged.ready = True

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
        staged.begun = True
        if self.device.type == "cuda":
            self._training = current_stream(self.device)
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

    def finish(self, staged: Staged) -> None:
        """The batch is done with, or will not be handed out."""
        if staged.begun and self.device.type == "cuda":
            after = current_stream(self.device).record_event()
            for ticket in staged.tickets:
                if isinstance(ticket.cache, HostCache):
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
