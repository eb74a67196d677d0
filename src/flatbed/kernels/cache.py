"""Index of a row cache, and its decisions: which rows are in which slots, and which slots to free.

`_triton.cache` has the kernels for an index on a GPU. `keep`, `decide` and `assign` here, in numpy, are for
an index on the host. `take_back` is for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flatbed.kernels import NONE

POLICIES = ("lru", "lfu")
HALF_LIFE = 4  # for "lfu": the weight of a use halves every HALF_LIFE * n_slots misses
ROUNDS = 16  # random draws of slots for a missing row, before a kernel tries all slots in order
WAYS = 8  # slots that are compared for each missing row
FREE = -(1 << 62)  # the stamp of a slot that was never used
COUNTS = ("hits", "misses", "evictions", "written", "overflow")


class CacheIndex:
    """Which row is in which slot, when the slot was last used, and whether its record has changed.

    `slot_of_row` and `row_of_slot` are inverse to each other; -1 stands for none. `clock` counts admissions;
    a slot's stamp is the clock of its last use. With a slot for every row, row i has slot i.
    """

    def __init__(self, n_rows: int, n_slots: int, *, policy: str, device: torch.device) -> None:
        self.policy = policy
        self.n_slots = n_slots
        self.direct = n_slots >= n_rows
        self.ageing = 1.0 / (HALF_LIFE * n_slots)
        """Half-lives that pass with each miss."""
        self.next_slot = 0
        """The next slot to compare, for an index on the host."""
        self.slot_of_row = torch.full((n_rows,), -1, dtype=torch.int32, device=device)
        self.row_of_slot = torch.full((n_slots,), -1, dtype=torch.int64, device=device)
        self.stamp = torch.full((n_slots,), FREE, dtype=torch.int64, device=device)
        n_counted = n_slots if policy == "lfu" else 0
        self.frequency = torch.full((n_counted,), -torch.inf, dtype=torch.float32, device=device)
        self.dirty = torch.zeros(n_slots, dtype=torch.int32, device=device)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.is_clearing = False
        """True if `clear` has been interrupted, and must be called again: the maps may not fit together."""
        self.moving = False
        """For `GpuCache`: True while the host issues decisions or moves. If it stays True, the maps may name
        slots whose records are not there, and will not be moved."""

    def clear(self) -> None:
        """Empty all slots without writing anything back."""
        self.is_clearing = True
        self.slot_of_row.fill_(-1)
        self.row_of_slot.fill_(-1)
        self.stamp.fill_(FREE)
        self.frequency.fill_(-torch.inf)
        self.dirty.zero_()
        self.is_clearing = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Missing rows of a batch that get slots, on the host."""

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    victims: NDArray[np.int64]
    """Changed rows that were in these slots, and must be written back; -1 for none."""
    n_rows: int
    """Rows of the batch that are in the cache now."""
    is_whole: bool
    """True if every missing row got a slot."""


# Numpy instead of torch, which would start threads on all cores for each of these small steps.


def keep(index: CacheIndex, rows: NDArray[np.int64]) -> None:
    """Stamp the slots of cached rows with the next tick, so that the next `decide` evicts none of them."""
    slots = index.slot_of_row.numpy()[rows]
    index.stamp.numpy()[slots[slots >= 0]] = int(index.clock) + 1


def decide(index: CacheIndex, rows: NDArray[np.int64]) -> Placement:
    """Stamp cached rows, count their use, and choose a slot for each missing row, or for as many as possible.

    Rows are unique, and in range. Slots of this batch are kept. Only stamps and counts change here. `assign`
    changes the maps.
    """
    counts = index.counts.numpy()
    index.clock += 1
    tick = int(index.clock)
    found = index.slot_of_row.numpy()[rows].astype(np.int64)  # numpy would convert int32 at every use
    is_cached = found >= 0
    hits, missing = found[is_cached], rows[~is_cached]
    index.stamp.numpy()[hits] = tick
    now = np.float32(counts[1] * index.ageing)
    if index.policy == "lfu":
        frequency = index.frequency.numpy()
        frequency[hits] = np.logaddexp2(frequency[hits], now)
    slots = missing if index.direct else _select_slots(index, len(missing), tick)
    old = index.row_of_slot.numpy()[slots]
    victims = np.where(index.dirty.numpy()[slots] != 0, old, -1)
    n_evicted, n_written = int((old >= 0).sum()), int((victims >= 0).sum())
    counts += (len(hits), len(missing), n_evicted, n_written, len(missing) - len(slots))
    is_whole, n_rows = len(slots) == len(missing), len(hits) + len(slots)
    return Placement(missing[: len(slots)], slots, victims, n_rows, is_whole)


def assign(index: CacheIndex, placement: Placement) -> None:
    """Give slots to the rows of a placement that `decide` returned."""
    slots, rows = placement.slots, placement.rows
    slot_of_row, row_of_slot = index.slot_of_row.numpy(), index.row_of_slot.numpy()
    old = row_of_slot[slots]
    slot_of_row[old[old >= 0]] = -1
    index.dirty.numpy()[slots] = 0
    if index.policy == "lfu":
        index.frequency.numpy()[slots] = int(index.counts[1]) * index.ageing
    row_of_slot[slots] = rows
    slot_of_row[rows] = slots


def take_back(index: CacheIndex, placement: Placement, *, is_overwritten: bool) -> None:
    """Empty the slots of a placement. It may have been assigned in part; a second call changes nothing.

    Changed rows get their slots back, unless the records in them were overwritten.
    """
    device = index.clock.device
    slots, victims = (torch.from_numpy(array).to(device) for array in (placement.slots, placement.victims))
    held = index.row_of_slot[slots]
    index.slot_of_row.index_fill_(0, held[held >= 0], NONE)
    index.row_of_slot.index_fill_(0, slots, NONE)
    index.dirty.index_fill_(0, slots, 0)
    if not is_overwritten:
        slots, victims = slots[victims >= 0], victims[victims >= 0]
        index.row_of_slot.index_copy_(0, slots, victims)
        index.dirty.index_fill_(0, slots, 1)
        index.slot_of_row.index_copy_(0, victims, slots.to(torch.int32))


def _select_slots(index: CacheIndex, n_rows: int, tick: int) -> NDArray[np.int64]:
    """Choose slots for n_rows, with the lowest scores among the next `WAYS` times as many slots."""
    stamp = index.stamp.numpy()
    scores = index.frequency.numpy() if index.policy == "lfu" else stamp
    chosen = []
    n_left, n_unseen = n_rows, index.n_slots
    while n_left and n_unseen:
        n_seen = min(WAYS * n_left, n_unseen)
        parts = _circular(index.next_slot, n_seen, index.n_slots)
        index.next_slot = (index.next_slot + n_seen) % index.n_slots
        n_unseen -= n_seen
        seen = np.concatenate([np.flatnonzero(stamp[part] < tick) + part.start for part in parts])
        if n_left < len(seen):
            seen = seen[np.argpartition(scores[seen], n_left)[:n_left]]
        stamp[seen] = tick
        chosen.append(seen)
        n_left -= len(seen)
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)


def _circular(first: int, n: int, n_slots: int) -> list[slice]:
    """Return n slots from `first` on, wrapping around at the end."""
    whole = slice(first, min(first + n, n_slots))
    return [whole] if first + n <= n_slots else [whole, slice(0, first + n - n_slots)]
