"""Stored rows of `flatbed bench tables` as tables, for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.table import Table

from flatbed.bench.rows import Record
from flatbed.bench.sheet import Sheet, marked_down
from flatbed.bench.tables_rows import (
    CUPY,
    SPARSE,
    SPEEDTORCH,
    TORCH,
    MoveRow,
    TrainRow,
    failed,
    gigabytes,
    group_moves,
    group_steps,
)

Steps = Sequence[TrainRow]
# What a column shows of a row among those of its case; None where there is nothing to show.
STEP_COLUMNS: dict[str, Callable[[TrainRow, Steps], str | None]] = {
    "step": lambda row, case: _ms(row.p50_ms),
    "p20 to p80": lambda row, case: f"{row.p20_ms:.3g} to {row.p80_ms:.3g} ms",
    "per step, in a row": lambda row, case: _ms(row.together_ms),
    f"speed vs {SPEEDTORCH}": lambda row, case: _faster(row, case, over=SPEEDTORCH),
    f"speed vs {SPARSE}": lambda row, case: _faster(row, case, over=SPARSE),
    "GPU memory": lambda row, case: _size(row.peak_memory_bytes),
    "of it allowed": lambda row, case: _size(row.memory_limit_bytes),
    "wrong rows": lambda row, case: _wrong(row),
}


def tables(records: Sequence[Record]) -> list[Table]:
    """One table per case."""
    return [sheet.drawn() for sheet in sheets(records)]


def to_markdown(records: Sequence[Record]) -> str:
    """A markdown table per case, with the machine under it."""
    return marked_down(sheets(records))


def sheets(records: Sequence[Record]) -> list[Sheet]:
    """All cases among the rows."""
    return [
        *map(_moves, group_moves(records, "move")),
        *map(_peers, group_moves(records, "speedtorch")),
        *map(_steps, group_steps(records, "step")),
        *map(_steps, group_steps(records, "fit")),
    ]


def _moves(rows: Sequence[MoveRow]) -> Sheet:
    """A line per kind of memory, size of the table and size of the record: both directions."""
    kinds: dict[tuple[str, int, int], dict[str, MoveRow]] = {}
    for row in rows:
        kinds.setdefault((row.memory, row.table_bytes, row.record_bytes), {})[row.direction] = row
    lines = []
    for (memory, table_bytes, record_bytes), both in kinds.items():
        line = [memory, gigabytes(table_bytes), f"{record_bytes:,} B"]
        for direction in ("to", "back"):
            line += _speed(both[direction]) if direction in both else ["", ""]
        lines.append(line)
    columns = ["memory", "table", "record", "gather", "of a copy", "scatter", "of a copy"]
    return Sheet(f"{rows[0].n_ids:,} random records{_copies(rows)}", rows[0].machine, columns, lines, 3)


def _speed(row: MoveRow) -> list[str]:
    return [_or_failed(row, f"{row.gb_per_s:.1f} GB/s"), f"{row.share_of_dma:.0%}"]


def _peers(rows: Sequence[MoveRow]) -> Sheet:
    """A line per way: both directions, and how they compare."""
    others = [way for way in (TORCH, CUPY) if any(row.way == way for row in rows)]
    columns = ["way", "memory"]
    for direction in ("to the device", "back"):
        columns += [direction, "GB/s", *(f"vs {other}" for other in others)]
    lines: dict[str, list[str]] = {row.way: [row.way, row.memory] for row in rows}
    for direction in ("to", "back"):
        these = {row.way: row for row in rows if row.direction == direction}
        for way, line in lines.items():
            if (row := these.get(way)) is None:
                line += [""] * (2 + len(others))
                continue
            line += [_or_failed(row, _ms(row.p50_ms)), f"{row.gb_per_s:.1f}"]
            line += [_times(these[other].p50_ms / row.p50_ms) if other in these else "" for other in others]
    first = rows[0]
    what = f"{first.n_ids:,} random rows of {first.record_bytes} B, table of {gigabytes(first.table_bytes)}"
    return Sheet(f"{what}{_copies(rows)}", first.machine, columns, list(lines.values()), 2)


def _copies(rows: Iterable[MoveRow]) -> str:
    speeds = {row.direction: row.dma_gb_per_s for row in rows}
    words = {"to": "to the device", "back": "back"}
    parts = [f"{speeds[d]:.1f} GB/s {word}" for d, word in words.items() if d in speeds]
    return f"; a plain copy: {', '.join(parts)}"


def _steps(rows: Steps) -> Sheet:
    """A line per way."""
    first = rows[0]
    columns = [
        name for name, show in STEP_COLUMNS.items() if any(show(row, rows) is not None for row in rows)
    ]
    lines = [[row.way, *(STEP_COLUMNS[name](row, rows) or "" for name in columns)] for row in rows]
    title = (
        f"{first.optimizer} on {first.n_rows:,} × {first.dim} ({gigabytes(first.table_bytes)} with state), "
        f"{first.n_ids:,} ids a step"
    )
    return Sheet(title, first.machine, ["way", *columns], lines)


def _faster(row: TrainRow, case: Steps, *, over: str) -> str | None:
    other = next((one for one in case if one.way == over), None)
    return None if other is None else _times(other.p50_ms / row.p50_ms)


def _wrong(row: TrainRow) -> str:
    text = f"{row.n_wrong_rows:,} of {row.n_checked_rows:,}"
    return f"FAILED {text}" if failed(row) else text


def _or_failed(row: MoveRow, text: str) -> str:
    return text if row.ok else f"{text} FAILED"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def _ms(value: float) -> str:
    return f"{value:.3g} ms"


def _size(value: int | None) -> str | None:
    return None if value is None else gigabytes(value)
