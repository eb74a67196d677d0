"""How the arrays of a batch go through chunks: large ones through several, many small ones through one."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatbed.feed.batches import torch_dtype
from flatbed.feed.staging import Array, Carrier, Lane

ALIGNMENT = 256  # of tensors that share memory on the device: that of torch's own is no larger
PACKED_BYTES = 1 << 20  # less shares memory, and a copy, with others
PARALLEL_BYTES = 1 << 18  # from here on it pays to wake torch's threads
ATTRIBUTES = (ctypes.c_int * 2)(2, 8)  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, …_IS_MANAGED
ON_HOST = 1  # CU_MEMORYTYPE_HOST
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- from leaves to slots


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """What arrays that look alike have in common: found once, looked up ever after."""

    dtype: torch.dtype
    native: np.dtype[Any]
    """The same for numpy, in this machine's byte order."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """On the device, without gaps: memory that has none keeps its order, as with `Tensor.to`."""
    strides: tuple[int, ...]
    """The same in bytes."""
    order: tuple[int, ...] | None
    """Axes as they are in memory; None if that is not as it will be on the device."""
    nbytes: int


@lru_cache(maxsize=4096)
def form_of(
    dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], own: torch.dtype | None = None
) -> Form | None:
    """Of arrays with these attributes; None if they are no numbers. `own`: what torch calls them."""
    own = torch_dtype(dtype) if own is None else own
    if own is None:
        return None
    axes = tuple(range(len(shape)))
    orders = (axes, tuple(sorted(axes, key=lambda axis: -strides[axis]))) if dtype.isnative else ()
    nbytes = dtype.itemsize
    for n in shape:
        nbytes *= n
    order = next((o for o in orders if not nbytes or _is_dense(o, shape, strides, dtype.itemsize)), None)
    stride = _strides(shape, axes if order is None else order)
    strides = tuple(dtype.itemsize * n for n in stride)
    return Form(own, dtype.newbyteorder("="), shape, stride, strides, order, nbytes)


