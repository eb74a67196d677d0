"""How the arrays of a batch are divided among chunks: large ones in several, many small ones in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.feed.batches import torch_dtype
from flatbed.feed.staging import Array, Copied, Copiers, Piece

ALIGNMENT = 256  # of tensors that share memory on the device: that of torch's own is no larger
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False, slots=True)
class Slot:
    """A place in a batch whose tensor is on its way. `mapped` takes it for a leaf, since it has a `to`."""

    source: Array
    """Flat bytes; or, where memory has gaps or another byte order, the array itself."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """On the device."""
    tensor: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    @property
    def dense(self) -> bool:
        """Whether it is in memory as it will be on the device."""
        return self.source.dtype == np.uint8 and self.source.flags.c_contiguous and self.source.ndim == 1

    def to(self, device: Any) -> Any:
        return self.tensor


# ---- from leaves to slots


def slot_of_array(array: Array) -> Slot | None:
    """For an array of numbers; None for any other."""
    dtype = torch_dtype(array.dtype)
    if dtype is None or isinstance(array, np.ma.MaskedArray):
        return None
    return _slot(np.asarray(array), dtype)


def slot_of_tensor(tensor: Tensor) -> Slot | None:
    """For a plain tensor on the host; None for any other, which knows itself how to be moved."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    if tensor.requires_grad or tensor.is_quantized:
        return None
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    plain = INTEGERS.get(tensor.dtype.itemsize)  # numpy does not know all of torch's numbers
    return _slot((tensor if plain is None else tensor.view(plain)).numpy(), tensor.dtype)


def _slot(array: Array, dtype: torch.dtype) -> Slot:
    """Memory without gaps keeps its order, as with `Tensor.to`; what has gaps becomes contiguous."""
    order: Sequence[int] = range(array.ndim)
    flat = array if array.dtype.isnative else None
    if flat is not None and not array.flags.c_contiguous:
        order = sorted(order, key=lambda axis: -array.strides[axis])
        flat = array.transpose(order)
    if flat is None or not flat.flags.c_contiguous:
        return Slot(array, dtype, array.shape, _strides(array.shape, range(array.ndim)))
    return Slot(flat.reshape(-1).view(np.uint8), dtype, array.shape, _strides(array.shape, order))


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Without gaps, the axes in this order, the last the fastest."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


# ---- from slots to tensors


def send(slots: Sequence[Slot], copiers: Copiers) -> list[Tensor]:
    """Give each slot a tensor on the device and issue the copies; returns the memory that they share.

    A tensor of its own has half a chunk or more; smaller ones share memory, a chunk of it at most.
    """
    chunk_bytes = copiers.ring.chunk_bytes
    owners: list[Tensor] = []
    pieces: list[Piece] = []
    for group in _groups(slots, chunk_bytes):
        places, nbytes = _placed(group)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=copiers.lane.device)
        for slot, place in zip(group, places, strict=True):
            slot.tensor = _tensor(memory, slot, place)
        owners.append(memory)
        if len(group) == 1:
            pieces += _pieces(group[0], memory, chunk_bytes)
        elif nbytes:
            parts = [Copied(place, slot.source) for slot, place in zip(group, places, strict=True)]
            pieces.append(Piece(memory, parts))
    copiers.run(pieces)
    return owners


def _groups(slots: Sequence[Slot], chunk_bytes: int) -> Iterator[list[Slot]]:
    """The large ones by themselves, then the small ones, as many together as fit into a chunk."""
    small: list[Slot] = []
    for slot in slots:
        if 2 * slot.nbytes >= chunk_bytes:
            yield [slot]
        else:
            small.append(slot)
    group: list[Slot] = []
    taken = 0
    for slot in small:
        if taken + slot.nbytes > chunk_bytes:
            yield group
            group, taken = [], 0
        group.append(slot)
        taken += _aligned(slot.nbytes)
    if group:
        yield group


def _placed(group: Sequence[Slot]) -> tuple[list[int], int]:
    """Where each begins, and where the last ends."""
    places, end = [], 0
    for slot in group:
        places.append(_aligned(end))
        end = places[-1] + slot.nbytes
    return places, end


def _tensor(memory: Tensor, slot: Slot, place: int) -> Tensor:
    """A tensor over memory that it shares. No view: writing into one must not mark the others as changed."""
    made = torch.empty(0, dtype=slot.dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), place // slot.dtype.itemsize, slot.shape, slot.stride)  # type: ignore[call-overload,no-any-return,unused-ignore]


def _pieces(slot: Slot, memory: Tensor, chunk_bytes: int) -> Iterator[Piece]:
    """One slot through as many chunks as it takes, about equally full."""
    source = slot.source
    if source.nbytes <= chunk_bytes:
        if source.nbytes:
            yield Piece(memory, [Copied(0, source)])
        return
    if source.nbytes > chunk_bytes * len(source):  # a row is larger than a chunk, and not even in order
        source = np.array(source, source.dtype.newbyteorder("="), order="C").reshape(-1).view(np.uint8)
    row_bytes = source.nbytes // len(source)
    step = -(-len(source) // -(-source.nbytes // chunk_bytes))
    step = min(_aligned(step) if row_bytes == 1 else step, max(1, chunk_bytes // row_bytes))
    for first in range(0, len(source), step):
        part = source[first : first + step]
        target = memory[first * row_bytes : first * row_bytes + part.nbytes]
        yield Piece(target, [Copied(0, part)])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
