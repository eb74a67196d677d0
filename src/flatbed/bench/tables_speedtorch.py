"""SpeedTorch's own benchmark: random rows of a large table on the host, to the GPU and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flatbed
from flatbed.bench import tables_cupy
from flatbed.bench.measure import free_memory
from flatbed.bench.tables_measure import (
    SEED,
    WARM_UP,
    distinct_ids,
    number_,
    read_each,
    same_bits,
    sample,
    wall_time,
)
from flatbed.bench.tables_move import MoveSetting, Shape, move_row
from flatbed.bench.tables_rows import CUPY, CUPY_GPU, KERNEL, ROWS, TORCH, MoveRow
from flatbed.kernels import rows as ops
from flatbed.kernels.rows import RecordLocation
from flatbed.tables.storage.memory import MemoryStorage

DIM = 128
CASE = "speedtorch"


@dataclass(frozen=True, slots=True)
class Mover:
    """A way to move rows of a table. Ids come from the host as each way likes them best."""

    way: str
    memory: str
    prepare: Callable[[Tensor], Any]
    to: Callable[[Any], Tensor]
    back: Callable[[Any, Tensor], object]


@dataclass(frozen=True, slots=True)
class Peer:
    """Ways over one table, (rows, DIM) of fp32 as the CPU sees it; it exists while they are measured."""

    table: Tensor
    movers: tuple[Mover, ...]


def run(setting: MoveSetting, *, left_out: Callable[[str, str], object]) -> Iterator[MoveRow]:
    """Rows as they are found; a peer that does not run here is named and left out."""
    shape = Shape(setting.table_bytes, 4 * DIM)
    for make in (_flatbed, _torch):
        yield from _measured(setting, shape, make)
        free_memory(setting.device)
    if setting.device.type != "cuda":
        return
    if not tables_cupy.have_cupy():
        left_out(CUPY, "it is not installed")
        return
    try:
        yield from _measured(setting, shape, _cupy)
    except Exception as error:  # of any kind: it must not cost what comes after it
        left_out(CUPY, f"{type(error).__name__}: {error}")
    finally:
        free_memory(setting.device)


def _measured(setting: MoveSetting, shape: Shape, make: Any) -> Iterator[MoveRow]:
    with make(shape.n_rows, setting.device) as peer:
        for mover in peer.movers:
            yield from _both_ways(setting, shape, peer.table, mover)


@contextmanager
def _flatbed(n_rows: int, device: torch.device) -> Iterator[Peer]:
    emb = flatbed.Embedding(n_rows, DIM, storage="host", device=device, init="zeros")
    tier = emb.table.store.ensure_layout()
    try:
        assert isinstance(tier, MemoryStorage)
        assert tier.memory is not None
        memory = tier.memory
        number_(memory.view(-1))
        kind = getattr(getattr(tier, "_allocation", None), "kind", "unknown")
        movers = [Mover(ROWS, kind, _as_is, emb.read_rows, emb.write_rows)]
        if emb.table.access.place is not None:
            kernel = Mover(
                KERNEL,
                kind,
                lambda ids: ids.to(device),
                lambda ids: ops.gather(RecordLocation(memory), ids, 4 * DIM).view(torch.float32),
                lambda ids, rows: ops.scatter_(RecordLocation(memory), ids, rows.view(torch.uint8)),
            )
            movers.insert(0, kernel)
        yield Peer(memory.view(torch.float32), tuple(movers))
    finally:
        emb.table.close()


@contextmanager
def _torch(n_rows: int, device: torch.device) -> Iterator[Peer]:
    table = torch.empty((n_rows, DIM))
    number_(table.view(-1).view(torch.uint8))

    def back(ids: Tensor, rows: Tensor) -> None:
        table[ids] = rows.cpu()

    yield Peer(table, (Mover(TORCH, "pageable", _as_is, lambda ids: table[ids].to(device), back),))


@contextmanager
def _cupy(n_rows: int, device: torch.device) -> Iterator[Peer]:
    pinned = tables_cupy.PinnedTable(n_rows, DIM)
    number_(pinned.memory)
    on_host = Mover(CUPY, "pinned", _as_numpy, pinned.read, pinned.write)
    on_gpu = Mover(
        CUPY_GPU, "pinned", lambda ids: tables_cupy.to_cupy(ids.to(device)), pinned.read, pinned.write
    )
    try:
        yield Peer(pinned.memory.view(torch.float32).view(n_rows, DIM), (on_host, on_gpu))
    finally:
        torch.cuda.synchronize(device)
        tables_cupy.free_pool()


def _as_is(ids: Tensor) -> Tensor:
    return ids


def _as_numpy(ids: Tensor) -> Any:
    """As SpeedTorch recommends."""
    return ids.numpy().astype(np.int32)


def _both_ways(setting: MoveSetting, shape: Shape, table: Tensor, mover: Mover) -> Iterator[MoveRow]:
    device = setting.device
    generator = torch.Generator().manual_seed(SEED)
    n = WARM_UP + setting.repeats
    ids = [distinct_ids(shape.n_rows, setting.n_ids, generator) for _ in range(2 * n)]
    batches = [mover.prepare(one) for one in ids]
    looked_at = sample(setting.n_ids)
    labels: Any = {"case": CASE, "way": mover.way, "memory": mover.memory, "clock": "wall"}

    found: list[Tensor] = []

    def to(batch: Any) -> None:
        found[:] = [mover.to(batch)]

    times = read_each(to, batches[:n], device, clock=wall_time)
    ok = same_bits(found[0][looked_at.to(device)], table[ids[n - 1][looked_at]])
    yield move_row(setting, shape, times, direction="to", ok=ok, **labels)

    rows = torch.randn((setting.n_ids, DIM), generator=generator).to(device)
    times = read_each(lambda batch: mover.back(batch, rows), batches[n:], device, clock=wall_time)
    ok = same_bits(table[ids[-1][looked_at]], rows[looked_at.to(device)])
    yield move_row(setting, shape, times, direction="back", ok=ok, **labels)
