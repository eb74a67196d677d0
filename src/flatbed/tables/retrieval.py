"""Exact search for the rows with the greatest scores. The table is read once, block by block.

Each block of rows is multiplied by all queries. The maxima of small groups of scores select the few
candidates that exceed the k-th best so far, which are sorted together with the best rows. Equal scores are
ordered by row, lowest first, so that the result does not depend on blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flatbed.cuda.streams import stream_for
from flatbed.distributed.row_shards import RowShards
from flatbed.kernels import rows as ops
from flatbed.progress import progress
from flatbed.tables.config import as_integer
from flatbed.tables.factory import location_of
from flatbed.tables.ids import as_floats
from flatbed.tables.record import WEIGHT
from flatbed.tables.row_store import RowStore
from flatbed.tables.storage.base import Storage

METRICS = ("dot", "cosine")
EPS = 1e-8  # least norm of a vector under "cosine", as in torch.nn.functional.cosine_similarity
UNIT = 1024
"""Rows per product on a CPU. Blocks are multiples of it, so that rounding does not depend on their size."""
GROUP = 16  # scores per maximum
MERGED = 4  # times k candidates per query are merged at once
GROWTH = 4  # of the first blocks: each one gives a better bound for the next
COPIED_BYTES = 1 << 27  # of rows at once, if they are copied
IN_PLACE_BYTES = 1 << 30  # of rows at once, if they are not
MAX_SCORES = {"cpu": 1 << 24, "cuda": 1 << 28}
MAX_QUERIES = 4096  # per product
QUERY = torch.int16  # of their numbers: a GPU sorts int64 in four times as many passes
TOPK = "topk"  # the name of the exchange in errors
NO_ROW = (1 << 63) - 1  # sorts after all rows of equal score
AHEAD = 2  # blocks that are being copied to the GPU while one is used


def topk(store: RowStore, queries: Any, k: Any, *, metric: str, chunk_rows: Any) -> tuple[Tensor, Tensor]:
    """Find the k rows with the greatest scores: queries (*shape, dim) → values and ids, (*shape, k)."""
    n_rows = store.config.n_rows - (store.config.local_padding_idx is not None)
    given, k = _checked(queries, k, metric, chunk_rows, dim=store.config.dim, n_rows=n_rows)
    values, ids = _search(store, given.reshape(-1, store.config.dim), k, metric=metric, chunk_rows=chunk_rows)
    shape = (*given.shape[:-1], k)
    return values.view(shape), ids.view(shape)


def sharded_topk(
    shards: RowShards, store: RowStore, queries: Any, k: Any, *, metric: str, chunk_rows: Any
) -> tuple[Tensor, Tensor]:
    """Find the k rows with the greatest scores over the rows of all ranks. A collective.

    Every rank has queries of its own, or none. It compares the queries of all ranks with its own rows, and
    returns its best rows to the rank that asked.
    """
    config, n_ranks = store.config, shards.n_ranks
    with shards.failing_together(TOPK):
        n_rows = shards.n_rows - (config.padding_idx is not None)
        given, k = _checked(queries, k, metric, chunk_rows, dim=config.dim, n_rows=n_rows)
        store.ensure_layout()
    flat = given.detach().reshape(-1, config.dim).to(store.device)
    n_own = [len(flat)] * n_ranks
    facts = {"k": k, "metric": metric, "dtype of queries": flat.dtype}
    counts = shards.channel.announce(shards.describe(TOPK), n_own, facts=facts).counts
    asked = shards.all_to_all(flat.repeat(n_ranks, 1), n_own, counts)
    with shards.channel.posting_failures():
        n_found = min(k, config.n_rows - (config.local_padding_idx is not None))
        values, ids = _search(store, asked, n_found, metric=metric, chunk_rows=chunk_rows)
    best = values.new_full((len(asked), k), -torch.inf), ids.new_full((len(asked), k), NO_ROW)
    best[0][:, :n_found], best[1][:, :n_found] = values, shards.to_global(ids)
    values, ids = (shards.all_to_all(part, counts, n_own) for part in best)
    # (ranks * queries, k) → (queries, ranks * k)
    values, ids = (torch.cat(part.view(n_ranks, -1, k).unbind(), 1) for part in (values, ids))
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    shape = (*given.shape[:-1], k)
    return values[:, :k].reshape(shape), ids.gather(1, order[:, :k]).view(shape)


def _checked(
    queries: Any, k: Any, metric: str, chunk_rows: Any, *, dim: int, n_rows: int
) -> tuple[Tensor, int]:
    given = as_floats(queries, "queries")
    if given.dim() < 1 or given.shape[-1] != dim:
        raise ValueError(f"queries must be (n, {dim}), as rows are; found shape {tuple(given.shape)}")
    k = as_integer("k", k)
    if not 1 <= k <= n_rows:
        raise ValueError(f"k must be between 1 and {n_rows}, the rows besides padding_idx; found {k}")
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}; found {metric!r}")
    if chunk_rows is not None and as_integer("chunk_rows", chunk_rows) < 1:
        raise ValueError(f"chunk_rows must be at least 1; found {chunk_rows}")
    return given, k


@torch.no_grad()
def _search(
    store: RowStore, queries: Tensor, k: int, *, metric: str, chunk_rows: Any
) -> tuple[Tensor, Tensor]:
    """Find the best rows of this rank: (n, dim) → values and ids, (n, k)."""
    config, device = store.config, store.device
    dtype = torch.promote_types(torch.promote_types(queries.dtype, config.dtype), torch.float32)
    with torch.autocast(device.type, enabled=False):
        # A copy, since queries may be a view of a table's weights; contiguous, since torch rounds by strides.
        wanted = queries.detach().to(device, dtype, copy=True, memory_format=torch.contiguous_format)
        if metric == "cosine":
            wanted = functional.normalize(wanted, eps=EPS)
        searches = [
            Search(part, k, metric, config.local_padding_idx) for part in torch.split(wanted, MAX_QUERIES)
        ]
        max_rows = MAX_SCORES[device.type] // max(1, len(searches[0].queries))
        with progress(f"top {k} of {config.n_rows:,} rows", config.n_rows, "rows") as advance:
            blocks = weight_blocks(store, chunk_rows, max_rows, first_rows=k + 1)  # one may be padding
            for first, rows in blocks if k and len(wanted) else ():
                for search in searches:
                    search.add_rows(rows, first)
                advance(len(rows))
        for search in searches:
            search.merge()
        values, ids = (torch.cat([getattr(one, name) for one in searches]) for name in ("values", "ids"))
    return values.view(len(wanted), k), ids.view(len(wanted), k)


class Candidates(NamedTuple):
    """Scores that may be among the best of their query, ascending by row for each query."""

    values: Tensor
    queries: Tensor
    ids: Tensor


class Search:
    """The best k rows so far for some queries. Rows must be added in ascending order."""

    def __init__(self, queries: Tensor, k: int, metric: str, padding_idx: int | None) -> None:
        self.queries, self.k, self.metric, self.padding_idx = queries, k, metric, padding_idx
        self.values = queries.new_empty((len(queries), 0))
        self.ids = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
        self._candidates: list[Candidates] = []

    def add_rows(self, rows: Tensor, first: int) -> None:
        """Compare with consecutive rows, (n, dim) on the device of the queries."""
        scores = self._scores(rows)
        if sum(len(found.values) for found in self._candidates) > MERGED * len(self.queries) * self.k:
            self.merge()  # while a GPU computes the scores
        self._candidates += self._find_candidates(scores, first)
        if self.values.shape[1] < self.k:  # there is no bound for the next rows yet
            self.merge()

    def merge(self) -> None:
        """Merge the candidates so far. Equal scores stay in the order of rows."""
        if not self._candidates:
            return
        each = torch.arange(len(self.queries), dtype=QUERY, device=self.ids.device)
        best = Candidates(
            self.values.flatten(), each.repeat_interleave(self.values.shape[1]), self.ids.flatten()
        )
        values, queries, ids = map(torch.cat, zip(best, *self._candidates, strict=True))
        self._candidates = []
        order = values.sort(descending=True, stable=True).indices
        queries, by_query = queries[order].sort(stable=True)
        n_best = min(self.k, len(values) // len(each))  # until there are k, all queries have equally many
        ranks = torch.arange(n_best, device=each.device)
        kept = order[by_query[torch.searchsorted(queries, each).unsqueeze(1) + ranks]]
        self.values, self.ids = values[kept], ids[kept]

    def _scores(self, rows: Tensor) -> Tensor:
        """Multiply rows by queries: (n, queries)."""
        if self.queries.device.type != "cpu":
            return self._comparable(rows) @ self.queries.T
        scores = self.queries.new_empty((len(rows), len(self.queries)))
        # One buffer for all storages: a product may round differently with another alignment.
        buffer = self.queries.new_empty((min(UNIT, len(rows)), rows.shape[1]))
        for start in range(0, len(rows), UNIT):
            some = rows[start : start + UNIT]
            part = self._comparable(buffer[: len(some)].copy_(some))
            torch.mm(part, self.queries.T, out=scores[start : start + UNIT])
        return scores

    def _comparable(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.queries.dtype)
        return functional.normalize(rows, eps=EPS) if self.metric == "cosine" else rows

    def _find_candidates(self, scores: Tensor, first: int) -> Iterator[Candidates]:
        """Select the groups of scores whose maximum exceeds the k-th best, and the rows after all groups.

        Of the first rows, select those that are not below the k-th best of these rows.
        """
        (n_rows, n_queries), device = scores.shape, scores.device
        if self.values.shape[1] < self.k:
            if self.padding_idx is not None and first <= self.padding_idx < first + n_rows:
                scores[self.padding_idx - first] = -torch.inf
            bounds = scores.T.contiguous().topk(min(self.k, n_rows)).values[:, -1]
            rows, queries = (~(scores < bounds)).nonzero(as_tuple=True)
            yield self._candidates_of(scores, rows, queries, first)
            return
        n_grouped = n_rows // GROUP * GROUP
        if n_grouped:
            maxima = scores[:n_grouped].view(n_rows // GROUP, GROUP, n_queries).amax(1)
            is_found = ~(maxima <= self.values[:, -1])  # NaN is the greatest, as in torch.topk
            groups, queries = is_found.nonzero(as_tuple=True)
            rows = groups.unsqueeze(1) * GROUP + torch.arange(GROUP, device=device)
            yield self._candidates_of(scores, rows.flatten(), queries.repeat_interleave(GROUP), first)
        if n_grouped < n_rows:
            rest = torch.arange(n_grouped, n_rows, device=device)
            queries = torch.arange(n_queries, device=device).repeat(len(rest))
            yield self._candidates_of(scores, rest.repeat_interleave(n_queries), queries, first)

    def _candidates_of(self, scores: Tensor, rows: Tensor, queries: Tensor, first: int) -> Candidates:
        if self.padding_idx is not None and first <= self.padding_idx < first + len(scores):
            is_kept = rows != self.padding_idx - first
            rows, queries = rows[is_kept], queries[is_kept]
        return Candidates(scores[rows, queries], queries.to(QUERY), rows + first)


# ---- rows


def weight_blocks(
    store: RowStore, block_rows: int | None, max_rows: int, first_rows: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, weights) of consecutive blocks on the computing device, multiples of `UNIT` rows.

    They grow from `first_rows` to `block_rows`, or to a size that suits the device.

    Blocks of a table that is in the device's memory are views. All others are copies, which are made ahead
    of time on a GPU.
    """
    storage, device = store.ensure_layout(), store.device
    store.flush()
    storage.check()
    is_in_place = storage.memory is not None and storage.device == device
    if block_rows is None:
        block_rows = (IN_PLACE_BYTES if is_in_place else COPIED_BYTES) // storage.record.weight.nbytes
    block_rows = UNIT * max(1, min(-(-block_rows // UNIT), max_rows // UNIT))
    bounds, n_rows, first, size = [], storage.n_rows, 0, UNIT * -(-first_rows // UNIT)
    while first < n_rows:
        last = min(first + min(size, block_rows), n_rows)
        bounds.append((first, last))
        first, size = last, size * GROWTH
    if is_in_place or device.type == "cpu":
        memory = storage.memory if is_in_place else None
        for first, last in bounds:
            records = storage.read(first, last) if memory is None else memory[first:last]
            yield first, storage.record.view(records, WEIGHT)
    else:
        yield from _copied_ahead(storage, device, bounds)


def _copied_ahead(
    storage: Storage, device: torch.device, bounds: list[tuple[int, int]]
) -> Iterator[tuple[int, Tensor]]:
    """Copy blocks to a GPU in a stream of their own, `AHEAD` of the one that is used."""
    stream, current = stream_for(device, "scan"), torch.cuda.current_stream(device)
    copies: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()
    coming = iter(bounds)
    while True:
        for first, last in coming:
            with torch.cuda.stream(stream):
                rows = _copied(storage, device, first, last)
            copies.append((first, rows, stream.record_event()))
            if len(copies) > AHEAD:
                break
        if not copies:
            return
        first, rows, is_copied = copies.popleft()
        current.wait_event(is_copied)
        rows.record_stream(current)
        yield first, rows


def _copied(storage: Storage, device: torch.device, first: int, last: int) -> Tensor:
    """Copy weights to a GPU in the current stream: by a kernel that reads host memory, or staged."""
    location, weight = location_of(storage, device), storage.record.weight
    if location is not None:  # a kernel, since weights may lie between other fields
        rows = torch.arange(first, last, device=device)
        return ops.gather(location, rows, weight.nbytes).view(weight.dtype)
    staged = torch.empty((last - first, weight.count), dtype=weight.dtype, device="cpu", pin_memory=True)
    staged.copy_(storage.record.view(storage.read(first, last), WEIGHT))
    return staged.to(device, non_blocking=True)