def _is_dense(order: Sequence[int], shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    step = itemsize
    for axis in reversed(order):
        if shape[axis] != 1 and strides[axis] != step:
            return False
        step *= shape[axis]
    return True


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Without gaps, the axes in this order, the last the fastest."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


class Slot:
    """A place in a batch whose tensor is on its way. `mapped` takes it for a leaf, since it has a `to`."""

    __slots__ = ("form", "source", "tensor")

    def __init__(self, source: Array, form: Form) -> None:
        self.source = source
        self.form = form
        self.tensor: Any = None

    def to(self, device: Any) -> Any:
        return self.tensor


def slot_of_array(array: Array) -> Slot | None:
    """For an array of numbers; None for any other."""
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            return None
        array = np.asarray(array)
    form = form_of(array.dtype, array.shape, array.strides)
    return None if form is None else Slot(array, form)


def slot_of_tensor(tensor: Tensor) -> Slot | None:
    """For a plain tensor on the host; None for any other, which knows itself how to be moved."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout != torch.strided:
        return None
    if tensor.requires_grad or tensor.is_quantized:
        return None
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    plain = INTEGERS.get(tensor.dtype.itemsize)  # numpy does not know all of torch's numbers
    array = (tensor if plain is None else tensor.view(plain)).numpy()
    form = form_of(array.dtype, array.shape, array.strides, tensor.dtype)
    return None if form is None else Slot(array, form)


# ---- from slots to tensors


def send(slots: Sequence[Slot], carrier: Carrier) -> list[Tensor]:
    """Give each slot a tensor on the device and issue the copies; returns the memory that they share.

    Small ones share memory, a chunk of it at most; each of the others has its own.
    """
    small = min(PACKED_BYTES, carrier.ring.chunk_bytes // 2)
    owners: list[Tensor] = []
    groups: dict[Form, list[Slot]] = {}
    for slot in slots:
        form = slot.form
        if form.nbytes >= small:
            owners.append(_send_alone(slot, carrier))
        elif form in groups:
            groups[form].append(slot)
        else:
            groups[form] = [slot]
    for runs, nbytes in _packed(groups, carrier.ring.chunk_bytes):
        owners.append(_send_together(runs, nbytes, carrier))
    return owners


def _send_alone(slot: Slot, carrier: Carrier) -> Tensor:
    """Through as many chunks as it takes, about equally full."""
    form, chunk_bytes = slot.form, carrier.ring.chunk_bytes
    memory = torch.empty(form.nbytes, dtype=torch.uint8, device=carrier.lane.device)
    if form.nbytes <= chunk_bytes:
        carrier.carry(memory, lambda chunk: _write(chunk, slot.source, form))
    else:
        for target, lines in _pieces(slot, memory, chunk_bytes):
            carrier.carry(target, lambda chunk: copy_into(_over(chunk, lines), lines))  # noqa: B023
    slot.tensor = memory.view(form.dtype).as_strided(form.shape, form.stride).data
    return memory


def _write(chunk: Array, source: Array, form: Form) -> None:
    if form.order is None:
        copy_into(chunk[: form.nbytes].view(form.native).reshape(form.shape), source)
    else:
        copy_into(chunk[: form.nbytes], _flat(source, form.order))


def _flat(source: Array, order: Sequence[int]) -> Array:
    """The bytes as they are in memory, which has no gaps."""
    flat: Array = source.transpose(order).reshape(-1).view(np.uint8)
    return flat


def _over(chunk: Array, lines: Array) -> Array:
    """The first bytes of a chunk, as what they are to be."""
    over: Array = chunk[: lines.nbytes].view(lines.dtype.newbyteorder("=")).reshape(lines.shape)
    return over


def _pieces(slot: Slot, memory: Tensor, chunk_bytes: int) -> Iterator[tuple[Tensor, Array]]:
    """A slot divided along its first axis, or anywhere if it is as it will be; and where each part goes."""
    source, order = slot.source, slot.form.order
    if order is None and source.nbytes > chunk_bytes * len(source):  # a row is larger than a chunk
        source = np.array(source, slot.form.native, order="C")
        order = tuple(range(source.ndim))
    lines = source if order is None else _flat(source, order)
    line_bytes = lines.nbytes // len(lines)
    step = -(-len(lines) // -(-lines.nbytes // chunk_bytes))
    step = min(_aligned(step) if line_bytes == 1 else step, max(1, chunk_bytes // line_bytes))
    for first in range(0, len(lines), step):
        part = lines[first : first + step]
        yield memory[first * line_bytes : first * line_bytes + part.nbytes], part


def send_in_place(slot: Slot, over: Tensor, lane: Lane) -> Tensor:
    """Straight from pinned memory: `over` is a tensor of the array's own."""
    form = slot.form
    slot.tensor = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=lane.device)
    lane.send(slot.tensor, over)
    return slot.tensor  # type: ignore[no-any-return]


# ---- many small ones


