"""Random rows of tables on the device, on the host and on disk, read and written by several variants.

Ids are unique and fresh in every call, and the rows of every timed call are checked. Ids are on the host, in
pinned memory, for tables on the host and on disk, and on the device for tables there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import flatbed
from benchmarks.harness import (
    SEED,
    Options,
    bus_gb_per_s,
    call_in_turns,
    free_memory,
    gpu_ms,
    same_bits,
    unique_ids,
    wall_ms,
)
from benchmarks.rows import Row, gb_per_s

CASES = ("device", "host", "disk")
OURS = "flatbed read_rows, write_rows"
WARM_UP = 2
GB = 10**9


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a table of fp32, and the number of ids per call."""

    table_bytes: int
    row_bytes: int
    n_ids: int

    @property
    def dim(self) -> int:
        return self.row_bytes // 4

    @property
    def n_rows(self) -> int:
        return self.table_bytes // self.row_bytes


@dataclass(frozen=True, slots=True)
class Variant:
    """Functions that read rows to the computing device and write them back."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor], object]


def shapes(storage: str, options: Options) -> list[Shape]:
    """List sizes: rows of several sizes in one table, then tables of several sizes."""
    if options.is_small:
        return [Shape(1 << 20, row_bytes, 64) for row_bytes in (64, 512)]
    table = {"device": 8 * GB, "host": 8 * GB, "disk": GB // 4}[storage]
    tables = {"device": (GB, 32 * GB), "host": (GB, 32 * GB), "disk": (GB,)}[storage]
    sizes = [Shape(table, row_bytes, 65_536) for row_bytes in (64, 256, 512, 1536, 4096)]
    sizes += [Shape(nbytes, 512, 65_536) for nbytes in tables]
    return [Shape(s.table_bytes, s.row_bytes, min(s.n_ids, s.n_rows // 4)) for s in sizes]


def run(options: Options) -> Iterator[Row]:
    """Measure the storages that were asked for."""
    to, back = bus_gb_per_s(options.device)
    options.report(f"a plain copy of pinned memory: {to:.1f} GB/s to the device, {back:.1f} GB/s back")
    for storage in CASES:
        if options.wants(storage):
            for shape in shapes(storage, options):
                yield from run_shape(storage, shape, (to, back), options)
                free_memory(options.device)


def run_shape(storage: str, shape: Shape, bus: tuple[float, float], options: Options) -> Iterator[Row]:
    """Measure all variants over tables of one size."""
    device, samples = options.device, options.steps or 7
    by_gpu = storage == "device" and options.on_gpu
    clock = gpu_ms if by_gpu else wall_ms
    generator, filler = torch.Generator().manual_seed(SEED), torch.Generator(device).manual_seed(SEED)

    def draw() -> tuple[Tensor, Tensor]:
        ids = unique_ids(shape.n_rows, shape.n_ids, generator)
        ids = ids.to(device) if storage == "device" else ids.pin_memory() if options.on_gpu else ids
        return ids, torch.randn((shape.n_ids, shape.dim), generator=filler, device=device)

    with STORAGES[storage](shape, options) as variants:
        chosen: dict[str, Variant] = options.choose(variants)
        common: dict[str, Any] = {"turns": samples, "warm_up": WARM_UP, "clock": clock}
        writes = {name: partial(_write, variant) for name, variant in chosen.items()}
        written = call_in_turns(writes, draw, options, **common)
        # Rows are written before they are read, so that every byte is known.
        reads = {name: partial(_read, chosen[name]) for name in written}
        read = call_in_turns(
            reads,
            draw,
            options,
            before=lambda name, value: chosen[name].write(*value),
            check=lambda found, value: same_bits(found, value[1]),
            **common,
        )
    nbytes = shape.n_ids * shape.row_bytes
    setting = {
        "storage": storage,
        "clock": "gpu" if by_gpu else "wall",
        "table_bytes": shape.table_bytes,
        "row_bytes": shape.row_bytes,
        "ids": shape.n_ids,
    }
    for name in read:
        metrics = {
            "read_gb_per_s": gb_per_s(nbytes, read[name].times),
            "write_gb_per_s": gb_per_s(nbytes, written[name].times),
            "copy_to_gb_per_s": bus[0],
            "copy_back_gb_per_s": bus[1],
        }
        yield options.row(
            "rows", "random", name, setting=setting, metrics=metrics, n_samples=samples, ok=read[name].ok
        )


def _write(variant: Variant, value: tuple[Tensor, Tensor]) -> None:
    variant.write(*value)


def _read(variant: Variant, value: tuple[Tensor, Tensor]) -> Tensor:
    return variant.read(value[0])


# ---- storages


Variants = Iterator[dict[str, Variant]]


@contextmanager
def on_device(shape: Shape, options: Options) -> Variants:
    """Make a flatbed table and a tensor on the device."""
    with embedding(shape, options, storage="device") as emb:
        table = torch.zeros((shape.n_rows, shape.dim), device=options.device)
        yield {
            OURS: Variant(emb.read_rows, emb.write_rows),
            "torch index_select": Variant(
                lambda ids: table.index_select(0, ids),
                lambda ids, rows: table.index_copy_(0, ids, rows),
            ),
        }


@contextmanager
def on_host(shape: Shape, options: Options) -> Variants:
    """Make a flatbed table and a tensor in host memory."""
    with embedding(shape, options, storage="host", cache_rows=0) as emb:
        table = torch.zeros((shape.n_rows, shape.dim))
        variants = {
            OURS: Variant(emb.read_rows, emb.write_rows),
            "torch index, .to()": by_torch(table, options.device),
        }
        if options.on_gpu:
            variants["torch, pinned staging"] = by_staged_torch(table, shape, options.device)
        yield variants


@contextmanager
def on_disk(shape: Shape, options: Options) -> Variants:
    """Make a flatbed table and a file mapped by torch. Both files stay in the page cache."""
    with TemporaryDirectory(dir=options.folder, prefix="flatbed-rows-") as name:
        path = Path(name)
        with embedding(shape, options, storage="disk", cache_rows=0, path=path / "rows.bed") as emb:
            n_elements = shape.n_rows * shape.dim
            file = torch.from_file(str(path / "rows.bin"), shared=True, size=n_elements, dtype=torch.float32)
            table = file.zero_().view(shape.n_rows, shape.dim)
            yield {
                OURS: Variant(emb.read_rows, emb.write_rows),
                "torch mapped, .to()": by_torch(table, options.device),
            }


STORAGES: dict[str, Any] = {"device": on_device, "host": on_host, "disk": on_disk}


@contextmanager
def embedding(shape: Shape, options: Options, **arguments: Any) -> Iterator[flatbed.Embedding]:
    """Make a table of zeros, and discard it afterwards."""
    emb = flatbed.Embedding(
        shape.n_rows, shape.dim, device=options.device, dtype=torch.float32, init="zeros", **arguments
    )
    try:
        yield emb
    finally:
        emb.table.close(discard=True)


def by_torch(table: Tensor, device: torch.device) -> Variant:
    """Index on the CPU and copy."""

    def write(ids: Tensor, rows: Tensor) -> None:
        table[ids] = rows.cpu()

    return Variant(lambda ids: table[ids].to(device), write)


def by_staged_torch(table: Tensor, shape: Shape, device: torch.device) -> Variant:
    """Index on the CPU into pinned memory and copy: the fastest variant with torch alone."""
    staging = torch.empty((shape.n_ids, shape.dim), pin_memory=True)

    def read(ids: Tensor) -> Tensor:
        return torch.index_select(table, 0, ids, out=staging).to(device, non_blocking=True)

    return Variant(read, lambda ids, rows: table.index_copy_(0, ids, staging.copy_(rows)))
