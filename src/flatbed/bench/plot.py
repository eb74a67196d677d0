"""Stored rows as a bar chart. Needs matplotlib, which flatbed installs only as the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flatbed.bench.rows import FUSED, Line, Row, describe_case, describe_machine, group

MISSING = "matplotlib is not installed; install it with: pip install 'flatbed[plot]'"
COLOURS = {"torch": "#b8bec9", "flat": "#e4572e"}


def have_matplotlib() -> bool:
    """Whether plots can be drawn."""
    return find_spec("matplotlib") is not None


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Draw p50 with p20 to p80 as whiskers: a line of two panels per case."""
    if not have_matplotlib():
        raise ModuleNotFoundError(MISSING, name="matplotlib")
    # A figure of its own, without pyplot: no global state, no display.
    from matplotlib.figure import Figure

    cases = group(rows)
    figure = Figure(figsize=(11, 0.4 + 3.2 * len(cases)))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    panels = figure.subfigures(len(cases), 1, squeeze=False)
    for (panel,), lines in zip(panels, cases, strict=True):
        first = lines[0].optimizer
        panel.suptitle(describe_case(first), x=0.01, ha="left", fontsize=13, weight="bold")
        panel.supxlabel(describe_machine(first.machine), x=0.99, ha="right", fontsize=8, color="#888888")
        titles = (f"clip + {first.optimizer} + zero_grad", "whole step, forward and backward included")
        axes = panel.subplots(1, 2)
        for axis, title, bars in zip(axes, titles, zip(*map(_parts, lines), strict=True), strict=True):
            _draw(axis, bars)
            axis.set_title(title, loc="left", fontsize=10, color="#555555")
    figure.savefig(str(path), dpi=160, facecolor="white")


def _parts(line: Line) -> tuple[Row, Row]:
    return line.optimizer, line.step


def _draw(axis: Any, rows: Sequence[Row]) -> None:
    """One panel: a bar per way from the top down, with its time and how it compares with torch fused."""
    longest = max(row.p80_ms for row in rows)
    for place, row in enumerate(rows):
        axis.barh(
            place, row.p50_ms, height=0.68, color=COLOURS.get(row.way.partition(" ")[0], COLOURS["flat"])
        )
        axis.plot([row.p20_ms, row.p80_ms], [place, place], color="#444444", linewidth=1.2)
        text = f"{row.p50_ms:.3g} ms" if row.ok else "FAILED its check"
        if row.ok and row.way != FUSED and row.ratio_to_fused is not None:
            text += f"   {1 / row.ratio_to_fused:.2f}×"
        bold = "bold" if row.way.startswith("flat") else "normal"
        axis.text(row.p80_ms + 0.015 * longest, place, text, va="center", fontsize=9, weight=bold)
    axis.set_yticks(range(len(rows)), [row.way for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * longest)
    axis.set_xlabel("ms per step; × is the speed against torch fused", fontsize=8, color="#888888")
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8, colors="#888888")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
