"""Loaders of several ranks, batch by batch: which ranks continue, have ended, or have left the loop.

All ranks take part in every lookup of a sharded table, and so must take as many batches. Before each batch,
all loaders exchange a header, those of loader threads over a channel of their own.

A rank that leaves its loop early says so in the header of a later batch, and in a note, since loaders without
room for another batch exchange no header. Other ranks raise when they ask for a batch that the rank did not
take, or while they wait for it in a lookup (`Channel.watchers`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from flatbed.distributed.channel import ENDED, LEFT, OK, Channel, Header
from flatbed.distributed.ranks import (
    ExchangeError,
    default_store,
    leave_note,
    left_alone,
    read_note,
    reason_of,
)
from flatbed.errors import FlatbedError
from flatbed.tables.table import Table

UNEVEN = ("stop", "empty", "error")
NO_BATCH: Any = object()
NEVER = 1 << 62


def common_channel(tables: Sequence[Table]) -> Channel | None:
    """Return the channel of the ranks of sharded tables; None if this rank holds all of their rows."""
    channels = [table._shards.channel for table in tables if table._shards is not None]
    for channel in channels:
        if channel.ranks != channels[0].ranks:
            raise ValueError(
                f"tables of a Prefetcher must be sharded across the same ranks; found {channels[0].ranks} "
                f"and {channel.ranks}: leave out those of one process group"
            )
    return channels[0] if channels else None


class Departure(NamedTuple):
    """What a rank that has left the loop did before."""

    n_taken: int
    n_exchanges: int  # those that its training thread has begun
    rank: int
    text: str
    has_failed: bool


class LoaderRanks:
    """The headers of one loop, and what this rank knows of the others."""

    def __init__(self, training: Channel, tables: Sequence[Table], *, uneven: str, depth: int) -> None:
        self.training, self.uneven = training, uneven
        self.channel = training  # of the loader thread, once the loop has begun, if there is a thread
        self._has_thread = depth > 0
        numbers = [table._shards.number for table in tables if table._shards is not None]
        self._facts = {"uneven": uneven, "depth": "0" if depth == 0 else "more than 0", "tables": numbers}
        self.empty_batch = NO_BATCH  # the last batch without its rows, if ended loaders continue with it
        self.reason = ""  # the error that made the training thread leave the loop
        self.is_exhausted = False  # the training thread has left after its last batch, as all ranks do
        self.n_loaded = 0  # batches that are ready for the training thread, or were
        self._n_agreed = self._n_taken = 0
        self._n_exchanges = 0  # exchanges of the training thread until this rank left
        self._is_over = False
        self._key = ""
        self._left: Departure | None = None

    # ---- in the training thread

    def begin(self) -> None:
        """Begin a loop on all ranks, at its first batch."""
        if self._key:
            return
        self.channel = self.training.loader_channel(self._facts, is_new=self._has_thread)
        channel = self.channel
        self._key = f"flatbed/{channel.parent.group_name}/{channel.number}/{channel.n_exchanges}/left"
        self.training.watchers.append(self.find_departed)

    def take_batch(self) -> None:
        """Count a batch that the training thread takes. Raises if another rank has left before it."""
        if self._left is not None and self._left.n_taken <= self._n_taken:
            raise left_alone(self._left.rank, self._left.text)
        self._n_taken += 1

    def find_departed(self, number: int | None) -> tuple[int, str] | None:
        """Return a rank that has left the loop, and that this one still waits for, with the reason.

        `number`: the prefetched exchange that the training thread waits for; None for another one. A rank
        that has left takes no part in exchanges of this loop. It may take part in later lookups.
        """
        if self._left is None:
            note = read_note(default_store(), self._key)
            if note is None:
                return None
            self._left = Departure(*note)
        left = self._left
        in_batch = number is None or number >> 48 == self.channel.number > 0
        is_missed = in_batch and self.training.n_exchanges > left.n_exchanges
        return (left.rank, left.text) if is_missed or self._n_taken > left.n_taken else None

    def end(self) -> None:
        """End the loop on this rank. If that is early, a note and the loader thread tell the others."""
        if self.find_departed not in self.training.watchers:
            return
        self.training.watchers.remove(self.find_departed)
        self._n_exchanges = self.training.n_exchanges
        if not self.is_exhausted:
            with suppress(ValueError):  # no process group any more
                leave_note(default_store(), self._key, *self._departure(self._n_taken, self.reason))

    # ---- in the loader thread, or in the training thread if there is none

    def agree(self, *, has_ended: bool) -> bool:
        """Tell the other ranks if this one has a batch; return True if all ranks continue."""
        has_batch = not has_ended or self.empty_batch is not NO_BATCH
        header = self._announce(ENDED if has_ended else OK, self.n_loaded if has_batch else -1)
        if LEFT in header.states:
            return self._others_left(header, is_end=has_ended)
        self._n_agreed += 1
        ended = [i for i, state in enumerate(header.states) if state == ENDED]
        if not ended or (self.uneven == "empty" and 0 < len(ended) < len(header.states)):
            empty = [i for i in ended if header.counts[i] < 0]
            if not empty:
                return True
            self._finish()
            raise FlatbedError(
                f"the loader of rank {self.channel.ranks[empty[0]]} has no batch, and a batch without rows "
                f'cannot be made of it: give each rank a batch, or use uneven="stop"'
            )
        self._finish()
        if len(ended) == len(header.states) or self.uneven == "stop":
            return False
        going = self.channel.ranks[header.states.index(OK)]
        raise FlatbedError(
            f"the loader of rank {self.channel.ranks[ended[0]]} has ended after {self.n_loaded} batches, and "
            f'that of rank {going} has more: give all ranks as many, or use uneven="stop" or "empty"'
        )

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the other ranks that this one loads no more batches, unless all ranks have ended.

        Waits for the loaders of the other ranks. `error` is that of the loader, if it has failed.
        """
        if self._is_over:
            return
        self._is_over = True
        if isinstance(error, ExchangeError):
            return  # known to all ranks; the channel is not used again
        n, why = (self._n_taken, self.reason) if error is None else (self.n_loaded, reason_of(error))
        left = self._departure(n, why)
        with suppress(Exception):  # other ranks may be gone
            self._announce(LEFT, n)
            self.channel.gather_texts(json.dumps(left), doing=self._doing)
            self._finish()

    def _departure(self, n: int, why: str) -> Departure:
        text = f"left the loop over its Prefetcher after {n} batches (break, or an exception in its body)"
        if why:
            text = f"failed after {n} batches of its Prefetcher ({why})"
        # A loader that has failed does not keep the training thread from the batches before.
        return Departure(n, self._n_exchanges or NEVER, dist.get_rank(), text, bool(why))

    @property
    def _doing(self) -> str:
        return f"batch {self._n_agreed} of a loop over a Prefetcher"

    def _announce(self, state: int, count: int) -> Header:
        return self.channel.announce(self._doing, [count] * len(self.channel.ranks), state=state)

    def _others_left(self, header: Header, *, is_end: bool) -> bool:
        """Raise, unless the loop ends here, and the ranks that left took all batches without an error."""
        texts = self.channel.gather_texts("", doing=self._doing)
        self._finish()
        self._left = left = min(Departure(*json.loads(text)) for text in texts if text)
        is_end = is_end or (self.uneven == "stop" and ENDED in header.states)
        if is_end and left.n_taken == self.n_loaded and not left.has_failed:
            return False
        raise left_alone(left.rank, left.text)

    def _finish(self) -> None:
        """Note that all ranks know of the end, and that later loops can use the channel."""
        self._is_over = self.channel.is_free = True
