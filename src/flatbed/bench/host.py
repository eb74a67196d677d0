"""How fast the host is just now. On a shared machine others may use the same core, and halve its speed."""

from __future__ import annotations

import os
import random
import time

N_ADDITIONS = 20_000  # about half a millisecond
QUIET = 1.2  # times of the fastest loop so far, up to which a core counts as nobody else's


class Host:
    """Times of a loop in Python, beside the fastest of all: 1 is as fast as can be, 2 takes twice as long."""

    def __init__(self) -> None:
        self.fastest = loop_time()
        self._search(0.0)

    def settle(self) -> float:
        """Go to a core that nobody else uses just now, if there is one; returns its pace.

        The thread may go on to others afterwards, as it likes.
        """
        here = self._look()
        return here / self.fastest if here <= QUIET * self.fastest else self._search(QUIET)

    def _look(self) -> float:
        """The time of a loop on the core that this thread is on."""
        found = min(loop_time() for _ in range(2))
        self.fastest = min(self.fastest, found)
        return found

    def _search(self, enough: float) -> float:
        """Try cores until one is fast enough, or all; stay on the best."""
        if not hasattr(os, "sched_setaffinity"):  # not on macOS and Windows
            return self._look() / self.fastest
        allowed = os.sched_getaffinity(0)
        found: dict[int, float] = {}
        try:
            for core in random.sample(sorted(allowed), len(allowed)):
                os.sched_setaffinity(0, {core})
                found[core] = self._look()
                if found[core] <= enough * self.fastest:
                    break
            best = min(found, key=found.__getitem__)
            os.sched_setaffinity(0, {best})
        finally:
            os.sched_setaffinity(0, allowed)
        return found[best] / self.fastest


def loop_time() -> float:
    """Seconds for a fixed piece of Python."""
    begin, total = time.perf_counter(), 0
    for i in range(N_ADDITIONS):
        total += i
    return time.perf_counter() - begin
