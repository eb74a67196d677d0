"""Stored rows of `flatbed bench tables` as curves and bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatbed.bench.rows import Record, describe_machine
from flatbed.bench.tables_rows import FLATBED, MoveRow, TrainRow, gigabytes, group_moves, group_steps

COLOURS = {"to": "#e4572e", "back": "#2e86ab", "other": "#b8bec9"}
NAMES = {"to": "gather", "back": "scatter"}


@dataclass(frozen=True, slots=True)
class Curves:
    """Speed of moving records against a size of something."""

    title: str
    x: Callable[[MoveRow], float]
    x_label: str
    rows: list[MoveRow]


@dataclass(frozen=True, slots=True)
class WayBars:
    """A number of each way; shorter is better."""

    title: str
    unit: str
    bars: list[tuple[str, float, bool]]
    """Way, number, whether its check passed."""


TablePanel = Curves | WayBars


def table_cases(records: Sequence[Record]) -> list[tuple[str, str, list[TablePanel]]]:
    """What is measured, on which machine, and what was found."""
    cases: list[tuple[str, str, list[TablePanel]]] = []
    for rows in group_moves(records, "move"):
        title = f"{rows[0].n_ids:,} random records of a table on the host"
        cases.append((title, describe_machine(rows[0].machine), _curves(rows)))
    for rows in group_moves(records, "speedtorch"):
        first = rows[0]
        title = f"{first.n_ids:,} rows of {first.record_bytes} B, table of {gigabytes(first.table_bytes)}"
        cases.append((title, describe_machine(first.machine), _both_ways(rows)))
    for case in ("step", "fit"):
        for steps in group_steps(records, case):
            one = steps[0]
            title = f"{one.optimizer} on {one.n_rows:,} × {one.dim}, {one.n_ids:,} ids a step"
            cases.append((title, describe_machine(one.machine), _steps(steps)))
    return cases


def _curves(rows: Sequence[MoveRow]) -> list[TablePanel]:
    """Against the record's size in the largest table, and against the table's where sizes differ."""
    largest = max(row.table_bytes for row in rows)
    main = next(row.memory for row in rows if row.table_bytes == largest)
    by_record = [row for row in rows if row.table_bytes == largest or row.memory != main]
    panels: list[TablePanel] = [
        Curves("by size of the record", lambda row: row.record_bytes, "bytes of a record", by_record)
    ]
    swept = {row.record_bytes for row in rows if row.memory == main and row.table_bytes != largest}
    by_table = [row for row in rows if row.memory == main and row.record_bytes in swept]
    if by_table:
        title = f"by size of the table, records of {by_table[0].record_bytes:,} B"
        panels.append(Curves(title, lambda row: row.table_bytes / 1e9, "GB of the table", by_table))
    return panels


def _both_ways(rows: Sequence[MoveRow]) -> list[TablePanel]:
    titles = {"to": "to the device", "back": "back"}
    panels: list[TablePanel] = []
    for direction, title in titles.items():
        bars = [(row.way, row.p50_ms, row.ok) for row in rows if row.direction == direction]
        if bars:
            panels.append(WayBars(title, "ms", bars))
    return panels


def _steps(rows: Sequence[TrainRow]) -> list[TablePanel]:
    panels: list[TablePanel] = [WayBars("a step", "ms", [(row.way, row.p50_ms, row.ok) for row in rows])]
    memory = [
        (row.way, row.peak_memory_bytes / 1e9, True) for row in rows if row.peak_memory_bytes is not None
    ]
    if memory:
        panels.append(WayBars("memory of the GPU", "GB", memory))
    return panels


def draw(axis: Any, panel: TablePanel) -> None:
    """Draw a panel into matplotlib's axes."""
    if isinstance(panel, Curves):
        _draw_curves(axis, panel)
    else:
        _draw_bars(axis, panel)
    axis.set_title(panel.title, loc="left", fontsize=10, color="#555555")
    axis.tick_params(axis="x", labelsize=8, colors="#888888")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_curves(axis: Any, panel: Curves) -> None:
    """A curve per direction and kind of memory; dashed: a plain copy."""
    kinds = list(dict.fromkeys(row.memory for row in panel.rows))
    highest = 0.0
    for direction, colour in list(COLOURS.items())[:2]:
        for style, kind in zip(("-", ":", "-.", "--"), kinds, strict=False):
            rows = [row for row in panel.rows if (row.direction, row.memory) == (direction, kind)]
            rows.sort(key=panel.x)
            if rows:
                label = f"{NAMES[direction]}, {kind}"
                speeds = [row.gb_per_s for row in rows]
                axis.plot(
                    [panel.x(row) for row in rows], speeds, style, marker="o", color=colour, label=label
                )
                highest = max(highest, *speeds, rows[0].dma_gb_per_s)
                axis.axhline(rows[0].dma_gb_per_s, color=colour, linestyle="--", linewidth=0.8, alpha=0.6)
    places = sorted({panel.x(row) for row in panel.rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, [f"{place:,g}" for place in places])
    axis.minorticks_off()
    axis.set_ylim(0, 1.15 * highest)
    axis.set_xlabel(f"{panel.x_label}; dashed: a plain copy of pinned memory", fontsize=8, color="#888888")
    axis.set_ylabel("GB/s", fontsize=8, color="#888888")
    axis.legend(frameon=False, fontsize=8, loc="best")


def _draw_bars(axis: Any, panel: WayBars) -> None:
    longest = max(value for _, value, _ in panel.bars)
    for place, (way, value, ok) in enumerate(panel.bars):
        ours = way.startswith(FLATBED)
        axis.barh(place, value, height=0.68, color=COLOURS["to" if ours else "other"])
        text = f"{value:.3g} {panel.unit}" if ok else f"{value:.3g} {panel.unit}, wrong rows"
        weight = "bold" if ours else "normal"
        axis.text(value + 0.015 * longest, place, text, va="center", fontsize=9, weight=weight)
    axis.set_yticks(range(len(panel.bars)), [way for way, _, _ in panel.bars])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * longest)
    axis.set_xlabel(panel.unit, fontsize=8, color="#888888")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
