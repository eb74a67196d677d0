"""Rows of a table divided among ranks: placement, and the exchanges between ranks.

Row `r` is row `r // n_ranks` of rank `r % n_ranks`: frequent ids, which often are consecutive, spread evenly,
and a table that grows moves no row.

Every exchange begins with a header on the host, over gloo: what the rank is doing, and the number of rows for
each peer. A rank that has failed says so in its header, so that all ranks raise instead of waiting. Rows and
values follow over NCCL, or over gloo for tables that compute on the CPU.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.errors import FlatbedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CPU = torch.device("cpu")
OK, FAILED, IDLE, ENDED, LEFT = range(5)
"""States in a header: taking part, having failed, taking part without rows of its own. Loaders have two more:
having no more batches, and having left the loop over them."""
PATIENCE = 2.0  # seconds that ranks wait for signs of life of the others, once an exchange has failed
LOOK_AROUND = datetime.timedelta(seconds=0.5)
"""How long a header is waited for before the watchers of the channel are asked, again and again."""


class ExchangeError(FlatbedError):
    """An exchange between ranks has failed. The other ranks raise, too."""


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
    if dist.get_world_size(group) == 1 and dist.get_world_size() > 1:
        raise FlatbedError(
            "the process group that the rows are divided over has one rank, and the default one has "
            f"{dist.get_world_size()}: build a table that this rank trains alone with replicate=False"
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
    """Number of rows that each rank asks for."""
    is_idle: bool = False
    """True if no rank has anything to exchange."""
    number: int = 0
    """Of an exchange ahead of time: the same number on all ranks, and on no other exchange."""


@dataclass(frozen=True, slots=True)
class Header:
    """What all ranks have said at the beginning of an exchange, in rank order."""

    states: list[int]
    counts: list[int]
    """What each rank tells this one."""
    numbers: list[int]
    """The exchange ahead of time that each rank would use; 0 for none."""


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
        self.number = self.channel.count_table()

    # ---- placement

    def n_local(self, n_rows: int | None = None, rank: int | None = None) -> int:
        """Return the number of rows of a rank, by default this one, in a table of `n_rows`."""
        rank = self.rank if rank is None else rank
        return ((self.n_rows if n_rows is None else n_rows) - rank + self.n_ranks - 1) // self.n_ranks

    def to_local(self, rows: Tensor) -> Tensor:
        """Return the position of rows within their owners' parts."""
        return torch.div(rows, self.n_ranks, rounding_mode="floor")

    def to_global(self, rows: Tensor, rank: int | None = None) -> Tensor:
        """Return the rows of the table at these positions of a rank's part, by default this rank's."""
        return rows * self.n_ranks + (self.rank if rank is None else rank)

    def is_own(self, rows: Tensor) -> Tensor:
        """Return a mask of the rows that this rank holds."""
        return rows % self.n_ranks == self.rank

    def route(self, rows: Tensor) -> Route:
        """Sort rows by owner. Waits for the GPU, since the host needs the counts."""
        owners = torch.where(rows < 0, self.n_ranks, rows % self.n_ranks)
        counts = torch.bincount(owners, minlength=self.n_ranks + 1).tolist()[: self.n_ranks]
        order = owners.argsort(stable=True)[: sum(counts)]
        return Route(order, self.to_local(rows[order]), counts, len(rows))

    def resize(self, n_rows: int, resize_part: Callable[[int], None]) -> None:
        """Change the number of rows on all ranks; `resize_part` changes that of this rank's part."""
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
        """Return what this rank does with which table, as errors and other ranks show it."""
        return f"{doing} of table {self.number} ({self.n_rows} rows)"

    def agree(self, doing: str, facts: Mapping[str, Any]) -> None:
        """Raise on all ranks if facts differ between them."""
        self.channel.announce(self.describe(doing), [0] * self.n_ranks, facts=facts)

    @contextmanager
    def failing_together(self, doing: str) -> Iterator[None]:
        """Tell the other ranks, which are in the exchange of this name, of an exception in the body."""
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
        doing = f"the prefetch of table {self.number}"  # its size may change in another thread
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
        """Send the values of rows that this rank was asked for; return those that it has asked for.

        Values of the row -1 are zeros.
        """
        route = exchanged.route
        found = self.all_to_all(values, exchanged.counts, route.counts)
        whole = found.new_zeros((route.n_rows, *values.shape[1:]))
        return whole.index_copy_(0, route.order, found)

    def to_owners(self, exchanged: Exchanged, values: Tensor) -> Tensor:
        """Send values, one for each row of the route, to the owners; return those for rows of this rank."""
        route = exchanged.route
        return self.all_to_all(values.index_select(0, route.order), route.counts, exchanged.counts)

    def all_to_all(self, sent: Tensor, counts: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `counts[rank]` elements to each rank, and return `received[rank]` of each, in rank order."""
        return self.channel.all_to_all(sent, counts, received, doing=self.describe("the exchange of rows"))


class Channel:
    """Headers and rows between the ranks of a process group. All tables of the group share it.

    A channel is for one thread, since ranks must use it in one order. The training threads have one, and the
    loader threads of each loop over a `Prefetcher` have one of its `loaders`, which later loops use again.
    """

    def __init__(self, parent: Any, number: int = 0) -> None:
        self.parent, self.number = parent, number
        self.ranks: list[int] = dist.get_process_group_ranks(parent)
        backend = str(dist.get_backend(parent))
        self._gpus_reached = "nccl" in backend
        self._is_fake = "fake" in backend
        self.group = dist.new_group(
            self.ranks,
            timeout=_timeout_of(parent),
            backend="fake" if self._is_fake else "gloo",
            use_local_synchronization=True,
        )
        self.n_exchanges = 0
        self._n_tables = 0
        self.watchers: list[Callable[[], BaseException | None]] = []
        """Return an error to raise if another rank is known never to answer a header."""
        self.loaders: list[Channel] = []
        self.is_free = False
        """Of a loader's channel: no loop uses it, and the last one ended on all ranks."""

    @staticmethod
    def of(parent: Any) -> Channel:
        """Return the channel of a process group, which all its ranks make at the first call."""
        if parent not in _channels:
            _channels[parent] = Channel(parent)
        return _channels[parent]

    def count_table(self) -> int:
        """Return the number of a new table, which all ranks build in the same order."""
        self._n_tables += 1
        return self._n_tables - 1

    # ---- headers

    def announce(
        self,
        doing: str,
        counts: Sequence[int],
        *,
        facts: Mapping[str, Any] | None = None,
        failure: BaseException | None = None,
        state: int = OK,
        number: int = 0,
    ) -> Header:
        """Tell each rank a count, and all of them a state and a number; return what the ranks tell.

        Raises on all ranks if one has failed, or if ranks do different things or hold different facts.
        """
        self.n_exchanges += 1
        state = state if failure is None else FAILED
        words = hashlib.sha256(repr((doing, self.n_exchanges, facts)).encode()).digest()
        digest = int.from_bytes(words[:7], "little")
        sent = torch.tensor([[state, digest, count, number] for count in counts], device=CPU)
        found = sent.clone()  # what the fake backend receives
        with self.named_errors(doing):
            self._wait(dist.all_to_all_single(found, sent, group=self.group, async_op=True))
        states, digests, received, numbers = found.T.tolist()
        if FAILED in states or set(digests) != {digest}:
            self._raise_unequal(doing, facts, failure)
        return Header(states, received, numbers)

    def _wait(self, work: Any) -> None:
        """Wait for all ranks, unless a watcher knows that one of them does not come."""
        while True:
            try:
                work.wait(LOOK_AROUND)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises if it has failed, and not only this wait for it
                    return
            for error in [watcher() for watcher in self.watchers]:
                if error is not None:
                    raise error

    def gather_texts(self, text: str, *, doing: str) -> list[str]:
        """Return a text of each rank, in rank order."""
        held: list[Any] = [text] * len(self.ranks)
        with self.named_errors(doing):
            dist.all_gather_object(held, text, group=self.group)
        return held

    def loader_channel(self, facts: Mapping[str, Any], *, is_new: bool) -> Channel:
        """Return a channel for the loaders of one loop, which the ranks begin together.

        `is_new`: another one than this, which no other loop uses.
        """
        doing = "the beginning of a loop over a Prefetcher"
        free = sum(1 << i for i, loader in enumerate(self.loaders) if loader.is_free)
        for others in self.announce(doing, [free] * len(self.ranks), facts=facts).counts:
            free &= others
        if not is_new:
            return self
        if free == 0:
            self.loaders.append(Channel(self.parent, len(self.loaders) + 1))
        chosen = self.loaders[(free & -free).bit_length() - 1]
        chosen.is_free = False
        return chosen

    def _raise_unequal(
        self, doing: str, facts: Mapping[str, Any] | None, failure: BaseException | None
    ) -> None:
        """Raise an error that says what the ranks do, on all of them."""
        reason = None if failure is None else f"{type(failure).__name__}: {failure}"
        shown = {name: str(value) for name, value in (facts or {}).items()}
        held: list[Any] = [None] * len(self.ranks)
        with self.named_errors(doing):
            dist.all_gather_object(held, (doing, shown, reason), group=self.group)
        if failure is not None:
            raise failure
        for rank, (what, _, why) in zip(self.ranks, held, strict=True):
            if why is not None:
                raise ExchangeError(f"rank {rank} failed in {what}: {why}")
        for rank, (what, others, _) in zip(self.ranks, held, strict=True):
            if what != held[0][0]:
                raise ExchangeError(
                    f"rank {self.ranks[0]} is in {held[0][0]}, and rank {rank} in {what}: make the same "
                    f"lookups and steps, in the same order, on all ranks"
                )
            for name in {**held[0][1], **others}:
                values = [one.get(name, "none") for one in (held[0][1], others)]
                if values[0] != values[1]:
                    raise ExchangeError(
                        f"{name} differs between ranks: rank {self.ranks[0]} has {values[0]}, rank {rank} "
                        f"has {values[1]}. Build the table and its optimizer alike on all ranks"
                    )
        raise ExchangeError(f"ranks have made different numbers of exchanges before {doing}")

    # ---- values

    def _device_for(self, device: torch.device) -> torch.device:
        return device if self._gpus_reached and device.type == "cuda" else CPU

    def _group_for(self, device: torch.device) -> Any:
        return self.parent if device.type == "cuda" else self.group

    def all_to_all(
        self, sent: Tensor, counts: Sequence[int], received: Sequence[int], *, doing: str
    ) -> Tensor:
        """Send `counts[rank]` elements to each rank, and return `received[rank]` of each, in rank order."""
        if self._is_fake:
            return sent.clone()
        device = self._device_for(sent.device)
        held = sent.to(device).contiguous()
        flat = held if held.dim() == 1 else held.view(torch.uint8)  # gloo knows few dtypes
        found = flat.new_empty((sum(received), *flat.shape[1:]))
        with self.named_errors(doing):
            dist.all_to_all_single(found, flat, list(received), list(counts), group=self._group_for(device))
        return found.view(sent.dtype).to(sent.device)

    def gather(self, value: Tensor, *, doing: str) -> Tensor:
        """Return the vectors of all ranks, of one length, in rank order: (n_ranks, n)."""
        device = self._device_for(value.device)
        held = value.reshape(-1).to(device)
        found = held.repeat(len(self.ranks), 1)
        with self.named_errors(doing):
            dist.all_gather(list(found.unbind()), held, group=self._group_for(device))
        return found.to(value.device)

    def share_flag_(self, flag: Tensor) -> None:
        """Set a flag if any rank has set its own."""
        flag.copy_(self.gather(flag, doing="the check for overflows").max().reshape(flag.shape))

    def first(self, value: int, *, doing: str) -> int:
        """Return the number that the first rank gives."""
        return int(self.gather(torch.tensor([value]), doing=doing)[0])

    # ---- failures

    @contextmanager
    def posting_failures(self) -> Iterator[None]:
        """Leave the reason of an exception for the other ranks, which will miss this one."""
        try:
            yield
        except Exception as error:
            with suppress(RuntimeError):
                reason = f"{type(error).__name__}: {error}"
                self._store.set(self._key("failure", dist.get_rank()), reason)
            raise

    @property
    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()

    def _key(self, kind: str, rank: int) -> str:
        return f"flatbed/{self.group.group_name}/{self.n_exchanges}/{kind}/{rank}"

    @contextmanager
    def named_errors(self, doing: str) -> Iterator[None]:
        """Name the ranks that are missing if a collective fails."""
        try:
            yield
        except ExchangeError:
            raise
        except RuntimeError as error:
            missing, reasons = self._missing()
            names = " and ".join(f"rank {rank}" for rank in missing) or "another rank"
            why = "; ".join(reasons) or str(error).split("] ", 1)[-1].split(". ")[0]  # without gloo's file
            raise ExchangeError(
                f"{names} did not answer in {doing}, and rank {dist.get_rank()} cannot continue ({why}): see "
                f"the errors of that rank, and start again from the last checkpoint"
            ) from error

    def _missing(self) -> tuple[list[int], list[str]]:
        """Return the ranks that give no sign of life within `PATIENCE` seconds, and reasons they left."""
        # Of all channels, and once for all: ranks may miss another one in different exchanges.
        alive = {rank: f"flatbed/{self.parent.group_name}/alive/{rank}" for rank in self.ranks}
        failures = {rank: self._key("failure", rank) for rank in self.ranks}
        try:
            self._store.set(alive[dist.get_rank()], "")
            deadline = time.monotonic() + PATIENCE
            while not self._store.check(list(alive.values())) and time.monotonic() < deadline:
                time.sleep(0.05)
            missing = [rank for rank, key in alive.items() if not self._store.check([key])]
            held = [rank for rank, key in failures.items() if self._store.check([key])]
            reasons = [f"rank {rank}: {self._store.get(failures[rank]).decode()}" for rank in held]
        except RuntimeError:  # the process that hosts the store is gone: rank 0, unless torchrun hosts it
            is_known = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and 0 in self.ranks
            return ([0] if is_known else []), []
        return missing, reasons


_channels: dict[Any, Channel] = {}


def _timeout_of(group: Any) -> Any:
    """Return the timeout of a process group's collectives; None for torch's default."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None
