"""Batches on the device before the loop asks for them, through pinned memory that is used again and again."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.feed.background import Background, Last
from flatbed.feed.batches import mapped, record_stream, recorded, tensors_in, to_device, to_host
from flatbed.feed.packing import Slot, send, slot_of_array, slot_of_tensor
from flatbed.feed.staging import Copiers, CudaLane, Event, Lane, Ring, n_threads, relax_capture, ring_for
from flatbed.kernels.streams import stream_for

if TYPE_CHECKING:
    from typing_extensions import Self

NAME = "flatbed-feed"
MOST = 1024  # batches ahead
STRAIGHT_BYTES = 1 << 16  # what is pinned goes straight from here on; less is packed with the rest
LEFT_SECONDS = 60.0
"""How long a new iteration waits for the thread of an earlier one that is still in the source."""


class Feeder:
    """The batches of a `DataLoader`, or of anything else to iterate over, on a device ahead of time.

    - `batches`: each is a numpy array, a tensor, or dicts, lists, tuples, named tuples and dataclasses of
      them. Arrays of numbers become tensors, objects with a method `to(device)` are moved by it, all else
      stays as it is. What is not in pinned memory may be written to again once the next batch is asked for.
    - `device`: by default the current GPU, or the CPU where there is none.
    - `depth`: how many batches are ready, or on their way, beside that in use.
    - `threads`: how many copy into pinned memory, by default one per core, 8 at most.

    For a GPU, a thread iterates, and several copy: pieces of a batch go into a ring of pinned memory, from
    there to the GPU on a stream of their own. Batches are the loop's for as long as it holds them; only the
    ring is used again. The GPU never holds more than `depth` + 1 batches of its own accord: the thread waits
    for the steps of earlier ones. For a CPU there is no thread and no copy: arrays become tensors of the same
    memory (if it may be written to), as with `torch.from_numpy`.

    Each iteration is one of `batches`. It ends, and its threads with it, at the last batch, at an error
    (raised when its turn comes), when the loop is left, or by `close()` of the iterator.

    >>> import flatbed, numpy as np
    >>> batches = [{"x": np.ones((4, 2), np.float32), "y": np.arange(4)} for _ in range(3)]
    >>> for batch in flatbed.feed.Feeder(batches, "cpu"):
    ...     print(batch["x"].sum().item(), batch["y"].dtype)
    8.0 torch.int64
    8.0 torch.int64
    8.0 torch.int64
    """

    def __init__(
        self, batches: Iterable[Any], device: Any = None, *, depth: int = 2, threads: int | None = None
    ) -> None:
        if not any(hasattr(type(batches), name) for name in ("__iter__", "__getitem__")):
            raise TypeError(f"batches must be something to iterate over; found {type(batches).__name__}")
        if isinstance(batches, Tensor | np.ndarray | str | bytes):
            raise TypeError(
                f"batches must be a DataLoader or another source of batches, and each item of a "
                f"{type(batches).__name__} would be taken for one: give [batch] if it is one"
            )
        if isinstance(depth, bool) or not hasattr(depth, "__index__"):
            raise TypeError(f"depth must be an integer; found {depth!r}")
        if not 1 <= depth <= MOST:
            raise ValueError(f"depth is how many batches are held ahead, 1 to {MOST}; found {depth}")
        self.batches = batches
        self.device = device_for(device)
        self.depth = int(depth)
        self.threads = n_threads(threads)
        self._ring: Ring | None = None
        self._earlier: weakref.WeakSet[Background[Sent]] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        raise TypeError("a Feeder cannot be copied or pickled: make another one")

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        source = type(self.batches).__name__
        return f"Feeder({source}, {str(self.device)!r}, depth={self.depth}, threads={self.threads})"

    def __iter__(self) -> Iterator[Any]:
        if self.device.type == "cpu":
            return Passed(iter(self.batches))
        for earlier in list(self._earlier):
            if earlier.stopped:  # the source may be one that cannot be in two threads at a time
                earlier.join(LEFT_SECONDS)
        # Here and not in the thread: what draws random numbers or forks at its start does so as ever.
        batches = iter(self.batches)
        lane = FeedLane(self.device, stream_for(self.device, "batches"))
        if self._ring is None:  # kept for the next epoch: to pin memory takes a while
            self._ring = ring_for(self.device)
            _close_at_exit()
        fed = Fed(Iteration(batches, lane, Copiers(self._ring, lane, self.threads), self.depth))
        self._earlier.add(fed.iteration.background)
        return fed


def device_for(device: Any) -> torch.device:
    """The device that was asked for, with its number; by default the current GPU, if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda"; found "{found}"')
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f'torch sees no CUDA GPU, and "{found}" was asked for: give device="cpu"')
    index: int | None = found.index
    if index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise ValueError(f'there are {torch.cuda.device_count()} GPUs; found device "{found}"')
    return found


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
        """End early: the threads, the iterator of the source, and what is on its way."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# ---- one batch


@dataclass(slots=True, eq=False)
class Sent:
    """A batch whose copies are issued."""

    batch: Any
    arrived: Any
    owners: list[Tensor] = field(default_factory=list)
    """Whatever has memory that the stream of the copies, or of the source, owns."""

    def drop(self) -> None:
        """Nobody takes it: its memory is free after its copies, on their own stream."""


class Crossing(Lane, Protocol):
    """A lane, and how what it carries changes hands."""

    def made(self, origins: set[torch.device]) -> list[Any]:
        """Events behind what the source has made on GPUs."""

    def wait(self, events: list[Any], tensors: list[Tensor]) -> None:
        """Let the lane wait, and share the memory of these tensors."""

    def arrive(self, sent: Sent) -> Any:
        """The batch, for the stream that is current: it waits for the copies, and shares their memory."""

    def reached(self) -> Event:
        """An event behind what the loop has issued."""


class FeedLane(CudaLane):
    """A stream of a GPU, between the streams of the source and of the loop."""

    def made(self, origins: set[torch.device]) -> list[Any]:
        return [recorded(torch.cuda.current_stream(origin)) for origin in origins]

    def wait(self, events: list[Any], tensors: list[Tensor]) -> None:
        for event in events:
            self.stream.wait_event(event)
        for tensor in tensors:
            record_stream(tensor, self.stream)

    def arrive(self, sent: Sent) -> Any:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(sent.arrived)
        for tensor in sent.owners:
            record_stream(tensor, current)
        return sent.batch

    def reached(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call,unused-ignore]
        event.record(torch.cuda.current_stream(self.device))
        return event


@dataclass(eq=False, slots=True)
class Itself:
    """A place in a batch whose value is moved by its own `to`, or is in pinned memory already."""

    value: Any
    moved: Any = None

    def to(self, device: Any) -> Any:
        return self.moved


class Conveyor:
    """What the background does with each batch."""

    def __init__(self, lane: Crossing, copiers: Copiers, depth: int) -> None:
        self.lane = lane
        self.copiers = copiers
        self.steps: SimpleQueue[Event] = SimpleQueue()
        """Behind each batch, in order, an event that the loop has issued its step before."""
        self._room = depth
        self._read: deque[tuple[Any, list[Any]]] = deque()
        """Pinned memory of others that copies may still read."""
        self._entered = False

    def __call__(self, batch: Any) -> Sent:
        if not self._entered:  # the thread that iterates: its streams are the source's own business
            self._entered = True
            relax_capture()
        if self._room:
            self._room -= 1
        else:
            self.steps.get().synchronize()  # the loop issues ahead of the GPU; memory must not
        slots: list[Slot] = []
        others: list[Itself] = []
        marked = mapped(batch, lambda leaf: self._mark(leaf, slots, others))
        found = [tensor for other in others for tensor in tensors_in(other.value) if tensor.is_cuda]
        made = self.lane.made({tensor.device for tensor in found}) if found else []
        with self.lane.within():
            if made:
                self.lane.wait(made, found)
            owners: dict[int, Tensor] = {}
            for other in others:
                other.moved = to_device(other.value, self.lane.device)
                owners.update((id(t), t) for t in tensors_in(other.moved) if t.is_cuda)
            shared = send(slots, self.copiers)
            arrived = self.lane.mark()
        self._keep(arrived, [other.value for other in others])
        whole = mapped(marked, lambda leaf: leaf.to(None) if isinstance(leaf, Slot | Itself) else leaf)
        return Sent(whole, arrived, [*shared, *owners.values()])

    def _mark(self, leaf: Any, slots: list[Slot], others: list[Itself]) -> Any:
        """What stands for a leaf until it is moved."""
        slot = None
        value = leaf
        if isinstance(leaf, np.ndarray):
            slot = slot_of_array(leaf)
            if slot is None:
                return leaf  # no numbers
        elif isinstance(leaf, Tensor):
            slot = slot_of_tensor(leaf)
        elif callable(pin := getattr(leaf, "pin_memory", None)):
            value = pin()
        if slot is not None:
            pinned = self._pinned(leaf) if slot.dense and slot.nbytes >= STRAIGHT_BYTES else None
            if pinned is None:
                slots.append(slot)
                return slot
            value = pinned
        others.append(Itself(value))
        return others[-1]

    def _pinned(self, leaf: Any) -> Tensor | None:
        """A tensor that the GPU can copy as it is."""
        if self.lane.device.type != "cuda":
            return None
        if isinstance(leaf, np.ndarray):
            if not leaf.flags.writeable:
                return None
            leaf = torch.from_numpy(leaf)
        return leaf if leaf.is_pinned() else None

    def _keep(self, arrived: Any, read: list[Any]) -> None:
        """Hold on to what copies read: not all pinned memory is torch's, which waits by itself."""
        while self._read and self._read[0][0].query():
            self._read.popleft()
        if read:
            self._read.append((arrived, read))

    def close(self) -> None:
        self.copiers.close()
        while self._read:
            with suppress(Exception):  # of the GPU; the loop will hear of it
                self._read[-1][0].synchronize()
            self._read.clear()


