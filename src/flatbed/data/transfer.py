"""Batches on their way to the device, through pinned memory.

Streams: the loader thread issues copies in the stream "batches", which waits for tensors that the loader made
on a GPU. The training stream waits for the event `arrived`, and every tensor of the batch is recorded for it.

Large tensors go through a ring of pinned chunks. A thread takes a free chunk, fills it, issues its copy, and
gives the chunk back with an event. The thread that takes the chunk next waits for that event first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.streams import stream_for
from flatbed.data.batches import as_tensor, map_leaves, moves_itself

CHUNK_BYTES = 32 << 20  # torch's threads fill a chunk together, and starting them takes a while
N_CHUNKS = 3  # more would not stay in the processor's caches
SMALL_BYTES = 1 << 20  # smaller tensors are not split
FEW = 4  # more small tensors than this share memory, and a copy
DIRECT_BYTES = 1 << 16  # pinned tensors of this size or more need no staging
ALIGNMENT = 256  # of tensors that share memory on the device


# ---- one batch


@dataclass(slots=True, eq=False)
class MovedBatch:
    """A batch whose copies were issued."""

    batch: Any
    tensors: dict[int, Tensor]
    """Tensors on the device, by the id of their host tensor."""
    has_objects: bool
    """Objects in the batch are to be moved by their own `to`."""
    owners: list[Tensor] = field(default_factory=list)
    """Tensors that own the memory of the batch."""
    arrived: Any = None
    """The event after the copies; None on a CPU."""


class BatchMover:
    """Moves batches to a device; `copies` is None for a CPU.

    `is_reused`: the loader may write to a batch when it makes the next one. No tensor shares its memory then.
    """

    def __init__(
        self, device: torch.device, copies: CopyStream | None = None, *, is_reused: bool = False
    ) -> None:
        self.device = device
        self.copies = copies
        self.is_reused = is_reused

    def to_host(self, batch: Any) -> tuple[Any, list[Any]]:
        """Turn arrays into tensors, and pin objects that move themselves. Returns each leaf once, too."""
        seen: dict[int, tuple[Any, Any]] = {}

        def convert(leaf: Any) -> Any:
            if id(leaf) in seen:
                return seen[id(leaf)][1]
            found = leaf
            if isinstance(leaf, np.ndarray):
                found = as_tensor(leaf)
            elif isinstance(leaf, Tensor):
                found = leaf.cpu() if self.copies is None else leaf
            elif self.copies is not None and callable(getattr(leaf, "pin_memory", None)):
                found = leaf.pin_memory()
            if self.is_reused and self.copies is None and isinstance(found, Tensor):
                found = found if found.requires_grad else found.clone()
            seen[id(leaf)] = (leaf, found)  # with the leaf, so that its id stays its own
            return found

        host = map_leaves(convert, batch)
        return host, [found for _, found in seen.values()]

    def move(self, batch: Any, leaves: list[Any], extra: Sequence[Tensor] = ()) -> MovedBatch:
        """Issue the copies of a batch with these leaves, and of the tensors `extra`. Does not wait."""
        tensors = {id(leaf): leaf for leaf in (*leaves, *extra) if isinstance(leaf, Tensor)}
        has_objects = any(map(moves_itself, leaves))
        if self.copies is None:
            return MovedBatch(batch, tensors, has_objects)
        origins = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        made = [torch.cuda.current_stream(origin).record_event() for origin in origins]
        with self.copies.context():
            for event in made:
                self.copies.stream.wait_event(event)
            sent, owners = send([*tensors.values()], self.copies, is_reused=self.is_reused)
            arrived = self.copies.record()
        if self.is_reused:
            for origin in origins:  # the loader may write there again
                torch.cuda.current_stream(origin).wait_event(arrived)
        moved = dict(zip(tensors, sent, strict=True))
        there = map_leaves(lambda leaf: moved.get(id(leaf), leaf), batch)
        return MovedBatch(there, moved, has_objects, owners, arrived)

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
    copies = {id(leaf): pinned(leaf) for _, leaves in hosts for leaf in leaves if isinstance(leaf, Tensor)}
    return [map_leaves(lambda leaf: copies.get(id(leaf), leaf), host) for host, _ in hosts]


# ---- the stream of copies, and the ring


class CopyStream:
    """Copies to one GPU, in the stream "batches" or in the stream that is current."""

    def __init__(self, device: torch.device, *, current: bool = False) -> None:
        self.device = device
        self.ring = ring_for(device)
        self._stream = None if current else stream_for(device, "batches")

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of the copies."""
        return torch.cuda.current_stream(self.device) if self._stream is None else self._stream

    def context(self) -> AbstractContextManager[Any]:
        """Make the stream current: memory that is allocated inside belongs to it."""
        return torch.cuda.stream(self.stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Issue a copy from pinned memory to the device."""
        target.copy_(source, non_blocking=True)

    def send_small(self, source: Tensor) -> Tensor:
        """Issue the copy of a small tensor, through memory that torch pins and keeps until it was copied."""
        memory = torch.empty_like(source, memory_format=torch.contiguous_format, pin_memory=True)
        return memory.copy_(source).to(self.device, non_blocking=True)

    def record(self) -> Any:
        """Return an event after all copies that were issued."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call,unused-ignore]
        event.record(self.stream)
        return event

    def hand_over(self, *tensors: Tensor, copied: Any = None) -> None:
        """Make the current stream wait for the event `copied` and use the tensors.

        Without an event, it waits for all copies.
        """
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.record() if copied is None else copied)
        for tensor in tensors:
            record_stream(tensor, current)


