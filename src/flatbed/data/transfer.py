"""What becomes of one batch: its leaves on their way to the device, and an event behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from operator import is_
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.streams import relax_capture
from flatbed.data import pins
from flatbed.data.batches import (
    ARRAYS,
    flat_values,
    mapped,
    record_stream,
    recorded,
    tensors_in,
    to_device,
    with_values,
)
from flatbed.data.packing import Slot, is_pinned, send, send_in_place, slot_of_array, slot_of_tensor
from flatbed.data.pins import Pins
from flatbed.data.staging import Array, Carrier, CudaLane, Event, Lane, Ring, spare_the_loop
from flatbed.errors import FlatbedError

STRAIGHT_BYTES = 1 << 16  # what is pinned goes straight from here on; less is packed with the rest


@dataclass(slots=True, eq=False)
class Sent:
    """A batch whose copies are issued."""

    batch: Any
    arrived: Any
    owners: list[Tensor] = field(default_factory=list)
    """Whatever has memory that the stream of the copies, or of the source, owns."""
    in_place: bool = False
    """Whether copies read memory that we have pinned ourselves: whose it is knows nothing of that."""

    def drop(self) -> None:
        """Nobody takes it: its memory is free after its copies, on their own stream."""


class Crossing(Lane, Protocol):
    """A lane, and how what it carries changes hands."""

    def made(self, origins: set[torch.device]) -> list[Any]:
        """Events behind what the source has made on GPUs."""

    def wait(self, events: list[Any], tensors: list[Tensor]) -> None:
        """Let the lane wait, and share the memory of these tensors."""

    def current(self) -> Any:
        """The stream that the loop issues its steps on."""

    def reached(self, current: Any, event: Any = None) -> Event:
        """An event behind what the loop has issued; the same one again, if given."""

    def arrive(self, sent: Sent, current: Any) -> Any:
        """The batch, for the loop's stream: it waits for the copies, and shares their memory."""


