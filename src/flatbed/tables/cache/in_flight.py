"""Batches that came through a cache while one before them is still to be used."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatbed.tables.cache.reservation import Reservation


class InFlight:
    """Live tickets, and how many rows have come since the oldest of them: so many slots are not free.

    A ticket ends by itself, at any time and in any thread: the garbage collector may end it. Those that have
    are forgotten when somebody asks.
    """

    def __init__(self) -> None:
        self.tick = 0
        """How many batches have come through, as far as the host knows."""
        self._tickets: list[Reservation] = []
        self._sizes: dict[int, int] = {}
        self._lock = threading.RLock()

    def _forget(self) -> None:
        live = [ticket for ticket in self._tickets if ticket.live]
        if len(live) == len(self._tickets):
            return
        self._tickets = live
        oldest = live[0].tick if live else self.tick + 1
        self._sizes = {tick: n for tick, n in self._sizes.items() if tick >= oldest}

    @property
    def tickets(self) -> list[Reservation]:
        """Those that live."""
        with self._lock:
            if self._tickets:
                self._forget()
            return self._tickets

    @property
    def window(self) -> int:
        """How many batches back the oldest live ticket is, from the batch that comes next."""
        held = self.tickets
        return self.tick + 1 - held[0].tick if held else 0

    @property
    def n_rows(self) -> int:
        """How many rows have come since, at most."""
        with self._lock:
            if self._tickets:
                self._forget()
            return sum(self._sizes.values())

    def come(self, n_rows: int) -> int:
        """Another batch comes; returns which it is."""
        with self._lock:
            self.tick += 1
            if self._tickets:
                self._sizes[self.tick] = n_rows
            return self.tick

    def begin(self, ticket: Reservation, n_rows: int) -> None:
        """The rows of the batch that came last are to stay."""
        with self._lock:
            self._tickets.append(ticket)
            self._sizes[ticket.tick] = n_rows
