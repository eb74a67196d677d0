"""A row cache's decisions: which rows are in which slots, and who makes room for rows that come.

Given twice, as all operations: for torch, where a caller may do things in between, and in `_triton.cache`
for GPUs, where nothing waits for the host.
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
ROUNDS = 16  # how often a row that comes looks at slots at random, before all are looked at
WAYS = 8  # how many slots are looked at for each row that comes
SAMPLE = 4096  # scores that tell which are low
FREE = -(1 << 62)  # the stamp of a slot that was never used
COUNTS = ("hits", "misses", "evictions", "written", "overflow")


class CacheIndex:
    """Which row is in which slot, when it was last used, and whether it has changed since it was at home.

    `slot_of_row` and `row_of_slot` are inverse to each other; -1 stands for none. The current tick is that of
    the batch at hand: what carries it stays. With a slot for every row, each has its own.
    """

    def __init__(self, n_rows: int, n_slots: int, *, policy: str, device: torch.device) -> None:
        self.policy = policy
        self.n_slots = n_slots
        self.direct = n_slots >= n_rows
        self.hand = 0
        """Where to look next for slots, if the host decides."""
        self.slot_of_row = torch.full((n_rows,), -1, dtype=torch.int32, device=device)
        self.row_of_slot = torch.full((n_slots,), -1, dtype=torch.int64, device=device)
        self.stamp = torch.full((n_slots,), FREE, dtype=torch.int64, device=device)
        self.frequency = torch.full((n_slots if policy == "lfu" else 0,), -torch.inf, device=device)
        self.dirty = torch.zeros(n_slots, dtype=torch.int32, device=device)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)

    def forget(self) -> None:
        """Nothing is here any more."""
        self.slot_of_row.fill_(-1)
        self.row_of_slot.fill_(-1)
        self.stamp.fill_(FREE)
        self.frequency.fill_(-torch.inf)
        self.dirty.zero_()

    @property
    def ageing(self) -> float:
        """How far a miss moves the time in which uses age; one half-life is 1."""
        return 1.0 / (HALF_LIFE * self.n_slots)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a batch's rows came upon."""

    slots: NDArray[np.int64]
    """Where they are; -1 for those that are not here."""
    hits: NDArray[np.int64]
    """Slots of those that are."""
    missing: NDArray[np.int64]
    """Rows that are not, in order."""
    now: float
    """The time in which uses age, when they came."""
    tick: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows that come, the slots they get, and which rows must go home from these (-1: none)."""

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    victims: NDArray[np.int64]
    old: NDArray[np.int64]
    """The rows that are in these slots until then (-1: none)."""


def probe(tags: CacheIndex, rows: Tensor) -> ProbeResult:
    """Touch the rows that are here, and find out which are not. Rows are distinct and exist.

    The uses are yet to be counted (`count_uses`), before the next batch comes.
    """
    # numpy, since torch would have all cores at work for each of these small steps, beside the training.
    counts, wanted = tags.counts.numpy(), rows.numpy()
    tags.clock += 1
    tick = int(tags.clock)
    slots = tags.slot_of_row.numpy()[wanted].astype(np.int64)  # once: numpy would do so for each use of them
    here = slots >= 0
    hits, missing = slots[here], wanted[~here]
    tags.stamp.numpy()[hits] = tick
    now = float(counts[1] * tags.ageing)
    counts[:2] += (len(hits), len(missing))
    return ProbeResult(slots, hits, missing, now, tick)


def select_victims(tags: CacheIndex, sought: ProbeResult, *, window: int = 0) -> Placement:
    """Slots for rows that are missing, in order: for fewer if there are no more, the others stay at home.

    Slots of this batch and of the last `window` batches are kept. Beside times of use and counts nothing
    changes until `evict`: whoever moves the records may fail.
    """
    missing, tick = sought.missing, sought.tick
    given = missing if tags.direct else _slots_for(tags, len(missing), tick, tick - window)
    coming = missing[: len(given)]
    old = tags.row_of_slot.numpy()[given]
    old = np.where(tags.slot_of_row.numpy()[old] == given, old, -1)  # an interruption may have left others
    victims = np.where(tags.dirty.numpy()[given] != 0, old, -1)
    n_evicted, n_written = int((old >= 0).sum()), int((victims >= 0).sum())
    tags.counts.numpy()[2:] += (n_evicted, n_written, len(missing) - len(coming))
    return Placement(coming, given, victims, old)


def count_uses(tags: CacheIndex, sought: ProbeResult) -> None:
    """For "lfu": the rows that were here were used once more."""
    if tags.policy == "lfu":
        frequency = tags.frequency.numpy()
        frequency[sought.hits] = _one_more(frequency[sought.hits], np.float32(sought.now))


def evict(tags: CacheIndex, arrivals: Placement) -> None:
    """The records that were in the slots of arrivals are safe elsewhere: nothing is there any more.

    In this order, and `insert` in its own: interrupted between any two lines, a slot is clean, or its row's.
    """
    old = arrivals.old
    tags.dirty.numpy()[arrivals.slots] = 0
    tags.slot_of_row.numpy()[old[old >= 0]] = -1
    tags.row_of_slot.numpy()[arrivals.slots] = -1


def insert(tags: CacheIndex, arrivals: Placement) -> None:
    """The records of arrivals are in their slots, which were let go before."""
    slots, rows = arrivals.slots, arrivals.rows
    tags.stamp.numpy()[slots] = int(tags.clock)
    if tags.policy == "lfu":
        tags.frequency.numpy()[slots] = int(tags.counts[1]) * tags.ageing
    tags.row_of_slot.numpy()[slots] = rows
    tags.slot_of_row.numpy()[rows] = slots


def _one_more(frequency: NDArray[np.float32], now: np.float32) -> NDArray[np.float32]:
    """log2(2^heat + 2^now), by functions that numpy has vector instructions for."""
    high = np.maximum(frequency, now)
    low = np.minimum(frequency, now)
    low -= high
    np.exp2(low, out=low)
    low += 1
    np.log2(low, out=low)
    low += high
    return low


def _slots_for(tags: CacheIndex, n_rows: int, tick: int, floor: int) -> NDArray[np.int64]:
    """Slots that are to go: of the next ones around the cache, `WAYS` times as many as needed, those with the
    lowest scores. Fewer if no more can.
    """
    stamp = tags.stamp.numpy()
    scores = tags.frequency.numpy() if tags.policy == "lfu" else stamp
    chosen = []
    n_left, n_unseen = n_rows, tags.n_slots
    while n_left and n_unseen:
        n_seen = min(WAYS * n_left, n_unseen)
        parts = _around(tags.hand, n_seen, tags.n_slots)
        tags.hand = (tags.hand + n_seen) % tags.n_slots
        n_unseen -= n_seen
        found = [np.flatnonzero(stamp[part] < floor) + part.start for part in parts]
        seen = found[0] if len(found) == 1 else np.concatenate(found)
        if n_left < len(seen):
            seen = _lowest(seen, scores[seen], n_left)
        stamp[seen] = tick
        chosen.append(seen)
        n_left -= len(seen)
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)


def _lowest(slots: NDArray[np.int64], scores: NDArray[Any], n: int) -> NDArray[np.int64]:
    """So many of more slots, those with the lowest scores: of very many as good as these, since to find out
    exactly would take longer than all else that is decided here.
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


def _around(first: int, n: int, n_slots: int) -> list[slice]:
    """So many slots from one on, and on from the beginning after the last."""
    whole = slice(first, min(first + n, n_slots))
    return [whole] if first + n <= n_slots else [whole, slice(0, first + n - n_slots)]
