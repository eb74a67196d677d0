"""Exchange of rows that ranks hold in turn for rows in row order, window by window.

Row r belongs to rank r % n_ranks, as its local row r // n_ranks. A window is a run of consecutive rows, and
is split into one segment per rank. An all-to-all gives each rank the rows of its segment, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatbed.distributed.channel import Channel


def local_rows(rows: range, rank: int, n_ranks: int) -> range:
    """Return the local numbers of a rank's rows among consecutive rows."""
    return range(-((rank - rows.start) // n_ranks), -((rank - rows.stop) // n_ranks))


@dataclass(frozen=True, slots=True)
class RowWindow:
    """Consecutive rows, split into segments of equal length; the last ones may be shorter or empty."""

    rows: range
    n_ranks: int

    def segment(self, rank: int) -> range:
        """Return the rows that a rank has after the exchange."""
        length = -(-len(self.rows) // self.n_ranks)
        return self.rows[rank * length : (rank + 1) * length]

    def local_rows(self, rank: int) -> range:
        """Return the local numbers of the rows that a rank has before."""
        return local_rows(self.rows, rank, self.n_ranks)


def row_windows(n_rows: int, n_ranks: int, segment_rows: int) -> Iterator[RowWindow]:
    """Split all rows into windows with segments of `segment_rows`."""
    step = n_ranks * segment_rows
    for start in range(0, n_rows, step):
        yield RowWindow(range(start, min(start + step, n_rows)), n_ranks)


class RowOrder:
    """Exchanges local rows for rows in row order, on the host.

    All windows use its buffers: new ones would fragment memory.
    """

    def __init__(self, channel: Channel, segment_rows: int, nbytes: int) -> None:
        self._channel, self._rank = channel, channel.rank
        self._received = torch.empty((segment_rows, nbytes), dtype=torch.uint8)
        self._ordered = torch.empty_like(self._received)

    def __call__(self, records: Tensor, window: RowWindow) -> Tensor:
        """Return the records of this rank's segment, given those of its local rows: (n, nbytes) of uint8.

        They are valid until the next call. All ranks call this with the same window.
        """
        n_ranks, segment = window.n_ranks, window.segment(self._rank)
        # Local rows are ascending: those of each segment are consecutive.
        n_sent = [len(local_rows(window.segment(peer), self._rank, n_ranks)) for peer in range(n_ranks)]
        n_received = [len(local_rows(segment, peer, n_ranks)) for peer in range(n_ranks)]
        received, ordered = self._received[: len(segment)], self._ordered[: len(segment)]
        self._channel.all_to_all_into(
            received, records.contiguous(), n_sent, n_received, doing="saving a table"
        )
        for peer, part in enumerate(torch.split(received, n_received)):
            ordered[(peer - segment.start) % n_ranks :: n_ranks] = part
        return ordered
