"""Rows of a table sharded across ranks: placement, and the exchanges between ranks.

Row `r` is row `r // n_ranks` of rank `r % n_ranks`. Frequent ids are often consecutive: this spreads them
evenly. When a table grows, no row moves.

Ranks tell each other how many rows they ask for, then which ones, and then send values (`Channel`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.distributed.channel import IDLE, OK, Channel, Header
from flatbed.distributed.ranks import ExchangeError
from flatbed.errors import FlatbedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_of(mesh: DeviceMesh | None, process_group: Any) -> Any:
    """Return the process group that rows are sharded across; None without any."""
    if mesh is not None and process_group is not None:
        raise ValueError("give mesh or process_group, not both")
    if not (dist.is_available() and dist.is_initialized()):
        n_ranks = os.environ.get("WORLD_SIZE", "1")
        if n_ranks != "1":
            raise FlatbedError(
                f'shard="row" needs a process group, and WORLD_SIZE is {n_ranks}: call '
                f"torch.distributed.init_process_group before building the table"
            )
        return None
    group = mesh.get_group() if mesh is not None else process_group
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise FlatbedError(
            f"rank {dist.get_rank()} is not part of the process group that rows are sharded across, whose "
            f"ranks are {dist.get_process_group_ranks(group)}: build the table on those ranks only"
        )
    return group


@dataclass(frozen=True, slots=True)
class Route:
    """Rows of this rank's lookup in the order of their owners."""

    order: Tensor  # positions of the rows, sorted by owner; the row -1 is left out
    rows: Tensor  # rows within their owners' parts, in this order
    counts: list[int]  # number of rows of each owner
    n_rows: int  # number of rows, with the row -1


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A route that ranks have exchanged: rows that this rank asks for, and rows that it is asked for."""

    route: Route
    rows: Tensor  # rows of this rank's part that all ranks ask for, in rank order
    counts: list[int]  # number of rows that each rank asks for
    is_idle: bool = False  # True if no rank has anything to exchange
    number: int = 0  # of an exchange ahead of time: equal on all ranks, and used for no other exchange


class RowShards:
    """Placement of a table's rows on the ranks of a process group, and exchanges for this table."""

    def __init__(self, n_rows: int, group: Any) -> None:
        if n_rows < dist.get_world_size(group):
            raise ValueError(
                f'shard="row" needs a row for each of the {dist.get_world_size(group)} ranks; found {n_rows}'
            )
        self.channel = Channel.of(group)
        self.rank: int = dist.get_rank(group)
        self.n_ranks: int = dist.get_world_size(group)
        self.n_rows = n_rows
        self.number = next(self.channel.table_numbers)

    # ---- placement

    def n_local(self, n_rows: int) -> int:
        """Return the number of rows of this rank in a table of `n_rows`."""
        return (n_rows - self.rank + self.n_ranks - 1) // self.n_ranks

    def to_local(self, rows: Tensor) -> Tensor:
        """Return the position of rows within their owners' parts."""
        return torch.div(rows, self.n_ranks, rounding_mode="floor")

    def to_global(self, rows: Tensor) -> Tensor:
        """Return the rows of the table at these positions of this rank's part."""
        return rows * self.n_ranks + self.rank

    def is_own(self, rows: Tensor) -> Tensor:
        """Return a mask of the rows that this rank holds."""
        return rows % self.n_ranks == self.rank

    def route(self, rows: Tensor) -> Route:
        """Sort rows by owner. Waits for the GPU once, since the host needs the counts."""
        owners, order = torch.where(rows < 0, self.n_ranks, rows % self.n_ranks).sort(stable=True)
        ranks = torch.arange(self.n_ranks + 1, device=rows.device)
        counts = torch.searchsorted(owners, ranks).diff().tolist()
        order = order[: sum(counts)]
        return Route(order, self.to_local(rows[order]), counts, len(rows))

    def resize(self, n_rows: int, resize_part: Callable[[int], None]) -> None:
        """Change the number of rows on all ranks; `resize_part` changes the size of this rank's part."""
        doing = "a change of size"
        self.agree(doing, {"num_embeddings": n_rows})
        if n_rows < self.n_rows:
            raise ValueError(f"a table can only grow; found {n_rows} rows asked of {self.n_rows}")
        with self.failing_together(doing):
            resize_part(self.n_local(n_rows))
        self.agree(doing, {})
        self.n_rows = n_rows

    # ---- exchanges: every rank makes the same calls in the same order

    def describe(self, doing: str) -> str:
        """Return a text for what this rank does with this table, for errors on this and other ranks."""
        return f"{doing} of table {self.number} ({self.n_rows} rows)"

    def agree(self, doing: str, facts: Mapping[str, Any]) -> None:
        """Raise on all ranks if facts differ between them."""
        self.channel.announce(self.describe(doing), [0] * self.n_ranks, facts=facts)

    @contextmanager
    def failing_together(self, doing: str) -> Iterator[None]:
        """Report an exception in the body to the other ranks, which are in the exchange `doing`."""
        try:
            yield
        except ExchangeError:
            raise
        except Exception as error:
            with suppress(ExchangeError):
                self.channel.announce(self.describe(doing), [0] * self.n_ranks, failure=error)
            raise

    def exchange(
        self, doing: str, route: Route, *, facts: Mapping[str, Any] | None = None, idle: bool = False
    ) -> Exchanged:
        """Ask the owners of rows for them. `idle`: this rank has no rows, and takes part for the others."""
        state = IDLE if idle else OK
        header = self.channel.announce(self.describe(doing), route.counts, facts=facts, state=state)
        if set(header.states) == {IDLE}:
            return Exchanged(route, route.rows, header.counts, is_idle=True)
        return self._exchange_rows(route, header, self.channel)

    def exchange_ahead(self, route: Route, channel: Channel) -> Exchanged:
        """Ask the owners of rows for them ahead of time, over the channel of the loader threads."""
        doing = f"the prefetch of table {self.number}"  # without its size, which another thread may change
        header = channel.announce(doing, route.counts)
        exchanged = self._exchange_rows(route, header, channel)
        return replace(exchanged, number=channel.number << 48 | channel.n_exchanges)

    def exchange_again(self, doing: str, ahead: Exchanged) -> Exchanged:
        """Return an exchange ahead of time if all ranks use the same one; otherwise exchange its rows now."""
        route = ahead.route
        header = self.channel.announce(self.describe(doing), route.counts, number=ahead.number)
        if set(header.numbers) == {ahead.number}:
            return ahead
        return self._exchange_rows(route, header, self.channel)

    def _exchange_rows(self, route: Route, header: Header, channel: Channel) -> Exchanged:
        doing = self.describe("the exchange of rows")
        rows = channel.all_to_all(route.rows, route.counts, header.counts, doing=doing)
        return Exchanged(route, rows, header.counts)

    def to_askers(self, exchanged: Exchanged, values: Tensor) -> Tensor:
        """Send values to the ranks that have asked for them; return the values that this rank has asked for.

        Values of the row -1 are zeros.
        """
        route = exchanged.route
        found = self.all_to_all(values, exchanged.counts, route.counts)
        whole = found.new_zeros((route.n_rows, *values.shape[1:]))
        return whole.index_copy_(0, route.order, found)

    def to_owners(self, exchanged: Exchanged, values: Tensor) -> Tensor:
        """Send a value for each row of the route to its owner; return the values for rows of this rank."""
        route = exchanged.route
        return self.all_to_all(values.index_select(0, route.order), route.counts, exchanged.counts)

    def all_to_all(self, sent: Tensor, counts: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `counts[rank]` elements to each rank, and return `received[rank]` of each, in rank order."""
        return self.channel.all_to_all(sent, counts, received, doing=self.describe("the exchange of rows"))
