"""Headers, rows and reasons between the ranks of a process group.

Every exchange begins with a header on the host: what the rank is doing, and a number for each peer. A rank
that has failed says so in its header, so that all ranks raise instead of waiting. Rows and values follow over
NCCL, or over gloo for tables that compute on the CPU. Headers have gloo groups of their own: each lookup
compares ranks without the GPU, from several threads, before or after any collective of the model.
"""

from __future__ import annotations

import atexit
import datetime
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.distributed.ranks import (
    ExchangeError,
    default_store,
    difference,
    leave_note,
    left_alone,
    naming_missing,
    read_note,
    reason_of,
)

CPU = torch.device("cpu")
LOOK_AROUND = datetime.timedelta(seconds=0.5)
"""How often a rank that waits for another one looks if that one is known to have failed."""
OK, FAILED, IDLE, ENDED, LEFT = range(5)
"""States in a header: taking part, having failed, taking part without rows of its own. Loaders have two more:
having no more batches, and having left the loop over them."""
Departed = tuple[int, str] | None
"""A rank that is known never to take part in an exchange, and what it did."""


@dataclass(frozen=True, slots=True)
class Header:
    """The statements of all ranks at the beginning of an exchange, in rank order."""

    states: list[int]
    counts: list[int]  # the count that each rank has for this rank
    numbers: list[int]  # the exchange ahead of time that each rank would use; 0 for none