class FeedLane(CudaLane):
    """A stream of a GPU, between the streams of the source and of the loop."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        super().__init__(device, stream)
        self._within = super().within()  # one for all batches: only one thread is ever in it

    def within(self) -> AbstractContextManager[Any]:
        return self._within

    def made(self, origins: set[torch.device]) -> list[Any]:
        return [recorded(torch.cuda.current_stream(origin)) for origin in origins]

    def wait(self, events: list[Any], tensors: list[Tensor]) -> None:
        for event in events:
            self.stream.wait_event(event)
        for tensor in tensors:
            record_stream(tensor, self.stream)

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def reached(self, current: Any, event: Any = None) -> Event:
        event = torch.cuda.Event(blocking=True) if event is None else event  # type: ignore[no-untyped-call,unused-ignore]
        event.record(current)
        return event  # type: ignore[no-any-return,unused-ignore]

    def arrive(self, sent: Sent, current: Any) -> Any:
        current.wait_event(sent.arrived)
        for tensor in sent.owners:
            record_stream(tensor, current)
        return sent.batch


class Itself:
    """A place in a batch whose value is moved by its own `to`, or is in pinned memory already."""

    __slots__ = ("tensor", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.tensor: Any = None

    def to(self, device: Any) -> Any:
        return self.tensor


PLACES = frozenset({Slot, Itself})


class Leaves:
    """Those of one batch. What stands for them there is filled once they are on their way."""

    def __init__(self, batch: Any, device: torch.device, pins: Pins | None = None) -> None:
        self.slots: list[Slot] = []
        self.straight: list[tuple[Slot, Tensor]] = []
        """Arrays that we have pinned, with tensors of their memory."""
        self.others: list[Itself] = []
        self.in_place = False
        """Whether we have pinned any of those that are not staged."""
        self._device = device
        self._pins = pins
        self._batch = batch
        self._values = values = flat_values(batch)
        self._marked: Any
        if values is None:
            self._marked = mapped(batch, self._mark)
        else:
            self._marked = [self._mark(value) if type(value) in ARRAYS else value for value in values]

    def filled(self) -> Any:
        """The batch, with what has become of its leaves."""
        marked = self._marked
        if self._values is None:
            return marked.tensor if type(marked) in PLACES else mapped(marked, _filled)
        if all(map(is_, marked, self._values)):
            return self._batch
        return with_values(self._batch, [_filled(leaf) for leaf in marked])

    def _mark(self, leaf: Any) -> Any:
        slot: Slot | None = None
        if isinstance(leaf, np.ndarray):
            slot = slot_of_array(leaf)
            if slot is None:
                return leaf  # no numbers
            if self._pins is not None and self._is_in_place(leaf, slot, self._pins):
                return slot
        elif isinstance(leaf, Tensor):
            slot = slot_of_tensor(leaf)
        if slot is not None and (slot.form.nbytes < STRAIGHT_BYTES or not self._is_pinned(slot)):
            self.slots.append(slot)
            return slot
        if slot is not None:
            leaf = slot.over() if isinstance(leaf, np.ndarray) else leaf
        elif isinstance(leaf, Tensor):
            self.in_place = self.in_place or _reads_ours(leaf)
        elif callable(pin := getattr(leaf, "pin_memory", None)):
            leaf = pin()
        self.others.append(Itself(leaf))
        return self.others[-1]

    def _is_in_place(self, array: Array, slot: Slot, by: Pins) -> bool:
        """Whether an array is pinned by our own doing."""
        if slot.form.nbytes < pins.MIN_BYTES:
            return False
        over = slot.over()
        if not by.pin(array, slot.form, None if over is None else over.data_ptr()) or over is None:
            return False
        self.in_place = True
        self.straight.append((slot, over))
        return True

    def _is_pinned(self, slot: Slot) -> bool:
        """Whether the GPU can copy it as it is."""
        if self._device.type != "cuda" or slot.form.order is None or not slot.source.flags.writeable:
            return False
        over = slot.over()
        if over is None:
            return False
        address, nbytes = over.data_ptr(), slot.form.nbytes
        if not is_pinned(address, nbytes):
            return False
        ours = pins.is_ours(address)  # before and after: another thread may be about to end it
        if not is_pinned(address, nbytes):
            return False
        if ours or pins.is_ours(address):  # a part, or a tensor, of such an array
            self.in_place = True
        return True


def _filled(leaf: Any) -> Any:
    return leaf.tensor if type(leaf) in PLACES else leaf


def _reads_ours(tensor: Tensor) -> bool:
    """Whether a tensor is over an array that we have pinned."""
    return tensor.layout == torch.strided and tensor.is_cpu and pins.is_ours(tensor.data_ptr())


def _tensors_in(value: Any) -> Iterable[Tensor]:
    return (value,) if type(value) is Tensor else tensors_in(value)


class Read(NamedTuple):
    """Pinned memory of others that copies may still read."""

    event: Any
    """Behind them."""
    memory: list[Any]
    is_arrival: bool = False
    """Whether the event is that which the batch has arrived at, too: the loop gives it back."""


class Conveyor:
    """What is done with each batch, in one thread at a time."""

    def __init__(
        self, ring: Ring, lane: Crossing, depth: int, *, in_thread: bool, pins: Pins | None = None
    ) -> None:
        self.lane = lane
        self.pins = pins
        """What arrays are pinned by, instead of being staged."""
        self.carrier = Carrier(ring, lane)
        self.steps: SimpleQueue[Event] = SimpleQueue()
        """Behind each batch, in order, an event that the loop has issued its step before."""
        self.spare_steps: list[Event] = []
        self.spare_arrivals: list[Event] = []
        """Events to be used again: one thread puts them here, one other takes them."""
        self._room = depth
        """How many batches the device is known to have room for."""
        self._step: Event | None = None
        """The next of `steps`, if it was looked at."""
        self._read: deque[Read] = deque()
        self._spare_reads: list[Any] = []
        self.closed = False
        self._entered = not in_thread

    def __call__(self, batch: Any) -> Sent:
        if not self._entered:  # the thread that iterates: its streams are the source's own business
            self._entered = True
            relax_capture()
            spare_the_loop()
        self._wait_for_room()
        self._check_open()
        lane = self.lane
        leaves = Leaves(batch, lane.device, self.pins)
        made, found = self._made(leaves.others) if leaves.others else ([], [])
        # First of all: if it was that of a batch in place, it was reached, and what was read is let go now.
        spare = self.spare_arrivals.pop() if self.spare_arrivals else None
        if self._read:
            self._let_go()
        owners: list[Tensor] = []
        arrived = None
        with lane.within():
            if made:
                lane.wait(made, found)
            if leaves.in_place:
                with pins.lock:  # nobody may end it until it is known to be under way
                    owners, arrived = self._issue(leaves, spare)
            elif leaves.others:
                owners, arrived = self._issue(leaves, spare)
            try:
                if leaves.slots:
                    owners += send(leaves.slots, self.carrier)
                if arrived is None:
                    arrived = lane.mark(spare)
            finally:
                self._check_open()
        return Sent(leaves.filled(), arrived, owners, leaves.in_place)

    def _made(self, others: list[Itself]) -> tuple[list[Any], list[Tensor]]:
        """What the source has made on GPUs, and events behind it."""
        found = [tensor for other in others for tensor in _tensors_in(other.value) if tensor.is_cuda]
        return self.lane.made({tensor.device for tensor in found}) if found else [], found

    def _issue(self, leaves: Leaves, spare: Any) -> tuple[list[Tensor], Any]:
        """What is not staged; returns whatever has memory of its own on the device. And, if nothing is staged
        and the loop waits for what is read, an event that the batch has arrived at: `spare` again, if given.
        """
        lane = self.lane
        try:
            owners = [send_in_place(slot, over, lane) for slot, over in leaves.straight]
            read: list[Any] = [slot.source for slot, _ in leaves.straight]
            if leaves.others:
                owners += self._move(leaves.others)
                read += [other.value for other in leaves.others]
            arrived = None
            if leaves.in_place and not leaves.slots:
                arrived = lane.mark(spare)
                self._read.append(Read(arrived, read, is_arrival=True))
            else:
                self._keep(read)
        except BaseException:  # whatever became of copies that read what nobody keeps
            with suppress(Exception):
                lane.settle()
            raise
        return owners, arrived

    def _move(self, others: list[Itself]) -> list[Tensor]:
        """By their own `to`; returns tensors on GPUs, each once."""
        moved: dict[int, Tensor] = {}
        for other in others:
            other.tensor = to_device(other.value, self.lane.device)
            moved.update((id(tensor), tensor) for tensor in _tensors_in(other.tensor) if tensor.is_cuda)
        return [*moved.values()]

    def has_room(self) -> bool:
        """Whether the device has room for one more batch by now: waits for the loop, not for the device."""
        if self._room:
            return True
        if self._step is None:
            self._step = self.steps.get()
        if not self._step.query():
            return False
        self._step_is_past(self._step)
        return True

    def _step_is_past(self, step: Event) -> None:
        self._room += 1
        self._step = None
        self.spare_steps.append(step)

    def _wait_for_room(self) -> None:
        """The loop issues its steps ahead of the GPU; memory must not go there as far ahead."""
        if not self.has_room() and self._step is not None:
            self._step.synchronize()
            self._step_is_past(self._step)
        self._room -= 1

    def _keep(self, read: list[Any]) -> None:
        """Hold on to what copies read: not all pinned memory is torch's, which waits by itself."""
        event = self.lane.mark(self._spare_reads.pop() if self._spare_reads else None)
        self._read.append(Read(event, read))

    def _let_go(self) -> None:
        """Of what was read."""
        while (oldest := self._oldest()) is not None:
            if not oldest.event.query():
                self._read.appendleft(oldest)
                break
            if not oldest.is_arrival:
                self._spare_reads.append(oldest.event)

    def _oldest(self) -> Read | None:
        """Whoever takes it holds on to it: another thread may be about to close all of this."""
        try:
            return self._read.popleft()
        except IndexError:
            return None

    def _check_open(self) -> None:
        """End the thread if it was too long in the source for the one that closes this to wait for it."""
        if self.closed:
            with suppress(Exception):
                self.lane.settle()
            self._read.clear()
            raise FlatbedError("this iteration has ended")

    def close(self) -> None:
        """Wait for copies that read what others own. In any thread."""
        self.closed = True
        while (oldest := self._oldest()) is not None:
            with suppress(Exception):  # of the GPU; the loop will hear of it
                oldest.event.synchronize()
