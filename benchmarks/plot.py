"""Charts of stored rows: lines where a setting is swept, timelines of traces, bars otherwise.

A chart's title says what it shows: how fast flatbed is against the fastest variant without it. Needs
matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
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
from benchmarks.rows import OURS, Row, is_ours, speedup, value_of

COLORS = {True: "#e4572e", False: "#b8bec9"}
"""Of variants that use flatbed, and of others."""
GROUPED = {"overlap": "model"}
"""Settings whose values have bars beside each other."""
TIMELINE, CAPTURED = "timeline", "captured"
UNITS = {"_ms": "ms, less is better", "_gb_per_s": "GB/s, more is better", "_per_s": "more is better"}
BOUNDS = ("model_alone_ms", "table_alone_ms")
N_SWEPT = 3
"""Different numbers of a setting that make it a sweep."""


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a line of panels per benchmark, case and split setting: one panel per compared metric."""
    from matplotlib.figure import Figure

    groups = split(merge_seeds(newest(rows)))
    panels = {key: metrics for key, group in groups.items() if (metrics := metrics_of(group))}
    if not panels:
        raise ValueError("no row has a metric that can be drawn")
    figure = Figure(figsize=(11, 0.4 + 3.2 * len(panels)))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    subfigures = figure.subfigures(len(panels), 1, squeeze=False)
    for (subfigure,), (key, metrics) in zip(subfigures, panels.items(), strict=True):
        group = groups[key]
        subfigure.suptitle(title_of(group, metrics[0]), x=0.01, ha="left", fontsize=13, weight="bold")
        subfigure.supxlabel(describe_machine(group[0]), x=0.99, ha="right", fontsize=8, color="#888888")
        axes = subfigure.subplots(1, len(metrics), squeeze=False)[0]
        for axis, metric in zip(axes, metrics, strict=True):
            shown = [row for row in group if metric in row["metrics"]]
            swept = swept_setting(shown)
            if metric == TIMELINE:
                draw_timeline(axis, shown)
            elif key[1] in GROUPED:
                draw_groups(axis, shown, metric, GROUPED[key[1]])
            elif swept is None:
                draw_bars(axis, shown, metric)
            else:
                draw_lines(axis, shown, metric, swept)
            unit = next((text for suffix, text in UNITS.items() if metric.endswith(suffix)), "")
            axis.set_title(
                f"{label(metric)}, {unit}" if unit else label(metric),
                loc="left",
                fontsize=10,
                color="#555555",
            )
            axis.tick_params(axis="both", labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(str(path), dpi=160, facecolor="white")


def title_of(rows: Sequence[Row], metric: str) -> str:
    """Say in one line what a chart of rows shows."""
    first, setting = rows[0], rows[0]["setting"]
    parts = [str(setting[name]) for name in SPLIT.get(first["benchmark"], ()) if name in setting]
    subject = ", ".join([f"{first['benchmark']} {first['case']}", *parts])
    if metric == TIMELINE:
        counts = [(row["metrics"]["kernels"], row["variant"]) for row in rows]
        (least, few), (most, many) = min(counts), max(counts)
        return f"{subject}: {least:,} kernels with {few}, {most:,} with {many}"
    has_captured_peer = any(CAPTURED in row["variant"] for row in rows if not is_ours(row))
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if is_ours(row) and (has_captured_peer or CAPTURED not in row["variant"]):
            ratios.setdefault(row["variant"], []).append(speedup(row, rows, metric) or 0)
    best = max(ratios, key=lambda name: median(ratios[name]), default="")
    if not best or not min(ratios[best]):
        return subject
    low, high = (f"{bound(ratios[best]):.2g}" for bound in (min, max))
    times = low if low == high else f"{low} to {high}"
    return f"{subject}: {best} has {times} × the speed of the fastest variant without flatbed"


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """List the metrics worth a panel: at most two; a trace has its timeline."""
    if all(TIMELINE in row["metrics"] for row in rows):
        return [TIMELINE]
    return [name for name in dict.fromkeys(m for row in rows for m in row["metrics"]) if name in COMPARED][:2]


def swept_setting(rows: Sequence[Row]) -> str | None:
    """Return the number that takes the most different values, if it takes several."""
    values: dict[str, set[float]] = {}
    for row in rows:
        for name, value in row["setting"].items():
            if isinstance(value, int | float) and value:
                values.setdefault(name, set()).add(value)
    swept = max(values, key=lambda name: len(values[name]), default=None)
    return swept if swept is not None and len(values[swept]) >= N_SWEPT else None


def draw_bars(axis: Any, rows: Sequence[Row], metric: str) -> None:
    """Draw a bar per row, with its median and p20 to p80. A bar far longer than others is cut."""
    values = [value_of(row["metrics"][metric]) for row in rows]
    longest = min(max(values), 3 * sorted(values)[len(values) // 2])
    names = distinguishing_names(rows)
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        spread = row["metrics"][metric]
        end = spread["p80"] if isinstance(spread, dict) else value
        axis.barh(i, min(value, longest), height=0.68, color=COLORS[is_ours(row)])
        if end > longest:
            end = min(value, longest)
        elif isinstance(spread, dict):
            axis.plot([spread["p20"], end], [i, i], color="#444444", linewidth=1.2)
        text = f"{'… ' if value > longest else ''}{format_value(metric, value)}"
        text += " FAILED" if row["ok"] is False else ""
        axis.text(end + 0.02 * longest, i, text, va="center", fontsize=9)
    if all("roofline_ms" in row["metrics"] for row in rows) and metric == "gpu_ms":
        axis.axvline(rows[0]["metrics"]["roofline_ms"], color="#444444", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.35 * longest)


def draw_timeline(axis: Any, rows: Sequence[Row]) -> None:
    """Draw each kernel as a bar, a line per variant. Bars are at least as wide as can be seen."""
    end = max(row["metrics"]["span_ms"] for row in rows)
    for i, row in enumerate(rows):
        bars = [(begin / 1e3, max(length / 1e3, end / 2000)) for begin, length in row["metrics"][TIMELINE]]
        axis.broken_barh(bars, (i - 0.34, 0.68), color=COLORS[is_ours(row)])
        text = f"{row['metrics']['kernels']:,} kernels, {row['metrics']['span_ms']:.2f} ms"
        axis.text(row["metrics"]["span_ms"] + 0.01 * end, i, text, va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), [row["variant"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * end)
    axis.set_xlabel("ms since the call of the update, under the profiler", fontsize=8, color="#888888")


def draw_groups(axis: Any, rows: Sequence[Row], metric: str, by: str) -> None:
    """Draw bars that stand beside each other for each value of a setting: bounds in grey, then variants."""
    known = {name for row in rows for name in row["metrics"]}
    series: dict[str, dict[str, float]] = {label(name): {} for name in BOUNDS if name in known}
    colors = [*["#b8bec9", "#8d96a8"][: len(series)], "#f4a78f", COLORS[True], "#8c2f16"]
    for row in rows:
        value = row["setting"][by]
        bounds = {label(name): row["metrics"][name] for name in BOUNDS if name in row["metrics"]}
        for name, height in {**bounds, row["variant"]: value_of(row["metrics"][metric])}.items():
            series.setdefault(name, {})[value] = height
    groups = list(dict.fromkeys(row["setting"][by] for row in rows))
    width = 0.8 / len(series)
    for i, (name, heights) in enumerate(series.items()):
        places = [groups.index(value) + (i - (len(series) - 1) / 2) * width for value in heights]
        bars = axis.bar(places, heights.values(), 0.92 * width, label=name, color=colors[i % len(colors)])
        axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), groups)
    axis.set_ylim(top=1.15 * max(max(heights.values()) for heights in series.values()))
    axis.legend(fontsize=7, frameon=False, ncols=len(series), loc="upper left")


def draw_lines(axis: Any, rows: Sequence[Row], metric: str, swept: str) -> None:
    """Draw a line per variant and remaining setting, against the swept setting."""
    lines: dict[str, list[tuple[float, float]]] = {}
    others = [{**row, "setting": {k: v for k, v in row["setting"].items() if k != swept}} for row in rows]
    for row, name in zip(rows, distinguishing_names(others), strict=True):
        if swept in row["setting"]:
            lines.setdefault(name, []).append((row["setting"][swept], value_of(row["metrics"][metric])))
    for name, points in lines.items():
        if len(points) > 1:
            points.sort()
            axis.plot(*zip(*points, strict=True), "o-" if name.startswith(OURS) else "s--", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel(swept.replace("_", " "), fontsize=8, color="#888888")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False)


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
