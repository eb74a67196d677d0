"""The ways of rows from an array to a device: read by a kernel, or gathered by the host."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from functools import partial
from math import gcd
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda import driver as cuda_host
from flatbed.cuda import host_memory as memory
from flatbed.cuda.driver import DriverError
from flatbed.cuda.streams import stream_for
from flatbed.data.batches import record_stream
from flatbed.data.packing import bytes_at, copy_into, is_pinned, send, slot_of_array
from flatbed.data.pins import let_go
from flatbed.data.staging import Array, Carrier, CudaLane, ring_for
from flatbed.kernels import rows as ops
from flatbed.kernels.dispatch import use_triton
from flatbed.kernels.rows import RecordLocation
from flatbed.tables.ids import to_device

BLOCK = 16  # bytes that kernels read at a time, and what their addresses are multiples of
SPAN = 2048  # bytes of a row that a program has in flight: more take too many registers
READ_ONLY = 8  # CU_MEMHOSTREGISTER_…
COPIED_AT_ONCE = 64 << 20
GATHERED_AT_ONCE = 4 << 20  # the bus takes one while the next is gathered
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Way(Protocol):
    """How rows come to a device."""

    name: str
    memory: str | None
    """What kind of memory they come from, or why, where that is not the array's own."""

    def gather(self, ids: Tensor) -> Tensor:
        """Rows of these numbers, int64 on any device: (n,) → (n, bytes of a row), contiguous."""

    def close(self) -> None:
        """Give everything back."""