class Run(NamedTuple):
    """Slots of one form, one after the other in memory that is shared."""

    form: Form
    slots: list[Slot]
    begin: int
    each: int
    """Bytes from the begin of one to that of the next."""

    def write(self, chunk: Array) -> None:
        """All of them, where they belong in the chunk."""
        form, slots = self.form, self.slots
        shape, strides = (len(slots), *form.shape), (self.each, *form.strides)
        places = np.ndarray(shape, form.native, chunk, self.begin, strides)  # type: ignore[arg-type,unused-ignore]
        if form.nbytes < PARALLEL_BYTES:
            for i, slot in enumerate(slots):
                places[i] = slot.source
        else:
            for i, slot in enumerate(slots):
                copy_into(places[i, ...], slot.source)

    def place(self, memory: Tensor) -> None:
        """Give each its tensor. No views: writing into one must not mark the others as changed."""
        form, slots, itemsize = self.form, self.slots, self.form.native.itemsize
        first = self.begin // itemsize
        if len(slots) == 1:
            slots[0].tensor = memory.as_strided(form.shape, form.stride, first).data
            return
        shape, stride = (len(slots), *form.shape), (self.each // itemsize, *form.stride)
        for slot, view in zip(slots, memory.as_strided(shape, stride, first).unbind(), strict=True):
            slot.tensor = view.data


def _packed(groups: dict[Form, list[Slot]], chunk_bytes: int) -> Iterator[tuple[list[Run], int]]:
    """As many together as fit into a chunk, and how many bytes they take."""
    runs: list[Run] = []
    end = 0
    for form, slots in groups.items():
        each = _aligned(max(1, form.nbytes))
        while slots:
            n = (chunk_bytes - end) // each
            if n:
                runs.append(Run(form, slots[:n], end, each))
                end += each * len(runs[-1].slots)
                slots = slots[n:]
            else:
                yield runs, end
                runs, end = [], 0
    if runs:
        yield runs, end


def _send_together(runs: list[Run], nbytes: int, carrier: Carrier) -> Tensor:
    memory = torch.empty(nbytes, dtype=torch.uint8, device=carrier.lane.device)

    def write(chunk: Array) -> None:
        for run in runs:
            run.write(chunk)

    carrier.carry(memory, write)
    typed: dict[torch.dtype, Tensor] = {}
    for run in runs:
        dtype = run.form.dtype
        if dtype not in typed:
            typed[dtype] = memory.view(dtype)
        run.place(typed[dtype])
    return memory


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# ---- copies on the host


def copy_into(target: Array, source: Array) -> None:
    """Numbers of equal shape, in this machine's order: by all of torch's threads, where that pays."""
    over = tensor_over(source) if source.nbytes >= PARALLEL_BYTES else None
    if over is None:
        np.copyto(target, source)
    else:
        torch.from_numpy(target).copy_(over)


def tensor_over(array: Array) -> Tensor | None:
    """The memory of an array that is not empty, to be read and not written; None if torch cannot have it."""
    dtype, itemsize = torch_dtype(array.dtype), array.dtype.itemsize
    if dtype is None or not array.dtype.isnative or any(n < 0 or n % itemsize for n in array.strides):
        return None
    if array.flags.writeable:
        return torch.from_numpy(array)
    # torch warns of arrays that are locked, and has no tensors that are.
    extent = itemsize + sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    over = bytes_at(int(array.__array_interface__["data"][0]), extent).view(dtype)
    return over.as_strided(array.shape, [n // itemsize for n in array.strides])


def is_pinned(address: int, nbytes: int) -> bool:
    """Whether all of it is. What is in nobody's pages but its own is, or is not, as a whole.

    The first and the last page may be pinned with a neighbour: memory of the heap does not begin with a page.
    """
    last, page = address + nbytes - 1, mmap.PAGESIZE
    if not _is_pinned_at(address):
        return False
    ends = {min(address // page * page + page, last), max(last // page * page - 1, address), last}
    return all(_is_pinned_at(one) for one in ends)


def _is_pinned_at(address: int) -> bool:
    """Asked of the driver itself, which is far quicker than torch. As there, managed memory is not meant."""
    ask = _pointer_attributes()
    if ask is not None:
        kind, managed = ctypes.c_uint64(), ctypes.c_uint64()
        places = (ctypes.c_void_p * 2)(ctypes.addressof(kind), ctypes.addressof(managed))
        if ask(2, ATTRIBUTES, places, address) == 0:
            return kind.value == ON_HOST and managed.value == 0
    return bytes_at(address, 1).is_pinned()


@lru_cache(maxsize=1)
def _pointer_attributes() -> Any:
    """The call of libcuda that finds nothing wrong with memory that it does not know."""
    if torch.version.cuda is None:
        return None
    with suppress(OSError, AttributeError):
        ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttributes
        ask.argtypes = (ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
        ask.restype = ctypes.c_int
        return ask
    return None


def bytes_at(address: int, nbytes: int) -> Tensor:
    """Bytes of whoever keeps them, to be read and not written."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
