"""Records of a table on the host, moved by flatbed's kernels: how close to the speed of a plain copy?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatbed.bench.measure import percentiles
from flatbed.bench.rows import Machine
from flatbed.bench.tables_measure import (
    SEED,
    WARM_UP,
    Dma,
    device_time,
    distinct_ids,
    number_,
    read_each,
    same_bits,
    sample,
)
from flatbed.bench.tables_rows import BENCHMARK, KERNEL, Clock, Direction, MoveRow
from flatbed.cuda.host_memory import HostMemory, allocate
from flatbed.kernels import rows as ops
from flatbed.kernels.rows import RecordLocation

RECORD_BYTES = (128, 256, 512, 1024, 1536, 3072)
ADAM_RECORD = 1536  # 128 numbers of fp32, with two moments
TABLE_BYTES = (10**9, 4 * 10**9, 10 * 10**9)
REGISTERED_BYTES = 8 * 10**9
REGISTERED_RECORDS = (512, 1536)


@dataclass(frozen=True, slots=True)
class MoveSetting:
    """How large, how often, where."""

    table_bytes: int
    n_ids: int
    repeats: int
    device: torch.device
    dma: Dma
    machine: Machine


@dataclass(frozen=True, slots=True)
class Shape:
    """A table as it is seen for one measurement: the first bytes of some memory, in records."""

    table_bytes: int
    record_bytes: int

    @property
    def n_rows(self) -> int:
        return self.table_bytes // self.record_bytes


def run(setting: MoveSetting) -> Iterator[MoveRow]:
    """Rows as they are found: record sizes in the largest table, then table sizes, then other memory."""
    yield from _in_memory(setting, shapes(setting.table_bytes), kind=None)
    if setting.device.type == "cuda":
        size = min(setting.table_bytes, REGISTERED_BYTES)
        registered = [Shape(size, record) for record in REGISTERED_RECORDS]
        yield from _in_memory(setting, registered, kind="registered")


def shapes(table_bytes: int) -> list[Shape]:
    """Every size of record in the whole table, and the whole table's parts."""
    parts = [Shape(size, ADAM_RECORD) for size in TABLE_BYTES if size < table_bytes]
    return [Shape(table_bytes, size) for size in RECORD_BYTES] + parts


def _in_memory(setting: MoveSetting, seen: list[Shape], *, kind: str | None) -> Iterator[MoveRow]:
    held = allocate(max(shape.table_bytes for shape in seen), device=setting.device, kind=kind)
    try:
        if not held.addressable:
            return
        number_(held.tensor[: held.nbytes // 4 * 4])
        for shape in seen:
            yield from _both_ways(setting, held, shape)
    finally:
        held.close()


def _both_ways(setting: MoveSetting, held: HostMemory, shape: Shape) -> Iterator[MoveRow]:
    table = held.tensor[: shape.n_rows * shape.record_bytes].view(shape.n_rows, shape.record_bytes)
    device = setting.device
    generator = torch.Generator(device).manual_seed(SEED)
    n = WARM_UP + setting.repeats
    batches = [distinct_ids(shape.n_rows, setting.n_ids, generator) for _ in range(2 * n)]
    looked_at = sample(setting.n_ids)

    found: list[Tensor] = []

    def gather(ids: Tensor) -> None:
        found[:] = [ops.gather(RecordLocation(table), ids, shape.record_bytes)]

    times = read_each(gather, batches[:n], device, clock=device_time)
    ok = same_bits(found[0][looked_at.to(device)], table[batches[n - 1].cpu()[looked_at]])
    yield move_row(setting, shape, times, direction="to", memory=held.kind, ok=ok)

    records = torch.randint(
        256, (setting.n_ids, shape.record_bytes), dtype=torch.uint8, device=device, generator=generator
    )
    times = read_each(
        lambda ids: ops.scatter_(RecordLocation(table), ids, records), batches[n:], device, clock=device_time
    )
    ok = same_bits(table[batches[-1].cpu()[looked_at]], records[looked_at.to(device)])
    yield move_row(setting, shape, times, direction="back", memory=held.kind, ok=ok)


def move_row(
    setting: MoveSetting,
    shape: Shape,
    times: list[float],
    *,
    direction: Direction,
    memory: str,
    ok: bool,
    case: str = "move",
    way: str = KERNEL,
    clock: Clock | None = None,
) -> MoveRow:
    """What was found about one direction."""
    p20, p50, p80 = percentiles(times)
    speed = setting.n_ids * shape.record_bytes / (1e6 * p50)
    dma = setting.dma.to if direction == "to" else setting.dma.back
    return MoveRow(
        benchmark=BENCHMARK,
        case=case,
        way=way,
        direction=direction,
        memory=memory,
        clock=clock or ("gpu" if setting.device.type == "cuda" else "wall"),
        table_bytes=shape.table_bytes,
        record_bytes=shape.record_bytes,
        n_ids=setting.n_ids,
        n_samples=len(times),
        p20_ms=p20,
        p50_ms=p50,
        p80_ms=p80,
        gb_per_s=speed,
        dma_gb_per_s=dma,
        share_of_dma=speed / dma,
        ok=ok,
        machine=setting.machine,
    )
