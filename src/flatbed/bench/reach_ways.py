"""Tables on the device, on the host and on disk, with the ways to their rows: flatbed's and others'."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import flatbed
from flatbed.bench import tables_cupy
from flatbed.bench.reach_measure import ReachSetting, Shape, Way, fill_
from flatbed.bench.reach_rows import (
    CUPY,
    FLATBED,
    PAGE_CACHE,
    TORCH,
    TORCH_DEVICE,
    TORCH_FILE,
    TORCH_PINNED,
)
from flatbed.cuda.host_memory import HostMemory, allocate
from flatbed.errors import FlatbedError
from flatbed.kernels import rows as ops
from flatbed.kernels.rows import RecordLocation
from flatbed.tables.record import WEIGHT, Field, Record
from flatbed.tables.storage.disk import DiskStorage

WaysOf: TypeAlias = Callable[[Shape], list[Way]]


@contextmanager
def on_device(nbytes: int, setting: ReachSetting) -> Iterator[WaysOf]:
    """Memory of the device, the same for all ways."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    fill_(memory)
    cupy = _cupy_or_why(setting)

    def ways(shape: Shape) -> list[Way]:
        table = shape.of(memory)

        def look(ids: Tensor) -> Tensor:
            return table[ids.to(table.device)]

        torchs = Way(
            TORCH_DEVICE,
            "device",
            lambda ids: table.index_select(0, ids),
            lambda ids, rows: table.index_copy_(0, ids, rows),
            look,
        )
        made = [_by_kernels(table, shape, "device", setting.device), torchs]
        if cupy:
            made.append(_by_cupy(cupy, lambda: cupy.from_dlpack(table), "device", look, setting.device))
        return made

    try:
        yield ways
    finally:
        _settle(setting, cupy)


@contextmanager
def on_host(nbytes: int, setting: ReachSetting) -> Iterator[WaysOf]:
    """Memory of the host, twice: as flatbed's tables have it, and for the others huge pages, pinned if it
    can be, which is the best they can get.
    """
    device, on_gpu = setting.device, setting.device.type == "cuda"
    with ExitStack() as held:
        ours = held.enter_context(_allocated(nbytes, device, kind=None))
        theirs = held.enter_context(_for_others(nbytes, device))
        cupy = _cupy_or_why(setting) if on_gpu and theirs.addressable else None
        held.callback(_settle, setting, cupy)
        for memory in (ours, theirs):
            fill_(memory.tensor)
        if not ours.addressable:
            setting.left_out(FLATBED, "the GPU cannot address host memory here")

        def ways(shape: Shape) -> list[Way]:
            made = []
            if ours.addressable:
                made.append(_by_kernels(shape.of(ours.tensor), shape, ours.kind, device))
            table = shape.of(theirs.tensor)
            made.append(_by_torch(TORCH, table, theirs.kind, device))
            if on_gpu:
                made.append(_by_pinned_torch(table, shape, theirs.kind, device))
            if cupy:
                over = partial(_cupy_over, cupy, table, device)
                made.append(_by_cupy(cupy, over, theirs.kind, lambda ids: table[ids], device))
            return made

        yield ways


@contextmanager
def on_disk(shape: Shape, setting: ReachSetting, folder: Path | None) -> Iterator[WaysOf]:
    """Two files of the same size, which the system has in memory: a flatbed table's, and one that torch maps.

    flatbed's writes go to the table's journal, as they do until a checkpoint.
    """
    with TemporaryDirectory(dir=folder, prefix="flatbed-rows-") as name, ExitStack() as held:
        device, path = setting.device, Path(name) / "rows.table"
        _write_table(path, shape)
        size = shape.n_rows, shape.n_words
        emb = flatbed.Embedding(
            *size, storage="disk", path=path, dtype=torch.float32, cache_rows=0, device=device
        )
        held.callback(emb.table.close, discard=True)
        access = emb.table.access

        def read(ids: Tensor) -> Tensor:
            return access.gather(ids).view(torch.float32)

        ours = Way(
            FLATBED,
            PAGE_CACHE,
            read,
            lambda ids, rows: access.scatter_(ids, rows.view(torch.uint8)),
            read,
        )
        others = _by_torch(TORCH_FILE, _mapped(Path(name) / "rows.bin", shape), PAGE_CACHE, device)
        for way in (ours, others):
            _touch(way, shape)
        yield lambda _: [ours, others]


# ---- the ways


