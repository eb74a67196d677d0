"""Failures between ranks: one error class, and how ranks name the rank and the reason.

All other modules of this folder build on it: `Meeting`, `Channel`, `Peers`, `Lockstep`, and `LoaderRanks`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flatbed.errors import FlatbedError

PATIENCE = 2.0  # seconds that ranks wait for signs of life of the others, once a collective has failed
LOOK_AROUND = timedelta(seconds=0.5)
"""How long a collective is waited for before known failures of other ranks are checked, again and again."""


class ExchangeError(FlatbedError):
    """Ranks cannot continue together: one of them has failed, is missing, or differs. All ranks raise."""


def default_store() -> Any:
    """Return the store of the default process group: a few keys and values that all ranks see."""
    return dist.distributed_c10d._get_default_store()


def left_alone(rank: int, text: str) -> ExchangeError:
    """Return the error of ranks that another rank has left, given what that rank did."""
    return ExchangeError(f"rank {rank} {text}, and the other ranks cannot continue without it")


def reason_of(error: BaseException) -> str:
    """Return an error as other ranks show it."""
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


def wait_for(work: Any, check: Callable[[], None]) -> None:
    """Wait for a collective between CPUs. `check` raises if another rank is known never to take part."""
    while True:
        try:
            work.wait(LOOK_AROUND)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if the collective has failed, and not only this wait for it
                return
        check()


@contextmanager
def naming_missing(
    doing: str, group: Any, ranks: Sequence[int], reasons: Callable[[], dict[int, str]] = dict
) -> Iterator[None]:
    """Turn an error of a collective into an `ExchangeError` that names the missing ranks of the group.

    `reasons` returns what ranks have told of their failures. They are named even if another of their threads
    gives signs of life.
    """
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as error:
        try:
            missing, known = _missing(group, ranks), reasons()
        except RuntimeError:  # the process that hosts the store is gone: rank 0, unless torchrun hosts it
            is_known = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and 0 in ranks
            missing, known = ([0] if is_known else []), {}
        names = " and ".join(f"rank {rank}" for rank in known or missing) or "another rank"
        told = "; ".join(f"rank {rank} {text}" for rank, text in known.items())
        why = told or str(error).split("] ", 1)[-1].split(". ")[0]  # without gloo's file
        raise ExchangeError(
            f"{names} did not answer in {doing}, and rank {dist.get_rank()} cannot continue ({why}): it "
            f"has ended, or makes another call. See its errors, make the same calls on all ranks, and "
            f"start again from the last checkpoint"
        ) from error


def _missing(group: Any, ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a process group that give no sign of life within `PATIENCE` seconds."""
    # Once for all collectives of the group: ranks may miss another one in different collectives.
    store, alive = default_store(), {rank: f"flatbed/{group.group_name}/alive/{rank}" for rank in ranks}
    store.set(alive[dist.get_rank()], "")
    deadline = time.monotonic() + PATIENCE
    while not store.check(list(alive.values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [rank for rank, key in alive.items() if not store.check([key])]
