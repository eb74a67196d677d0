"""How fast the host is just now. On a shared machine others may use the same core, and halve its speed."""

from __future__ import annotations

import functools
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

    def pace(self) -> float:
        """Of the core that this thread is on."""
        return self._look() / self.fastest

    def settle(self) -> float:
        """Go to a core that nobody else uses just now, if there is one; returns its pace.

        The thread may go on to others afterwards, as it likes.
        """
        pace = self.pace()
        return pace if pace <= QUIET else self._search(QUIET)

    def _look(self) -> float:
        found = min(loop_time() for _ in range(2))
        self.fastest = min(self.fastest, found)
        return found

    def _search(self, enough: float) -> float:
        """Try cores until one is fast enough, or all; stay on the best. Returns its pace."""
        allowed = allowed_cores()
        found: dict[int, float] = {}
        try:
            for core in random.sample(allowed, len(allowed)):
                if _go({core}):
                    found[core] = self._look()
                    if found[core] <= enough * self.fastest:
                        break
            if found:
                _go({min(found, key=found.__getitem__)})
        finally:
            _go(set(allowed))
        return min(found.values()) / self.fastest if found else self.pace()


@functools.cache
def this_host() -> Host:
    """One for all that is measured, so that paces can be compared."""
    return Host()


def allowed_cores() -> list[int]:
    """Those that this thread may use; none where nobody tells: macOS, Windows."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return []


def _go(cores: set[int]) -> bool:
    """Let this thread use these alone; whether it may: containers can forbid it."""
    if not cores:
        return False
    try:
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError):
        return False
    return True


def loop_time() -> float:
    """Seconds for a fixed piece of Python."""
    begin, total = time.perf_counter(), 0
    for i in range(N_ADDITIONS):
        total += i
    return time.perf_counter() - begin
