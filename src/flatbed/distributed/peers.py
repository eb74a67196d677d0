"""The other ranks of one optimizer: they agree when it is built.

`Meeting` is not enough: a rank without shards does not know that others wait for it. So ranks leave notes in
the store, which others read while they wait, under the number of the optimizer on its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from flatbed.distributed.ranks import (
    ExchangeError,
    Meeting,
    default_store,
    leave_note,
    read_note,
    world_size,
)
from flatbed.errors import FlatbedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PATIENCE = 10.0
"""Seconds until ranks raise because another rank has built an optimizer without shards instead."""
_numbers = count()


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter or an option, as ranks compare it."""

    name: str
    value: str
    mesh: DeviceMesh | None = None
    """The ranks that hold shards of the parameter."""


class Peers:
    """Notes that the ranks of one optimizer leave for each other in the store."""

    def __init__(self) -> None:
        self._key = f"flatbed/optimizer/{next(_numbers)}"
        self._store, self._rank = default_store(), dist.get_rank()
        self._timeout = self._store.timeout.total_seconds()
        self._is_built = False
        self._n_steps = 0

    @staticmethod
    def of_new_optimizer() -> Peers | None:
        """Return the other ranks; None if there are none, and for backends without a store (MPI)."""
        has_store = world_size() > 1 and str(dist.get_backend()) not in ("fake", "mpi")
        return Peers() if has_store else None

    def agree(self, described: Sequence[Described], failure: Exception | None = None) -> None:
        """Raise on all ranks that share shards if parameters or options differ, or if one rank has failed.

        Every rank of each mesh calls it. Meshes are visited in one order, since ranks may share several.
        """
        holders = {id(d): () if d.mesh is None else tuple(d.mesh.mesh.flatten().tolist()) for d in described}
        meetings = sorted(set(holders.values()) - {()})
        everyone = sorted({self._rank, *(rank for ranks in meetings for rank in ranks)})
        try:
            for ranks in meetings:
                if self._rank in ranks and len(ranks) > 1:
                    own = [(d.name, d.value) for d in described if holders[id(d)] in ((), ranks)]
                    self._meet(ranks, own, None if failure is None else str(failure))
        except ExchangeError as error:
            self._tell(error, everyone)
            if failure is None:
                raise
        if failure is not None:
            self._tell(failure, everyone)
            raise failure

    def agree_in(self, group: Any, options: dict[str, Any]) -> None:
        """Raise on all ranks of a process group if options differ between them."""
        own = [(name, repr(value)) for name, value in options.items()]
        ranks = dist.get_process_group_ranks(group)
        try:
            self._meet(ranks, own, None)
        except ExchangeError as error:
            self._tell(error, ranks)
            raise

    def _meet(self, ranks: Sequence[int], own: list[tuple[str, str]], failure: str | None) -> None:
        def give_up(waited: float, absent: Callable[[], list[int]]) -> str | None:
            told = self._told("failed")
            if told is not None and told[0] in absent():
                return f"rank {told[0]}: {told[2]}"
            if waited > PATIENCE:
                for rank in absent():
                    if instead := self._told(f"whole/{rank}"):
                        return self._absence(ranks, [rank], f"it built {instead[0]}")
            if waited > self._timeout:
                return self._absence(ranks, absent(), f"ranks waited for {waited:.0f} s")
            return None

        Meeting(ranks).hold(own, give_up, failure)

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
        """Tell ranks that wait for this one that it has failed to build the optimizer."""
        self._tell(error, [])
        Meeting.missed = True

    def built(self) -> None:
        """Record that the optimizer exists: a failure to add a group later does not end its steps."""
        self._is_built = True

    def _tell(self, error: Exception, concerned: list[int]) -> None:
        if not self._is_built:
            leave_note(self._store, f"{self._key}/failed", self._rank, concerned, str(error))

    def _told(self, name: str) -> list[Any] | None:
        return read_note(self._store, f"{self._key}/{name}")

    def begin_step(self) -> None:
        """Count a step. The steps 1, 2, 4, 8, ... raise if another rank could not build the optimizer."""
        self._n_steps += 1
        told = None if self._n_steps & (self._n_steps - 1) else self._told("failed")
        if told is not None and self._rank in told[1]:
            Meeting.missed = True
            raise FlatbedError(f"rank {told[0]} failed to build this optimizer: {told[2]}")
