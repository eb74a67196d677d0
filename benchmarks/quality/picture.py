"""Differences to gensim as a picture: intervals beside the margins, and every run's speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatbed.bench.rows import describe_machine
from quality.judge import MEASURES
from quality.rows import GENSIM, ComparisonRow, RunRow, unique

COLOURS = {"compared": "#e4572e", "default": "#f3a712", "broken": "#8d99ae", GENSIM: "#2e86ab"}
WORST, BEST = -6.0, 4.0  # how many margins of the axis are drawn


def draw(runs: Sequence[RunRow], comparisons: Sequence[ComparisonRow], path: Path) -> None:
    """A panel per measure with a line per trainer, and one of speeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.4))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    first = runs[0]
    title = (
        f"word2vec beside gensim {first.gensim}: {first.n_words:,} words × {first.epochs} epochs, "
        f"dim {first.dim}, window {first.window}, {first.negatives} negatives"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold")
    figure.supxlabel(describe_machine(first.machine), x=0.99, ha="right", fontsize=8, color="#888888")
    axes = figure.subplots(2, 3).flatten()
    for place, (axis, measure) in enumerate(zip(axes, MEASURES, strict=False)):
        rows = [row for row in comparisons if row.measure == measure.name]
        _panel(axis, rows, measure.why, named=place % 3 == 0)
    _speeds(axes[len(MEASURES)], [run for run in runs if run.role in ("compared", "default")])
    figure.savefig(str(path), dpi=160, facecolor="white")


def _panel(axis: Any, rows: Sequence[ComparisonRow], why: str, *, named: bool) -> None:
    """Intervals of the difference; right of the dashed line is not worse, and far off is at the edge."""
    margin = rows[0].margin
    low, high = WORST * margin, BEST * margin
    for place, row in enumerate(rows):
        colour = COLOURS[row.role]
        if row.difference < low:
            axis.plot(low + 0.2 * margin, place, "<", color=colour, markersize=8)
            axis.text(
                low + 0.5 * margin, place, f"{row.difference:+.2f}", va="center", fontsize=8, color=colour
            )
            continue
        ends = max(row.low, low), min(row.high, high)
        axis.plot(ends, [place, place], color=colour, linewidth=3, solid_capstyle="butt")
        axis.plot(row.difference, place, "o", color=colour, markersize=7)
    axis.axvspan(-margin, high, color="#3a7d44", alpha=0.08, linewidth=0)
    axis.axvline(0, color="#444444", linewidth=0.8)
    axis.axvline(-margin, color="#444444", linewidth=1, linestyle="--")
    axis.set_xlim(low, high)
    axis.set_xticks([-4 * margin, -2 * margin, 0, 2 * margin])
    axis.set_yticks(range(len(rows)), [row.trainer if named else "" for row in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_title(f"{rows[0].measure}: {rows[0].gensim_mean:.3f} by gensim", loc="left", fontsize=10)
    axis.set_xlabel(f"better than gensim by ({why})", fontsize=8, color="#888888")
    _bare(axis)


def _speeds(axis: Any, runs: Sequence[RunRow]) -> None:
    """Every run is a dot."""
    trainers = unique(run.trainer for run in runs)
    for run in runs:
        colour = COLOURS[GENSIM if run.trainer == GENSIM else run.role]
        place = trainers.index(run.trainer)
        axis.plot(run.words_per_second / 1000, place, "o", color=colour, markersize=6, alpha=0.5)
    axis.set_yticks(range(len(trainers)), trainers, fontsize=9)
    axis.set_ylim(len(trainers) - 0.5, -0.5)
    axis.set_xlim(0, 1.1 * max(run.words_per_second for run in runs) / 1000)
    threads = runs[0].machine.threads
    axis.set_title(f"speed with {threads} thread{'s'[: threads > 1]}", loc="left", fontsize=10)
    axis.set_xlabel("thousand words/s; a dot is a run", fontsize=8, color="#888888")
    _bare(axis)


def _bare(axis: Any) -> None:
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8, colors="#888888")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
