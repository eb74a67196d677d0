"""Stored rows of `flatbed bench cache` as curves and bars. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatbed.bench.cache_rows import FLATBED, CacheRow, steps_of, swaps_of
from flatbed.bench.cache_table import describe, split
from flatbed.bench.plot import MISSING, have_matplotlib
from flatbed.bench.rows import Machine, Record, describe_machine
from flatbed.bench.tables_plot import WayBars
from flatbed.bench.tables_plot import draw as draw_bars

COLOURS = ("#e4572e", "#2e86ab", "#76b041", "#f3a712")
STYLES = {"lru": "-", "lfu": "--"}


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: places and heights."""

    label: str
    colour: str
    style: str
    points: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LinePanel:
    """Curves over a number of rows."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    highest: float | None = None


Panel = LinePanel | WayBars
Figure = tuple[str, Machine, list[Panel]]
"""A title, the machine, and what is drawn side by side."""


def write_plot(records: Sequence[Record], path: Path) -> None:
    """Draw a line of panels per case."""
    if not have_matplotlib():
        raise ModuleNotFoundError(MISSING, name="matplotlib")
    from matplotlib.figure import Figure as Canvas  # without pyplot: no global state, no display

    cases = cache_cases(records)
    height = [0.9 + 0.38 * max(_n_bars(panel) for panel in panels) for _, _, panels in cases]
    canvas = Canvas(figsize=(15, sum(height) + 0.3))
    canvas.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    subfigures = canvas.subfigures(len(cases), 1, squeeze=False, height_ratios=height)
    for (subfigure,), (title, machine, panels) in zip(subfigures, cases, strict=True):
        subfigure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold")
        subfigure.supxlabel(describe_machine(machine), x=0.99, ha="right", fontsize=8, color="#888888")
        axes = subfigure.subplots(1, len(panels), squeeze=False)
        for axis, panel in zip(axes[0], panels, strict=True):
            draw(axis, panel)
    canvas.savefig(str(path), dpi=160, facecolor="white")


def _n_bars(panel: Panel) -> int:
    return max(6, len(panel.bars)) if isinstance(panel, WayBars) else 8


def cache_cases(records: Sequence[Record]) -> list[Figure]:
    """What is drawn of some rows."""
    made: list[Figure] = []
    for rows in steps_of(records, "step"):
        bars = [_bars(part) for part in split(rows, by=lambda row: row.distribution)]
        made.append((_without_law(rows), rows[0].machine, [*bars]))
    for rows in steps_of(records, "sizes"):
        made.append((_without_law(rows), rows[0].machine, _over_sizes(rows, by_policy=True)))
    for rows in steps_of(records, "rows"):
        made.append((_without_law(rows), rows[0].machine, _over_rows(rows)))
    for rows in steps_of(records, "disk"):
        model = [("the model alone", rows[0].model_ms or 0.0, True)]
        steps = [(row.way, row.in_row_p50_ms, row.ok) for row in rows]
        made.append((describe(rows), rows[0].machine, [WayBars("per step, in a row", "ms", model + steps)]))
    for swaps in swaps_of(records):
        one = swaps[0]
        found = [(row.way, row.gb_per_s, row.ok) for row in swaps]
        panel = WayBars("both ways together", "GB/s", [*found, ("pinned copies", one.dma_gb_per_s, True)])
        title = f"{one.n_misses:,} records of {one.record_bytes:,} B swapped"
        made.append((title, one.machine, [panel]))
    return made


def _without_law(rows: Sequence[CacheRow]) -> str:
    return describe(rows).partition(": ")[2]


def _bars(rows: Sequence[CacheRow]) -> WayBars:
    """Step time of each way, under one distribution."""
    bars = [(_label(row), row.in_row_p50_ms, row.ok) for row in rows]
    return WayBars(f"{rows[0].distribution}: per step, in a row", "ms", bars)


def _label(row: CacheRow) -> str:
    if not row.way.startswith(FLATBED):
        return row.way
    cache = f"{row.policy} {_short(row.cache_rows)}" if row.cache_rows else "no cache"
    return f"{FLATBED} {cache}{row.way.removeprefix(FLATBED)}"


def _over_sizes(rows: Sequence[CacheRow], *, by_policy: bool) -> list[Panel]:
    """Hit rate and step time against the cache's size."""

    def lines(height: Callable[[CacheRow], float]) -> list[Line]:
        laws = list(dict.fromkeys(row.distribution for row in rows))
        made = []
        for part in split(rows, by=lambda row: (row.distribution, row.policy, row.captured)):
            first = part[0]
            colour = COLOURS[laws.index(first.distribution) % len(COLOURS)]
            points = sorted((float(row.cache_rows), height(row)) for row in part)
            label = f"{first.distribution}, {first.policy}" if by_policy else _law(first)
            style = STYLES.get(first.policy or "", "-") if by_policy else _style(first)
            made.append(Line(label, colour, style, points))
        return made

    rates = lines(lambda row: 100 * (row.hit_rate or 0.0))
    times = lines(lambda row: row.in_row_p50_ms)
    return [
        LinePanel("hits", "rows of the cache", "% of the distinct rows of a batch", rates, highest=100),
        LinePanel("a step, in a row", "rows of the cache", "ms", times),
    ]


def _over_rows(rows: Sequence[CacheRow]) -> list[Panel]:
    """Step time against the table's rows, then against the cache's with the same hits."""
    fixed = [row for row in rows if row.distribution == "half hits"]
    panels: list[Panel] = []
    lines = []
    others = [row for row in rows if row not in fixed]
    laws = list(dict.fromkeys(row.distribution for row in others))
    for part in split(others, by=lambda row: (row.distribution, row.captured)):
        points = sorted((float(row.n_rows), row.in_row_p50_ms) for row in part)
        colour = COLOURS[laws.index(part[0].distribution) % len(COLOURS)]
        lines.append(Line(_law(part[0]), colour, _style(part[0]), points))
    if lines:
        panels.append(LinePanel("a step, in a row", "rows of the table", "ms", lines))
    if fixed:
        panels += _over_sizes(fixed, by_policy=False)[1:]
    return panels


def _law(row: CacheRow) -> str:
    return f"{row.distribution}, captured" if row.captured else row.distribution


def _style(row: CacheRow) -> str:
    return "--" if row.captured else "-"


def draw(axis: Any, panel: Panel) -> None:
    """Draw a panel into matplotlib's axes."""
    if isinstance(panel, WayBars):
        draw_bars(axis, panel)
        return
    highest = panel.highest or 0.0
    places: set[float] = set()
    for line in panel.lines:
        xs, ys = zip(*line.points, strict=True)
        axis.plot(xs, ys, line.style, marker="o", color=line.colour, label=line.label)
        highest = max(highest, 1.15 * max(ys)) if panel.highest is None else highest
        places |= set(xs)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(places), [_short(place) for place in sorted(places)])
    axis.minorticks_off()
    axis.set_ylim(0, highest)
    axis.set_xlabel(panel.x_label, fontsize=8, color="#888888")
    axis.set_ylabel(panel.y_label, fontsize=8, color="#888888")
    axis.set_title(panel.title, loc="left", fontsize=10, color="#555555")
    axis.tick_params(axis="both", labelsize=8, colors="#888888")
    axis.legend(frameon=False, fontsize=8, loc="best")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _short(n: float) -> str:
    """A number of rows for an axis: 131k, 2.1M."""
    return f"{n / 1e6:.3g}M" if n >= 1e6 else f"{n / 1e3:.3g}k" if n >= 1e3 else f"{n:g}"
