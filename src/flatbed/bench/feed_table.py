"""Stored rows of `flatbed bench feed` as tables, for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from flatbed.bench.feed_rows import (
    FEEDER,
    PLAIN,
    BandwidthRow,
    EpochRow,
    FeedRow,
    ReadRow,
    describe,
    newest,
    on_cpu,
    size,
)
from flatbed.bench.rows import Record
from flatbed.bench.sheet import Sheet, marked_down


def tables(records: Sequence[Record]) -> list[Table]:
    """One table per case."""
    return [sheet.drawn() for sheet in sheets(records)]


def to_markdown(records: Sequence[Record]) -> str:
    """A markdown table per case, with the machine under it."""
    return marked_down(sheets(records))


def sheets(records: Sequence[Record]) -> list[Sheet]:
    """All cases among the rows."""
    return [
        *map(_bandwidths, newest(records, BandwidthRow)),
        *map(_epochs, newest(records, EpochRow)),
        *map(_reads, newest(records, ReadRow)),
    ]


def _bandwidths(rows: Sequence[BandwidthRow]) -> Sheet:
    lines = []
    for row in rows:
        plain = next((o for o in rows if o.way == PLAIN and describe(o) == describe(row)), None)
        times = "" if plain is None else f"{plain.p50_ms / row.p50_ms:.2f}×"
        lines.append([row.way, describe(row), _ms(row), *_speeds(row), times])
    columns = ["way", "batch", "per batch", "speed", "of a pinned copy", f"vs {PLAIN}"]
    title = f"numpy batches to the device; a plain copy of pinned memory: {rows[0].dma_gb_per_s:.1f} GB/s"
    if on_cpu(rows[0]):
        title = "numpy batches on a CPU, where nothing is moved: what the ways themselves take"
    return Sheet(title, rows[0].machine, columns, lines, 2)


def _epochs(rows: Sequence[EpochRow]) -> Sheet:
    lines = [
        [row.way, f"{row.compute_ms:.3g} ms", f"{row.transfer_ms:.3g} ms", _ms(row),
         _or_failed(row, f"{row.ratio:.3f}×")]
        for row in rows
    ]  # fmt: skip
    columns = ["way", "compute", "transfer", "epoch, per batch", "of the larger of both"]
    n = max(row.n_batches for row in rows if row.way == FEEDER) if _has(rows, FEEDER) else rows[0].n_batches
    title = f"epochs of {n} batches of {size(rows[0].batch_bytes)}, each computed with"
    return Sheet(title, rows[0].machine, columns, lines)


def _has(rows: Sequence[FeedRow], way: str) -> bool:
    return any(row.way == way for row in rows)


def _reads(rows: Sequence[ReadRow]) -> Sheet:
    lines = []
    for row in rows:
        others = [o for o in rows if o.row_bytes == row.row_bytes and not o.way.startswith("flatbed")]
        best = min((o.p50_ms for o in others), default=None)
        times = "" if best is None else f"{best / row.p50_ms:.2f}×"
        lines.append([row.way, size(row.row_bytes), _ms(row), *_speeds(row), times])
    first = rows[0]
    title = f"{first.n_ids:,} random rows of an array of {size(first.array_bytes)}, ids on the host"
    columns = ["way", "row", "time", "speed", "of a pinned copy", "vs the best without flatbed"]
    return Sheet(title, first.machine, columns, lines, 2)


def _speeds(row: BandwidthRow | ReadRow) -> list[str]:
    if on_cpu(row):
        return [_or_failed(row, ""), ""]
    return [_or_failed(row, f"{row.gb_per_s:.1f} GB/s"), f"{row.share_of_dma:.0%}"]


def _ms(row: FeedRow) -> str:
    return f"{row.p50_ms:.3g} ms"


def _or_failed(row: FeedRow, text: str) -> str:
    return text if row.ok else f"{text} FAILED"
