"""Rows of coming batches, brought to where lookups find them while earlier batches are trained on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.cache.host_index import HostIndexCache, Reservation
from flatbed.tables.ids import as_ids, check_range
from flatbed.tables.table import Table

READ_ROWS = 1024  # read from disk at once, on a CPU: the training thread may have to wait for it


@dataclass(slots=True)
class PrefetchRequest:
    """The lookups of one batch in one table."""

    ids: list[Tensor]
    """On the host, flat."""
    error: IndexError | None = None
    """Set if ids were out of range when the request was staged."""
    routes: list[Route] = field(default_factory=list)
    """For each lookup the rows to ask other ranks for, if the table is sharded; on the host."""
    exchanged: list[Exchanged] = field(default_factory=list)
    """For each lookup the rows that ranks have asked each other for; on the host."""
    rows: list[Tensor] = field(default_factory=list)
    """For each lookup the unique rows to read from disk."""
    reservations: list[tuple[HostIndexCache, Reservation] | None] = field(default_factory=list)
    """For each lookup the disk cache and its reservation, if it has one."""
    batches: list[LookupBatch] = field(default_factory=list)
    """Prefetched lookups."""

    @property
    def sought(self) -> list[Tensor]:
        """For each lookup the rows of this rank that are looked up, with repeats; on the host."""
        return [one.rows for one in self.exchanged] if self.exchanged else self.ids


class RowPrefetch:
    """Prefetches rows of one table, for one iteration of a loader.

    It never changes the result of a lookup. `depth` is the number of batches between the one in hand and the
    last one prefetched.
    """

    def __init__(self, table: Table, depth: int) -> None:
        store = table._storage
        self.table, self.store, self.depth = table, store, depth
        # In training, on a GPU or under Triton's interpreter, rows are admitted to a cache. The mode of this
        # thread counts: the loader thread has one of its own.
        on_gpu = store.device.type == "cuda" or use_triton(store.device)
        self._admits = torch.is_grad_enabled() and on_gpu
        is_cached = self._admits and store.config.cache_rows != 0
        self.reads_disk = store.config.storage == "disk" and (is_cached or not self._admits)
        """True if `read` takes long enough for a thread of its own."""
        self._training_stream: torch.cuda.Stream | None = None

    def check(self, ids: list[Tensor]) -> PrefetchRequest:
        """Check ids, which are on the host, and find the rows that `read` has to read. Loader thread."""
        request = PrefetchRequest([as_ids(one).flatten() for one in ids])
        n_rows = self.table.num_embeddings
        try:
            for one in request.ids:
                check_range(one, n_rows)
        except IndexError as error:
            request.error = error
            return request
        shards = self.table._shards
        if shards is not None:
            request.routes = [shards.route(_unique(one, n_rows)) for one in request.ids]
        elif self.reads_disk:
            self._plan_reads(request)
        return request

    def exchange(self, request: PrefetchRequest, ids: list[Tensor], channel: Channel | None) -> list[Tensor]:
        """Ask other ranks for rows, if the table is sharded. Loader thread, in one order on all ranks.

        Returns the tensors that `admit` needs on the computing device; `ids` are among them.
        """
        shards = self.table._shards
        if shards is None or channel is None:
            return ids
        request.exchanged = [shards.exchange_ahead(route, channel) for route in request.routes]
        if self.reads_disk:
            self._plan_reads(request)
        routes = [(one.route.order, one.route.rows, one.rows) for one in request.exchanged]
        return [*ids, *(tensor for route in routes for tensor in route)]

    def _plan_reads(self, request: PrefetchRequest) -> None:
        n_rows = self.store.config.n_rows
        request.rows = [_unique(one, n_rows) for one in request.sought if one.numel() or self._admits]

    def read(self, request: PrefetchRequest) -> None:
        """Read rows from disk into the cache, or into the system's page cache. Loader thread, in order."""
        rows, request.rows = request.rows, []
        if not rows:
            return
        store = self.store
        if not self._admits:
            for some in torch.split(torch.cat(rows), READ_ROWS):
                with suppress(FlatbedError):  # the file may be replaced meanwhile
                    store.ensure_layout().gather(some)
            return
        # The cache that is there, if any: replacing it here would take it from the training thread.
        found = store.cache or store.ensure_cache(
            sum(one.numel() for one in request.sought), n_batches=self.depth + 2
        )
        if found is None:
            return
        cache = cast(HostIndexCache, found)  # the kind that tables on disk have
        with torch.cuda.stream(
            stream_for(self.store.device, "files") if self.store.device.type == "cuda" else None
        ):
            for some in rows:
                try:
                    reservation = cache.reserve(some)
                except FlatbedError:
                    self.finish(request)
                    if not cache.retired:  # otherwise the file was replaced
                        raise
                    return
                request.reservations.append(None if reservation is None else (cache, reservation))

    def admit(self, request: PrefetchRequest, tensors: list[Tensor]) -> None:
        """Admit rows to the cache in the current stream. Training thread.

        `tensors` are those that `exchange` returned, on the computing device; the current stream is ordered
        after their copies.
        """
        if request.error is not None:
            return
        ids, moved = tensors[: len(request.ids)], tensors[len(request.ids) :]
        sought = moved[2::3] if request.exchanged else ids
        batches: list[LookupBatch | None] = [None] * len(ids)
        if any(one.numel() for one in sought) and self._admits:
            batches = self._admit(request, sought)
        for i, exchanged in enumerate(request.exchanged):
            route = replace(exchanged.route, order=moved[3 * i], rows=moved[3 * i + 1])
            on_device = replace(exchanged, route=route, rows=sought[i])
            batches[i] = self._exchanged_batch(ids[i], on_device, batches[i])
        for one, batch in zip(ids, batches, strict=True):
            if batch is not None:
                batch.ids, batch.version = one, -1 if one.is_inference() else one._version
                if self.store.device.type == "cuda":
                    batch.ready = torch.cuda.current_stream(self.store.device).record_event()
                request.batches.append(batch)

    def _admit(self, request: PrefetchRequest, sought: list[Tensor]) -> list[LookupBatch | None]:
        """Admit the rows of each lookup; None for a lookup whose rows cannot be kept."""
        cache = self.store.ensure_cache(sum(one.numel() for one in sought), n_batches=self.depth + 2)
        if cache is None:
            return [None] * len(sought)
        # The batch in hand, `depth` batches after it, and the one whose step may still run; not this lookup.
        window = (self.depth + 2) * len(sought) - 1
        reservations = request.reservations or [None] * len(sought)
        batches: list[LookupBatch | None] = []
        for one, reserved in zip(sought, reservations, strict=True):
            keys = to_int32_keys(as_ids(one).reshape(-1), self.store.config.n_rows)
            reservation = reserved[1] if reserved is not None and reserved[0] is cache else None
            found = cache.prefetch(keys, window=window, reservation=reservation)
            batches.append(None if found is None else LookupBatch(one.shape, keys, found[0], cache, found[1]))
        return batches

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
        """Order the current stream after the admission, and let lookups find it. Training thread.

        Raises IndexError if staged ids are out of range; the table may have grown since they were staged.
        """
        if request.error is not None:
            for ids in request.ids:
                try:
                    check_range(ids, self.table.num_embeddings)
                except IndexError as error:
                    raise IndexError(f"the lookups of {self.table!r}: {error}") from None
        if self.store.device.type == "cuda":
            stream = self._training_stream = torch.cuda.current_stream(self.store.device)
            for batch in request.batches:
                if batch.ready is not None:
                    stream.wait_event(batch.ready)
                batch.record_stream(stream)
        for batch in request.batches:
            if batch.cache is not None:
                batch.cache.begin(batch.admission)
                break
        self.table._prefetched.extend(request.batches)

    def finish(self, request: PrefetchRequest) -> None:
        """Let the rows be evicted after the training work issued so far. Any thread; idempotent."""
        batches, request.batches = request.batches, []
        for batch in batches:
            with suppress(ValueError):
                self.table._prefetched.remove(batch)
        reservations, request.reservations = request.reservations, []
        after = self._issued_work() if any(reservations) else None
        for reserved in reservations:
            if reserved is not None:
                cache, reservation = reserved
                cache.release(reservation, after)

    def _issued_work(self) -> torch.cuda.Event | None:
        """Record an event in the training stream, unless it is capturing a graph."""
        if self._training_stream is None:
            return None
        with torch.cuda.stream(self._training_stream):
            return None if is_capturing(self.store.device) else self._training_stream.record_event()


def _unique(ids: Tensor, n_rows: int) -> Tensor:
    """Return unique ids in order, by numpy: torch would start more threads."""
    found = np.sort(ids.numpy().astype(np.int32 if n_rows < 2**31 else np.int64))
    first = np.ones(len(found), np.bool_)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return torch.from_numpy(found[first].astype(np.int64))
