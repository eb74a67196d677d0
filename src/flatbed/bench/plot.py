"""Stored rows as a chart. Needs matplotlib, which flatbed installs only as the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flatbed.bench import train_rows
from flatbed.bench.floor import FloorRow
from flatbed.bench.floor_table import group_floor
from flatbed.bench.rows import FUSED, LOOP, Record, Row, describe_case, describe_machine, group
from flatbed.bench.tables_plot import TablePanel, table_cases
from flatbed.bench.tables_plot import draw as draw_table

MISSING = "matplotlib is not installed; install it with: pip install matplotlib"
COLOURS = {"torch": "#b8bec9", "flat": "#e4572e"}


def have_matplotlib() -> bool:
    """Whether plots can be drawn."""
    return find_spec("matplotlib") is not None


@dataclass(frozen=True, slots=True)
class Bar:
    """A way's time: p50, with p20 to p80 as whiskers."""

    way: str
    times_ms: tuple[float, float, float]
    ok: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars to be compared, and a time that none of them can be below."""

    title: str
    bars: list[Bar]
    floor_ms: float | None = None


Case = tuple[str, str, Sequence[Panel | TablePanel]]
"""What is measured, on which machine, and what was found."""


def write_plot(records: Sequence[Record], path: Path) -> None:
    """Draw a line of panels per case, of rows of any benchmark."""
    if not have_matplotlib():
        raise ModuleNotFoundError(MISSING, name="matplotlib")
    from flatbed.bench import cache_plot, feed_plot, reach_plot  # which use this one

    if cache_plot.cache_cases(records):
        cache_plot.write_plot(records, path)
        return
    if feed_plot.feed_cases(records):
        feed_plot.write_plot(records, path)
        return
    if reach_plot.reach_cases(records):
        reach_plot.write_plot(records, path)
        return
    # A figure of its own, without pyplot: no global state, no display.
    from matplotlib.figure import Figure

    cases = [*_step_cases(records), *_floor_cases(records), *table_cases(records), *_words_cases(records)]
    figure = Figure(figsize=(11, 0.4 + 3.2 * len(cases)))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    subfigures = figure.subfigures(len(cases), 1, squeeze=False)
    for (subfigure,), (title, machine, panels) in zip(subfigures, cases, strict=True):
        subfigure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold")
        subfigure.supxlabel(machine, x=0.99, ha="right", fontsize=8, color="#888888")
        axes = subfigure.subplots(1, len(panels), squeeze=False)
        for axis, panel in zip(axes[0], panels, strict=True):
            if isinstance(panel, Panel):
                _draw(axis, panel)
            else:
                draw_table(axis, panel)
    figure.savefig(str(path), dpi=160, facecolor="white")


def _words_cases(records: Sequence[Record]) -> list[Case]:
    return [
        (train_rows.describe(rows[0]), describe_machine(rows[0].machine), train_rows.panels(rows))
        for rows in train_rows.groups(records)
    ]


def _step_cases(records: Sequence[Record]) -> list[Case]:
    cases: list[Case] = []
    for lines in group([record for record in records if isinstance(record, Row)]):
        first = lines[0].optimizer
        titles = (f"clip + {first.optimizer} + zero_grad", "whole step, forward and backward included")
        parts = ([line.optimizer for line in lines], [line.step for line in lines])
        panels = [
            Panel(title, [Bar(row.way, (row.p20_ms, row.p50_ms, row.p80_ms), row.ok) for row in rows])
            for title, rows in zip(titles, parts, strict=True)
        ]
        cases.append((describe_case(first), describe_machine(first.machine), panels))
    return cases


def _floor_cases(records: Sequence[Record]) -> list[Case]:
    cases: list[Case] = []
    for rows in group_floor([record for record in records if isinstance(record, FloorRow)]):
        gpu = [
            Bar(row.way, (row.gpu_p20_ms, row.gpu_p50_ms, row.gpu_p80_ms), row.ok)
            for row in rows
            if row.gpu_p20_ms is not None and row.gpu_p50_ms is not None and row.gpu_p80_ms is not None
        ]
        wall = [Bar(row.way, (row.wall_p20_ms, row.wall_p50_ms, row.wall_p80_ms), row.ok) for row in rows]
        panels = [Panel("GPU time of clip + step; dashed: the floor", gpu, rows[0].floor_ms)] if gpu else []
        panels.append(Panel("wall time of clip + step + zero_grad", wall))
        title = f"{rows[0].model}, {rows[0].optimizer}, {rows[0].precision}: {rows[0].n_params:,} parameters"
        cases.append((title, describe_machine(rows[0].machine), panels))
    return cases


def _draw(axis: Any, panel: Panel) -> None:
    """A bar per way from the top down, with its time and how it compares with torch fused."""
    bars = panel.bars
    fused = next((bar.times_ms[1] for bar in bars if bar.way == FUSED), None)
    # Where torch's loop would leave nothing to see of the others, its bar runs out of the picture.
    seen = [bar.times_ms[2] for bar in bars if bar.way != LOOP] or [bar.times_ms[2] for bar in bars]
    longest = min(max(bar.times_ms[2] for bar in bars), 1.6 * max(seen))
    for place, bar in enumerate(bars):
        p20, p50, p80 = bar.times_ms
        colour = COLOURS.get(bar.way.partition(" ")[0], COLOURS["flat"])
        axis.barh(place, min(p50, longest), height=0.68, color=colour)
        if p80 <= longest:
            axis.plot([p20, p80], [place, place], color="#444444", linewidth=1.2)
        text = f"{p50:.3g} ms" if bar.ok else "FAILED its check"
        if p50 > longest:
            text = "… " + text
        if bar.ok and bar.way != FUSED and fused is not None:
            text += f"   {fused / p50:.2f}×"
        bold = "bold" if bar.way.startswith("flat") else "normal"
        axis.text(min(p80, longest) + 0.015 * longest, place, text, va="center", fontsize=9, weight=bold)
    if panel.floor_ms is not None:
        axis.axvline(panel.floor_ms, color="#444444", linestyle="--", linewidth=1)
    axis.set_title(panel.title, loc="left", fontsize=10, color="#555555")
    axis.set_yticks(range(len(bars)), [bar.way for bar in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * longest)
    axis.set_xlabel("ms per step; × is the speed against torch fused", fontsize=8, color="#888888")
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8, colors="#888888")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