# ---- one iteration


class Iteration:
    """The loop's side. Knows nothing of the iterator that it is in."""

    def __init__(self, batches: Iterator[Any], lane: Crossing, copiers: Copiers, depth: int) -> None:
        self.lane = lane
        self.conveyor = Conveyor(lane, copiers, depth)
        self.background: Background[Sent] = Background(
            batches, self.conveyor, depth=depth, name=NAME, drop=Sent.drop
        )
        self.closed = False
        self._process = os.getpid()
        _open.add(self)

    def next(self) -> Any:
        """The next batch. Waits for the host's part of its way, and for no step but those long past."""
        if self.closed:
            raise StopIteration
        if os.getpid() != self._process:
            raise FlatbedError("this iteration began in another process, and is there: iterate anew here")
        try:
            self.background.start()
            self.conveyor.steps.put(self.lane.reached())
            taken = self.background.take(wait=True)
            if isinstance(taken, Sent):
                return self.lane.arrive(taken)
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

    def close(self) -> None:
        """End everything. In any thread, as often as you like."""
        self.closed = True
        if os.getpid() != self._process:
            return  # a copy by fork: all of it belongs to the parent
        self.background.stop()
        self.conveyor.copiers.stop()
        if self.conveyor.copiers.is_mine():
            return  # the garbage collector in a thread that others wait for: all end by themselves
        self.background.join()
        self.conveyor.close()


_open: weakref.WeakSet[Iteration] = weakref.WeakSet()


@lru_cache(maxsize=1)
def _close_at_exit() -> None:
    """Exit handlers run last come, first served: this one before that which frees the ring's memory."""
    atexit.register(_close_all)


def _close_all() -> None:
    for iteration in list(_open):
        iteration.close()
