"""Stored rows of `flatbed bench rows` as tables, for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from flatbed.bench.reach_rows import FLATBED, ReachRow, gigabytes, newest, plain_copy
from flatbed.bench.rows import Record
from flatbed.bench.sheet import Sheet, marked_down

WHERE = {
    "device": "on the device, ids there",
    "host": "on the host, ids there",
    "disk": "in a file in the page cache, ids on the host",
}
CLOCKS = {"gpu": "GPU time", "wall": "wall time"}
COLUMNS = ["way", "table", "row", "rows", "read, GB/s", "write, GB/s", "of a copy", "vs others"]


def tables(records: Sequence[Record]) -> list[Table]:
    """One table per tier."""
    return [sheet.drawn() for sheet in sheets(records)]


def to_markdown(records: Sequence[Record]) -> str:
    """A markdown table per tier, with the machine under it."""
    return marked_down(sheets(records))


def sheets(records: Sequence[Record]) -> list[Sheet]:
    """All tiers among the rows."""
    return [_sheet(rows) for rows in newest(records)]


def _sheet(rows: Sequence[ReachRow]) -> Sheet:
    first = rows[0]
    title = f"random rows of tables {WHERE[first.tier]}; {CLOCKS[first.clock]}"
    pairs: dict[tuple[int, int, str], dict[str, ReachRow]] = {}
    for row in rows:
        pairs.setdefault((row.table_bytes, row.row_bytes, row.way), {})[row.direction] = row
    copies = {row.direction: f"{row.dma_gb_per_s:.1f} GB/s" for row in rows}
    if first.tier != "device" and len(copies) == 2:
        title += f"; {plain_copy(first.machine)}: {copies['read']} to the device, {copies['write']} back"
    # Sorted by size; ways of one shape stay in the order in which they were measured.
    keys = sorted(pairs, key=lambda key: key[:2])
    lines = [_line(pairs[key], [pairs[other] for other in keys if other[:2] == key[:2]]) for key in keys]
    drop = COLUMNS.index("of a copy") if first.tier == "device" else len(COLUMNS)
    return Sheet(title, first.machine, _without(COLUMNS, drop), [_without(line, drop) for line in lines], 3)


def _without(cells: list[str], place: int) -> list[str]:
    return cells[:place] + cells[place + 1 :]


def _line(pair: dict[str, ReachRow], beside: Sequence[dict[str, ReachRow]]) -> list[str]:
    """Both directions of one way, with all ways of the same shape beside it."""
    some = next(iter(pair.values()))
    found = [pair.get(direction) for direction in ("read", "write")]
    cells = [some.way, gigabytes(some.table_bytes), f"{some.row_bytes:,} B", f"{some.n_ids:,}"]
    cells += ["" if row is None else _speed(row) for row in found]
    cells.append(_both(["" if row is None else f"{row.share_of_dma:.0%}" for row in found]))
    cells.append(_both([_times(row, beside) for row in found]) if some.way.startswith(FLATBED) else "")
    return cells


def _speed(row: ReachRow) -> str:
    """At p50, and at p80 and p20 of the times."""
    slow, fast = row.spread
    return f"{row.gb_per_s:.3g} ({slow:.3g}–{fast:.3g})" + ("" if row.ok else " FAILED")


def _times(row: ReachRow | None, beside: Sequence[dict[str, ReachRow]]) -> str:
    """How many times faster than the best of others, in the same direction."""
    if row is None:
        return ""
    peers = [pair[row.direction] for pair in beside if row.direction in pair]
    best = min((peer.p50_ms for peer in peers if not peer.way.startswith(FLATBED) and peer.ok), default=None)
    return "" if best is None else f"{best / row.p50_ms:.2f}×"


def _both(cells: Sequence[str]) -> str:
    return ", ".join(cell for cell in cells if cell)