def record_stream(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a stream uses this memory: it is reused after that stream's work."""
    parts = [tensor]
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    for part in parts:
        if part.is_cuda:
            part.record_stream(stream)  # type: ignore[arg-type,unused-ignore]


class StagingRing:
    """Chunks of pinned memory that any number of threads use in turn. A thread holds one chunk at a time."""

    def __init__(self, n_chunks: int = N_CHUNKS, chunk_bytes: int = CHUNK_BYTES, *, pin: bool = True) -> None:
        self.chunk_bytes = chunk_bytes
        self._free: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()  # with the event after the last copy
        for _ in range(n_chunks):
            chunk = torch.empty(chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
            self._free.put((chunk, None))

    def send(self, target: Tensor, fill: Callable[[Tensor], Any], copies: CopyStream) -> None:
        """Let `fill` write the bytes of `target` to a chunk, and issue the copy of them.

        `target` has contiguous bytes on the device, a chunk at most. The memory that `fill` reads may change
        after this returns.
        """
        chunk, copied = self._free.get()
        try:
            if copied is not None:
                copied.synchronize()
            memory = chunk[: target.numel()]
            fill(memory)
            copies.copy(target, memory)
            copied = copies.record()
        finally:
            self._free.put((chunk, copied))


@lru_cache
def ring_for(device: torch.device) -> StagingRing:
    """Return the ring of a GPU."""
    with torch.inference_mode(False):  # or it could be written to in no other mode
        return StagingRing()


# ---- from tensors to the device


def send(
    tensors: Sequence[Tensor], copies: CopyStream, *, is_reused: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Issue the copies of tensors to the device. Returns the tensors there, and those that own their memory.

    Many small tensors share memory of a chunk at most, and one copy. Large ones go through several chunks.
    Pinned ones are copied from where they are, unless their memory `is_reused` after this call. Others
    (sparse, quantized, subclasses) are moved by their own `to`. Axes keep their order in memory.
    """
    moved: dict[int, Tensor] = {}
    owners: list[Tensor] = []
    small: dict[int, Tensor] = {}
    axes: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        is_plain = _is_plain(tensor)
        source, axes[i] = _in_memory_order(tensor) if is_plain else (tensor, [])
        if not is_plain:
            is_copied = is_reused and not source.requires_grad
            moved[i] = source.to(copies.device, non_blocking=not is_reused, copy=is_copied)
        elif (
            source.nbytes >= DIRECT_BYTES and not is_reused and source.is_contiguous() and source.is_pinned()
        ):
            moved[i] = source.to(copies.device, non_blocking=True)
        elif source.numel() == 0:
            moved[i] = torch.empty_like(source, device=copies.device)
        elif source.nbytes < min(SMALL_BYTES, copies.ring.chunk_bytes // 2):
            small[i] = source
            continue
        else:
            moved[i] = _send_alone(source, copies)
        owners.append(moved[i])
    if len(small) <= FEW:
        sent = {i: copies.send_small(source) for i, source in small.items()}
        moved.update(sent)
        owners += sent.values()
    else:
        for load in _loads(small, copies.ring.chunk_bytes):
            memory, views = _send_packed([small[i] for i in load], copies)
            moved.update(zip(load, views, strict=True))
            owners.append(memory)
    return [moved[i].permute(axes[i]) if axes[i] else moved[i] for i in range(len(tensors))], owners


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Permute the axes from the slowest to the fastest in memory. Returns the permutation back as well."""
    if tensor.is_contiguous():
        return tensor, []
    strides = tensor.stride()
    axes = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    return tensor.permute(axes), [axes.index(axis) for axis in range(tensor.ndim)]


def _send_alone(source: Tensor, copies: CopyStream) -> Tensor:
    """Send a tensor in as many pieces along its first axis as it needs chunks."""
    chunk_bytes = copies.ring.chunk_bytes
    moved = torch.empty(source.shape, dtype=source.dtype, device=copies.device)
    if source.is_contiguous() or source[0].nbytes > chunk_bytes:
        source = source.contiguous().view(-1).view(torch.uint8)
    line_bytes = source[0].nbytes
    n_lines = chunk_bytes // line_bytes
    target = moved.view(-1).view(torch.uint8)
    for first in range(0, len(source), n_lines):
        piece = source[first : first + n_lines]
        begin = first * line_bytes
        copies.ring.send(target[begin : begin + piece.nbytes], partial(_fill, piece), copies)
    return moved


def _fill(source: Tensor, memory: Tensor) -> None:
    memory.view(source.dtype).view(source.shape).copy_(source)


def _loads(small: Mapping[int, Tensor], chunk_bytes: int) -> list[list[int]]:
    """Group the keys of small tensors, so that the tensors of a group fit into a chunk."""
    loads: list[list[int]] = []
    free = 0
    for i, source in small.items():
        if _aligned(source.nbytes) > free:
            loads.append([])
            free = chunk_bytes
        loads[-1].append(i)
        free -= _aligned(source.nbytes)
    return loads


def _send_packed(sources: list[Tensor], copies: CopyStream) -> tuple[Tensor, list[Tensor]]:
    """Send tensors in one copy. Returns their memory on the device and a tensor there for each."""
    groups: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for i, source in enumerate(sources):
        groups.setdefault((source.dtype, source.shape), []).append(i)
    nbytes = sum(_aligned(source.nbytes) for source in sources)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=copies.device)
    order = [i for positions in groups.values() for i in positions]

    def fill(chunk: Tensor) -> None:
        torch._foreach_copy_(_views(chunk, groups), [sources[i] for i in order])

    copies.ring.send(memory, fill, copies)
    # `.data`, since a write to one tensor must not count as a change of the others to autograd.
    views = {i: view.data for i, view in zip(order, _views(memory, groups), strict=True)}
    return memory, [views[i] for i in range(len(sources))]


def _views(memory: Tensor, groups: dict[tuple[torch.dtype, torch.Size], list[int]]) -> list[Tensor]:
    """Return tensors in memory, one after the other; those of one group are made in one go."""
    views: list[Tensor] = []
    begin = 0
    for (dtype, shape), positions in groups.items():
        n, nbytes = len(positions), shape.numel() * dtype.itemsize
        end = begin + n * _aligned(nbytes)
        lines = memory[begin:end].view(n, -1)[:, :nbytes].view(dtype)
        views += lines.view(n, *shape).unbind()
        begin = end
    return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pinned(tensor: Tensor) -> Tensor:
    """Copy a host tensor, into pinned memory unless it is so small that it is staged anyway."""
    if not _is_plain(tensor):
        return tensor
    source, axes = _in_memory_order(tensor)
    if tensor.nbytes >= DIRECT_BYTES:
        copy = source.contiguous().pin_memory()
    else:
        copy = source.clone(memory_format=torch.contiguous_format)
    return copy.permute(axes) if axes else copy
