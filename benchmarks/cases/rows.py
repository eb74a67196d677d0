"""Random rows of tables on the device, on the host and on disk, read and written by several variants.

Ids are unique and fresh in every call, and the rows of every timed call are checked. Ids of tables on the
device are on the device, and those of tables on the host and on disk are in host memory, pinned for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import flatbed
from benchmarks import harness
from benchmarks.harness import SEED, Options, Plan, each, time_in_turns
from benchmarks.rows import Row, gb_per_s

CASES = ("device", "host", "disk")
GB = 10**9
TABLE_BYTES = {"device": (8 * GB, GB, 32 * GB), "host": (8 * GB, GB, 32 * GB), "disk": (GB // 4, GB)}
"""Rows of all sizes are read from a table of the first size."""


class Shape(NamedTuple):
    """Size of a table of fp32, and the number of ids per call."""

    table_bytes: int
    row_bytes: int
    n_ids: int

    @property
    def size(self) -> tuple[int, int]:
        """Rows and elements per row."""
        return self.table_bytes // self.row_bytes, self.row_bytes // 4


class Variant(NamedTuple):
    """Functions that read rows to the computing device and write them back."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor], object]

    def read_drawn(self, drawn: tuple[Tensor, Tensor]) -> Tensor:
        return self.read(drawn[0])

    def write_drawn(self, drawn: tuple[Tensor, Tensor]) -> None:
        self.write(*drawn)


def shapes(storage: str, options: Options) -> list[Shape]:
    """List sizes: rows of several sizes in one table, then tables of several sizes."""
    if options.is_small:
        return [Shape(1 << 20, row_bytes, 64) for row_bytes in (64, 512)]
    first, *others = TABLE_BYTES[storage]
    sizes = [(first, row_bytes) for row_bytes in (64, 256, 512, 1536, 4096)]
    sizes += [(table_bytes, 512) for table_bytes in others]
    return [Shape(table, row, min(65_536, table // row // 4)) for table, row in sizes]


def run(options: Options) -> Iterator[Row]:
    """Measure the storages that were asked for."""
    bus = harness.bus_gb_per_s(options.device)
    options.report(f"a plain copy: {bus[0]:.1f} GB/s to the device, {bus[1]:.1f} GB/s back")
    for storage in CASES:
        for shape in shapes(storage, options) if options.wants(storage) else ():
            yield from run_shape(storage, shape, bus, options)
            harness.free_memory(options.device)


def run_shape(storage: str, shape: Shape, bus: tuple[float, float], options: Options) -> Iterator[Row]:
    """Measure all variants over tables of one size."""
    device, (n_rows, dim) = options.device, shape.size
    plan = Plan(turns=options.steps or 7, warm_up=2, synchronized=1)
    by_gpu = storage == "device" and options.on_gpu
    random, filler = np.random.default_rng(SEED), torch.Generator(device).manual_seed(SEED)

    def draw(n: int) -> list[tuple[Tensor, Tensor]]:
        return [draw_one() for _ in range(n)]

    def draw_one() -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(random.choice(n_rows, shape.n_ids, replace=False))
        ids = ids.to(device) if storage == "device" else ids.pin_memory() if options.on_gpu else ids
        return ids, torch.randn((shape.n_ids, dim), generator=filler, device=device)

    with make_variants(storage, shape, options) as variants:
        chosen = options.choose(variants)
        clock = harness.gpu_ms if by_gpu else harness.wall_ms
        writes = {name: each(variant.write_drawn) for name, variant in chosen.items()}
        written = time_in_turns(writes, draw, plan, options, clock=clock)
        # Rows are written before they are read, so that every byte is known.
        read = time_in_turns(
            {name: each(chosen[name].read_drawn) for name in written},
            draw,
            plan,
            options,
            clock=clock,
            before=lambda name, value: chosen[name].write(*value),
            check=lambda found, value: harness.same_bits(found, value[1]),
        )
    nbytes = shape.n_ids * shape.row_bytes
    setting = {"storage": storage, "clock": "gpu" if by_gpu else "wall", "table_bytes": shape.table_bytes}
    setting |= {"row_bytes": shape.row_bytes, "ids": shape.n_ids}
    for name, readings in read.items():
        metrics = {
            "read_gb_per_s": gb_per_s(nbytes, readings.synchronized),
            "write_gb_per_s": gb_per_s(nbytes, written[name].synchronized),
            "copy_to_gb_per_s": bus[0],
            "copy_back_gb_per_s": bus[1],
        }
        yield options.row("rows random", name, setting, metrics, n_samples=plan.turns, ok=readings.ok)


@contextmanager
def make_variants(storage: str, shape: Shape, options: Options) -> Iterator[dict[str, Variant]]:
    """Make a flatbed table and a tensor in the same storage. Files stay in the page cache."""
    device = options.device
    with TemporaryDirectory(dir=options.folder) as folder:
        more: dict[str, Any] = {} if storage == "device" else {"cache_rows": 0}
        if storage == "disk":
            more["path"] = Path(folder) / "rows.bed"
        emb = flatbed.Embedding(*shape.size, storage=storage, device=device, init="zeros", **more)
        variants = {"flatbed read_rows, write_rows": Variant(emb.read_rows, emb.write_rows)}
        if storage == "device":
            table = torch.zeros(shape.size, device=device)
            variants["torch index_select"] = Variant(
                lambda ids: table.index_select(0, ids), lambda ids, rows: table.index_copy_(0, ids, rows)
            )
        elif storage == "host":
            table = torch.zeros(shape.size)
            variants["torch index, .to()"] = by_torch(table, device)
            if options.on_gpu:
                variants["torch, pinned staging"] = by_staged_torch(table, shape, device)
        else:
            n_elements = shape.size[0] * shape.size[1]
            table = torch.from_file(str(Path(folder) / "rows.bin"), shared=True, size=n_elements)
            variants["torch mapped, .to()"] = by_torch(table.zero_().view(shape.size), device)
        yield variants
        emb.table.close(discard=True)


def by_torch(table: Tensor, device: torch.device) -> Variant:
    """Index on the CPU and copy."""

    def write(ids: Tensor, rows: Tensor) -> None:
        table[ids] = rows.cpu()

    return Variant(lambda ids: table[ids].to(device), write)


def by_staged_torch(table: Tensor, shape: Shape, device: torch.device) -> Variant:
    """Index on the CPU into pinned memory and copy: the fastest variant with torch alone."""
    staging = torch.empty((shape.n_ids, shape.size[1]), pin_memory=True)

    def read(ids: Tensor) -> Tensor:
        return torch.index_select(table, 0, ids, out=staging).to(device, non_blocking=True)

    return Variant(read, lambda ids, rows: table.index_copy_(0, ids, staging.copy_(rows)))
