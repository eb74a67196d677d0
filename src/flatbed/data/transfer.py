"""One batch on its way to the device.

Streams: the loader thread issues copies in the stream "batches"; tensors that the loader made on a GPU are
waited for by an event in the loader thread's stream. The training stream waits for the event `arrived`, and
every tensor of the batch is recorded for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.data.batches import as_tensor, map_leaves, moves_itself
from flatbed.data.staging import CopyStream, StagingRing, pinned, send

CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class HostBatch:
    """A batch whose arrays are tensors, and its leaves, each once."""

    batch: Any
    leaves: list[Any]


@dataclass(slots=True, eq=False)
class MovedBatch:
    """A batch whose copies were issued."""

    batch: Any
    tensors: dict[int, Tensor] = field(default_factory=dict)
    """Tensors on the device, by the id of their host tensor."""
    owners: list[Tensor] = field(default_factory=list)
    """Tensors that own the memory of the batch."""
    arrived: Any = None
    """The event after the copies; None on a CPU."""
    has_objects: bool = False
    """Objects in the batch are to be moved by their own `to`."""


class BatchMover:
    """Moves batches to a device; `copies` and `ring` are None for a CPU."""

    def __init__(self, device: torch.device, copies: CopyStream | None, ring: StagingRing | None) -> None:
        self.device = device
        self.copies = copies
        self.ring = ring

    def to_host(self, batch: Any) -> HostBatch:
        """Turn the arrays of a batch into tensors, and pin objects that move themselves."""
        leaves: list[Any] = []

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                leaf = as_tensor(leaf)
            elif isinstance(leaf, Tensor):
                leaf = leaf.to(CPU) if self.copies is None else leaf
            elif self.copies is not None and callable(getattr(leaf, "pin_memory", None)):
                leaf = leaf.pin_memory()
            leaves.append(leaf)
            return leaf

        return HostBatch(map_leaves(convert, batch), leaves)

    def move(self, host: HostBatch, extra: Sequence[Tensor] = ()) -> MovedBatch:
        """Issue the copies of a batch and of the tensors `extra`. Does not wait for the GPU."""
        has_objects = any(map(moves_itself, host.leaves))
        tensors = {id(leaf): leaf for leaf in (*host.leaves, *extra) if isinstance(leaf, Tensor)}
        if self.copies is None or self.ring is None:
            return MovedBatch(host.batch, tensors, has_objects=has_objects)
        origins = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        made = [torch.cuda.current_stream(origin).record_event() for origin in origins]
        with self.copies.context():
            for event in made:
                self.copies.stream.wait_event(event)
            sent, owners = send([*tensors.values()], self.ring, self.copies)
            arrived = self.copies.record()
        moved = dict(zip(tensors, sent, strict=True))
        batch = map_leaves(lambda leaf: moved.get(id(leaf), leaf), host.batch)
        return MovedBatch(batch, moved, owners, arrived, has_objects)

    def hand_out(self, moved: MovedBatch) -> Any:
        """Return the batch for the current stream, which waits for the copies.

        Objects that move themselves are moved here: their memory then belongs to the current stream.
        """
        if self.copies is not None:
            self.copies.hand_over(*moved.owners, copied=moved.arrived)
        return map_leaves(self._move_object, moved.batch) if moved.has_objects else moved.batch

    def _move_object(self, leaf: Any) -> Any:
        if not moves_itself(leaf):
            return leaf
        if self.copies is not None:
            with suppress(TypeError):  # not all have that argument
                return leaf.to(self.device, non_blocking=True)
        return leaf.to(self.device)


def pinned_batches(batches: Sequence[Any], mover: BatchMover) -> list[Any]:
    """Copy the arrays and tensors of all batches, into pinned memory where that is faster."""
    hosts = [mover.to_host(batch) for batch in batches]
    copies = {id(leaf): pinned(leaf) for host in hosts for leaf in host.leaves if isinstance(leaf, Tensor)}
    return [map_leaves(lambda leaf: copies.get(id(leaf), leaf), host.batch) for host in hosts]
