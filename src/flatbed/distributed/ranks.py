"""The ranks of a job: their number, errors that name a rank, meetings, and blocks that all complete, or none.

- `ExchangeError`: the error that all ranks raise if one of them has failed, is missing, or differs.
- `Meeting` goes through the store of the default process group, since a collective hangs if one rank does not
  call it. It ends on all ranks. It is slow, and held once per optimizer or checkpoint.
- `Lockstep` only needs the process group of the user, which may only have NCCL.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.progress import note

# ---- failures

ALIVE_SECONDS = 2.0  # how long ranks wait for signs of life of the others, once a collective has failed


class ExchangeError(FlatbedError):
    """Ranks cannot continue together: one of them has failed, is missing, or differs. All ranks raise."""


def default_store() -> Any:
    """Return the store of the default process group: a few keys and values that all ranks see."""
    return dist.distributed_c10d._get_default_store()


def leave_note(store: Any, key: str, *values: Any) -> list[Any]:
    """Leave values in the store, unless a rank has left some already; return the values in the store."""
    with suppress(RuntimeError):  # the process that hosts the store is gone
        return list(json.loads(store.compare_set(key, "", json.dumps(values))))
    return list(values)


def read_note(store: Any, key: str) -> list[Any] | None:
    """Return values that a rank has left in the store; None if there are none."""
    with suppress(RuntimeError):
        if store.check([key]):
            return list(json.loads(store.get(key)))
    return None


def left_alone(rank: int, text: str) -> ExchangeError:
    """Return the error for the remaining ranks after `rank` has left them; `text` says what it did."""
    return ExchangeError(
        f"rank {rank} {text}, and the other ranks cannot continue without it: start all ranks again from the "
        f"last checkpoint"
    )


def reason_of(error: BaseException) -> str:
    """Return the text of an error for messages on other ranks."""
    return f"{type(error).__name__}: {error}"


def difference(held: Mapping[int, Mapping[str, str]], advice: str) -> str | None:
    """Return the first fact in which ranks differ, as a sentence."""
    first_rank, *others = held
    first = held[first_rank]
    for rank in others:
        for name in {**first, **held[rank]}:
            left, right = first.get(name, "missing"), held[rank].get(name, "missing")
            if left != right:
                return (
                    f"{name} differs between ranks: rank {first_rank} has {left}, rank {rank} has {right}. "
                    f"{advice}"
                )
        if list(first) != list(held[rank]):
            return f"ranks {first_rank} and {rank} have the same parameters or options in another order"
    return None


@contextmanager
def naming_missing(
    doing: str,
    group: Any,
    ranks: Sequence[int],
    find_departed: Callable[[], tuple[int, str] | None] = lambda: None,
) -> Iterator[None]:
    """Turn an error of a collective into an `ExchangeError` that names the missing ranks of the group.

    `find_departed` returns a rank that has told of its failure. This rank is named even if another of its
    threads gives signs of life.
    """
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as error:
        if str(error).startswith("DataLoader worker"):  # from torch's signal handler, not from a collective
            raise
        try:
            missing, departed = _missing(group, ranks), find_departed()
        except RuntimeError:  # the process that hosts the store is gone: rank 0, unless torchrun hosts it
            is_known = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and 0 in ranks
            missing, departed = ([0] if is_known else []), None
        if departed is not None:
            raise left_alone(*departed) from error
        names = " and ".join(f"rank {rank}" for rank in missing) or "another rank"
        why = str(error).split("] ", 1)[-1].split(". ")[0]  # without the name of gloo's source file
        raise ExchangeError(
            f"{names} did not answer in {doing}, and rank {dist.get_rank()} cannot continue ({why}): it "
            f"has ended, or makes another call. See its errors, make the same calls on all ranks, and "
            f"start again from the last checkpoint"
        ) from error


def _missing(group: Any, ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a process group that give no sign of life within `ALIVE_SECONDS` seconds."""
    # One sign of life for all collectives of the group: ranks may miss a rank in different collectives.
    store, alive = default_store(), {rank: f"flatbed/{group.group_name}/alive/{rank}" for rank in ranks}
    store.set(alive[dist.get_rank()], "")
    deadline = time.monotonic() + ALIVE_SECONDS
    while not store.check(list(alive.values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [rank for rank, key in alive.items() if not store.check([key])]


# ---- meetings


MET = "met"
Statement = Sequence[tuple[str, str]]
"""Names and values that ranks compare."""
GiveUp = Callable[[float, Callable[[], list[int]]], str | None]
"""Returns the message that ends a meeting, given the seconds so far and a function for the absent ranks."""

_n_held: Counter[tuple[int, ...]] = Counter()


class Meeting:
    """One meeting of some ranks. All of them hold their meetings in the same order."""

    missed = False
    """True if this rank failed before a meeting that other ranks held. The next `Meeting` skips that one."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks, self._store = tuple(ranks), default_store()
        name, self.key = hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16], ""
        while not self.key or (Meeting.missed and self._store.check([f"{self.key}/decision"])):
            _n_held[self._ranks] += 1
            self.key = f"flatbed/meeting/{name}/{_n_held[self._ranks]}"
        Meeting.missed = False

    def end(self, decision: str) -> None:
        """End the meeting, unless it has a decision already. All ranks raise if it is not MET."""
        self._store.compare_set(f"{self.key}/decision", "", decision)

    def hold(self, statement: Statement, give_up: GiveUp) -> None:
        """Wait for all ranks; raise on all of them if a rank is missing, has failed, or states otherwise."""
        store, key = self._store, self.key
        shown = json.dumps(list(statement))
        digest = hashlib.sha256(shown.encode()).hexdigest()
        store.set(f"{key}/{digest}", shown)  # one text for all ranks that state the same
        store.set(f"{key}/{dist.get_rank()}", digest)
        if store.add(f"{key}/n", 1) == len(self._ranks):
            self.end(self._difference() or MET)
        began, pause = time.monotonic(), 0.001
        while not store.check([f"{key}/decision"]):
            message = give_up(time.monotonic() - began, self._absent)
            if message is not None:
                self.end(message)
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        decision = store.get(f"{key}/decision").decode()
        if decision != MET:
            raise ExchangeError(decision)

    def _absent(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"{self.key}/{rank}"])]

    def _difference(self) -> str | None:
        """Return what differs between ranks. All of them must be present."""
        digests = {rank: self._store.get(f"{self.key}/{rank}").decode() for rank in self._ranks}
        texts = {digest: self._store.get(f"{self.key}/{digest}") for digest in set(digests.values())}
        held = {rank: dict(json.loads(texts[digest])) for rank, digest in digests.items()}
        return difference(held, "Build the optimizer with the same parameters and options on all ranks")


# ---- the default process group


PATIENCE = 300.0  # seconds that the first rank waits for others, which may evaluate longer than it did
TELL_AFTER = 5.0  # seconds until the first rank writes a note that it waits


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank; 0 without a process group."""
    return int(dist.get_rank()) if world_size() > 1 else 0


def communication_device(device: torch.device) -> torch.device:
    """Return the device that tensors must be on for a collective, given where they are computed."""
    reaches_gpus = world_size() > 1 and "nccl" in str(dist.get_backend())
    return device if reaches_gpus else torch.device("cpu")


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order."""
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def any_rank(flag: Tensor) -> Tensor:
    """Return the largest value of a flag over all ranks, on the device of the flag."""
    found = flag.to(communication_device(flag.device), torch.float32).reshape(1).clone()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.to(flag.device)


def communicating(doing: str) -> AbstractContextManager[None]:
    """Turn an error of a collective into an `ExchangeError` that names missing ranks."""
    return naming_missing(doing, dist.group.WORLD, range(world_size()))


class Lockstep:
    """A `with` block on all ranks. An error on one rank ends the block on all of them.

    All ranks enter the block and call `meet` or `gather` equally often: before every other collective, and
    where no rank may continue without the others. A rank that fails answers the next call of the others when
    it leaves the block, so that they raise. `undo` then runs on every rank. With `alone`, this rank works
    without the others.
    """

    def __init__(self, doing: str, *, alone: bool = False) -> None:
        self.doing = doing
        self.many = world_size() > 1 and not alone
        self.first = not self.many or dist.get_rank() == 0
        self.undo: Callable[[], None] = lambda: None
        self._is_over = False

    def __enter__(self) -> Lockstep:
        """Wait until all ranks are here; raise if one does not come: a collective would hang."""
        has_told = False

        def give_up(waited: float, absent: Callable[[], list[int]]) -> str | None:
            nonlocal has_told
            # The first rank may be evaluating.
            if waited < (PATIENCE if self.first else default_store().timeout.total_seconds()):
                if self.first and waited > TELL_AFTER and not has_told:
                    has_told = True
                    late = ", ".join(map(str, absent()))
                    note(f"{self.doing} waits for rank {late}: all ranks call it, not rank 0 alone")
                return None
            return (
                f"{self.doing} began on some of the {world_size()} ranks alone; found that rank "
                f"{', '.join(map(str, absent()))} did not follow within {waited:.0f} s: call it on every "
                f"rank, not within `if rank == 0:`. If a rank may be later than that, call "
                f"torch.distributed.barrier() first, which waits as long as the process group's timeout"
            )

        if self.many:
            with communicating(self.doing):
                Meeting(range(world_size())).hold([("the call", self.doing)], give_up)
        return self

    def of_first(self, value: str) -> str:
        """Return the string that the first rank gives."""
        return str(self.gather(value)[0])

    def meet(self) -> None:
        """Wait for all ranks; raise if one of them has failed since the last call."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order; raise as `meet` does."""
        try:
            return self._gather(value, None)
        except BaseException:
            self._is_over = True
            raise

    def _gather(self, value: Any, failure: BaseException | None) -> list[Any]:
        """Gather values. If another rank has failed and this one has not, raise."""
        found = [(value, None if failure is None else reason_of(failure))]
        if self.many:
            found *= world_size()
            with communicating(self.doing):
                dist.all_gather_object(found, found[0])
        for number, (_, reason) in enumerate(found):
            if reason is not None and failure is None:
                raise FlatbedError(f"{self.doing} failed on rank {number} ({reason})")
        return [value for value, _ in found]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # `error` is not raised here: its traceback would refer to this frame, and stay until a collection.
        try:
            # After an `ExchangeError` no rank waits for another: each rank raises one, or has ended.
            if not self._is_over and not isinstance(error, ExchangeError):
                self._is_over = True
                with suppress(ExchangeError) if error is not None else nullcontext():
                    self._gather(None, error)
        except BaseException:
            self.undo()
            raise
        if error is not None:
            self.undo()
