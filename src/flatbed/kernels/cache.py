"""Index of a row cache, and its decisions: which rows are in which slots, and which slots to free.

The numpy functions here serve caches whose index is on the host. `_triton.cache` has the kernels for an
index on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

POLICIES = ("lru", "lfu")
HALF_LIFE = 4  # for "lfu": a use counts half after as many misses as would fill the cache so many times
ROUNDS = 16  # random draws of slots for a missing row, before a kernel tries all slots in order
WAYS = 8  # slots that are compared for each missing row
SAMPLE = 4096  # scores from which the threshold of low scores is estimated
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
        """How far a miss moves the time in which uses age; one half-life is 1."""
        self.hand = 0
        """The next slot to compare, for an index on the host."""
        self.slot_of_row = torch.full((n_rows,), -1, dtype=torch.int32, device=device)
        self.row_of_slot = torch.full((n_slots,), -1, dtype=torch.int64, device=device)
        self.stamp = torch.full((n_slots,), FREE, dtype=torch.int64, device=device)
        self.frequency = torch.full((n_slots if policy == "lfu" else 0,), -torch.inf, device=device)
        self.dirty = torch.zeros(n_slots, dtype=torch.int32, device=device)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.moving = False
        """True while the host issues decisions or moves. If it stays True, the maps may name slots whose
        records are not there, and will not be moved."""

    def clear(self) -> None:
        """Empty all slots without writing anything back."""
        self.slot_of_row.fill_(-1)
        self.row_of_slot.fill_(-1)
        self.stamp.fill_(FREE)
        self.frequency.fill_(-torch.inf)
        self.dirty.zero_()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Which rows of a batch are in the cache."""

    slots: NDArray[np.int64]
    """For every row its slot; -1 for missing rows."""
    hits: NDArray[np.int64]
    """Slots of the cached rows."""
    missing: NDArray[np.int64]
    """Missing rows, in order."""
    tick: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Missing rows and the slots that they get."""

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    victims: NDArray[np.int64]
    """Changed rows in these slots, which must be written back; -1 for none."""
    old: NDArray[np.int64]
    """All rows in these slots; -1 for none."""


# Numpy instead of torch, which would start threads on all cores for each of these small steps.


def probe(index: CacheIndex, rows: Tensor) -> ProbeResult:
    """Stamp cached rows, count their use, and find the missing ones. Rows are unique and in range."""
    counts, wanted = index.counts.numpy(), rows.numpy()
    index.clock += 1
    tick = int(index.clock)
    slots = index.slot_of_row.numpy()[wanted].astype(np.int64)  # numpy would convert int32 at every use
    cached = slots >= 0
    hits, missing = slots[cached], wanted[~cached]
    index.stamp.numpy()[hits] = tick
    now = float(counts[1] * index.ageing)
    counts[:2] += (len(hits), len(missing))
    if index.policy == "lfu":
        frequency = index.frequency.numpy()
        frequency[hits] = _add_use(frequency[hits], np.float32(now))
    return ProbeResult(slots, hits, missing, tick)


def select_victims(
    index: CacheIndex, probed: ProbeResult, reserved_at: NDArray[np.int64] | None = None, oldest: int = 0
) -> Placement:
    """Choose slots for missing rows, in order: for fewer rows if there are not enough slots.

    Slots of this batch, and slots that were reserved at the tick `oldest` or later, are kept. Only stamps and
    counts change here: moving the records may still fail.
    """
    missing, n = probed.missing, len(probed.missing)
    slots = missing if index.direct else _select_slots(index, n, probed.tick, reserved_at, oldest)
    rows = missing[: len(slots)]
    old = index.row_of_slot.numpy()[slots]
    old = np.where(index.slot_of_row.numpy()[old] == slots, old, -1)  # an interruption may have left others
    victims = np.where(index.dirty.numpy()[slots] != 0, old, -1)
    n_evicted, n_written = int((old >= 0).sum()), int((victims >= 0).sum())
    index.counts.numpy()[2:] += (n_evicted, n_written, len(missing) - len(rows))
    return Placement(rows, slots, victims, old)


def evict(index: CacheIndex, placement: Placement) -> None:
    """Empty the slots of a placement, whose changed records are safe elsewhere.

    The order of the lines matters here and in `insert`: after an interruption between any two of them, a
    slot is clean, or it belongs to its row.
    """
    old = placement.old
    index.dirty.numpy()[placement.slots] = 0
    index.slot_of_row.numpy()[old[old >= 0]] = -1
    index.row_of_slot.numpy()[placement.slots] = -1


def insert(index: CacheIndex, placement: Placement) -> None:
    """Assign slots, which `evict` has emptied, to rows whose records are in them."""
    slots, rows = placement.slots, placement.rows
    index.stamp.numpy()[slots] = int(index.clock)
    if index.policy == "lfu":
        index.frequency.numpy()[slots] = int(index.counts[1]) * index.ageing
    index.row_of_slot.numpy()[slots] = rows
    index.slot_of_row.numpy()[rows] = slots


def _add_use(frequency: NDArray[np.float32], now: np.float32) -> NDArray[np.float32]:
    """Return log2(2^frequency + 2^now), by functions for which numpy has vector instructions."""
    high = np.maximum(frequency, now)
    low = np.minimum(frequency, now)
    low -= high
    np.exp2(low, out=low)
    low += 1
    np.log2(low, out=low)
    low += high
    return low


def _select_slots(
    index: CacheIndex, n_rows: int, tick: int, reserved_at: NDArray[np.int64] | None, oldest: int
) -> NDArray[np.int64]:
    """Choose slots for n_rows, with the lowest scores among the next `WAYS` times as many slots."""
    stamp = index.stamp.numpy()
    scores = index.frequency.numpy() if index.policy == "lfu" else stamp
    chosen = []
    n_left, n_unseen = n_rows, index.n_slots
    while n_left and n_unseen:
        n_seen = min(WAYS * n_left, n_unseen)
        parts = _circular(index.hand, n_seen, index.n_slots)
        index.hand = (index.hand + n_seen) % index.n_slots
        n_unseen -= n_seen
        found = []
        for part in parts:
            free = stamp[part] < tick
            if reserved_at is not None:
                free &= reserved_at[part] < oldest
            found.append(np.flatnonzero(free) + part.start)
        seen = np.concatenate(found)
        if n_left < len(seen):
            seen = _lowest(seen, scores[seen], n_left)
        stamp[seen] = tick
        chosen.append(seen)
        n_left -= len(seen)
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)


def _lowest(slots: NDArray[np.int64], scores: NDArray[Any], n: int) -> NDArray[np.int64]:
    """Choose n slots with low scores. Among very many slots a sample sets the threshold: an exact selection
    would take longer than the rest of the admission.
    """
    apart = max(1, len(scores) // SAMPLE)
    some = scores[::apart]
    n_some = n if apart == 1 else -(-n // apart) + int(5 * (n / apart) ** 0.5) + 1  # rather too many
    last = np.partition(some, at := min(n_some, len(some)) - 1)[at]
    found = np.concatenate((slots[scores < last], slots[scores == last]))[:n]
    if len(found) == n:
        return found
    order: NDArray[np.int64] = slots[np.argpartition(scores, n - 1)[:n]]
    return order


def _circular(first: int, n: int, n_slots: int) -> list[slice]:
    """Return n slots from `first` on, wrapping around at the end."""
    whole = slice(first, min(first + n, n_slots))
    return [whole] if first + n <= n_slots else [whole, slice(0, first + n - n_slots)]
