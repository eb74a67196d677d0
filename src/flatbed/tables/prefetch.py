"""Prefetches: rows of coming batches, moved while earlier batches are trained on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing, stream_for
from flatbed.distributed.channel import Channel
from flatbed.distributed.row_shards import Exchanged
from flatbed.errors import FlatbedError
from flatbed.kernels import use_triton
from flatbed.kernels.rows import key_dtype, unique
from flatbed.tables.cache.base import Cache, LookupBatch
from flatbed.tables.cache.host_copy import HostCopyCache, Reservation
from flatbed.tables.ids import as_ids, check_range
from flatbed.tables.row_io import LOOKUP, ShardedRowIO
from flatbed.tables.table import Table

READ_ROWS = 1024  # read from disk at once, on a CPU: the training thread may have to wait for it


@dataclass(slots=True, eq=False)
class LookupRequest:
    """One lookup of a batch, from the loader to the end of its step."""

    source: Tensor
    """The ids as they are in the batch."""
    version: int
    """That of `source` before its ids were read."""
    n_ids: int
    """How many are looked up in the rows of this rank."""
    rows: Tensor | None
    """The unique rows on the host, if they are exchanged with other ranks, or read into the page cache."""
    exchanged: Exchanged | None = None
    """If the table is sharded, the rows that ranks have asked each other for; on the host."""
    reserved: tuple[HostCopyCache, Reservation] | None = None
    """The cache of a disk table, and the reservation of the rows in it."""
    admitted: LookupBatch | None = None
    """The rows of this rank that were admitted. Holding them keeps the memory of the admission."""
    batch: LookupBatch | None = None
    """The prefetched lookup: that of `admitted`, unless the table is sharded."""


@dataclass(slots=True, eq=False)
class PrefetchRequest:
    """The lookups of one batch in one table."""

    lookups: list[LookupRequest]
    tensors: list[Tensor] = field(default_factory=list)
    """The tensors that `RowPrefetch.admit` needs on the computing device."""
    is_in_range: bool = True
    """False if ids were out of range when they were checked."""
    cache: Cache | None = None
    """The cache that the rows are admitted to."""


class RowPrefetch:
    """Prefetches rows of one table, for one iteration of a loader.

    It never changes the result of a lookup. Rows of up to `depth` batches after the current one are
    prefetched; with 0, ids are only checked. `keys` are those of a batch that have the ids, for errors.
    """

    def __init__(self, table: Table, depth: int, keys: Sequence[object] = ()) -> None:
        store = table._store
        self.table, self.store, self.depth = table, store, depth
        self._name = f"the lookups of {table!r}" + "".join(f" by {key!r}" for key in keys)
        # In training, on a GPU or under Triton's interpreter, rows are admitted to a cache. The mode of this
        # thread counts: the loader thread has one of its own.
        on_gpu = store.device.type == "cuda" or use_triton(store.device)
        self._admits = torch.is_grad_enabled() and on_gpu
        is_cached = self._admits and store.config.has_cache
        self.reads_disk = store.config.storage == "disk" and (is_cached or not self._admits)
        """True if `read` has work to do, which it does in a thread of its own."""
        self._reads_pages = self.reads_disk and not self._admits
        """True if rows are read into the system's page cache alone."""
        self._training_stream: torch.cuda.Stream | None = None

    # ---- where batches are loaded: in the training thread, or in loader threads

    def check(self, ids: list[Tensor], *, at_once: bool) -> PrefetchRequest:
        """Raise IndexError for ids out of range: here if `at_once`, otherwise in `begin`."""
        request, n_rows = PrefetchRequest([], ids), self.table.num_embeddings
        needs_rows = self._reads_pages or self.table._shards is not None
        for one in ids:
            version, sought = version_of(one), as_ids(one.cpu())
            try:
                check_range(sought, n_rows)
            except IndexError as error:
                if at_once:
                    raise IndexError(f"{self._name}: {error}") from None
                request.is_in_range = False
            rows = torch.unique(sought) if needs_rows else None
            request.lookups.append(LookupRequest(one, version, sought.numel(), rows))
        return request

    def exchange(self, request: PrefetchRequest, channel: Channel) -> None:
        """Ask other ranks for rows, if the table is sharded. All ranks do so in one order."""
        shards = self.table._shards
        if shards is None:
            return
        for lookup in request.lookups:
            assert lookup.rows is not None
            found = lookup.exchanged = shards.exchange_ahead(shards.route(lookup.rows), channel)
            lookup.n_ids = found.rows.numel()
            lookup.rows = torch.unique(found.rows) if self._reads_pages else None
            request.tensors += [found.route.order, found.route.rows, found.rows]

    def read(self, request: PrefetchRequest, moved: Mapping[int, Tensor], arrived: Any = None) -> None:
        """Read rows from disk into the cache, or into the system's page cache. Batches are read in order.

        `moved` has the request's tensors on the computing device, by the id of each, after the event given.
        """
        if not (self.reads_disk and request.is_in_range and request.lookups):
            return
        if self._admits:
            self._reserve(request, moved, arrived)
        else:
            rows = torch.cat([lookup.rows for lookup in request.lookups if lookup.rows is not None])
            for some in torch.split(rows, READ_ROWS):
                with suppress(FlatbedError):  # another thread may replace the file
                    self.store.ensure_layout().gather(some)

    def _reserve(self, request: PrefetchRequest, moved: Mapping[int, Tensor], arrived: Any) -> None:
        """Reserve the rows of all lookups in the cache, which reads them."""
        # The present cache, if any: replacing it here would take it from the training thread.
        n_ids = sum(lookup.n_ids for lookup in request.lookups)
        found = self.store.cache or self.store.ensure_cache(n_ids, n_batches=self.depth + 1)
        if found is None:
            return
        cache = cast(HostCopyCache, found)  # the kind that tables on disk have
        on_gpu = self.store.device.type == "cuda"
        stream = stream_for(self.store.device, "files") if on_gpu else None
        if stream is not None and arrived is not None:
            stream.wait_event(arrived)
        with torch.cuda.stream(stream):
            for lookup in request.lookups:
                ids = self._sought(lookup, moved)
                if ids.device != self.store.device:  # the table may have moved in the loop
                    continue
                if stream is not None:
                    ids.record_stream(stream)  # type: ignore[arg-type,unused-ignore]
                try:
                    reservation = cache.reserve(ids)
                except FlatbedError:
                    self.finish(request)
                    if not cache.retired:  # otherwise the file was replaced
                        raise
                    return
                lookup.reserved = None if reservation is None else (cache, reservation)

    def _sought(self, lookup: LookupRequest, moved: Mapping[int, Tensor]) -> Tensor:
        """Return the ids that are looked up in the rows of this rank."""
        return moved[id(lookup.source if lookup.exchanged is None else lookup.exchanged.rows)]

    # ---- in the training thread

    def admit(self, request: PrefetchRequest, moved: Mapping[int, Tensor]) -> None:
        """Admit rows to the cache in the current stream; for a table on disk, use the reservation of `read`.

        A lookup whose rows cannot be kept gets no batch.

        `moved` has the request's tensors on the computing device, by the id of each. The current stream is
        ordered after their copies, and after all training work issued so far.
        The caller calls `issue_moves` next, also after an error.
        """
        lookups = request.lookups
        n_ids = sum(lookup.n_ids for lookup in lookups)
        cache = None
        if self._admits and n_ids and request.is_in_range:
            cache = request.cache = self.store.ensure_cache(n_ids, n_batches=self.depth + 1)
        if cache is not None and cache.has_unseen_replays and not cache.has_warned:
            cache.has_warned = True
            warnings.warn(
                f"rows of {self.table!r} are not prefetched: a captured CUDA graph uses them, and the host "
                "does not know when. To prefetch again, call set_cache, and capture the training step by "
                "flatbed.capture in a loop over a Prefetcher",
                stacklevel=4,
            )
        # Keeps the batch that is handed out next, and all between it and this lookup.
        window = (self.depth + 1) * len(lookups) - 1
        for lookup in lookups:
            ids = moved[id(lookup.source)]
            if cache is not None and ids.device == self.store.device:  # the table may have moved in the loop
                rows = self._sought(lookup, moved)
                reserved_in, reservation = lookup.reserved or (None, None)
                if reserved_in is not cache:  # the table has had another cache since
                    reservation = None
                found = cache.prefetch(rows.flatten(), window=window, reservation=reservation)
                if found is not None:
                    keys, unique_rows, admission = found
                    lookup.admitted = LookupBatch(rows.shape, keys, unique_rows, cache, admission)
            lookup.batch = lookup.admitted
            if lookup.exchanged is not None:
                lookup.batch = self._exchanged_batch(ids, lookup, moved)
            if version_of(lookup.source) != lookup.version:  # the loop has changed this batch of its list
                lookup.batch = None
            if lookup.batch is not None:
                lookup.batch.ids, lookup.batch.version = ids, version_of(ids)

    def issue_moves(self, request: PrefetchRequest) -> None:
        """Let records move, in a stream that is ordered after the one of `admit`."""
        if request.cache is not None:
            request.cache.issue_moves()

    def _exchanged_batch(
        self, ids: Tensor, lookup: LookupRequest, moved: Mapping[int, Tensor]
    ) -> LookupBatch:
        """Return the batch of a lookup in the rows of all ranks."""
        assert lookup.exchanged is not None
        exchanged, route, n_rows = lookup.exchanged, lookup.exchanged.route, self.table.num_embeddings
        keys = ids.flatten().to(key_dtype(n_rows, self.store.device))
        found = unique(keys, n_rows)
        # Both are in ascending order. Kernels return more rows, of which the last are -1.
        order, rows = moved[id(route.order)], moved[id(route.rows)]
        route = replace(route, order=order, rows=rows, n_rows=len(found.rows))
        exchanged = replace(exchanged, route=route, rows=moved[id(exchanged.rows)])
        batch = LookupBatch(ids.shape, keys, found, exchanged=exchanged)
        if lookup.admitted is not None:
            batch.cache, batch.admission = lookup.admitted.cache, lookup.admitted.admission
        return batch

    def begin(self, request: PrefetchRequest, stream: torch.cuda.Stream | None = None) -> None:
        """Let lookups in the training stream, None on a CPU, find the prefetched batches.

        Raises IndexError if ids are out of range; the table may have grown since they were checked.
        """
        if not request.is_in_range:
            self.check(request.tensors, at_once=True)
        self._training_stream = stream
        for lookup in request.lookups:
            if stream is not None and lookup.reserved is not None and lookup.admitted is not None:
                lookup.admitted.record_stream(stream)  # memory of the stream "files"
        self.table._prefetched += [lookup.batch for lookup in request.lookups if lookup.batch is not None]

    # ---- in any thread

    def finish(self, request: PrefetchRequest, *, is_left: bool = False) -> None:
        """Remove the lookups from the table's prefetched batches, and release their reservations. Idempotent.

        A reservation ends after the training work issued so far. (A `GpuCache` has windows instead.) The
        request still holds the memory of its admissions. If the loop `is_left`, no later `next` orders
        "decisions" after the last use of that memory, so `record_stream` keeps it.
        """
        if self.store._is_forked:  # threads and reservations are the parent's
            return
        for lookup in request.lookups:
            if lookup.batch is not None:
                with suppress(ValueError):
                    self.table._prefetched.remove(lookup.batch)
            if lookup.admitted is not None and lookup.admitted.cache is not None:
                lookup.admitted.cache.end_prefetch(lookup.admitted)
        if is_left:
            self._keep_memory(request)
        reserved = [lookup for lookup in request.lookups if lookup.reserved is not None]
        after, stream = None, self._training_stream
        if reserved and stream is not None:
            with torch.cuda.stream(stream):
                after = None if is_capturing(self.store.device) else stream.record_event()
        for lookup in reserved:
            cache, reservation = lookup.reserved or (None, None)
            if cache is not None and reservation is not None:  # another thread may finish it, too
                cache.release(reservation, after)
            lookup.reserved = None  # last: an interruption would keep the rows for good

    def _keep_memory(self, request: PrefetchRequest) -> None:
        """Keep the memory of admissions until the streams other than "decisions" have used it.

        Accumulated gradients may refer to admissions of earlier batches, too.
        """
        streams = [] if self._training_stream is None else [self._training_stream]
        if self.store.device.type == "cuda":
            streams.append(stream_for(self.store.device, "moves"))
        found = [batch for lookup in request.lookups for batch in (lookup.batch, lookup.admitted)]
        batches = dict.fromkeys(batch for batch in found if batch is not None)
        caches = dict.fromkeys([self.store.cache, *[batch.cache for batch in batches]])
        for stream in streams:
            for batch in batches:
                batch.record_stream(stream)
            for cache in caches:
                if cache is not None:
                    cache.prefetch_after(stream)


