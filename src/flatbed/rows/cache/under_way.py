"""Batches that came through a cache while one before them is still to be used."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatbed.rows.cache.ticket import Ticket


class UnderWay:
    """Live tickets, and how many rows have come since the oldest of them: so many slots are not free."""

    def __init__(self) -> None:
        self.tick = 0
        """How many batches have come through, as far as the host knows."""
        self.tickets: list[Ticket] = []
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def window(self) -> int:
        """How many batches back the oldest live ticket is, from the batch that comes next."""
        with self._lock:
            return self.tick + 1 - self.tickets[0].tick if self.tickets else 0

    @property
    def n_rows(self) -> int:
        """How many rows have come since, at most."""
        with self._lock:
            return sum(self._sizes.values())

    def come(self, n_rows: int) -> int:
        """Another batch comes; returns which it is."""
        with self._lock:
            self.tick += 1
            if self.tickets:
                self._sizes[self.tick] = n_rows
            return self.tick

    def begin(self, ticket: Ticket, n_rows: int) -> None:
        """The rows of the batch that came last are to stay."""
        with self._lock:
            self.tickets.append(ticket)
            self._sizes[ticket.tick] = n_rows

    def end(self, ticket: Ticket) -> None:
        """They need not any more."""
        with self._lock:
            if ticket in self.tickets:
                self.tickets.remove(ticket)
            oldest = self.tickets[0].tick if self.tickets else self.tick + 1
            self._sizes = {tick: n for tick, n in self._sizes.items() if tick >= oldest}
