"""Gradients of a table's rows: recorded in backward passes, summed when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flatbed.cuda.streams import OrderedLock, is_capturing
from flatbed.errors import FlatbedError
from flatbed.kernels.records import NONE, SENTINEL
from flatbed.kernels.rows import segment_sum, unique
from flatbed.tables.lookup_batch import LookupBatch

MAX_PARTS = 16  # recorded parts; more are summed at once


@dataclass(slots=True)
class RowGrads:
    """Unique rows and their gradients; the gradient of the row -1 is zero."""

    rows: Tensor
    grads: Tensor
    task: int = -1
    """The backward pass that recorded it."""
    shared: bool = False
    """True if it is the mean over all ranks already."""
    batch: LookupBatch | None = None
    """The lookup that the rows are of; for a sum over several lookups one that stands for all, or None."""
    captured: bool = False
    """True if it is part of a CUDA graph."""

    def weights(self, generation: tuple[int, int]) -> Tensor | None:
        """Return the rows' weights as the lookup has read them, if no row has changed since."""
        batch = self.batch
        return None if batch is None or batch.generation != generation else batch.weights


@dataclass(slots=True)
class GradAccumulator:
    """Gradients that backward passes have recorded. Backward passes may run in several threads."""

    n_rows: int
    parts: list[RowGrads] = field(default_factory=list)
    n_cleared: int = 0
    """How often gradients were dropped: `table.grad` of an earlier count is stale."""
    _lock: OrderedLock = field(default_factory=lambda: OrderedLock("gradients"), repr=False)

    def record(self, rows: Tensor, grads: Tensor, batch: LookupBatch | None = None) -> None:
        """Add the gradients of a lookup."""
        task = torch._C._current_graph_task_id()
        part = RowGrads(rows, grads, task, batch=batch, captured=is_capturing(rows.device))
        with self._lock:
            self.parts.append(part)
            if len(self.parts) > MAX_PARTS:  # the current pass is summed apart until it ends
                current = [part for part in self.parts if part.task == task and not part.shared]
                earlier = [part for part in self.parts if part.task != task or part.shared]
                self.parts = [*self._sums(earlier), merge(current, self.n_rows)]

    def _sums(self, parts: list[RowGrads]) -> list[RowGrads]:
        """Sum to at most two parts: the one that ranks have exchanged, and the one that they have not."""
        sums = []
        for shared in (True, False):
            passes: dict[int, list[RowGrads]] = {}
            for part in parts:
                if part.shared == shared:
                    passes.setdefault(part.task, []).append(part)
            # As in torch: first within a backward pass, then over passes.
            merged = [merge(found, self.n_rows) for found in passes.values()]
            if merged:
                sums.append(merge(merged, self.n_rows))
        return sums

    def packed(self) -> RowGrads | None:
        """Return the sum of all parts, with each row once."""
        with self._lock:
            if len(self.parts) > 1:
                self.parts = [merge(self._sums(self.parts), self.n_rows)]
            return self.parts[0] if self.parts else None

    def compact(self) -> RowGrads | None:
        """Return the sum of all parts without the row -1. Waits for the GPU."""
        with self._lock:
            packed = self.packed()
            if packed is not None:
                self.parts = [compacted(packed)]
            return self.parts[0] if self.parts else None

    def check_capture(self, capturing: bool) -> None:
        """Raise if gradients were recorded inside a captured CUDA graph and are used outside, or reversed."""
        if any(part.captured != capturing for part in self.parts):
            self.clear()
            raise FlatbedError(
                "a table has gradients from outside of this CUDA graph, or from inside of another: capture "
                "lookup, backward and optimizer.step() in one CUDA graph, after optimizer.zero_grad()"
            )

    def clear(self) -> None:
        """Drop all gradients."""
        with self._lock:
            self.parts = []
            self.n_cleared += 1


def compacted(packed: RowGrads) -> RowGrads:
    """Return gradients without the row -1."""
    present = packed.rows >= 0
    if bool(present.all()):
        return packed
    return RowGrads(packed.rows[present], packed.grads[present], packed.task, packed.shared)


def merge(parts: list[RowGrads], n_rows: int) -> RowGrads:
    """Sum parts in their order."""
    if len(parts) == 1:
        return parts[0]
    rows = torch.cat([part.rows for part in parts])
    dtype = parts[0].grads.dtype
    for part in parts:
        dtype = torch.promote_types(dtype, part.grads.dtype)
    found = unique(torch.where(rows == NONE, SENTINEL, rows), n_rows)
    grads = torch.cat([part.grads.to(dtype) for part in parts])
    summed = RowGrads(*segment_sum(grads, found, None), parts[0].task, all(part.shared for part in parts))
    summed.captured, summed.batch = parts[0].captured, _oldest_batch(parts)
    return summed


def _oldest_batch(parts: list[RowGrads]) -> LookupBatch | None:
    """Return a batch whose protection in the cache holds for the rows of all parts; None if there is none."""
    batches = [part.batch for part in parts if part.batch is not None and part.batch.cache is not None]
    if len(batches) < len(parts) or any(batch.cache is not batches[0].cache for batch in batches):
        return None
    oldest = batches[0].cache.oldest(batches)
    return None if oldest is None else replace(oldest, weights=None)
