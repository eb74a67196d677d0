"""Stored rows of `flatbed bench cache` as tables, for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from rich.table import Table

from flatbed.bench.cache_rows import CacheRow, SwapRow, describe_cache, steps_of, swaps_of
from flatbed.bench.rows import Record
from flatbed.bench.sheet import Sheet, marked_down
from flatbed.bench.tables_rows import gigabytes

# What a column shows of a row; None where there is nothing to show.
TIMES: dict[str, Callable[[CacheRow], str | None]] = {
    "per step, in a row": lambda row: _ms(row.in_row_p50_ms),
    "p20 to p80": lambda row: f"{row.in_row_p20_ms:.3g} to {row.in_row_p80_ms:.3g} ms",
    "one by one": lambda row: _ms(row.p50_ms),
    "host": lambda row: None if row.host_pace_p50 is None else f"{row.host_pace_p50:.2f}×",
    "hits": lambda row: None if row.hit_rate is None else f"{row.hit_rate:.1%}",
    "misses a step": lambda row: None if row.misses_per_step is None else f"{row.misses_per_step:,.0f}",
}
COLUMNS: dict[str, dict[str, Callable[[CacheRow], str | None]]] = {
    "step": {
        "way": lambda row: row.way,
        "cache": describe_cache,
        **TIMES,
        "GPU memory": lambda row: _size(row.peak_memory_bytes),
    },
    "sizes": {
        "policy": lambda row: row.policy,
        "cache": lambda row: f"{row.cache_rows:,}",
        **TIMES,
        "warm-up": lambda row: f"{row.warm_up_steps:,} steps",
    },
    "rows": {
        "way": lambda row: row.way,
        "table": lambda row: f"{row.n_rows:,}",
        "cache": lambda row: f"{row.cache_rows:,}",
        **TIMES,
    },
    "disk": {
        "way": lambda row: row.way,
        "cache": describe_cache,
        **TIMES,
        "model alone": lambda row: None if row.model_ms is None else _ms(row.model_ms),
        "over the model": lambda row: None if row.model_ratio is None else f"{row.model_ratio:.2f}×",
    },
}


def tables(records: Sequence[Record]) -> list[Table]:
    """One table per case and distribution."""
    return [sheet.drawn() for sheet in sheets(records)]


def to_markdown(records: Sequence[Record]) -> str:
    """A markdown table per case and distribution, with the machine under it."""
    return marked_down(sheets(records))


def sheets(records: Sequence[Record]) -> list[Sheet]:
    """All cases among the rows."""
    made: list[Sheet] = []
    for case in COLUMNS:
        for rows in steps_of(records, case):
            made += [_steps(case, part) for part in split(rows, by=_part)]
    return [*made, *(_swaps(rows) for rows in swaps_of(records))]


def split(rows: Sequence[CacheRow], *, by: Callable[[CacheRow], Hashable]) -> list[list[CacheRow]]:
    """Rows that have something in common, together, in order of appearance."""
    parts: dict[Hashable, list[CacheRow]] = {}
    for row in rows:
        parts.setdefault(by(row), []).append(row)
    return list(parts.values())


def _part(row: CacheRow) -> Hashable:
    """What the rows of a sheet have in common."""
    shape = (row.distribution, row.optimizer, row.dim, row.n_ids)
    return shape if row.case == "rows" else (*shape, row.n_rows)


def _steps(case: str, rows: Sequence[CacheRow]) -> Sheet:
    """A line per row; columns that are empty throughout are left out."""
    columns = [name for name, show in COLUMNS[case].items() if any(show(row) is not None for row in rows)]
    lines = [[COLUMNS[case][name](row) or "" for name in columns] for row in rows]
    for row, line in zip(rows, lines, strict=True):
        line[-1] += "" if row.ok else " FAILED"
    return Sheet(describe(rows), rows[0].machine, columns, lines, 2)


def describe(rows: Sequence[CacheRow]) -> str:
    """What the steps of some rows have in common, for a title."""
    first = rows[0]
    n_rows = dict.fromkeys(f"{row.n_rows:,}" for row in rows)
    size = f" ({gigabytes(first.n_rows * first.record_bytes)} with state)" if len(n_rows) == 1 else ""
    where = " on disk" if first.storage == "disk" else ""
    return (
        f"{first.distribution}: {first.optimizer} on {', '.join(n_rows)} × {first.dim}{size}{where}, "
        f"{first.n_ids:,} ids a step"
    )


def _swaps(rows: Sequence[SwapRow]) -> Sheet:
    columns = ["way", "memory", "table", "record", "misses", "time", "both ways", "copies", "of the copies"]
    lines = []
    for row in rows:
        mark = "" if row.ok else " FAILED"
        line = [row.way, row.memory, gigabytes(row.table_bytes), f"{row.record_bytes:,} B"]
        line += [f"{row.n_misses:,}", _ms(row.p50_ms), f"{row.gb_per_s:.1f} GB/s{mark}"]
        lines.append([*line, f"{row.dma_gb_per_s:.1f} GB/s", f"{row.share_of_dma:.0%}"])
    title = "records read, and others written home, at once; beside pinned copies both ways at once"
    return Sheet(title, rows[0].machine, columns, lines, 2)


def _ms(value: float) -> str:
    return f"{value:.3g} ms"


def _size(value: int | None) -> str | None:
    return None if value is None else gigabytes(value)
