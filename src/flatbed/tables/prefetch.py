"""Rows of coming batches, moved to where lookups find them while earlier batches are trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing, stream_for
from flatbed.distributed.channel import Channel
from flatbed.distributed.row_shards import Exchanged, Route
from flatbed.errors import FlatbedError
from flatbed.kernels import use_triton
from flatbed.kernels.rows import to_int32_keys, unique
from flatbed.tables.cache.base import Cache, LookupBatch
from flatbed.tables.cache.host_index import HostIndexCache, Reservation
from flatbed.tables.ids import as_ids, check_range
from flatbed.tables.table import Table

READ_ROWS = 1024  # read from disk at once, on a CPU: the training thread may have to wait for it


@dataclass(slots=True)
class LookupRequest:
    """One lookup of a batch, from the loader to the end of its step."""

    source: Tensor
    """The ids as they are in the batch; `ids` once the batch is handed out."""
    ids: Tensor
    """The ids on the host, flat."""
    route: Route | None = None
    """If the table is sharded, the rows to ask other ranks for; on the host."""
    exchanged: Exchanged | None = None
    """If the table is sharded, the rows that ranks have asked each other for; on the host."""
    rows_to_read: Tensor | None = None
    """Unique rows to read from disk."""
    reserved: tuple[HostIndexCache, Reservation] | None = None
    """The cache of a disk table, and the reservation of the rows in it."""
    batch: LookupBatch | None = None
    """The prefetched lookup."""

    @property
    def sought(self) -> Tensor:
        """The rows of this rank that are looked up, with repeats; on the host."""
        return self.ids if self.exchanged is None else self.exchanged.rows


@dataclass(slots=True)
class PrefetchRequest:
    """The lookups of one batch in one table."""

    lookups: list[LookupRequest]
    is_in_range: bool = True
    """False if ids were out of range when the request was staged."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that `RowPrefetch.admit` needs on the computing device."""
        tensors = [lookup.source for lookup in self.lookups]
        for exchanged in (lookup.exchanged for lookup in self.lookups):
            if exchanged is not None:
                tensors += [exchanged.route.order, exchanged.route.rows, exchanged.rows]
        return tensors


