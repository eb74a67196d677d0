"""Rows of a table divided among ranks: placement, and the exchanges between ranks.

Row `r` is row `r // n_ranks` of rank `r % n_ranks`: frequent ids, which often are consecutive, spread evenly,
and a table that grows moves no row.

Every exchange begins with a header on the host, over gloo: what the rank is doing, and the number of rows for
each peer. A rank that has failed says so in its header, so that all ranks raise instead of waiting. Rows and
values follow over NCCL, or over gloo for tables that compute on the CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.errors import FlatbedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CPU = torch.device("cpu")
OK, FAILED = 0, 1
PATIENCE = 2.0  # seconds that ranks wait for signs of life of the others, once an exchange has failed


def group_of(mesh: DeviceMesh | None, process_group: Any) -> Any:
    """Return the process group over which rows are divided; None if there is one rank."""
    if mesh is not None and process_group is not None:
        raise ValueError("give mesh or process_group, not both")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f'rows are divided over one dimension; found a mesh of {mesh.ndim}: pass mesh["name"] of one'
        )
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
            f"rank {dist.get_rank()} is not part of the process group that the rows are divided over, whose "
            f"ranks are {dist.get_process_group_ranks(group)}: build the table on those ranks only"
        )
    return group if dist.get_world_size(group) > 1 else None


@dataclass(frozen=True, slots=True)
class Route:
    """Rows of this rank's lookup in the order of their owners."""

    order: Tensor
    """Positions of the rows, sorted by owner; the row -1 is left out."""
    rows: Tensor
    """Rows within their owners' parts, in this order."""
    counts: list[int]
    """Number of rows of each owner."""
    n_rows: int
    """Number of rows, with the row -1."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A route that ranks have exchanged: rows that this rank asks for, and rows that it is asked for."""

    route: Route
    rows: Tensor
    """Rows of this rank's part that all ranks ask for, in rank order."""
    counts: list[int]
    """Number of rows that each rank asks for; -1 for a rank that takes part without rows of its own."""


class RowShards:
    """Placement of a table's rows on the ranks of a process group, and exchanges for this table."""

    def __init__(self, n_rows: int, group: Any) -> None:
        self.channel = Channel.of(group)
        self.rank: int = dist.get_rank(group)
        self.n_ranks: int = dist.get_world_size(group)
        self.number = self.channel.new_number()
        self.n_rows = n_rows
        if n_rows < self.n_ranks:
            raise ValueError(
                f"a table with shard='row' has at least one row on each of the {self.n_ranks} ranks; found "
                f"{n_rows} rows"
            )

    # ---- placement

    def n_local(self, n_rows: int | None = None, rank: int | None = None) -> int:
        """Return the number of rows of a rank, by default this one, if the table has `n_rows`."""
        rank = self.rank if rank is None else rank
        return ((self.n_rows if n_rows is None else n_rows) - rank + self.n_ranks - 1) // self.n_ranks

    def owners(self, rows: Tensor) -> Tensor:
        """Return the ranks that hold these rows."""
        return rows % self.n_ranks

    def to_local(self, rows: Tensor) -> Tensor:
        """Return the position of rows within their owners' parts."""
        return torch.div(rows, self.n_ranks, rounding_mode="floor")

    def to_global(self, rows: Tensor, rank: int | None = None) -> Tensor:
        """Return the rows of the table at these positions of a rank's part, by default this rank's."""
        return rows * self.n_ranks + (self.rank if rank is None else rank)


class Channel:
    """Headers between the ranks of a process group, on the host. All tables of the group share it.

    A channel belongs to one thread: ranks must use it in one order.
    """

    def __init__(self, parent: Any) -> None:
        self.parent = parent
        self.ranks: list[int] = dist.get_process_group_ranks(parent)
        self.rank: int = dist.get_rank(parent)
        self.is_fake = "fake" in str(dist.get_backend(parent))
        self.group = dist.new_group(
            self.ranks,
            timeout=_timeout_of(parent),
            backend="fake" if self.is_fake else "gloo",
            use_local_synchronization=True,
        )
        self.n_exchanges = 0
        self._n_tables = 0

    @staticmethod
    def of(parent: Any) -> Channel:
        """Return the channel of a process group, which all its ranks make at the first call."""
        if parent not in _channels:
            _channels[parent] = Channel(parent)
        return _channels[parent]

    def new_number(self) -> int:
        """Count the tables of the group, which all ranks build in the same order."""
        self._n_tables += 1
        return self._n_tables - 1

    def first(self, value: int) -> int:
        """Return the number that the first rank gives."""
        held = torch.tensor([value])
        dist.broadcast(held, group_src=0, group=self.group)
        return int(held)


_channels: dict[Any, Channel] = {}


def _timeout_of(group: Any) -> Any:
    """Return the timeout of a process group's collectives; None for torch's default."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            return options._timeout
    return None