class Channel:
    """Headers and rows between the ranks of a process group. All tables of the group share it.

    Only one thread of a rank uses a channel, since all ranks must use it in the same order. The training
    thread uses the channel of `Channel.of`. The loader thread of a loop over a `Prefetcher` uses one of its
    `loaders`, which later loops use again.
    """

    def __init__(self, parent: Any, number: int = 0) -> None:
        self.parent, self.number = parent, number
        self.ranks: list[int] = dist.get_process_group_ranks(parent)
        backend = str(dist.get_backend(parent))
        self._gpus_reached = "nccl" in backend or "fake" in backend  # "fake" measures one rank's work
        with naming_missing("the connection of ranks of a sharded table", parent, self.ranks):
            self._gloo = _gloo_of(parent, number)
        self.n_exchanges = 0
        self.table_numbers = count()
        """Numbers of new tables. All ranks build tables in the same order."""
        self.watchers: list[Callable[[int | None], Departed]] = []
        """Functions that return a rank that is known never to answer a header, and why, or None.

        They take the number in the header, or None after a collective has failed.
        """
        self.loaders: list[Channel] = []
        self.is_free = False  # a loader's channel that no loop uses, after its last loop ended on all ranks
        self._lost_key = f"flatbed/{parent.group_name}/{number}/lost"
        self._lost: list[Any] | None = None  # a rank with which others have given up an exchange, and why

    @staticmethod
    def of(parent: Any) -> Channel:
        """Return the channel of a process group, which all its ranks make at the first call."""
        if parent not in _channels:
            _channels[parent] = Channel(parent)
        return _channels[parent]

    def close(self) -> None:
        """End gloo's threads, which would abort a process that ends before them."""
        for loader in self.loaders:
            loader.close()
        self.parent = self._gloo = None

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
        """Send each rank a count, and all ranks a state and a number; return what all ranks have sent.

        Raises on all ranks if one has failed, or if ranks do different things or hold different facts.
        """
        if self._lost:
            raise left_alone(*self._lost)
        self.n_exchanges += 1
        state = state if failure is None else FAILED
        words = hashlib.sha256(repr((doing, self.n_exchanges, facts)).encode()).digest()
        digest = int.from_bytes(words[:7], "little")
        told = np.full((len(counts), 4), (state, digest, 0, number))
        told[:, 2] = counts
        sent = torch.from_numpy(told)
        found = torch.empty_like(sent)
        departed = partial(self._departed, number)
        with self._named_errors(doing):
            self._wait_for(self._gloo.alltoall_base(found, sent, [], []), departed)
        states, digests, received, numbers = found.T.tolist()
        if FAILED in states or set(digests) != {digest}:
            self._give_up(departed())
            self._raise_unequal(doing, facts, failure)
        return Header(states, received, numbers)

    def _wait_for(self, work: Any, departed: Callable[[], Departed] = lambda: None) -> None:
        """Wait for gloo; raise if another rank is known never to take part.

        Errors that signal handlers raise here do not end the wait. torch has such a handler for killed
        workers of a DataLoader. The DataLoader's iterator raises, too, so that no error is lost.
        """
        while True:
            try:
                work.wait(LOOK_AROUND)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises if the collective has failed, not only the wait for it
                    return
            try:
                self._give_up(departed())
            except ExchangeError:
                # Gloo cannot cancel its work, and would wait for it at the end of the process.
                threading.Thread(target=_wait_out, args=(work, self._gloo), daemon=True).start()
                raise

    def _departed(self, number: int | None) -> Departed:
        found = (watcher(number) for watcher in [*self.watchers])
        return next((one for one in found if one is not None), None)

    def _give_up(self, departed: Departed = None) -> None:
        """Raise, now and in later exchanges of all ranks, if a rank is known never to take part in this one.

        Otherwise that rank's next header would be taken for the answer to this exchange.
        """
        if departed is not None:
            self._lost = leave_note(default_store(), self._lost_key, *departed)
        self._lost = self._lost or read_note(default_store(), self._lost_key)
        if self._lost:
            raise left_alone(*self._lost)

    def gather_texts(self, text: str, *, doing: str) -> list[str]:
        """Return a text of each rank, in rank order."""
        n_ranks, data = len(self.ranks), torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(data)], device=CPU), doing=doing).flatten().tolist()
        found = self.all_to_all(data.repeat(n_ranks), [len(data)] * n_ranks, lengths, doing=doing)
        return [bytes(part.tolist()).decode().strip() for part in torch.split(found, lengths)]

    def loader_channel(self, facts: Mapping[str, Any], *, is_new: bool) -> Channel:
        """Return a channel for the loaders of one loop, which the ranks begin together.

        `is_new`: return another channel than this one, which no other loop uses.
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
        """Raise an error on all ranks that says what the ranks do."""
        reason = None if failure is None else reason_of(failure)
        shown = {name: str(value) for name, value in (facts or {}).items()}
        texts = self.gather_texts(json.dumps((doing, shown, reason)), doing=doing)
        if failure is not None:
            raise failure
        held = dict(zip(self.ranks, map(json.loads, texts), strict=True))
        for rank, (what, _, why) in held.items():
            if why is not None:
                raise ExchangeError(f"rank {rank} failed in {what}: {why}")
        first = self.ranks[0]
        for rank, (what, *_) in held.items():
            if what != held[first][0]:
                raise ExchangeError(
                    f"rank {first} is in {held[first][0]}, and rank {rank} in {what}: make the same "
                    f"lookups and steps, in the same order, on all ranks"
                )
        advice = "Build and load the table and its optimizer alike on all ranks"
        found = difference({rank: stated for rank, (_, stated, _) in held.items()}, advice)
        raise ExchangeError(found or f"ranks have made different numbers of exchanges before {doing}")

    # ---- values

    def _device_for(self, device: torch.device) -> torch.device:
        return device if self._gpus_reached and device.type == "cuda" else CPU

    def all_to_all(
        self, sent: Tensor, counts: Sequence[int], received: Sequence[int], *, doing: str
    ) -> Tensor:
        """Send `counts[rank]` elements to each rank, and return `received[rank]` of each, in rank order."""
        device = self._device_for(sent.device)
        held = sent.to(device).contiguous()
        flat = held if held.dim() == 1 else held.view(torch.uint8)  # gloo knows few dtypes
        found = flat.new_empty((sum(received), *flat.shape[1:]))
        self.all_to_all_into(found, flat, counts, received, doing=doing)
        return found.view(sent.dtype).to(sent.device)

    def all_to_all_into(
        self, found: Tensor, sent: Tensor, counts: Sequence[int], received: Sequence[int], *, doing: str
    ) -> None:
        """Write the elements that all ranks send to this one into `found`."""
        with self._named_errors(doing):
            if found.is_cuda:
                dist.all_to_all_single(found, sent, list(received), list(counts), group=self.parent)
            else:
                self._wait_for(self._gloo.alltoall_base(found, sent, list(received), list(counts)))

    def gather(self, value: Tensor, *, doing: str) -> Tensor:
        """Return the vectors of all ranks, which have the same length, in rank order: (n_ranks, n)."""
        device = self._device_for(value.device)
        held = value.reshape(-1).to(device)
        found = held.repeat(len(self.ranks), 1)
        with self._named_errors(doing):
            if device.type == "cuda":
                dist.all_gather(list(found.unbind()), held, group=self.parent)
            else:
                self._wait_for(self._gloo.allgather([list(found.unbind())], [held]))
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
        """Leave the reason of an exception for the other ranks, which wait for this one in an exchange."""
        try:
            yield
        except Exception as error:
            why = f"failed: {reason_of(error)}"
            self._lost = leave_note(default_store(), self._lost_key, dist.get_rank(), why)
            raise

    def _named_errors(self, doing: str) -> AbstractContextManager[None]:
        """Name the missing ranks in the error of a collective."""

        def find_departed() -> Any:
            return read_note(default_store(), self._lost_key) or self._departed(None)

        return naming_missing(doing, self.parent, self.ranks, find_departed)


_channels: dict[Any, Channel] = {}


@atexit.register
def _close_all() -> None:
    while _channels:
        _channels.popitem()[1].close()


def _wait_out(work: Any, _: Any) -> None:
    """Keep gloo alive until a piece of work or the process ends."""
    with suppress(RuntimeError):
        work.wait()


def _gloo_of(parent: Any, number: int) -> Any:
    """Make gloo's part of a channel, on all ranks of a process group.

    Not by `dist.new_group`, which all ranks of the job would have to call. Otherwise it names the group by a
    count in each process, and the count may differ between ranks.
    """
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore(f"flatbed/{parent.group_name}/{number}", default_store())
    return dist.ProcessGroupGloo(store, parent.rank(), parent.size(), _timeout_of(parent))


def _timeout_of(group: Any) -> datetime.timedelta:
    """Return the timeout of a process group's collectives."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return dist.constants.default_pg_timeout