def _by_kernels(table: Tensor, shape: Shape, memory: str, device: torch.device) -> Way:
    """flatbed's, which follow addresses; on a CPU, its reference."""
    place = RecordLocation(table.view(torch.uint8))

    def read(ids: Tensor) -> Tensor:
        found = ops.gather(place, ids.to(device, non_blocking=True), shape.row_bytes)
        return found.view(torch.float32)

    def write(ids: Tensor, rows: Tensor) -> None:
        ops.scatter_(place, ids.to(device, non_blocking=True), rows.view(torch.uint8))

    return Way(FLATBED, memory, read, write, lambda ids: table[ids.to(table.device)])


def _by_torch(name: str, table: Tensor, memory: str, device: torch.device) -> Way:
    def write(ids: Tensor, rows: Tensor) -> None:
        table[ids] = rows.cpu()

    return Way(name, memory, lambda ids: table[ids].to(device), write, lambda ids: table[ids])


def _by_pinned_torch(table: Tensor, shape: Shape, memory: str, device: torch.device) -> Way:
    """What torch indexes is not pinned, wherever it comes from: it is, if it is told where to put it."""
    between = torch.empty((shape.n_ids, shape.n_words), pin_memory=device.type == "cuda")

    def read(ids: Tensor) -> Tensor:
        return torch.index_select(table, 0, ids, out=between).to(device, non_blocking=True)

    def write(ids: Tensor, rows: Tensor) -> None:
        table.index_copy_(0, ids, between.copy_(rows))

    return Way(TORCH_PINNED, memory, read, write, lambda ids: table[ids])


def _by_cupy(
    cupy: Any, make: Callable[[], Any], memory: str, look: Callable[[Tensor], Tensor], device: torch.device
) -> Way:
    """CuPy's kernels, which read memory of the host in place, too."""
    array = lru_cache(maxsize=1)(make)  # with the first call, where it is seen whether it can be made

    def known(ids: Tensor) -> Any:
        return cupy.from_dlpack(ids.to(device, non_blocking=True))

    def write(ids: Tensor, rows: Tensor) -> None:
        array()[known(ids)] = cupy.from_dlpack(rows)

    return Way(CUPY, memory, lambda ids: from_dlpack(array()[known(ids)]), write, look)


def _cupy_or_why(setting: ReachSetting) -> Any:
    """CuPy's module; None where there is none, or no GPU."""
    if setting.device.type != "cuda":
        return None
    if not tables_cupy.have_cupy():
        setting.left_out(CUPY, "it is not installed")
        return None
    try:
        return import_module("cupy")
    except Exception as error:  # of any kind: it is not ours
        setting.left_out(CUPY, f"{type(error).__name__}: {error}")
        return None


def _cupy_over(cupy: Any, table: Tensor, device: torch.device) -> Any:
    """A CuPy array over memory of the host that the GPU can address."""
    gpu = torch.cuda.current_device() if device.index is None else device.index
    known = cupy.cuda.UnownedMemory(table.data_ptr(), table.nbytes, table, gpu)
    return cupy.ndarray(tuple(table.shape), dtype=cupy.float32, memptr=cupy.cuda.MemoryPointer(known, 0))


def _settle(setting: ReachSetting, cupy: Any) -> None:
    """Before memory goes: nobody may be using it."""
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    if cupy:
        tables_cupy.free_pool()


# ---- their memory


@contextmanager
def _allocated(nbytes: int, device: torch.device, *, kind: str | None) -> Iterator[HostMemory]:
    held = allocate(nbytes, device=device, kind=kind)
    try:
        yield held
    finally:
        held.close()


@contextmanager
def _for_others(nbytes: int, device: torch.device) -> Iterator[HostMemory]:
    """Pinned for a GPU, if the driver allows."""
    with ExitStack() as held:
        try:
            found = held.enter_context(_allocated(nbytes, device, kind="registered"))
        except FlatbedError:
            found = held.enter_context(_allocated(nbytes, device, kind="pageable"))
        yield found


def _write_table(path: Path, shape: Shape) -> None:
    record = Record((Field(WEIGHT, torch.float32, shape.n_words),))

    def fill(start: int, stop: int, records: Tensor) -> None:
        fill_(records.view(-1), start * shape.n_words)

    DiskStorage.create(path, record, shape.n_rows, fill=fill).close()


def _mapped(path: Path, shape: Shape) -> Tensor:
    size = shape.n_rows * shape.n_words
    table = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32)
    fill_(table.view(torch.uint8))
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)  # nothing is to be written back while times are taken
    finally:
        os.close(descriptor)
    return table.view(shape.n_rows, shape.n_words)


def _touch(way: Way, shape: Shape) -> None:
    """Read all rows once: the system has them in memory, and the process has its mapping."""
    for start in range(0, shape.n_rows, shape.n_ids):
        way.look(torch.arange(start, min(start + shape.n_ids, shape.n_rows)))
