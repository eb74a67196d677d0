"""Stored rows of `flatbed bench rows` as curves, against sizes of rows and of tables. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatbed.bench.plot import MISSING, have_matplotlib
from flatbed.bench.reach_rows import (
    CUPY,
    FLATBED,
    TORCH,
    TORCH_DEVICE,
    TORCH_FILE,
    TORCH_PINNED,
    ReachRow,
    gigabytes,
    newest,
    plain_copy,
    swept,
)
from flatbed.bench.reach_table import WHERE
from flatbed.bench.rows import Machine, Record, describe_machine

COLOURS = {
    FLATBED: "#e4572e",
    TORCH: "#7d8597",
    TORCH_DEVICE: "#7d8597",
    TORCH_FILE: "#7d8597",
    TORCH_PINNED: "#2e86ab",
    CUPY: "#3a9d5d",
}
STYLES = {"read": ("-", "o"), "write": (":", "s")}


@dataclass(frozen=True, slots=True)
class Curves:
    """Speed of each way, in both directions, against a size of something."""

    title: str
    x: Callable[[ReachRow], float]
    x_label: str
    rows: list[ReachRow]


def reach_cases(records: Sequence[Record]) -> list[tuple[str, Machine, list[Curves]]]:
    """What is drawn of some rows: a title, the machine, and panels side by side."""
    made = []
    for rows in newest(records):
        table, row_bytes = swept(rows)
        by_row = [row for row in rows if row.table_bytes == table]
        by_table = [row for row in rows if row.row_bytes == row_bytes]
        panels = [
            Curves(f"by size of the row, table of {gigabytes(table)}", _row_size, "bytes of a row", by_row),
            Curves(
                f"by size of the table, rows of {row_bytes:,} B", _table_size, "GB of the table", by_table
            ),
        ]
        title = f"random rows of tables {WHERE[rows[0].tier]}"
        made.append((title, rows[0].machine, panels))
    return made


def _row_size(row: ReachRow) -> float:
    return row.row_bytes


def _table_size(row: ReachRow) -> float:
    return row.table_bytes / 1e9


def write_plot(records: Sequence[Record], path: Path) -> None:
    """Draw a line of two panels per tier."""
    if not have_matplotlib():
        raise ModuleNotFoundError(MISSING, name="matplotlib")
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    cases = reach_cases(records)
    if not cases:
        raise ValueError("there are no rows of `flatbed bench rows` to draw")
    figure = Figure(figsize=(13, 4.2 * len(cases)))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    subfigures = figure.subfigures(len(cases), 1, squeeze=False)
    for (subfigure,), (title, machine, panels) in zip(subfigures, cases, strict=True):
        subfigure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold")
        subfigure.supxlabel(describe_machine(machine), x=0.99, ha="right", fontsize=8, color="#888888")
        axes = subfigure.subplots(1, len(panels), squeeze=False)
        for axis, panel in zip(axes[0], panels, strict=True):
            _draw(axis, panel)
        subfigure.legend(
            *axes[0][0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right upper"
        )
    figure.savefig(str(path), dpi=140, facecolor="white")


def _draw(axis: Any, panel: Curves) -> None:
    """A curve per way and direction, p20 to p80 as bars; dashed: a plain copy."""
    for way in dict.fromkeys(row.way for row in panel.rows):
        for direction, (line, marker) in STYLES.items():
            rows = [row for row in panel.rows if (row.way, row.direction) == (way, direction)]
            if rows:
                _draw_curve(axis, sorted(rows, key=panel.x), panel, line + marker)
    note = ""
    if panel.rows[0].tier != "device":
        for level in {row.dma_gb_per_s for row in panel.rows}:
            axis.axhline(level, color="#444444", linestyle="--", linewidth=0.8, alpha=0.6)
        note = f"; dashed: {plain_copy(panel.rows[0].machine)}"
    places = sorted({panel.x(row) for row in panel.rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, [f"{place:,g}" for place in places])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel(panel.x_label + note, fontsize=8, color="#888888")
    axis.set_ylabel("GB/s", fontsize=8, color="#888888")
    axis.set_title(panel.title, loc="left", fontsize=10, color="#555555")
    axis.tick_params(labelsize=8, colors="#888888")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_curve(axis: Any, rows: Sequence[ReachRow], panel: Curves, style: str) -> None:
    first = rows[0]
    speeds = [row.gb_per_s for row in rows]
    below = [max(0.0, row.gb_per_s - row.spread[0]) for row in rows]
    above = [max(0.0, row.spread[1] - row.gb_per_s) for row in rows]
    wrong = "" if all(row.ok for row in rows) else " (FAILED)"
    axis.errorbar(
        [panel.x(row) for row in rows],
        speeds,
        yerr=[below, above],
        fmt=style,
        color=COLOURS.get(first.way, "#7d8597"),
        markersize=4,
        linewidth=1.6,
        elinewidth=1,
        label=f"{first.way}, {first.direction}{wrong}",
    )
