"""Charts of stored rows: grouped bars by a setting, timelines of traces, bars otherwise.

A panel's title states its result: how fast flatbed is beside the fastest variant without it. A chart is as
wide as a page, so that its text is as large as the page's. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from benchmarks.report import (
    COMPARED,
    SPLIT,
    describe_machine,
    format_value,
    label,
    merge_seeds,
    newest,
    split,
)
from benchmarks.rows import Row, is_ours, speedup, value_of

COLORS = {True: "#e4572e", False: "#b8bec9"}
"""Of variants that use flatbed, and of others."""
SHADES = ("#b8bec9", "#8d96a8", "#f4a78f", "#e4572e", "#8c2f16")
"""Of bars beside each other: two bounds, then variants."""
GROUPED = {"overlap": "model"}
"""Settings whose values have bars beside each other."""
TIMELINE, CAPTURED, BOUND = "timeline", "captured", "bound_ratio"
UNITS = {"_ms": "ms, less is better", "_gb_per_s": "GB/s, more is better", "_per_s": "more is better"}
BOUNDS = ("model_alone_ms", "table_alone_ms")
WIDTH, LETTERS = 7.5, 56
"""Inches, and letters of a title in a line."""
BAR_INCHES, MIN_INCHES = 0.3, 2.6


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel per benchmark, case and split setting that has something to compare with."""
    from matplotlib.figure import Figure

    groups = split(merge_seeds(newest(rows)))
    panels = {key: metric for key, group in groups.items() if (metric := metric_of(group))}
    if not panels:
        raise ValueError("no row has a metric that can be drawn")
    heights = [
        MIN_INCHES if key[1] in GROUPED else max(MIN_INCHES, 1 + BAR_INCHES * len(groups[key]))
        for key in panels
    ]
    figure = Figure(figsize=(WIDTH, 0.3 + sum(heights)))
    figure.set_layout_engine("constrained", h_pad=0.12)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (key, metric) in zip(axes, panels.items(), strict=True):
        group = [row for row in groups[key] if metric in row["metrics"]]
        if metric == TIMELINE:
            draw_timeline(axis, group)
        elif key[1] in GROUPED:
            draw_groups(axis, group, metric, GROUPED[key[1]])
        else:
            draw_bars(axis, group, metric)
        axis.set_title(fill(title_of(group, metric), LETTERS), loc="left", fontsize=11, weight="bold")
        axis.tick_params(axis="both", labelsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(describe_machine(rows[0]), x=0.99, ha="right", fontsize=7, color="#888888")
    figure.savefig(str(path), dpi=160, facecolor="white")


def title_of(rows: Sequence[Row], metric: str) -> str:
    """State the result of a panel in one sentence."""
    first, setting = rows[0], rows[0]["setting"]
    parts = [str(setting[name]) for name in SPLIT.get(first["benchmark"], ()) if name in setting]
    subject = ", ".join(parts) or f"{first['benchmark']} {first['case']}"
    if metric == TIMELINE:
        fewest: dict[bool, Row] = {}
        for row in sorted(rows, key=lambda row: (not is_ours(row), row["metrics"]["kernels"])):
            fewest.setdefault(is_ours(row), row)
        counts = [f"{row['metrics']['kernels']:,} kernels with {row['variant']}" for row in fewest.values()]
        return f"{subject}: {', '.join(counts)}"
    has_captured_peer = any(CAPTURED in row["variant"] for row in rows if not is_ours(row))
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if BOUND in row["metrics"]:
            ratios.setdefault(row["variant"], []).append(1 / row["metrics"][BOUND])
        elif is_ours(row) and (has_captured_peer or CAPTURED not in row["variant"]):
            ratios.setdefault(row["variant"], []).append(speedup(row, rows, metric) or 0)
    best = max(ratios, key=lambda name: median(ratios[name]), default="")
    if not best or not min(ratios[best]):
        return subject
    if BOUND in first["metrics"]:
        times = spread([1 / ratio for ratio in ratios[best]])
        return f"{subject}: steps take {times} × the larger of model and table alone ({best})"
    return f"{subject}: {best} has {spread(ratios[best])} × the speed of the fastest variant without flatbed"


def spread(numbers: Sequence[float]) -> str:
    """Format the smallest and the largest number."""
    low, high = (f"{bound(numbers):.2g}" for bound in (min, max))
    return low if low == high else f"{low} to {high}"


def metric_of(rows: Sequence[Row]) -> str | None:
    """Return the first metric that has something beside it: a variant without flatbed, or a bound."""
    if all(TIMELINE in row["metrics"] for row in rows):
        return TIMELINE
    has_peer = any(not is_ours(row) or BOUNDS[1] in row["metrics"] for row in rows)
    names = (name for row in rows for name in row["metrics"] if name in COMPARED)
    return next(names, None) if has_peer else None


def draw_bars(axis: Any, rows: Sequence[Row], metric: str) -> None:
    """Draw a bar per row, with its median and p20 to p80. A bar far longer than others is cut."""
    values = [value_of(row["metrics"][metric]) for row in rows]
    longest = min(max(values), 3 * sorted(values)[len(values) // 2])
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        metrics = row["metrics"][metric]
        end = metrics["p80"] if isinstance(metrics, dict) else value
        axis.barh(i, min(value, longest), height=0.68, color=COLORS[is_ours(row)])
        if end > longest:
            end = min(value, longest)
        elif isinstance(metrics, dict):
            axis.plot([metrics["p20"], end], [i, i], color="#444444", linewidth=1.2)
        text = f"{'… ' if value > longest else ''}{format_value(metric, value)}"
        text += " FAILED" if row["ok"] is False else ""
        axis.text(end + 0.02 * longest, i, text, va="center", fontsize=9)
    if all("roofline_ms" in row["metrics"] for row in rows) and metric == "gpu_ms":
        axis.axvline(rows[0]["metrics"]["roofline_ms"], color="#444444", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(rows)), distinguishing_names(rows))
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * longest)
    axis.set_xlabel(axis_label(metric), fontsize=9, color="#555555")


def draw_timeline(axis: Any, rows: Sequence[Row]) -> None:
    """Draw each kernel as a bar, a line per variant. Bars are at least as wide as can be seen."""
    end = max(row["metrics"]["span_ms"] for row in rows)
    for i, row in enumerate(rows):
        bars = [(begin / 1e3, max(length / 1e3, end / 2000)) for begin, length in row["metrics"][TIMELINE]]
        axis.broken_barh(bars, (i - 0.34, 0.68), color=COLORS[is_ours(row)])
        text = f"{row['metrics']['kernels']:,} kernels, {row['metrics']['span_ms']:.2f} ms"
        axis.text(row["metrics"]["span_ms"] + 0.01 * end, i, text, va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.45 * end)
    axis.set_xlabel("ms since the call of the update, under the profiler", fontsize=9, color="#555555")


def draw_groups(axis: Any, rows: Sequence[Row], metric: str, by: str) -> None:
    """Draw bars that stand beside each other for each value of a setting: bounds in grey, then variants."""
    known = {name for row in rows for name in row["metrics"]}
    series: dict[str, dict[str, float]] = {label(name): {} for name in BOUNDS if name in known}
    for row in rows:
        value = row["setting"][by]
        bounds = {label(name): row["metrics"][name] for name in BOUNDS if name in row["metrics"]}
        for name, height in {**bounds, row["variant"]: value_of(row["metrics"][metric])}.items():
            series.setdefault(name, {})[value] = height
    groups = list(dict.fromkeys(row["setting"][by] for row in rows))
    width = 0.84 / len(series)
    colors = SHADES[len(BOUNDS) - sum(name in known for name in BOUNDS) :]
    for i, (name, heights) in enumerate(series.items()):
        places = [groups.index(value) + (i - (len(series) - 1) / 2) * width for value in heights]
        bars = axis.bar(places, heights.values(), 0.92 * width, label=name, color=colors[i % len(colors)])
        texts = [f"{height:#.2g}".removesuffix(".") for height in heights.values()]
        axis.bar_label(bars, texts, fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), groups)
    axis.set_ylim(top=1.3 * max(max(heights.values()) for heights in series.values()))
    axis.set_ylabel(axis_label(metric), fontsize=9, color="#555555")
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper left", labelspacing=0.2)


def axis_label(metric: str) -> str:
    """Name a metric with its unit."""
    unit = next((text for suffix, text in UNITS.items() if metric.endswith(suffix)), "")
    return f"{label(metric)}, {unit}" if unit else label(metric)


def distinguishing_names(rows: Sequence[Row]) -> list[str]:
    """Name rows by variant and by settings that differ between them."""
    names = list(dict.fromkeys(name for row in rows for name in row["setting"]))
    varying = [name for name in names if len({str(row["setting"].get(name)) for row in rows}) > 1]
    return [
        ", ".join(
            [row["variant"], *(format_value(n, row["setting"][n]) for n in varying if row["setting"].get(n))]
        )
        for row in rows
    ]
