"""Meetings of ranks, through the store of the default process group.

Reason for it besides collectives: a collective hangs if one rank does not call it. A meeting ends on all
ranks, and names the ranks that are missing, or what differs. It is slow, and held once per optimizer or
checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch.distributed as dist

from flatbed.distributed.failures import ExchangeError, default_store, difference

MET = "met"
Statement = Sequence[tuple[str, str]]
"""Names and values that ranks compare."""
GiveUp = Callable[[float, Callable[[], list[int]]], str | None]
"""Returns the message that ends a meeting, given the seconds so far and a function for the absent ranks."""

_n_held: Counter[tuple[int, ...]] = Counter()


class Meeting:
    """One meeting of some ranks, which all of them hold in the same order."""

    missed = False
    """True after an error of this rank alone: the others have ended a meeting without this rank."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks, self._rank, self._store = tuple(ranks), dist.get_rank(), default_store()
        self._key = self._next_key()
        while Meeting.missed and self._store.check([f"{self._key}/decision"]):
            self._key = self._next_key()
        Meeting.missed = False

    def _next_key(self) -> str:
        name = hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]
        _n_held[self._ranks] += 1
        return f"flatbed/meeting/{name}/{_n_held[self._ranks]}"

    def hold(self, statement: Statement, give_up: GiveUp, failure: str | None = None) -> None:
        """Wait for all ranks; raise on all of them if a rank is missing, has failed, or states otherwise."""
        store, key = self._store, self._key
        self._state(statement, failure)
        if store.add(f"{key}/n", 1) == len(self._ranks):
            store.compare_set(f"{key}/decision", "", self._difference() or MET)
        began, pause = time.monotonic(), 0.001
        while not store.check([f"{key}/decision"]):
            message = give_up(time.monotonic() - began, self._absent)
            if message is not None:
                store.compare_set(f"{key}/decision", "", message)
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        decision = store.get(f"{key}/decision").decode()
        if decision != MET:
            raise ExchangeError(decision)

    def _state(self, statement: Statement, failure: str | None) -> None:
        """Publish what this rank states; in full if it is the first one, or differs from the first one."""
        store, key = self._store, self._key
        digest = hashlib.sha256(repr(list(statement)).encode()).hexdigest()
        first = store.compare_set(f"{key}/first", "", f"{self._rank} {digest}").decode().split()
        agrees = first[1] == digest and failure is None
        shown = json.dumps([list(statement), failure])
        store.set(f"{key}/{self._rank}", "-" if agrees and first[0] != str(self._rank) else shown)
        if not agrees:
            store.set(f"{key}/differs", "-")

    def _absent(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"{self._key}/{rank}"])]

    def _difference(self) -> str | None:
        """Return what differs between ranks, all of which are present."""
        if not self._store.check([f"{self._key}/differs"]):
            return None
        texts = ((rank, self._store.get(f"{self._key}/{rank}").decode()) for rank in self._ranks)
        held = {rank: json.loads(text) for rank, text in texts if text != "-"}
        for rank, (_, failure) in held.items():
            if failure is not None:
                return f"rank {rank}: {failure}"
        advice = "Build the optimizer with the same parameters and options on all ranks"
        return difference({rank: dict(map(tuple, pairs)) for rank, (pairs, _) in held.items()}, advice)
