"""Rows of `flatbed bench tables` as an H200 might give them."""

from dataclasses import replace

from flatbed.bench.tables_rows import CUPY, DEVICE, HOST, KERNEL, SPARSE, SPEEDTORCH, TORCH, MoveRow, TrainRow
from tests.bench.samples import MACHINE

MOVE_ROW = MoveRow(
    benchmark="tables",
    case="move",
    way=KERNEL,
    direction="to",
    memory="managed",
    clock="gpu",
    table_bytes=30 * 10**9,
    record_bytes=1536,
    n_ids=65_536,
    n_samples=30,
    p20_ms=1.99,
    p50_ms=2.0,
    p80_ms=2.1,
    gb_per_s=50.0,
    dma_gb_per_s=55.0,
    share_of_dma=50 / 55,
    ok=True,
    machine=MACHINE,
)
TRAIN_ROW = TrainRow(
    benchmark="tables",
    case="step",
    way=HOST,
    optimizer="adam",
    n_rows=20_000_000,
    dim=128,
    n_ids=65_536,
    table_bytes=20_000_000 * 1536,
    n_samples=30,
    p20_ms=4.3,
    p50_ms=4.4,
    p80_ms=4.5,
    together_ms=4.2,
    peak_memory_bytes=400_000_000,
    growth_bytes=500_000_000,
    memory_limit_bytes=None,
    n_checked_rows=130_000,
    n_wrong_rows=0,
    max_abs_error=1e-9,
    ok=True,
    machine=MACHINE,
)


def both(row: MoveRow, *, back_ms: float | None = None) -> list[MoveRow]:
    return [row, replace(row, direction="back", p50_ms=back_ms or row.p50_ms)]


def moves() -> list[MoveRow]:
    rows = []
    for size, speed in ((128, 20.0), (512, 47.0), (1536, 50.0)):
        rows += both(replace(MOVE_ROW, record_bytes=size, gb_per_s=speed, share_of_dma=speed / 55))
    for gigabytes in (1, 10):
        rows += both(replace(MOVE_ROW, table_bytes=gigabytes * 10**9))
    for size in (512, 1536):
        rows += both(
            replace(MOVE_ROW, memory="registered", table_bytes=8 * 10**9, record_bytes=size, gb_per_s=14.0)
        )
    return rows


def peers() -> list[MoveRow]:
    row = replace(
        MOVE_ROW,
        case="speedtorch",
        clock="wall",
        table_bytes=10**10,
        record_bytes=512,
        n_ids=131_072,
        p50_ms=1.5,
        gb_per_s=45.0,
    )
    return [
        *both(row),
        *both(replace(row, way=TORCH, memory="pageable", p50_ms=15.0, gb_per_s=4.5), back_ms=30.0),
        *both(replace(row, way=CUPY, memory="pinned", p50_ms=6.0, gb_per_s=11.2)),
    ]


def steps() -> list[TrainRow]:
    return [
        TRAIN_ROW,
        replace(TRAIN_ROW, way=SPEEDTORCH, p50_ms=22.0, n_wrong_rows=212, ok=False),
        replace(TRAIN_ROW, way=SPARSE, p50_ms=2.2, peak_memory_bytes=31 * 10**9),
        replace(TRAIN_ROW, way=DEVICE, p50_ms=1.1, peak_memory_bytes=31 * 10**9),
    ]
