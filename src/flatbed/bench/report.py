"""Stored rows of any benchmark: read, as tables for the terminal, as markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from flatbed.bench import (
    cache_table,
    feed_table,
    floor_table,
    reach_table,
    rows,
    table,
    tables_table,
    train_rows,
)
from flatbed.bench.cache_rows import CacheRow, SwapRow
from flatbed.bench.feed_rows import BandwidthRow, EpochRow, ReadRow
from flatbed.bench.floor import FloorRow
from flatbed.bench.reach_rows import ReachRow
from flatbed.bench.rows import Record, Row, read_rows
from flatbed.bench.tables_rows import MoveRow, TrainRow, rows_of
from flatbed.bench.train_rows import WordsRow


def read(path: Path) -> list[Record]:
    """The rows in a file; ValueError where it holds something else."""
    kinds = (
        Row,
        FloorRow,
        MoveRow,
        TrainRow,
        CacheRow,
        SwapRow,
        BandwidthRow,
        EpochRow,
        ReadRow,
        ReachRow,
        WordsRow,
    )
    return list(read_rows(path, *kinds))


def step_rows(records: Sequence[Record]) -> list[Row]:
    """Those of `flatbed bench step`."""
    return [record for record in records if isinstance(record, Row)]


def floor_rows(records: Sequence[Record]) -> list[FloorRow]:
    """Those of `flatbed bench floor`."""
    return [record for record in records if isinstance(record, FloorRow)]


def tables(records: Sequence[Record]) -> list[Table]:
    """A table per case."""
    return [
        *table.tables(step_rows(records)),
        *floor_table.tables(floor_rows(records)),
        *tables_table.tables(rows_of(records)),
        *cache_table.tables(records),
        *feed_table.tables(records),
        *reach_table.tables(records),
        *train_rows.tables(records),
    ]


def to_markdown(records: Sequence[Record]) -> str:
    """A markdown table per case, with the machine under it."""
    texts = (
        rows.to_markdown(step_rows(records)),
        floor_table.to_markdown(floor_rows(records)),
        tables_table.to_markdown(rows_of(records)),
        cache_table.to_markdown(records),
        feed_table.to_markdown(records),
        reach_table.to_markdown(records),
        train_rows.to_markdown(records),
    )
    return "\n".join(text for text in texts if text.strip())
