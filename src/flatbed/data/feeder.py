"""Batches on the device before the loop asks for them, through pinned memory that is used again and again."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from flatbed.cuda.streams import stream_for
from flatbed.data.batches import mapped, nbytes_in, to_host
from flatbed.data.pins import Pins
from flatbed.data.pins import close_all as close_pins
from flatbed.data.sources import Begins, check_source, n_batches
from flatbed.data.staging import Event, Ring, ring_for
from flatbed.data.transfer import Conveyor, Crossing, FeedLane, Sent
from flatbed.data.worker import Background, Foreground, Last, join_stopped
from flatbed.errors import FlatbedError
from flatbed.tables.config import device_of

if TYPE_CHECKING:
    from typing_extensions import Self

NAME = "flatbed-feed"
MOST = 1024  # batches ahead
AT_ONCE_BYTES = 16 << 20
"""Batches of a list that need no more staged are sent by the loop's own thread: to have them handed over by
another one takes longer."""
LISTS = frozenset({list, tuple})  # iterated over again, they have the same batches
LEFT_SECONDS = 60.0
"""How long a new iteration waits for the thread of an earlier one that is still in the source."""


class Feeder:
    """The batches of a `DataLoader`, or of anything else to iterate over, on a device ahead of time.

    - `batches`: each is a numpy array, a tensor, or dicts, lists, tuples, named tuples and dataclasses of
      them. Arrays of numbers become tensors, objects with a method `to(device)` are moved by it, all else
      stays as it is. What is not in pinned memory may be written to again once the next batch is asked for.
    - `device`: by default the current GPU, or the CPU where there is none.
    - `depth`: how many batches are ready, or on their way, beside that in use.

    For a GPU, a thread iterates, and copies with all of torch's threads: pieces of a batch go into a ring of
    pinned memory, from there to the GPU on a stream of their own. Batches are the loop's for as long as it
    holds them; only the ring is used again. The GPU never holds more than `depth` + 1 batches of its own
    accord: the thread waits for the steps of earlier ones. Batches of a list or tuple, of 16 MiB at most, are
    sent ahead by the loop's own thread. For a CPU there is no thread and no copy: arrays become tensors of
    the same memory (if it may be written to), as with `torch.from_numpy`.

    Keep the feeder of a list or tuple for all epochs. From the second on, large arrays (of 32 MiB or more,
    and often less) are registered with CUDA where they are, a quarter of the machine's memory at most, and
    go straight to the GPU; from the third on, that costs the host next to nothing. They stay so until nobody
    has them any more, until the feeder goes, or until its `close()`.

    Each iteration is one of `batches`. It ends, and its thread with it, at the last batch, at an error
    (raised when its turn comes), when the loop is left, or by `close()` of the iterator.

    >>> import flatbed, numpy as np
    >>> batches = [{"x": np.ones((4, 2), np.float32), "y": np.arange(4)} for _ in range(3)]
    >>> for batch in flatbed.data.Feeder(batches, "cpu"):
    ...     print(batch["x"].sum().item(), batch["y"].dtype)
    8.0 torch.int64
    8.0 torch.int64
    8.0 torch.int64
    """

    def __init__(self, batches: Iterable[Any], device: Any = None, *, depth: int = 2) -> None:
        check_source("batches", batches)
        self._source = Begins("batches")
        if isinstance(depth, bool) or not hasattr(depth, "__index__"):
            raise TypeError(f"depth must be an integer; found {depth!r}")
        if not 1 <= depth <= MOST:
            raise ValueError(f"depth is how many batches are held ahead, 1 to {MOST}; found {depth}")
        self.batches = batches
        self.device = device_for(device)
        self.depth = int(depth)
        self._ring: Ring | None = None
        self._pins: Pins | None = None
        self._begun = False
        self._earlier: weakref.WeakSet[Background[Sent] | Foreground[Sent]] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        raise TypeError("a Feeder cannot be copied or pickled: make another one")

    def __len__(self) -> int:
        return n_batches(self.batches)

    def __repr__(self) -> str:
        return f"Feeder({type(self.batches).__name__}, {str(self.device)!r}, depth={self.depth})"

    def __iter__(self) -> Iterator[Any]:
        if self.device.type == "cpu":
            return Passed(self._source.begin(self.batches))
        join_stopped(list(self._earlier), LEFT_SECONDS)
        # Here and not in the thread: what draws random numbers or forks at its start does so as ever.
        batches = self._source.begin(self.batches)
        lane = FeedLane(self.device, stream_for(self.device, "batches"))
        if self._ring is None:  # kept for the next epoch: to pin memory takes a while
            self._ring = ring_for(self.device)
            _close_at_exit()
        if self._begun and self._pins is None and type(self.batches) in LISTS:
            self._pins = Pins(self.device)
        self._begun = True
        at_once, pins = self._at_once(), self._pins
        fed = Fed(Iteration(batches, self._ring, lane, self.depth, at_once=at_once, pins=pins))
        self._earlier.add(fed.iteration.source)
        return fed

    def close(self) -> None:
        """Give pinned memory back now, and not when the feeder goes. It can be iterated over again."""
        pins, self._pins, self._ring, self._begun = self._pins, None, None, False
        if pins is not None:
            pins.close()

    def _at_once(self) -> bool:
        """Whether batches are there, and take so little that a thread would be in the loop's way."""
        found: Any = self.batches
        if type(found) not in LISTS or not found:
            return False
        if self._pins is None:
            return nbytes_in(found[0]) <= AT_ONCE_BYTES
        # The last one, too: what is beyond the limit is staged in each epoch.
        return all(staged_bytes(batch, self._pins) <= AT_ONCE_BYTES for batch in (found[0], found[-1]))