def find_way(array: Array, device: torch.device, *, copy: bool | None) -> Way:
    """The best that there is."""
    if device.type == "cpu" or not array.nbytes:
        return OnHost(array)
    why: str | None = None
    if use_triton(device):
        if copy is not True and _rows_are_whole(array):
            try:
                return in_place(array, device)
            except DriverError as error:  # other ways are left
                why = str(error)
        if copy is True or (copy is None and array.nbytes < memory.available_bytes() // 2):
            way = copied(array, device)
            if way is not None:
                return way
    return Staged(array, device, why)


def _rows_are_whole(array: Array) -> bool:
    """Whether each row is a run of bytes, one further on than the other, numbers in the machine's order."""
    row = array[0]
    return bool(array.dtype.isnative and row.flags.c_contiguous and array.strides[0] >= row.nbytes)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _extent(array: Array) -> int:
    """Bytes from the first row to the end of the last."""
    return int((len(array) - 1) * array.strides[0] + array[0].nbytes)


# ---- on a CPU


class OnHost:
    """Indexing by torch's threads, over the array's memory."""

    name = "cpu"
    memory: str | None = None

    def __init__(self, array: Array) -> None:
        self.array = array
        self.words = words_over(array) if array.nbytes and _rows_are_whole(array) else None

    def gather(self, ids: Tensor) -> Tensor:
        ids = ids.cpu()
        if self.words is not None:
            return self.words.index_select(0, ids).view(torch.uint8)
        return torch.from_numpy(in_order(self.array, ids.numpy()))

    def close(self) -> None:
        self.words = None


def words_over(array: Array) -> Tensor:
    """The memory of rows that are whole, as words as large as can be: (rows, words of a row)."""
    n, stride, row_bytes, address = len(array), array.strides[0], array[0].nbytes, _address(array)
    word = gcd(8, stride, row_bytes, address)
    rows = bytes_at(address, _extent(array)).as_strided((n, row_bytes), (stride, 1))
    return rows.view(WORDS[word])


def in_order(array: Array, ids: Array) -> Array:
    """Rows of any array, as bytes in the machine's order."""
    found = array[ids]
    found = np.ascontiguousarray(found, found.dtype.newbyteorder("="))
    return found.reshape(len(found), -1).view(np.uint8)


# ---- read by a kernel


class Addressed:
    """Memory of the host that kernels read: rows of any size, anywhere in it.

    Kernels read blocks of 16 bytes. Where rows do not begin at multiples of that, the blocks around each are
    read, and the row is cut out on the device.
    """

    def __init__(self, name: str, memory: str | None, address: int, layout: Layout, *, owner: Any) -> None:
        self.name = name
        self.memory = memory
        self.layout = layout
        self._owner = owner  # whose end gives the memory back
        self._into = address % BLOCK
        self._n_blocks = -(-(self._into + layout.extent) // BLOCK)
        self._blocks = bytes_at(address - self._into, self._n_blocks * BLOCK).view(-1, BLOCK)

    def gather(self, ids: Tensor) -> Tensor:
        stride, row_bytes, device = self.layout.stride, self.layout.row_bytes, self.layout.device
        step = gcd(stride, BLOCK)  # between the places in a block where rows may begin
        if step == BLOCK:
            span = _blocks_of(self._into + row_bytes)
            found = self._read(to_device(ids * (stride // BLOCK), device), span)
            return found[:, self._into : self._into + row_bytes].contiguous()
        span = _blocks_of(BLOCK - step + self._into % step + row_bytes)
        begin = ids * stride + self._into
        first = (begin // BLOCK).clamp(max=self._n_blocks - span // BLOCK)  # not beyond the last row's end
        both = to_device(torch.stack([first, begin - first * BLOCK]), device)
        return _cut(self._read(both[0], span), both[1].unsqueeze(1), row_bytes, self._into % step, step)

    def _read(self, first: Tensor, nbytes: int) -> Tensor:
        """Blocks from these on: (n,) → (n, nbytes)."""
        place = RecordLocation(self._blocks)
        if nbytes <= SPAN:
            return ops.gather(place, first, nbytes)
        n_spans, rest = divmod(nbytes, SPAN)
        starts = torch.arange(n_spans, device=first.device) * (SPAN // BLOCK)
        spans = ops.gather(place, (first.unsqueeze(1) + starts).flatten(), SPAN).view(len(first), -1)
        if not rest:
            return spans
        return torch.cat([spans, ops.gather(place, first + n_spans * (SPAN // BLOCK), rest)], 1)

    def close(self) -> None:
        self._owner.close()


class Layout:
    """Where rows lie, and who reads them."""

    def __init__(self, device: torch.device, *, row_bytes: int, stride: int, extent: int) -> None:
        self.device = device
        self.row_bytes = row_bytes
        self.stride = stride
        self.extent = extent
        """Bytes from the first row to the end of what may be read."""

    @property
    def largest_span(self) -> int:
        """Bytes that are read for a row, at most."""
        return _blocks_of(2 * BLOCK + self.row_bytes)


def _blocks_of(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _cut(blocks: Tensor, shift: Tensor, row_bytes: int, least: int, step: int) -> Tensor:
    """The row in each line of blocks, which begins after so many bytes: (n, span), (n, 1) → (n, row)."""
    word = gcd(step, row_bytes, least or step, 8)
    lines, width = blocks.view(WORDS[word]), row_bytes // word
    found = lines[:, least // word : least // word + width].contiguous()
    for begin in range(least + step, blocks.shape[1] - row_bytes + 1, step):
        there = lines[:, begin // word : begin // word + width]
        found = torch.where(shift == begin, there, found)
    return found.view(torch.uint8)


# ---- memory that kernels reach


_pinned: weakref.WeakSet[Registered] = weakref.WeakSet()


class Registered:
    """Pages of somebody else's memory, pinned for GPUs to address; unpinned at its end, whose it is kept.

    The first and the last of them may have bytes of neighbours, too, and a page is pinned only once: who is
    found to be pinned in part shares what there is, and pins the rest.
    """

    def __init__(self, array: Array, begin: int, end: int, gpu: int, driver: cuda_host.Driver) -> None:
        self.begin, self.end = begin, end
        _register(driver, gpu, begin, end - begin, read_only=not array.flags.writeable)
        self._free = weakref.finalize(self, _unregister, os.getpid(), driver, gpu, begin, array)
        self.users = 0
        _pinned.add(self)

    def close(self) -> None:
        """By one of its users; the last one unpins."""
        self.users -= 1
        if self.users == 0:
            self._free()
            _pinned.discard(self)


def _register(driver: cuda_host.Driver, gpu: int, address: int, nbytes: int, *, read_only: bool) -> None:
    flags = cuda_host.PORTABLE | cuda_host.DEVICEMAP
    with driver._context(gpu):
        if read_only:
            try:
                driver._call("cuMemHostRegister_v2", address, nbytes, flags | READ_ONLY)
            except DriverError:
                pass  # not known to all drivers, nor needed for memory that is only marked so
            else:
                return
        driver._call("cuMemHostRegister_v2", address, nbytes, flags)


def _unregister(process: int, driver: cuda_host.Driver, gpu: int, address: int, array: Array) -> None:
    if os.getpid() == process:
        memory._when_allowed(partial(_unpin, driver, gpu, address, array))


def _unpin(driver: cuda_host.Driver, gpu: int, address: int, array: Array) -> None:
    """With the array, which must not go before."""
    driver.unregister(gpu, address)


def in_place(array: Array, device: torch.device) -> Addressed:
    """The array's own memory; DriverError where kernels cannot have it."""
    layout = Layout(
        device, row_bytes=array[0].nbytes, stride=array.strides[0] or array[0].nbytes, extent=_extent(array)
    )
    if layout.extent < layout.largest_span:
        raise DriverError("there are too few bytes to read blocks around rows")
    if _is_file(array) and layout.extent > memory.available_bytes():
        raise DriverError("to pin a file needs memory for all of it")
    driver, gpu = cuda_host.driver(), device.index
    if driver is None or not driver.can_register(gpu):
        raise DriverError("kernels do not see registered memory under its own address")
    page = mmap.PAGESIZE
    begin = _address(array) // page * page
    end = -(-(_address(array) + layout.extent) // page) * page
    let_go(begin, end)  # a feeder's: it would end that when it likes
    shared = [one for one in list(_pinned) if one.begin < end and begin < one.end]
    if not shared and _was_pinned(_address(array), layout.extent):
        return Addressed("in place", None, _address(array), layout, owner=Borrowed(array))
    holders = [*shared, *(Registered(array, *gap, gpu, driver) for gap in _gaps(begin, end, shared))]
    for one in holders:
        one.users += 1
    owner = holders[0] if len(holders) == 1 else Holders(holders)
    return Addressed("in place", None, _address(array), layout, owner=owner)


def _gaps(begin: int, end: int, taken: list[Registered]) -> Iterator[tuple[int, int]]:
    """What is left of a range."""
    for one in sorted(taken, key=lambda one: one.begin):
        if begin < one.begin:
            yield begin, one.begin
        begin = max(begin, one.end)
    if begin < end:
        yield begin, end


class Holders:
    """All that an array's pages are pinned by, where a part of them is shared with a neighbour."""

    def __init__(self, holders: list[Registered]) -> None:
        self._holders = holders

    def close(self) -> None:
        """By one of the users of each."""
        for one in self._holders:
            one.close()


class Borrowed:
    """Memory that somebody else has pinned."""

    def __init__(self, array: Array) -> None:
        self.array: Array | None = array

    def close(self) -> None:
        torch.cuda.synchronize()  # kernels may be reading
        self.array = None


def _was_pinned(address: int, nbytes: int) -> bool:
    """By torch or anybody else: to pin it again would be refused."""
    return is_pinned(address, nbytes)


def copied(array: Array, device: torch.device) -> Addressed | None:
    """A copy in memory that kernels read fastest; None where they cannot reach any."""
    row_bytes = array[0].nbytes
    extent = len(array) * row_bytes
    layout = Layout(device, row_bytes=row_bytes, stride=row_bytes, extent=extent + _blocks_of(row_bytes) + 64)
    held = memory.allocate(layout.extent, device=device)
    if not held.addressable:
        held.close()
        return None
    target = held.tensor[:extent].numpy().view(array.dtype.newbyteorder("=")).reshape(array.shape)
    step = max(1, COPIED_AT_ONCE // max(1, row_bytes))
    for i in range(0, len(array), step):
        copy_into(target[i : i + step], array[i : i + step])
    return Addressed("copied", held.kind, held.tensor.data_ptr(), layout, owner=held)


def _is_file(array: Any) -> bool:
    while array is not None:
        if isinstance(array, np.memmap | mmap.mmap):
            return True
        array = getattr(array, "base", None) if not isinstance(array, memoryview) else array.obj
    return False


# ---- gathered by the host


class Staged:
    """Rows that torch's threads gather into pinned memory, from where they are copied."""

    name = "staged"

    def __init__(self, array: Array, device: torch.device, why: str | None = None) -> None:
        self.array: Array | None = array
        self.memory = None if why is None else f"not in place: {why}"
        ring = ring_for(device)
        self.carrier = Carrier(ring, CudaLane(device, stream_for(device, "batches")))

    def gather(self, ids: Tensor) -> Tensor:
        assert self.array is not None
        lane = self.carrier.lane
        with lane.within():
            found = gathered(self.array, ids.cpu(), self.carrier)
            arrived = lane.mark()
        current = torch.cuda.current_stream(lane.device)
        current.wait_event(arrived)
        record_stream(found, current)
        return found

    def close(self) -> None:
        self.array = None


def gathered(array: Array, ids: Tensor, carrier: Carrier) -> Tensor:
    """Rows through the ring: (n,) → (n, bytes of a row) on the device."""
    row_bytes, chunk_bytes = array[0].nbytes, carrier.ring.chunk_bytes
    if not _rows_are_whole(array) or row_bytes > chunk_bytes:
        slot = slot_of_array(in_order(array, ids.numpy()))
        assert slot is not None
        send([slot], carrier)
        return slot.tensor  # type: ignore[no-any-return]
    words = words_over(array)
    found = torch.empty((len(ids), row_bytes), dtype=torch.uint8, device=carrier.lane.device)
    step = max(1, min(GATHERED_AT_ONCE, chunk_bytes) // row_bytes)
    for first in range(0, len(ids), step):
        target, part = found[first : first + step], ids[first : first + step]

        def gather(chunk: Array) -> None:
            lines = torch.from_numpy(chunk[: target.numel()]).view(target.shape)  # noqa: B023
            torch.index_select(words, 0, part, out=lines.view(words.dtype))  # noqa: B023

        carrier.carry(target.view(-1), gather)
    return found
