"""Rows of coming batches, brought to where lookups find them while earlier batches are trained on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing, stream_for
from flatbed.errors import FlatbedError
from flatbed.kernels import use_triton
from flatbed.kernels.rows import to_int32_keys
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
    rows: list[Tensor] = field(default_factory=list)
    """For each lookup the unique rows to read from disk."""
    reservations: list[tuple[HostIndexCache, Reservation] | None] = field(default_factory=list)
    """For each lookup the disk cache and its reservation, if it has one."""
    batches: list[LookupBatch] = field(default_factory=list)
    """Prefetched lookups."""


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
        self._admits = torch.is_grad_enabled() and on_gpu and table._shards is None
        is_cached = self._admits and store.config.cache_rows != 0
        self.reads_disk = store.config.storage == "disk" and (is_cached or not self._admits)
        self.reads_disk = self.reads_disk and table._shards is None  # other ranks hold most of the rows
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
        if self.reads_disk:
            request.rows = [_unique(one, n_rows) for one in request.ids if one.numel() or self._admits]
        return request

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
        found = store.cache or store.cache_for(
            sum(one.numel() for one in request.ids), n_batches=self.depth + 2
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

    def admit(self, request: PrefetchRequest, ids: list[Tensor]) -> None:
        """Admit rows to the cache in the current stream. Training thread.

        `ids` are the same ids on the computing device; the current stream is ordered after their copy.
        """
        n_ids = sum(one.numel() for one in request.ids)
        if request.error is not None or not n_ids or not self._admits:
            return
        cache = self.store.cache_for(n_ids, n_batches=self.depth + 2)
        if cache is None:
            return
        # The batch in hand, `depth` batches after it, and the one whose step may still run; not this lookup.
        window = (self.depth + 2) * len(ids) - 1
        reservations = request.reservations or [None] * len(ids)
        for one, reserved in zip(ids, reservations, strict=True):
            keys = to_int32_keys(as_ids(one).reshape(-1), self.store.config.n_rows)
            reservation = reserved[1] if reserved is not None and reserved[0] is cache else None
            found = cache.prefetch(keys, window=window, reservation=reservation)
            if found is not None:
                batch = LookupBatch(one.shape, keys, found[0], cache, found[1], one)
                batch.version = -1 if one.is_inference() else one._version
                if self.store.device.type == "cuda":
                    batch.ready = torch.cuda.current_stream(self.store.device).record_event()
                request.batches.append(batch)

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
        if request.batches and request.batches[0].cache is not None:
            request.batches[0].cache.begin(request.batches[0].admission)
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
