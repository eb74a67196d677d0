"""Lookups: from ids to rows, prefetched or not, and from gradients of the output to gradients of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing, stream_for
from flatbed.distributed.channel import Channel
from flatbed.distributed.row_shards import Exchanged
from flatbed.errors import FlatbedError
from flatbed.kernels import NONE, UniqueRows, check_values_exist, sentinel_of, use_triton
from flatbed.kernels.rows import key_dtype, mask_row, segment_sum, to_int32_keys, unique
from flatbed.tables.cache.base import LookupBatch
from flatbed.tables.cache.host_copy import HostCopyCache, Reservation
from flatbed.tables.ids import NO_ERROR, as_ids, check_range, new_first_error, to_device
from flatbed.tables.row_io import LOOKUP, ShardedRowIO
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.tables.cache.gpu import GpuCache

_reshape = torch.ops.aten._unsafe_view.default  # without a view, which users could not change in place


def prepare_lookup(
    table: Table, ids: Any, *, for_bag: bool = False, records_grad: bool = False
) -> LookupBatch:
    """Check ids and find their unique rows. With `records_grad`, the rows are admitted to the table's cache.

    Ids out of range: those on the host raise here, those on a GPU raise later (`DeferredIdChecks`).
    For a bag of a table with a padding row, a key in front of the ids stands for all padding ids. The first
    unique row is then -1.
    """
    check_values_exist("a lookup")
    store, checks = table._store, table._deferred_checks
    n_rows, device, lead = store.config.n_rows, store.device, store.config.padding_idx if for_bag else None
    capturing = is_capturing(device)
    if capturing and records_grad and lead is None:
        captured = _captured_lookup(table, ids)
        if captured is not None:
            return captured
    if records_grad and device.type == "cuda" and checks.graph_error is None and not capturing:
        checks.prepare_capture(device, n_rows)
    if table._prefetched and not capturing and isinstance(ids, Tensor):
        if for_bag and table._shards is None:  # otherwise all ranks are told
            _check_bags(ids)
        batch = _find_prefetched(table, ids, lead=lead, records_grad=records_grad)
        if batch is not None:
            return batch
    if isinstance(table._row_io, ShardedRowIO):
        return _prepare_sharded(table, table._row_io, ids, for_bag=for_bag, records_grad=records_grad)
    given = as_ids(ids)
    if for_bag:
        _check_bags(given)
    on_checked = None
    if capturing:
        _check_capture(table, given)
        keys, first_error = _keys(given, n_rows, device), checks.first_error_of_graphs()
    elif given.device.type == "cpu":
        check_range(given, n_rows)
        keys, first_error = _keys(given, n_rows, device, in_range=True), None
    else:
        keys, first_error = _keys(given, n_rows, device), new_first_error(device)
        table._raise_bad_ids(wait=False)
        on_checked = partial(checks.add, given, first_error, n_rows=n_rows, offset=int(lead is not None))
    cache = store.ensure_cache(keys.numel()) if records_grad else None
    sought = keys if lead is None else _with_lead(keys, lead)
    if cache is not None:  # a `GpuCache` calls `on_checked` before rows move: `step` waits for no bus
        found, admission = cache.admit(sought, first_error, on_checked)
    else:
        found, admission = unique(sought, n_rows, first_error), None
        if on_checked is not None:
            on_checked()
    return LookupBatch(given.shape, keys, found if lead is None else _without_lead(found), cache, admission)


def _find_prefetched(
    table: Table, ids: Tensor, *, lead: int | None, records_grad: bool
) -> LookupBatch | None:
    """Return the prefetched batch that was made of these ids, if their memory has not changed since.

    With a `lead`, the unique rows are found again; their records are in the cache.
    """
    version = _version(ids)
    for batch in table._prefetched:
        own = batch.ids
        if own is None or version != batch.version:
            continue
        if not _is_same_memory(ids, own):
            continue
        batch = batch if batch.shape == ids.shape else replace(batch, shape=ids.shape)
        if isinstance(table._row_io, ShardedRowIO):
            if lead is not None:
                return None
            return table._row_io.exchange_again(LOOKUP[records_grad], batch, admits=records_grad)
        if records_grad and batch.cache is not None and batch.cache.protects(batch):
            if lead is None:
                return batch
            found = unique(_with_lead(batch.keys, lead), table.num_embeddings)
            return replace(batch, unique=_without_lead(found))
    return None


def _is_same_memory(ids: Tensor, own: Tensor) -> bool:
    """Return True if ids are those of another tensor, in the same order and memory."""
    return ids is own or (
        (ids.data_ptr(), ids.dtype, ids.numel(), ids.device)
        == (own.data_ptr(), own.dtype, own.numel(), own.device)
        and ids.is_contiguous()
        and own.is_contiguous()
    )


def _version(ids: Tensor) -> int:
    """Return how often torch has changed the memory of ids."""
    return -1 if ids.is_inference() else ids._version


def _prepare_sharded(
    table: Table, row_io: ShardedRowIO, ids: Any, *, for_bag: bool, records_grad: bool
) -> LookupBatch:
    """Check ids, find their unique rows, and ask the owners for them. A collective.

    Ids on a GPU raise here, too: the host waits for the number of rows of each owner.
    """
    device, n_rows = table._store.device, table.num_embeddings
    lead = table._store.config.padding_idx if for_bag else None
    doing = LOOKUP[records_grad]
    with row_io.shards.failing_together(doing):
        if is_capturing(device):
            raise FlatbedError("a lookup in a sharded table cannot be part of a CUDA graph")
        given = as_ids(ids)
        if for_bag:
            _check_bags(given)
        on_host = given.device.type == "cpu"
        if on_host:
            check_range(given, n_rows)
        first_error = None if on_host else new_first_error(device)
        keys = _keys(given, n_rows, device, in_range=on_host)
        found = unique(keys if lead is None else _with_lead(keys, lead), n_rows, first_error)
        route = row_io.shards.route(found.rows)
        if first_error is not None and int(first_error) != NO_ERROR:
            check_range(given, n_rows)
    exchanged = row_io.exchange(doing, route, admits=records_grad)
    found = found if lead is None else _without_lead(found)
    return LookupBatch(given.shape, keys, found, exchanged=exchanged)


def _check_bags(ids: Tensor) -> None:
    if ids.dim() not in (1, 2):
        raise ValueError(f"bags are (bags, length), or (n,) with offsets; found {tuple(ids.shape)}")


def _keys(ids: Tensor, n_rows: int, device: torch.device, *, in_range: bool = False) -> Tensor:
    """Return ids as keys on the computing device, flat, in the dtype that kernels sort fastest."""
    if in_range:  # copied in that dtype
        return to_device(ids.flatten(), device, key_dtype(n_rows, device))
    return to_int32_keys(ids.flatten().to(device, non_blocking=True), n_rows)


def _with_lead(keys: Tensor, padding_idx: int) -> Tensor:
    """Put the key of no row in front of keys, and in place of the padding row."""
    sentinel = sentinel_of(keys)
    return torch.cat([keys.new_full((1,), sentinel), torch.where(keys == padding_idx, sentinel, keys)])


def _without_lead(found: UniqueRows) -> UniqueRows:
    return UniqueRows(found.rows, found.inverse[1:])


def _check_capture(table: Table, ids: Tensor) -> None:
    store = table._store
    if not store.is_allocated or store.relayout_pending or store.location_for() is None:
        raise FlatbedError(
            "a lookup of this table cannot be part of a CUDA graph"
            + (
                ": the host reads rows on disk"
                if store.config.storage == "disk"
                else " yet: take a training step with it before the capture"
            )
        )
    if ids.device.type == "cpu" and not ids.is_pinned():
        raise FlatbedError(
            "ids inside the capture of a CUDA graph must be on the GPU, or in pinned memory as int64, where "
            "every replay reads them again"
        )


# ---- prefetched rows in CUDA graphs: a replay reads from the same memory which rows its ids are


@dataclass(slots=True, eq=False)
class CapturedLookup:
    """A lookup of a captured step. The host finds its unique rows before each replay."""

    table: Table
    position: int
    """Of the ids among the leaves of a batch."""
    batch: LookupBatch
    """What the graph reads. `load_captured` writes the unique rows."""


class LookupCapture:
    """The inputs of a graph that is being captured, the leaves that they stand for, and lookups of these."""

    def __init__(self, inputs: list[Tensor], leaves: list[Tensor]) -> None:
        self.inputs, self.leaves = inputs, leaves
        self.lookups: list[CapturedLookup] = []


_capture: LookupCapture | None = None


@contextmanager
def lookups_in_capture(inputs: list[Tensor], leaves: list[Tensor]) -> Iterator[list[CapturedLookup]]:
    """Let lookups of inputs in the body use prefetched rows of the leaves. Yields the list of them."""
    global _capture
    _capture = LookupCapture(inputs, leaves)
    try:
        yield _capture.lookups
    finally:
        _capture = None


def _captured_lookup(table: Table, ids: Any) -> LookupBatch | None:
    """Return the batch of a lookup whose rows are admitted before each replay; None for other lookups.

    The ids are an input of the graph, as a whole, and the leaf that it stands for was prefetched.
    """
    store = table._store
    if _capture is None or not isinstance(ids, Tensor) or table._shards is not None or not store.in_memory:
        return None
    for position, (own, leaf) in enumerate(zip(_capture.inputs, _capture.leaves, strict=True)):
        if not _is_same_memory(ids, own):
            continue
        found = _find_prefetched(table, leaf, lead=None, records_grad=True)
        if found is None or found.cache is None or found.cache is not store.cache or store.relayout_pending:
            return None
        from flatbed.kernels._triton.rows import empty_results

        keys = _keys(as_ids(ids), store.config.n_rows, store.device)
        unique_rows = empty_results(keys.numel(), store.device)
        batch = LookupBatch(ids.shape, keys, unique_rows, found.cache, found.admission)
        _capture.lookups.append(CapturedLookup(table, position, batch))
        found.cache.in_graphs = True
        return batch
    return None


def load_captured(lookups: list[CapturedLookup], leaves: list[Tensor]) -> bool:
    """Admit the rows of a batch that were not prefetched, and write what the next replay reads.

    Returns False if a table has another cache than the graph uses: the step must be captured again.
    """
    from flatbed.kernels._triton.rows import copy_results_

    for lookup in lookups:
        if lookup.table._deferred_checks.pending:
            lookup.table._raise_bad_ids()  # of an earlier batch
    batches = []
    for lookup in lookups:
        batch = prepare_lookup(lookup.table, leaves[lookup.position], records_grad=True)
        if batch.cache is None or batch.cache is not lookup.batch.cache:
            return False
        copy_results_(lookup.batch.unique, batch.unique)
        batches.append(batch)
    for batch in batches:
        assert batch.cache is not None
        batch.cache.location_for(batch)
    return True


class LookupFunction(torch.autograd.Function):
    """ids → (*shape, dim). Backward sums the gradients of equal ids and records them."""

    @staticmethod
    def forward(ctx: Any, table: Table, batch: LookupBatch) -> Tensor:
        ctx.table, ctx.batch = table, batch
        store, config, location = table._store, table._store.config, None
        if batch.cache is not None and batch.cache is store.cache and batch.exchanged is None:
            location = batch.cache.location_for(batch)
        if location is not None:  # one kernel reads the weights of all ids
            from flatbed.kernels._triton import cache

            out = cache.lookup(location, batch.keys, config.dim, config.dtype, config.n_rows)
        else:
            rows = table._row_io.weights(batch.unique.rows, batch)
            if use_triton(rows.device) and batch.exchanged is None:
                batch.weights, batch.generation = rows, store.generation
            out = rows.index_select(0, batch.unique.inverse)
        return out if len(batch.shape) == 1 else _reshape(out, (*batch.shape, config.dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        table, batch, config = ctx.table, ctx.batch, ctx.table._store.config
        grad = grads[0].detach().reshape(-1, config.dim)
        rows, sums = segment_sum(grad, batch.unique, config.padding_idx)
        table._record_grads(rows, sums, batch)
        return None, None


class GatherFunction(torch.autograd.Function):
    """Unique rows → their weights, (n, dim). Backward records their gradients."""

    @staticmethod
    def forward(ctx: Any, table: Table, batch: LookupBatch) -> Tensor:
        ctx.table, ctx.batch = table, batch
        return table._row_io.weights(batch.unique.rows, batch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        rows, sums = mask_row(ctx.batch.unique.rows, grads[0].detach().to(wide), NONE)
        ctx.table._record_grads(rows, sums, ctx.batch)
        return None, None


# ---- prefetches: rows of coming batches, moved while earlier batches are trained on


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
    """The rows of this rank that were admitted. They keep the memory of the admission while it is in use."""
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
    cache: GpuCache | HostCopyCache | None = None
    """The cache that the rows are admitted to."""


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
            version, sought = _version(one), as_ids(one.cpu())
            try:
                check_range(sought, n_rows)
            except IndexError as error:
                if at_once:
                    raise IndexError(f"the lookups of {self.table!r}: {error}") from None
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
        ordered after their copies, and after the training work on batches before the one handed out next.
        The caller calls `issue_moves` next, also after an error.
        """
        lookups = request.lookups
        n_ids = sum(lookup.n_ids for lookup in lookups)
        cache = None
        if self._admits and n_ids and request.is_in_range:
            cache = request.cache = self.store.ensure_cache(n_ids, n_batches=self.depth + 1)
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
            if _version(lookup.source) != lookup.version:  # the loop has changed this batch of its list
                lookup.batch = None
            if lookup.batch is not None:
                lookup.batch.ids, lookup.batch.version = ids, _version(ids)

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
        "rows" after the last use of that memory, so `record_stream` keeps it.
        """
        if self.store._is_forked:  # threads and reservations are the parent's
            return
        for lookup in request.lookups:
            if lookup.batch is not None:
                with suppress(ValueError):
                    self.table._prefetched.remove(lookup.batch)
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
        """Keep the memory of admissions until the streams other than "rows" have used it.

        Steps may also use that of earlier batches, with gradients that were accumulated.
        """
        streams = [] if self._training_stream is None else [self._training_stream]
        if self.store.device.type == "cuda":
            streams.append(stream_for(self.store.device, "records"))
        found = [batch for lookup in request.lookups for batch in (lookup.batch, lookup.admitted)]
        batches = dict.fromkeys(batch for batch in found if batch is not None)
        caches = dict.fromkeys([self.store.cache, *[batch.cache for batch in batches]])
        for stream in streams:
            for batch in batches:
                batch.record_stream(stream)
            for cache in caches:
                if cache is not None:
                    cache.prefetch_after(stream)