class RowPrefetch:
    """Prefetches rows of one table, for one iteration of a loader.

    It never changes the result of a lookup. Rows of up to `depth` batches after the current one are
    prefetched.
    """

    def __init__(self, table: Table, depth: int) -> None:
        store = table._store
        self.table, self.store, self.depth = table, store, depth
        # In training, on a GPU or under Triton's interpreter, rows are admitted to a cache. The mode of this
        # thread counts: the loader thread has one of its own.
        on_gpu = store.device.type == "cuda" or use_triton(store.device)
        self._admits = torch.is_grad_enabled() and on_gpu
        is_cached = self._admits and store.config.cache_rows != 0
        self.reads_disk = store.config.storage == "disk" and (is_cached or not self._admits)
        """True if `read` takes long enough for a thread of its own."""
        self._training_stream: torch.cuda.Stream | None = None

    # ---- in the loader threads

    def check(self, ids: list[Tensor]) -> PrefetchRequest:
        """Check ids, and find the rows that `read` has to read."""
        request = PrefetchRequest([LookupRequest(one, as_ids(one.cpu()).flatten()) for one in ids])
        try:
            check_ids(self.table, (lookup.ids for lookup in request.lookups))
        except IndexError:  # `begin` raises, unless the table has grown by then
            request.is_in_range = False
            return request
        shards = self.table._shards
        if shards is not None:
            for lookup in request.lookups:
                lookup.route = shards.route(_unique(lookup.ids, shards.n_rows))
        elif self.reads_disk:
            self._plan_reads(request)
        return request

    def exchange(self, request: PrefetchRequest, channel: Channel) -> None:
        """Ask other ranks for rows, if the table is sharded. All ranks do so in one order."""
        if self.table._shards is None:
            return
        for lookup in request.lookups:
            assert lookup.route is not None
            lookup.exchanged = self.table._shards.exchange_ahead(lookup.route, channel)
        if self.reads_disk:
            self._plan_reads(request)

    def _plan_reads(self, request: PrefetchRequest) -> None:
        for lookup in request.lookups:
            if self._admits or lookup.sought.numel():
                lookup.rows_to_read = _unique(lookup.sought, self.store.config.n_rows)

    def read(self, request: PrefetchRequest) -> None:
        """Read rows from disk into the cache, or into the system's page cache. Batches are read in order."""
        rows = [lookup.rows_to_read for lookup in request.lookups if lookup.rows_to_read is not None]
        if rows and self._admits:
            self._reserve(request)
        elif rows:
            for some in torch.split(torch.cat(rows), READ_ROWS):
                with suppress(FlatbedError):  # another thread may replace the file
                    self.store.ensure_layout().gather(some)

    def _reserve(self, request: PrefetchRequest) -> None:
        """Reserve the rows of all lookups in the cache, which reads them."""
        # The present cache, if any: replacing it here would take it from the training thread.
        n_sought = sum(lookup.sought.numel() for lookup in request.lookups)
        found = self.store.cache or self.store.ensure_cache(n_sought, n_batches=self.depth + 2)
        if found is None:
            return
        cache = cast(HostIndexCache, found)  # the kind that tables on disk have
        on_gpu = self.store.device.type == "cuda"
        with torch.cuda.stream(stream_for(self.store.device, "files") if on_gpu else None):
            for lookup in request.lookups:
                assert lookup.rows_to_read is not None
                try:
                    reservation = cache.reserve(lookup.rows_to_read)
                except FlatbedError:
                    self.finish(request)
                    if not cache.retired:  # otherwise the file was replaced
                        raise
                    return
                lookup.reserved = None if reservation is None else (cache, reservation)

    # ---- in the training thread

    def admit(self, request: PrefetchRequest, moved: Mapping[int, Tensor]) -> None:
        """Admit rows to the cache in the current stream.

        `moved` has the request's tensors on the computing device, by the id of each. The current stream is
        ordered after their copies.
        """
        if not request.is_in_range:
            return
        lookups = request.lookups
        n_sought = sum(lookup.sought.numel() for lookup in lookups)
        cache = None
        if self._admits and n_sought:
            cache = self.store.ensure_cache(n_sought, n_batches=self.depth + 2)
        if cache is not None:
            self._admit(lookups, moved, cache)
        for lookup in lookups:
            if lookup.exchanged is not None:
                exchanged = _moved_exchange(lookup.exchanged, moved)
                lookup.batch = self._exchanged_batch(moved[id(lookup.source)], exchanged, lookup.batch)
        for lookup in lookups:
            batch, ids = lookup.batch, moved[id(lookup.source)]
            if batch is not None:
                batch.ids, batch.version = ids, -1 if ids.is_inference() else ids._version
                if self.store.device.type == "cuda":
                    batch.ready = torch.cuda.current_stream(self.store.device).record_event()

    def _admit(self, lookups: list[LookupRequest], moved: Mapping[int, Tensor], cache: Cache) -> None:
        """Admit the rows of each lookup. Lookups whose rows cannot be kept get no batch."""
        # Keeps the two batches whose steps may still run, and all batches between them and this lookup.
        window = (self.depth + 2) * len(lookups) - 1
        for lookup in lookups:
            sought = moved[id(lookup.source if lookup.exchanged is None else lookup.exchanged.rows)]
            keys = to_int32_keys(as_ids(sought).reshape(-1), self.store.config.n_rows)
            reserved_in, reservation = lookup.reserved or (None, None)
            if reserved_in is not cache:  # the table has had another cache since
                reservation = None
            found = cache.prefetch(keys, window=window, reservation=reservation)
            if found is not None:
                lookup.batch = LookupBatch(sought.shape, keys, found[0], cache, found[1])

    def _exchanged_batch(self, ids: Tensor, exchanged: Exchanged, own: LookupBatch | None) -> LookupBatch:
        """Return the batch of a lookup in the rows of all ranks; `own` is that of this rank's rows."""
        n_rows = self.table.num_embeddings
        keys = to_int32_keys(as_ids(ids).reshape(-1), n_rows)
        found = unique(keys, n_rows)
        # Both are in ascending order. Kernels return more rows, of which the last are -1.
        route = replace(exchanged.route, n_rows=len(found.rows))
        batch = LookupBatch(ids.shape, keys, found, exchanged=replace(exchanged, route=route))
        if own is not None:
            batch.cache, batch.admission = own.cache, own.admission
        return batch

    def begin(self, request: PrefetchRequest) -> None:
        """Order the current stream after the admission, and let lookups find it.

        Raises IndexError if ids are out of range; the table may have grown since they were staged.
        """
        if not request.is_in_range:
            check_ids(self.table, (lookup.ids for lookup in request.lookups))
        for lookup in request.lookups:
            lookup.source = lookup.ids  # the training loop alone holds the batch
        batches = [lookup.batch for lookup in request.lookups if lookup.batch is not None]
        if self.store.device.type == "cuda":
            stream = self._training_stream = torch.cuda.current_stream(self.store.device)
            for batch in batches:
                if batch.ready is not None:
                    stream.wait_event(batch.ready)
                batch.record_stream(stream)
        for batch in batches:  # the first admission is the oldest: `protects` covers those after it
            if batch.cache is not None:
                batch.cache.begin(batch.admission)
                break
        self.table._prefetched.extend(batches)

    # ---- in any thread

    def finish(self, request: PrefetchRequest) -> None:
        """End the lookups: they are no longer found. Idempotent.

        Reservations in the cache of a disk table end after the training work issued so far. In a `GpuCache`,
        windows alone decide which rows may be evicted.
        """
        reserved = []
        for lookup in request.lookups:
            if lookup.batch is not None:
                with suppress(ValueError):
                    self.table._prefetched.remove(lookup.batch)
            if lookup.reserved is not None:
                reserved.append(lookup.reserved)
            lookup.batch = lookup.reserved = None
        after = self._issued_work() if reserved else None
        for cache, reservation in reserved:
            cache.release(reservation, after)

    def _issued_work(self) -> torch.cuda.Event | None:
        """Record an event in the training stream, unless it is capturing a graph."""
        if self._training_stream is None:
            return None
        with torch.cuda.stream(self._training_stream):
            return None if is_capturing(self.store.device) else self._training_stream.record_event()


def check_ids(table: Table, ids: Iterable[Tensor]) -> None:
    """Raise IndexError for ids of a batch that are out of range."""
    for one in ids:
        try:
            check_range(as_ids(one.cpu()), table.num_embeddings)
        except IndexError as error:
            raise IndexError(f"the lookups of {table!r}: {error}") from None


def _moved_exchange(exchanged: Exchanged, moved: Mapping[int, Tensor]) -> Exchanged:
    """Return an exchange with its tensors on the device."""
    route = exchanged.route
    route = replace(route, order=moved[id(route.order)], rows=moved[id(route.rows)])
    return replace(exchanged, route=route, rows=moved[id(exchanged.rows)])


def _unique(ids: Tensor, n_rows: int) -> Tensor:
    """Return unique ids in order, by numpy: torch would start more threads."""
    found = np.sort(ids.numpy().astype(np.int32 if n_rows < 2**31 else np.int64))
    first = np.ones(len(found), np.bool_)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return torch.from_numpy(found[first].astype(np.int64))
