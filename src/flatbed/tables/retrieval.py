"""Exact search for the rows with the greatest scores. The table is read once, block by block.

Each block of rows is multiplied by all queries. The maxima of small groups of scores select a few candidates,
which are sorted together with the best rows so far. Equal scores are ordered by row, lowest first, so that
the result does not depend on blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

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
SORTED = 512  # scores that are sorted at once
COPIED_BYTES = 1 << 27  # of rows at once, if they are copied
IN_PLACE_BYTES = 1 << 30  # of rows at once, if they are not
MAX_SCORES = {"cpu": 1 << 24, "cuda": 1 << 28}
MAX_QUERIES = 4096  # per product
TOPK = "topk"  # the name of the exchange in errors
NO_ROW = (1 << 63) - 1  # sorts after all rows of equal score
AHEAD = 2  # blocks that are being copied to the GPU while one is used


def topk(store: RowStore, queries: Any, k: Any, *, metric: str, chunk_rows: Any) -> tuple[Tensor, Tensor]:
    """Find the k rows with the greatest scores: queries (*shape, dim) → values and ids, (*shape, k)."""
    n_rows = store.config.n_rows - (store.config.local_padding_idx is not None)
    given, k = _checked(queries, k, metric, dim=store.config.dim, n_rows=n_rows)
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
        given, k = _checked(queries, k, metric, dim=config.dim, n_rows=n_rows)
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


def _checked(queries: Any, k: Any, metric: str, *, dim: int, n_rows: int) -> tuple[Tensor, int]:
    given = as_floats(queries, "queries", f"(n, {dim})")
    if given.dim() < 1 or given.shape[-1] != dim:
        raise ValueError(f"queries must be (n, {dim}), as rows are; found shape {tuple(given.shape)}")
    k = as_integer("k", k)
    if not 1 <= k <= n_rows:
        raise ValueError(f"k must be between 1 and {n_rows}, the rows besides padding_idx; found {k}")
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}; found {metric!r}")
    return given, k


@torch.no_grad()
def _search(
    store: RowStore, queries: Tensor, k: int, *, metric: str, chunk_rows: Any
) -> tuple[Tensor, Tensor]:
    """Find the best rows of this rank: (n, dim) → values and ids, (n, k)."""
    config, device = store.config, store.device
    dtype = torch.promote_types(torch.promote_types(queries.dtype, config.dtype), torch.float32)
    if chunk_rows is not None and as_integer("chunk_rows", chunk_rows) < 1:
        raise ValueError(f"chunk_rows must be at least 1; found {chunk_rows}")
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
            for first, rows in weight_blocks(store, chunk_rows, max_rows) if k and len(wanted) else ():
                for search in searches:
                    search.add_rows(rows, first)
                advance(len(rows))
        values = torch.cat([search.values for search in searches], 1).T.contiguous()
        ids = torch.cat([search.ids for search in searches], 1).T.contiguous()
    return values.view(len(wanted), k), ids.view(len(wanted), k)


class Search:
    """The best k rows so far for some queries, (k, queries). Rows must be added in ascending order."""

    def __init__(self, queries: Tensor, k: int, metric: str, padding_idx: int | None) -> None:
        self.queries, self.k, self.metric, self.padding_idx = queries, k, metric, padding_idx
        self.values = queries.new_empty((0, len(queries)))
        self.ids = torch.empty((0, len(queries)), dtype=torch.int64, device=queries.device)

    def add_rows(self, rows: Tensor, first: int) -> None:
        """Compare with consecutive rows, (n, dim) on the device of the queries."""
        scores = self._scores(rows)
        skipped = None if self.padding_idx is None else self.padding_idx - first
        if skipped is None or not 0 <= skipped < len(rows):
            self._add_scores(scores, first)
            return
        self._add_scores(scores[:skipped], first)
        self._add_scores(scores[skipped + 1 :], first + skipped + 1)

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

    def _add_scores(self, scores: Tensor, first: int) -> None:
        is_full = len(self.values) == self.k
        values, positions = candidates(scores, self.k, above=self.values[-1] if is_full else None)
        if not len(values):
            return
        values = torch.cat([self.values, values])
        ids = torch.cat([self.ids, positions + first])
        best = largest(values, min(self.k, len(values)))
        self.values, self.ids = values.gather(0, best), ids.gather(0, best)


# ---- selection, in the columns of a matrix: rows side by side are read fast, also by a GPU


def largest(values: Tensor, k: int) -> Tensor:
    """Find the positions of the k greatest of each column, (n, columns) → (k, columns), greatest first.

    Equal values are ordered by position. NaN is the greatest, as in torch.topk.
    """
    if len(values) <= max(SORTED, 2 * GROUP * k):
        return values.T.contiguous().sort(dim=1, descending=True, stable=True).indices[:, :k].T
    some, positions = candidates(values, k)
    return positions.gather(0, largest(some, k))


def candidates(values: Tensor, k: int, *, above: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select some values of each column, with their positions, that include its k greatest.

    With `above`, (columns,), they include those of the k greatest that exceed it. Positions are ascending.

    The k greatest are in the k groups with the greatest maxima. That holds for equal values, too: of two
    groups with equal maxima, `largest` prefers the one with lower positions.
    """
    n, n_columns = values.shape
    n_groups = n // GROUP
    whole = n_groups * GROUP
    grouped = torch.unflatten(values[:whole], 0, (n_groups, GROUP))
    maxima = grouped.amax(1)
    if above is not None and n_groups:  # "not less or equal", since NaN is the greatest
        k = min(k, int((~(maxima <= above)).sum(0).max()))
    positions = torch.arange(n, device=values.device).unsqueeze(1)
    if n_groups <= k:
        return values, positions.expand(n, n_columns)
    rest = positions[whole:].expand(-1, n_columns)
    if not k:
        return values[whole:], rest
    groups = largest(maxima, k).sort(dim=0).values.unsqueeze(1).expand(k, GROUP, n_columns)
    found = grouped.gather(0, groups).flatten(0, 1)
    where = (groups * GROUP + positions[:GROUP]).flatten(0, 1)
    return torch.cat([found, values[whole:]]), torch.cat([where, rest])


# ---- rows


def weight_blocks(store: RowStore, block_rows: int | None, max_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, weights) of consecutive blocks on the computing device, multiples of `UNIT` rows.

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
    n_rows = storage.n_rows
    bounds = [(first, min(first + block_rows, n_rows)) for first in range(0, n_rows, block_rows)]
    if is_in_place:
        assert storage.memory is not None
        for first, last in bounds:
            yield first, storage.record.view(storage.memory[first:last], WEIGHT)
    elif device.type == "cpu":
        for first, last in bounds:
            yield first, storage.record.view(storage.read(first, last), WEIGHT)
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
