"""Gradients of a table's rows, as they come in: recorded in backward, summed up when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels.rows import NONE, SENTINEL, segment_sum, unique
from flatbed.tables.cache.reservation import Reservation

MANY = 16  # recorded parts that are summed up without being asked for


@dataclass(frozen=True, slots=True)
class CachedWeights:
    """Weights of rows on the computing device."""

    weights: Tensor
    edition: tuple[int, int]
    """Of the table when they were read: in another one they may be others."""


@dataclass(slots=True)
class RowGrads:
    """Distinct rows and their gradients; the gradient of the row -1 is zero."""

    rows: Tensor
    grads: Tensor
    task: int = -1
    """The backward pass that it came from."""
    shared: bool = False
    """Whether it is the mean over all ranks already."""
    fetched: CachedWeights | None = None
    """The rows' weights as the lookup has read them, so that a step need not."""
    ticket: Reservation | None = None
    """If they are in a cache and stay there until the step."""
    captured: bool = False
    """Whether it is part of a CUDA graph."""


@dataclass(slots=True)
class GradAccumulator:
    """What backward passes have recorded."""

    n_rows: int
    parts: list[RowGrads] = field(default_factory=list)

    def record(
        self,
        rows: Tensor,
        grads: Tensor,
        fetched: CachedWeights | None = None,
        ticket: Reservation | None = None,
    ) -> None:
        """Take a lookup's gradients."""
        task = torch._C._current_graph_task_id()
        captured = rows.is_cuda and torch.cuda.is_current_stream_capturing()
        self.parts.append(RowGrads(rows, grads, task, fetched=fetched, ticket=ticket, captured=captured))
        if len(self.parts) > MANY:  # the pass goes on: it is not to be added to those before until it ends
            now = [part for part in self.parts if part.task == task and not part.shared]
            before = [part for part in self.parts if part.task != task or part.shared]
            self.parts = [*self._summed(before), merge(now, self.n_rows)]

    def _summed(self, parts: list[RowGrads]) -> list[RowGrads]:
        """At most two parts: what the ranks have exchanged, and what they have not."""
        made = []
        for shared in (True, False):
            passes: dict[int, list[RowGrads]] = {}
            for part in parts:
                if part.shared == shared:
                    passes.setdefault(part.task, []).append(part)
            # As torch does it: first within a backward pass, then to what was there.
            sums = [merge(held, self.n_rows) for held in passes.values()]
            if sums:
                made.append(merge(sums, self.n_rows))
        return made

    def packed(self) -> RowGrads | None:
        """All of it, every row once."""
        if len(self.parts) > 1:
            self.parts = [merge(self._summed(self.parts), self.n_rows)]
        return self.parts[0] if self.parts else None

    def compact(self) -> RowGrads | None:
        """The same without the row -1. Waits for the GPU."""
        packed = self.packed()
        if packed is not None:
            self.parts = [compacted(packed)]
        return self.parts[0] if self.parts else None

    def check_capture(self, capturing: bool) -> None:
        """Raise if gradients were recorded inside the capture of a CUDA graph, and are used outside of it."""
        if any(part.captured != capturing for part in self.parts):
            self.parts = []
            raise FlatbedError(
                "a table's gradients are used up by the step: capture lookup, backward and optimizer.step() "
                "in one CUDA graph, with no gradients left from before (optimizer.zero_grad())"
            )

    def clear(self) -> None:
        self.parts = []


def compacted(packed: RowGrads) -> RowGrads:
    """Without the row -1."""
    present = packed.rows >= 0
    if bool(present.all()):
        return packed
    return RowGrads(packed.rows[present], packed.grads[present], packed.task, packed.shared)


def merge(parts: list[RowGrads], n_rows: int) -> RowGrads:
    """The sum, in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    rows = torch.cat([part.rows for part in parts])
    dtype = parts[0].grads.dtype
    for part in parts:
        dtype = torch.promote_types(dtype, part.grads.dtype)
    found = unique(torch.where(rows == NONE, SENTINEL, rows), n_rows)
    grads = torch.cat([part.grads.to(dtype) for part in parts])
    made = RowGrads(*segment_sum(grads, found, None), parts[0].task, all(part.shared for part in parts))
    made.captured = parts[0].captured
    return made
