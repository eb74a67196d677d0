"""The other ranks of one optimizer: they agree when it is built.

`Meeting` is not enough: a rank that shares nothing does not know that others wait for it. So ranks leave
notes in the store, which others read while they wait, under the number of the optimizer on its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist

from flatbed.distributed.ranks import (
    ExchangeError,
    Meeting,
    Statement,
    default_store,
    leave_note,
    read_note,
    world_size,
)
from flatbed.errors import FlatbedError

PATIENCE = 10.0
"""Seconds until ranks raise because another rank has built an optimizer without shards instead."""
_numbers = count()


class Peers:
    """Notes that the ranks of one optimizer leave for each other in the store."""

    def __init__(self) -> None:
        self._key, self._n_steps = f"flatbed/optimizer/{next(_numbers)}", 0
        self._store, self._rank = default_store(), dist.get_rank()
        self._concerned: list[int] = []
        """Ranks that share something of the optimizer."""

    @staticmethod
    def of_new_optimizer() -> Peers | None:
        """Return the other ranks; None if there are none, and for backends without a store (MPI)."""
        has_store = world_size() > 1 and str(dist.get_backend()) not in ("fake", "mpi")
        return Peers() if has_store else None

    def agree(self, stated: Mapping[tuple[int, ...], Statement], failure: Exception | None = None) -> None:
        """Raise on all ranks of a key of `stated` if their statements differ, or if one of them has failed.

        Every rank of each key calls it. Keys are visited in one order, since ranks may be in several.
        """
        self._concerned = sorted({rank for ranks in stated for rank in ranks})
        for ranks in sorted(stated):
            if self._rank not in ranks or len(ranks) == 1:
                continue
            meeting = Meeting(ranks)
            if failure is not None:
                meeting.end(f"rank {self._rank}: {failure}")
                continue
            try:
                meeting.hold(stated[ranks], partial(self._give_up, ranks))
            except ExchangeError as error:
                failure = error
        if failure is not None:
            raise failure

    def _give_up(self, ranks: Sequence[int], waited: float, absent: Callable[[], list[int]]) -> str | None:
        told = self._told("failed")
        if told is not None and told[0] in absent():
            return f"rank {told[0]}: {told[2]}"
        if waited > PATIENCE:
            for rank in absent():
                if instead := self._told(f"whole/{rank}"):
                    return self._absence(ranks, [rank], f"it built {instead[0]}")
        if waited > self._store.timeout.total_seconds():
            return self._absence(ranks, absent(), f"ranks waited for {waited:.0f} s")
        return None

    def _absence(self, ranks: Sequence[int], absent: list[int], found: str) -> str:
        return (
            f"ranks {list(ranks)} share shards, a norm or the state of an optimizer; found that rank "
            f"{', '.join(map(str, absent))} did not build it: {found}. Build the same optimizers in the "
            f"same order, with the same parameters and options, on all of these ranks"
        )

    def tell_whole(self, kind: str, n_params: int) -> None:
        """Tell ranks that may wait for this one that its optimizer has no shards."""
        told = f"{kind} of {n_params} whole parameters"
        leave_note(self._store, f"{self._key}/whole/{self._rank}", told)

    def tell_failure(self, error: Exception) -> None:
        """Tell the other ranks that this one has failed to build the optimizer."""
        leave_note(self._store, f"{self._key}/failed", self._rank, self._concerned, str(error))
        Meeting.missed = Meeting.missed or not isinstance(error, ExchangeError)

    def _told(self, name: str) -> list[Any] | None:
        return read_note(self._store, f"{self._key}/{name}")

    def begin_step(self) -> None:
        """Count a step. The steps 1, 2, 4, 8, ... raise if another rank could not build the optimizer."""
        self._n_steps += 1
        told = None if self._n_steps & (self._n_steps - 1) else self._told("failed")
        if told is not None and self._rank in told[1]:
            Meeting.missed = True
            raise FlatbedError(f"rank {told[0]} failed to build this optimizer: {told[2]}")
