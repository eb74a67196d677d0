"""Rows of coming batches, moved to where lookups find them while earlier batches are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing, stream_for
from flatbed.distributed.channel import Channel
from flatbed.distributed.row_shards import Exchanged
from flatbed.errors import FlatbedError
from flatbed.kernels import use_triton
from flatbed.kernels.rows import to_int32_keys, unique
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.cache.host_index import HostIndexCache, Reservation
from flatbed.tables.ids import as_ids, check_range
from flatbed.tables.table import Table

READ_ROWS = 1024  # read from disk at once, on a CPU: the training thread may have to wait for it


@dataclass(slots=True, eq=False)
class LookupRequest:
    """One lookup of a batch, from the loader to the end of its step."""

    source: Tensor
    """The ids as they are in the batch."""
    sought: Tensor
    """The rows of this rank that are looked up, with repeats; on the host."""
    exchanged: Exchanged | None = None
    """If the table is sharded, the rows that ranks have asked each other for; on the host."""
    rows_to_read: Tensor | None = None
    """Unique rows to read from disk."""
    reserved: tuple[HostIndexCache, Reservation] | None = None
    """The cache of a disk table, and the reservation of the rows in it."""
    batch: LookupBatch | None = None
    """The prefetched lookup."""


@dataclass(slots=True, eq=False)
class PrefetchRequest:
    """The lookups of one batch in one table."""

    lookups: list[LookupRequest]
    tensors: list[Tensor] = field(default_factory=list)
    """The tensors that `RowPrefetch.admit` needs on the computing device."""
    is_in_range: bool = True
    """False if ids were out of range when they were checked."""


class RowPrefetch:
    """Prefetches rows of one table, for one iteration of a loader.

    It never changes the result of a lookup. Rows of up to `depth` batches after the current one are
    prefetched; with 0, ids are only checked.
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

    def check(self, ids: list[Tensor], *, at_once: bool) -> PrefetchRequest:
        """Check ids, and find the rows that `read` has to read.

        Raises IndexError for ids out of range; unless `at_once`, `begin` does, if the table has not grown.
        """
        request, n_rows = PrefetchRequest([], ids), self.table.num_embeddings
        for one in ids:
            lookup = LookupRequest(one, as_ids(one.cpu()))
            request.lookups.append(lookup)
            try:
                check_range(lookup.sought, n_rows)
            except IndexError as error:
                if at_once:
                    raise IndexError(f"the lookups of {self.table!r}: {error}") from None
                request.is_in_range = False
        if self.reads_disk and self.depth and request.is_in_range and self.table._shards is None:
            self._plan_reads(request)
        return request

    def exchange(self, request: PrefetchRequest, channel: Channel) -> None:
        """Ask other ranks for rows, if the table is sharded. All ranks do so in one order."""
        shards = self.table._shards
        if shards is None:
            return
        for lookup in request.lookups:
            route = shards.route(torch.from_numpy(np.unique(lookup.sought.numpy())))
            found = lookup.exchanged = shards.exchange_ahead(route, channel)
            lookup.sought = found.rows
            request.tensors += [found.route.order, found.route.rows, found.rows]
        if self.reads_disk:
            self._plan_reads(request)

    def _plan_reads(self, request: PrefetchRequest) -> None:
        for lookup in request.lookups:
            if self._admits or lookup.sought.numel():
                lookup.rows_to_read = torch.from_numpy(np.unique(lookup.sought.numpy()))

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
        """Admit rows to the cache in the current stream. Lookups whose rows cannot be kept get no batch.

        `moved` has the request's tensors on the computing device, by the id of each. The current stream is
        ordered after their copies.
        """
        lookups = request.lookups
        n_sought = sum(lookup.sought.numel() for lookup in lookups)
        cache = None
        if self._admits and n_sought and request.is_in_range:
            cache = self.store.ensure_cache(n_sought, n_batches=self.depth + 2)
        # Keeps the two batches whose steps may still run, and all batches between them and this lookup.
        window = (self.depth + 2) * len(lookups) - 1
        for lookup in lookups:
            ids = moved[id(lookup.source)]
            if cache is not None:
                rows = ids if lookup.exchanged is None else moved[id(lookup.sought)]
                keys = to_int32_keys(as_ids(rows).reshape(-1), self.store.config.n_rows)
                reserved_in, reservation = lookup.reserved or (None, None)
                if reserved_in is not cache:  # the table has had another cache since
                    reservation = None
                found = cache.prefetch(keys, window=window, reservation=reservation)
                if found is not None:
                    lookup.batch = LookupBatch(rows.shape, keys, found[0], cache, found[1], ready=found[2])
            if lookup.exchanged is not None:
                lookup.batch = self._exchanged_batch(ids, lookup, moved)
            if lookup.batch is not None:
                lookup.batch.ids = ids
                lookup.batch.version = -1 if ids.is_inference() else ids._version

    def _exchanged_batch(
        self, ids: Tensor, lookup: LookupRequest, moved: Mapping[int, Tensor]
    ) -> LookupBatch:
        """Return the batch of a lookup in the rows of all ranks; `lookup.batch` is that of this rank."""
        assert lookup.exchanged is not None
        exchanged, route, n_rows = lookup.exchanged, lookup.exchanged.route, self.table.num_embeddings
        keys = to_int32_keys(as_ids(ids).reshape(-1), n_rows)
        found = unique(keys, n_rows)
        # Both are in ascending order. Kernels return more rows, of which the last are -1.
        order, rows = moved[id(route.order)], moved[id(route.rows)]
        route = replace(route, order=order, rows=rows, n_rows=len(found.rows))
        exchanged = replace(exchanged, route=route, rows=moved[id(exchanged.rows)])
        batch = LookupBatch(ids.shape, keys, found, exchanged=exchanged)
        if lookup.batch is not None:
            batch.cache, batch.admission = lookup.batch.cache, lookup.batch.admission
        if self.store.device.type == "cuda":
            batch.ready = torch.cuda.current_stream(self.store.device).record_event()
        return batch

    def begin(
        self,
        request: PrefetchRequest,
        stream: torch.cuda.Stream | None = None,
        issued: torch.cuda.Event | None = None,
    ) -> None:
        """Order the training stream after the admission, and let lookups find it.

        `issued` was recorded in the training stream after all work on earlier batches. Both are None on a
        CPU. Raises IndexError if ids are out of range; the table may have grown since they were checked.
        """
        if not request.is_in_range:
            self.check(request.tensors, at_once=True)
        self._training_stream = stream
        batches = [lookup.batch for lookup in request.lookups if lookup.batch is not None]
        for batch in batches if stream is not None else ():
            assert stream is not None
            if batch.ready is not None:
                stream.wait_event(batch.ready)
            batch.record_stream(stream)
        for batch in batches:  # the first admission is the oldest: `protects` covers those after it
            if batch.cache is not None:
                batch.cache.begin(batch.admission, stream, issued)
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
        after, stream = None, self._training_stream
        if reserved and stream is not None:
            with torch.cuda.stream(stream):
                after = None if is_capturing(self.store.device) else stream.record_event()
        for cache, reservation in reserved:
            cache.release(reservation, after)
