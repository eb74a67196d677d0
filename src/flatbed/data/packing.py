"""How the arrays of a batch go through chunks: large ones through several, many small ones through one."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.data.batches import native_dtype, torch_dtype
from flatbed.data.staging import Array, Carrier, Chunk, Lane

ALIGNMENT = 256  # of tensors that share memory on the device: that of torch's own is no larger
PACKED_BYTES = 1 << 20  # less shares memory, and a copy, with others
PARALLEL_BYTES = 1 << 18  # from here on it pays to wake torch's threads
ATTRIBUTES = (ctypes.c_int * 2)(2, 8)  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, …_IS_MANAGED
ON_HOST = 1  # CU_MEMORYTYPE_HOST
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
USUAL = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8})
"""What most tensors are made of, and numpy knows."""


# ---- from leaves to slots


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """What arrays that look alike have in common: found once, looked up ever after."""

    dtype: torch.dtype
    native: np.dtype[Any]
    """The same for numpy, in this machine's byte order; for what it does not know, integers."""
    plain: torch.dtype
    """The same as `native`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """On the device, without gaps: memory that has none keeps its order, as with `Tensor.to`."""
    strides: tuple[int, ...]
    """The same in bytes."""
    order: tuple[int, ...] | None
    """Axes as they are in memory; None if that is not as it will be on the device."""
    nbytes: int
    readable: bool
    """Whether torch can have a tensor of such an array."""


@lru_cache(maxsize=4096)
def form_of(
    dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], own: torch.dtype | None = None
) -> Form | None:
    """Of arrays with these attributes; None if they are no numbers. `own`: what torch calls them."""
    plain = torch_dtype(dtype)
    if plain is None:
        return None
    axes = tuple(range(len(shape)))
    orders = (axes, tuple(sorted(axes, key=lambda axis: -strides[axis]))) if dtype.isnative else ()
    nbytes = dtype.itemsize
    for n in shape:
        nbytes *= n
    order = next((o for o in orders if not nbytes or _is_dense(o, shape, strides, dtype.itemsize)), None)
    readable = dtype.isnative and all(n >= 0 and n % dtype.itemsize == 0 for n in strides)
    stride = _strides(shape, axes if order is None else order)
    strides = tuple(dtype.itemsize * n for n in stride)
    return Form(own or plain, native_dtype(dtype), plain, shape, stride, strides, order, nbytes, readable)


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

    __slots__ = ("_over", "form", "source", "tensor")

    def __init__(self, source: Array, form: Form, over: Tensor | None = None) -> None:
        self.source = source
        self.form = form
        self.tensor: Any = None
        self._over = over

    def over(self) -> Tensor | None:
        """A tensor of the memory that it comes from, as with `tensor_over`."""
        if self._over is None:
            self._over = tensor_over(self.source, self.form)
        return self._over

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
    dtype, over = tensor.dtype, tensor
    if dtype not in USUAL and dtype.itemsize in INTEGERS:  # numpy does not know all of torch's numbers
        over = tensor.view(INTEGERS[dtype.itemsize])
    array = over.numpy()
    form = form_of(array.dtype, array.shape, array.strides, dtype)
    return None if form is None else Slot(array, form, over)


# ---- from slots to tensors


def send(slots: Sequence[Slot], carrier: Carrier) -> list[Tensor]:
    """Give each slot a tensor on the device and issue the copies; returns the memory that they share.

    Small ones share memory, a chunk of it at most; each of the others has its own.
    """
    chunk_bytes = carrier.ring.chunk_bytes
    small = min(PACKED_BYTES, chunk_bytes // 2)
    owners: list[Tensor] = []
    packed: list[Slot] = []
    for slot in slots:
        if slot.form.nbytes >= small:
            owners.append(_send_alone(slot, carrier))
        else:
            packed.append(slot)
    if len(packed) == 1 and packed[0].form.nbytes:
        owners.append(_send_alone(packed[0], carrier))
    elif packed:
        for load in _loads(tuple([slot.form for slot in packed]), chunk_bytes):
            owners.append(_send_together(load, packed, carrier))
    return owners


def _send_alone(slot: Slot, carrier: Carrier) -> Tensor:
    """Through as many chunks as it takes."""
    form = slot.form
    if form.nbytes > carrier.ring.chunk_bytes:
        return _send_in_pieces(slot, carrier)
    memory = torch.empty_strided(form.shape, form.stride, dtype=form.plain, device=carrier.lane.device)

    def fill(chunk: Chunk) -> Tensor:
        array, tensor, filled = chunk.view(form, _as_form)
        over = slot.over() if form.nbytes >= PARALLEL_BYTES else None
        if over is None:
            np.copyto(array, slot.source)
        else:
            tensor.copy_(over)
        return filled  # type: ignore[no-any-return]

    carrier.carry_as(memory, fill)
    slot.tensor = memory if form.dtype is form.plain else memory.view(form.dtype).data
    return memory


def _as_form(chunk: Chunk, form: Form) -> tuple[Array, Tensor, Tensor]:
    """The first bytes of a chunk, as they will be on the device: to be filled by numpy or by torch, and to be
    copied. The last is made of torch's memory, which is to know of copies if it is pinned by torch.
    """
    array: Array = np.ndarray(form.shape, form.native, chunk.array, 0, form.strides)  # type: ignore[arg-type,unused-ignore]
    filled = chunk.memory[: form.nbytes].view(form.plain).as_strided(form.shape, form.stride)
    return array, torch.from_numpy(array), filled


def _send_in_pieces(slot: Slot, carrier: Carrier) -> Tensor:
    """Through chunks that are about equally full."""
    form = slot.form
    memory = torch.empty(form.nbytes, dtype=torch.uint8, device=carrier.lane.device)
    for target, lines in _pieces(slot, memory, carrier.ring.chunk_bytes):
        carrier.carry(target, lambda chunk: copy_into(_over(chunk, lines), lines))  # noqa: B023
    slot.tensor = memory.view(form.dtype).as_strided(form.shape, form.stride).data
    return memory


def _flat(source: Array, order: Sequence[int]) -> Array:
    """The bytes as they are in memory, which has no gaps."""
    flat: Array = source.transpose(order).reshape(-1).view(np.uint8)
    return flat


def _over(chunk: Array, lines: Array) -> Array:
    """The first bytes of a chunk, as what they are to be."""
    over: Array = chunk[: lines.nbytes].view(native_dtype(lines.dtype)).reshape(lines.shape)
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


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Slots of one form, one after the other in memory that is shared."""

    form: Form
    slots: tuple[int, ...]
    """Which, of those that are sent."""
    begin: int
    each: int
    """Bytes from the begin of one to that of the next."""

    def write(self, chunk: Array, slots: Sequence[Slot]) -> None:
        """All of them, where they belong in the chunk."""
        form = self.form
        shape, strides = (len(self.slots), *form.shape), (self.each, *form.strides)
        places = np.ndarray(shape, form.native, chunk, self.begin, strides)  # type: ignore[arg-type,unused-ignore]
        if form.nbytes < PARALLEL_BYTES:
            for i, n in enumerate(self.slots):
                places[i] = slots[n].source
        else:
            for i, n in enumerate(self.slots):
                _copy_into(places[i, ...], slots[n].source, slots[n].over())

    def place(self, memory: Tensor, slots: Sequence[Slot]) -> None:
        """Give each its tensor. No views: writing into one must not mark the others as changed."""
        form, itemsize = self.form, self.form.native.itemsize
        first = self.begin // itemsize
        if len(self.slots) == 1:
            slots[self.slots[0]].tensor = memory.as_strided(form.shape, form.stride, first).data
            return
        shape, stride = (len(self.slots), *form.shape), (self.each // itemsize, *form.stride)
        for n, view in zip(self.slots, memory.as_strided(shape, stride, first).unbind(), strict=True):
            slots[n].tensor = view.data


@dataclass(frozen=True, eq=False, slots=True)
class Load:
    """Slots that share a chunk, and memory on the device."""

    runs: tuple[Run, ...]
    nbytes: int


@lru_cache(maxsize=64)
def _loads(forms: tuple[Form, ...], chunk_bytes: int) -> tuple[Load, ...]:
    """As many together as fit into a chunk: found once, looked up for all batches that look alike."""
    groups: dict[Form, list[int]] = {}
    for n, form in enumerate(forms):
        groups.setdefault(form, []).append(n)
    loads: list[Load] = []
    runs: list[Run] = []
    end = 0
    for form, slots in groups.items():
        each = _aligned(max(1, form.nbytes))
        while slots:
            n = (chunk_bytes - end) // each
            if n:
                runs.append(Run(form, tuple(slots[:n]), end, each))
                end += each * len(runs[-1].slots)
                slots = slots[n:]
            else:
                loads.append(Load(tuple(runs), end))
                runs, end = [], 0
    if runs:
        loads.append(Load(tuple(runs), end))
    return tuple(loads)


def _send_together(load: Load, slots: Sequence[Slot], carrier: Carrier) -> Tensor:
    memory = torch.empty(load.nbytes, dtype=torch.uint8, device=carrier.lane.device)

    def fill(chunk: Chunk) -> Tensor:
        for run in load.runs:
            run.write(chunk.array, slots)
        return chunk.view(load.nbytes, _as_bytes)  # type: ignore[no-any-return]

    carrier.carry_as(memory, fill)
    typed: dict[torch.dtype, Tensor] = {}
    for run in load.runs:
        dtype = run.form.dtype
        if dtype not in typed:
            typed[dtype] = memory.view(dtype)
        run.place(typed[dtype], slots)
    return memory


def _as_bytes(chunk: Chunk, nbytes: int) -> Tensor:
    return chunk.memory[:nbytes]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# ---- copies on the host


def copy_into(target: Array, source: Array) -> None:
    """Numbers of equal shape, in this machine's order: by all of torch's threads, where that pays."""
    _copy_into(target, source, tensor_over(source) if source.nbytes >= PARALLEL_BYTES else None)


def _copy_into(target: Array, source: Array, over: Tensor | None) -> None:
    if over is None:
        np.copyto(target, source)
    else:
        torch.from_numpy(target).copy_(over)


def tensor_over(array: Array, form: Form | None = None) -> Tensor | None:
    """The memory of an array that is not empty, to be read and not written; None if torch cannot have it."""
    form = form_of(array.dtype, array.shape, array.strides) if form is None else form
    if form is None or not form.readable:
        return None
    if array.flags.writeable:
        try:
            return torch.from_numpy(array)
        except TypeError:  # torch knows one of those that are alike to numpy
            return torch.from_numpy(array.view(form.native))
    # torch warns of arrays that are locked, and has no tensors that are.
    itemsize = array.dtype.itemsize
    extent = itemsize + sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    over = bytes_at(int(array.__array_interface__["data"][0]), extent).view(form.plain)
    return over.as_strided(array.shape, [n // itemsize for n in array.strides])


def is_pinned(address: int, nbytes: int) -> bool:
    """Whether all of it is. What is in nobody's pages but its own is, or is not, as a whole.

    The first and the last page may be pinned with a neighbour: memory of the heap does not begin with a page.
    """
    if not _is_pinned_at(address):
        return False
    last, page = address + nbytes - 1, mmap.PAGESIZE
    ends = {min(address // page * page + page, last), max(last // page * page - 1, address), last}
    return all(_is_pinned_at(one) for one in ends)


class _Answer(threading.local):
    """Where the driver writes to, in each thread: what kind of memory it is, and whether it is managed."""

    def __init__(self) -> None:
        self.kind, self.managed = ctypes.c_uint64(), ctypes.c_uint64()
        self.places = (ctypes.c_void_p * 2)(ctypes.addressof(self.kind), ctypes.addressof(self.managed))


_answer = _Answer()


def _is_pinned_at(address: int) -> bool:
    """Asked of the driver itself, which is far quicker than torch. As there, managed memory is not meant."""
    ask = _pointer_attributes()
    if ask is not None:
        kind, managed = _answer.kind, _answer.managed
        kind.value = managed.value = 0
        if ask(2, ATTRIBUTES, _answer.places, address) == 0:
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