def staged_bytes(batch: Any, pins: Pins) -> float:
    """Of a batch, those that are not in place; without end if there is something to be registered yet."""
    found: list[float] = []

    def count(leaf: Any) -> Any:
        if not pins.has(leaf):
            found.append(inf if pins.wants(leaf) else nbytes_in(leaf))
        return leaf

    mapped(batch, count)
    return sum(found)


def device_for(device: Any) -> torch.device:
    """The device that was asked for, with its number; by default the current GPU, if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda"; found "{found}"')
    return device_of(found)


class Passed(Iterator[Any]):
    """One iteration for a CPU."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches: Iterator[Any] | None = batches

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        try:
            return mapped(next(self._batches), to_host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the iterator of the source go."""
        self._batches = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Fed(Iterator[Any]):
    """One iteration for a GPU. Left alone, it ends everything that it began."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self._end = weakref.finalize(self, iteration.close)

    def __next__(self) -> Any:
        return self.iteration.next()

    def close(self) -> None:
        """End early: the thread, the iterator of the source, and what is on its way."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# ---- one iteration


class Iteration:
    """The loop's side. Knows nothing of the iterator that it is in."""

    def __init__(
        self,
        batches: Iterator[Any],
        ring: Ring,
        lane: Crossing,
        depth: int,
        *,
        at_once: bool = False,
        pins: Pins | None = None,
    ) -> None:
        self.lane = lane
        self.conveyor = conveyor = Conveyor(ring, lane, depth, in_thread=not at_once, pins=pins)
        self.source: Background[Sent] | Foreground[Sent]
        if at_once:
            self.source = Foreground(batches, conveyor, depth=depth, has_room=conveyor.has_room)
        else:
            self.source = Background(batches, conveyor, depth=depth, name=NAME, drop=Sent.drop)
        self.closed = False
        self._reading: Event | None = None
        """Behind the copies of the batch that the loop has, if they read its arrays where they are."""
        self._process = os.getpid()
        _open.add(self)

    def next(self) -> Any:
        """The next batch. Waits for the host's part of its way, and for no step but those long past."""
        if self.closed:
            raise StopIteration
        if os.getpid() != self._process:
            raise FlatbedError("this iteration began in another process, and is there: iterate anew here")
        try:
            self.source.start()
            current, spare = self.lane.current(), self.conveyor.spare_steps
            self.conveyor.steps.put(self.lane.reached(current, spare.pop() if spare else None))
            if self._reading is not None:
                self._wait_until_read(self._reading)
            taken = self.source.take(wait=True)
            if isinstance(taken, Sent):
                batch = self.lane.arrive(taken, current)
                if taken.in_place:
                    self._reading = taken.arrived
                else:
                    self.conveyor.spare_arrivals.append(taken.arrived)
                return batch
        except BaseException:
            self.close()
            raise
        self.close()
        if not isinstance(taken, Last) or taken.error is None:
            raise StopIteration
        try:
            raise taken.error
        finally:
            del taken  # the error's traceback has this frame

    def _wait_until_read(self, event: Event) -> None:
        """The loop may write to its arrays from now on. The bus has later copies to go on with."""
        if not event.query():
            event.synchronize()
        self._reading = None
        self.conveyor.spare_arrivals.append(event)

    def close(self) -> None:
        """End everything. In any thread, as often as you like."""
        self.closed = True
        if os.getpid() != self._process:
            return  # a copy by fork: all of it belongs to the parent
        self.source.close()
        self.conveyor.close()


_open: weakref.WeakSet[Iteration] = weakref.WeakSet()


@lru_cache(maxsize=1)
def _close_at_exit() -> None:
    """Exit handlers run last come, first served: this one before that which frees the ring's memory."""
    atexit.register(_close_all)


def _close_all() -> None:
    for iteration in list(_open):
        iteration.close()
    close_pins()