# ---- in lookups


def find_prefetched(
    table: Table, ids: Tensor, *, records_grad: bool, is_padded: bool = False
) -> LookupBatch | None:
    """Return the prefetched batch that was made of these ids, if their memory has not changed since.

    `is_padded`: the lookup needs other unique rows, which a sharded table would have to exchange.
    """
    version = version_of(ids)
    for batch in table._prefetched:
        own = batch.ids
        if own is None or version != batch.version or not is_same_memory(ids, own):
            continue
        if isinstance(table._row_io, ShardedRowIO):
            if is_padded:
                return None
            return table._row_io.exchange_again(LOOKUP[records_grad], batch, admits=records_grad)
        if records_grad and batch.cache is not None and batch.cache.protects(batch):
            return batch
    return None


def is_same_memory(ids: Tensor, own: Tensor) -> bool:
    """Return True if ids are those of another tensor, in the same order and memory."""
    return ids is own or (
        (ids.data_ptr(), ids.dtype, ids.numel(), ids.device)
        == (own.data_ptr(), own.dtype, own.numel(), own.device)
        and ids.is_contiguous()
        and own.is_contiguous()
    )


def version_of(ids: Tensor) -> int:
    """Return torch's version counter of ids, which counts changes in place; -1 for an inference tensor."""
    return -1 if ids.is_inference() else ids._version
