"""Copies of host tensors to a GPU through a ring of pinned memory.

A thread takes a free chunk of the ring, fills it, issues its copy to the GPU, and gives the chunk back with
an event. The thread that takes the chunk next waits for that event before it writes. A thread holds one chunk
at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.streams import OrderedLock, stream_for
from flatbed.data.batches import record_stream

CHUNK_BYTES = 32 << 20  # torch's threads fill a chunk together, and starting them takes a while
N_CHUNKS = 3  # more would not stay in the processor's caches
PACKED_BYTES = 1 << 20  # smaller tensors share memory, and a copy, with others
DIRECT_BYTES = 1 << 16  # pinned tensors of this size or more need no staging
ALIGNMENT = 256  # of tensors that share memory on the device


class CopyStream:
    """Copies to one GPU, in the stream "batches" or in the stream that is current."""

    def __init__(self, device: torch.device, *, current: bool = False) -> None:
        self.device = device
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


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of the ring, and the event after the last copy from it."""

    memory: Tensor
    copied: Any = None


class StagingRing:
    """Chunks of pinned memory that any number of threads use in turn."""

    def __init__(self, n_chunks: int = N_CHUNKS, chunk_bytes: int = CHUNK_BYTES, *, pin: bool = True) -> None:
        self.chunk_bytes = chunk_bytes
        self._free: SimpleQueue[Chunk] = SimpleQueue()
        for _ in range(n_chunks):
            self._free.put(Chunk(torch.empty(chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)))

    def send(self, target: Tensor, fill: Callable[[Tensor], Any], copies: CopyStream) -> None:
        """Let `fill` write the bytes of `target` to a chunk, and issue the copy of them.

        `target` has contiguous bytes on the device, a chunk at most. The memory that `fill` reads may change
        after this returns.
        """
        chunk = self._free.get()
        try:
            if chunk.copied is not None:
                chunk.copied.synchronize()
            memory = chunk.memory[: target.numel()]
            fill(memory)
            copies.copy(target, memory)
            chunk.copied = copies.record()
        finally:
            self._free.put(chunk)


_rings: weakref.WeakValueDictionary[torch.device, StagingRing] = weakref.WeakValueDictionary()
_rings_lock = OrderedLock("staging")


def ring_for(device: torch.device) -> StagingRing:
    """Return the ring of a GPU, which lives as long as one of its users does."""
    with _rings_lock:
        ring = _rings.get(device)
        if ring is None:
            with torch.inference_mode(False):  # or it could be written to in no other mode
                ring = _rings[device] = StagingRing()
        return ring


# ---- from tensors to the device


def send(
    tensors: Sequence[Tensor], ring: StagingRing, copies: CopyStream
) -> tuple[list[Tensor], list[Tensor]]:
    """Issue the copies of tensors to the device. Returns the tensors there, and those that own their memory.

    Small tensors share memory of a chunk at most, and one copy. Large ones go through several chunks. Pinned
    ones are copied from where they are. Others (sparse, quantized, subclasses) are moved by their own `to`.
    Axes keep their order in memory.
    """
    moved: dict[int, Tensor] = {}
    owners: list[Tensor] = []
    small: dict[int, Tensor] = {}
    axes: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        is_plain = _is_plain(tensor)
        source, axes[i] = _in_memory_order(tensor) if is_plain else (tensor, [])
        if not is_plain or _needs_no_staging(source):
            moved[i] = source.to(copies.device, non_blocking=True)
        elif source.numel() == 0:
            moved[i] = torch.empty_like(source, device=copies.device)
        elif source.nbytes < min(PACKED_BYTES, ring.chunk_bytes // 2):
            small[i] = source
            continue
        else:
            moved[i] = _send_alone(source, ring, copies)
        owners.append(moved[i])
    for load in _loads(small, ring.chunk_bytes):
        memory, views = _send_packed([small[i] for i in load], ring, copies)
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


def _needs_no_staging(tensor: Tensor) -> bool:
    return tensor.nbytes >= DIRECT_BYTES and tensor.is_contiguous() and tensor.is_pinned()


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Permute the axes from the slowest to the fastest in memory. Returns the permutation back as well."""
    if tensor.is_contiguous():
        return tensor, []
    strides = tensor.stride()
    axes = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    return tensor.permute(axes), [axes.index(axis) for axis in range(tensor.ndim)]


def _send_alone(source: Tensor, ring: StagingRing, copies: CopyStream) -> Tensor:
    """Send a tensor in as many pieces along its first axis as it needs chunks."""
    moved = torch.empty(source.shape, dtype=source.dtype, device=copies.device)
    if source.is_contiguous() or source[0].nbytes > ring.chunk_bytes:
        source = source.contiguous().view(-1).view(torch.uint8)
    n_lines = ring.chunk_bytes // source[0].nbytes
    target = moved.view(-1).view(torch.uint8)
    for first in range(0, len(source), n_lines):
        piece = source[first : first + n_lines]
        begin = first * source[0].nbytes
        ring.send(target[begin : begin + piece.nbytes], partial(_fill, piece), copies)
    return moved


def _fill(source: Tensor, memory: Tensor) -> None:
    memory.view(source.dtype).view(source.shape).copy_(source)


def _loads(small: Mapping[int, Tensor], chunk_bytes: int) -> list[list[int]]:
    """Divide the keys of small tensors into groups whose tensors fit into a chunk."""
    loads: list[list[int]] = []
    free = 0
    for i, source in small.items():
        if _aligned(source.nbytes) > free:
            loads.append([])
            free = chunk_bytes
        loads[-1].append(i)
        free -= _aligned(source.nbytes)
    return loads


def _send_packed(sources: list[Tensor], ring: StagingRing, copies: CopyStream) -> tuple[Tensor, list[Tensor]]:
    """Send tensors in one copy. Returns their memory on the device and a tensor there for each."""
    groups: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for i, source in enumerate(sources):
        groups.setdefault((source.dtype, source.shape), []).append(i)
    nbytes = sum(_aligned(source.nbytes) for source in sources)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=copies.device)
    order = [i for positions in groups.values() for i in positions]

    def fill(chunk: Tensor) -> None:
        torch._foreach_copy_(_views(chunk, groups), [sources[i] for i in order])

    ring.send(memory, fill, copies)
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
    is_large = tensor.nbytes >= DIRECT_BYTES
    copy = (
        source.contiguous().pin_memory() if is_large else source.clone(memory_format=torch.contiguous_format)
    )
    return copy.permute(axes) if axes else copy
