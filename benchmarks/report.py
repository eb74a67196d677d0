"""Markdown tables of stored rows.

A table has one line per variant and setting. Settings that all its rows share are its title, and those that
differ are columns. × is the speed against the fastest correct variant without flatbed in the same setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.rows import Row, percentiles, speedup, value_of

SPLIT = {
    "step": ("model", "optimizer"),
    "roofline": ("model", "precision"),
    "cache": ("distribution",),
    "overlap": ("storage", "distribution"),
    "rows": ("storage",),
    "topk": ("storage",),
    "speedtorch": ("storage",),
    "trace": ("model",),
    "word2vec": ("text",),
}
"""Settings by which rows of a benchmark are split into tables."""
COMPARED = {
    *("optimizer_ms", "step_ms", "gpu_ms", "wall_ms", "back_to_back_ms", "batch_ms", "read_ms"),
    *("read_gb_per_s", "write_gb_per_s", "words_per_s"),
}
"""Metrics whose speed is compared with variants without flatbed."""
HIDDEN = {
    *("copy_gb_per_s", "bytes_per_element", "written_per_step", "warm_up_steps", "memory_growth_bytes"),
    *("batches", "max_abs_error", "table_bytes", "seconds", "lr", "margin", "host_slowdown", "memory"),
    "timeline",
}
"""Metrics that tables leave out."""
SHARED = ("copy_to_gb_per_s", "copy_back_gb_per_s", "roofline_ms")
"""Metrics that all variants share; they are part of the title."""


# ---- cells


def size(nbytes: float) -> str:
    """Format a number of bytes."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes:,.0f} B"


def number(value: float) -> str:
    """Format a number with three digits, without exponents."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


FORMATS: list[tuple[str, Callable[[float], str]]] = [
    ("_ms", lambda value: f"{number(value)} ms"),
    ("_gb_per_s", lambda value: f"{number(value)} GB/s"),
    ("_per_s", lambda value: f"{value:,.0f}"),
    ("_per_step", lambda value: f"{value:,.0f}"),
    ("_bytes", size),
    ("_rate", lambda value: f"{value:.1%}"),
    ("_share", lambda value: f"{value:.0%}"),
    ("_ratio", lambda value: f"{value:.2f}×"),
    ("_error", lambda value: f"{value:.0e}" if value else "0"),
]


def format_value(name: str, value: Any) -> str:
    """Format a setting or a metric by the unit in its name."""
    if isinstance(value, str):
        return value
    for suffix, show in FORMATS:
        if name.endswith(suffix):
            return show(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def format_metric(name: str, metric: Any) -> str:
    """Format a metric; percentiles as p50 with p20 and p80 behind it."""
    text = format_value(name, value_of(metric))
    if not isinstance(metric, dict):
        return text
    low, high = (format_value(name, metric[p]).split(" ")[0] for p in ("p20", "p80"))
    return f"{text} ({low}–{high})"


def label(name: str) -> str:
    """Return a name without its unit."""
    for suffix in ("_gb_per_s", "_bytes", "_ms"):
        name = name.removesuffix(suffix)
    return name.replace("_per_", "/").replace("_", " ")


# ---- tables


def key_of(row: Row, *, without: str = "") -> tuple[Any, ...]:
    """Return what a row is about, except for one setting."""
    setting = tuple(item for item in row["setting"].items() if item[0] != without)
    return row["machine"]["device"], row["benchmark"], row["case"], row["variant"], setting


def newest(rows: Iterable[Row]) -> list[Row]:
    """Keep the last row of each variant and setting."""
    return list({key_of(row): row for row in rows}.values())


def merge_seeds(rows: Iterable[Row]) -> list[Row]:
    """Merge rows that differ only in their seed: numbers become percentiles."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key_of(row, without="seed"), []).append(row)
    return [_merged(group) if len(group) > 1 else group[0] for group in groups.values()]


def _merged(group: Sequence[Row]) -> Row:
    first = group[0]
    metrics = {
        name: value if isinstance(value, str) else percentiles([row["metrics"][name] for row in group])
        for name, value in first["metrics"].items()
    }
    setting = {name: value for name, value in first["setting"].items() if name != "seed"}
    return {**first, "setting": setting, "metrics": metrics, "ok": all(row["ok"] for row in group)}


def tables(rows: Iterable[Row]) -> list[str]:
    """Render a table per benchmark, case and split setting."""
    shown = [row for row in merge_seeds(newest(rows)) if row["case"] != "reference"]
    return [to_table(group) for group in split(shown).values()]


def split(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Group rows by device, benchmark, case and split setting."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        names = SPLIT.get(row["benchmark"], ())
        own = [str(row["setting"][name]) for name in names if name in row["setting"]]
        key = (row["machine"]["device"], row["benchmark"], row["case"], *own)
        groups.setdefault(key, []).append(row)
    return groups


def to_table(rows: Sequence[Row]) -> str:
    """Render one table."""
    first = rows[0]
    settings = list(dict.fromkeys(name for row in rows for name in row["setting"]))
    shared = [name for name in settings if len({str(row["setting"].get(name)) for row in rows}) == 1]
    varying = [name for name in settings if name not in shared]
    named = dict.fromkeys(name for row in rows for name in row["metrics"])
    metrics = [name for name in named if name not in HIDDEN and name not in SHARED]
    compared = {m for m in metrics if m in COMPARED and any(speedup(row, rows, m) for row in rows)}
    columns = ["variant", *(label(name.replace("_bytes", "_size")) for name in varying)]
    rule = "---|" * len(columns)
    for name in metrics:
        columns += [label(name), "×"] if name in compared else [label(name)]
    rule += "---:|" * (len(columns) - 1 - len(varying))
    lines = [columns, *(_cells(row, rows, varying, metrics, compared) for row in rows)]
    text = [f"| {' | '.join(line)} |" for line in lines]
    parts = [describe(name, first["setting"][name]) for name in shared]
    parts += [describe(name, first["metrics"][name]) for name in SHARED if name in first["metrics"]]
    title = f"{first['benchmark']} {first['case']}" + (f": {', '.join(parts)}" if parts else "")
    footer = f"<sub>{describe_machine(first)}</sub>"
    return "\n".join([f"**{title}**", "", text[0], f"|{rule}", *text[1:], "", footer])


def _cells(
    row: Row, rows: Sequence[Row], varying: Sequence[str], metrics: Sequence[str], compared: set[str]
) -> list[str]:
    setting, found = row["setting"], row["metrics"]
    cells = [row["variant"] + (" FAILED" if row["ok"] is False else "")]
    cells += [format_value(name, setting[name]) if name in setting else "" for name in varying]
    for name in metrics:
        cells.append(format_metric(name, found[name]) if name in found else "")
        if name in compared:
            ratio = speedup(row, rows, name)
            cells.append("" if ratio is None else f"{ratio:.2f}×")
    return cells


def describe(name: str, value: Any) -> str:
    """Describe a setting: `20,000,000 rows`, `adam`, `512 B row`."""
    text = format_value(name, value)
    return text if isinstance(value, str) else f"{text} {label(name)}"


def describe_machine(row: Row) -> str:
    """Describe machine, versions and commit in one line."""
    machine, versions = row["machine"], row["versions"]
    where = f"{machine['cpu']}, {machine['threads']} threads"
    if machine["device"] != "cpu":
        where = f"{machine['device']}, {where}"
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "python")
    commit = row["commit"] or "unknown"
    dirty = "-dirty" if commit.endswith("-dirty") and len(commit) > 10 else ""
    return f"{where}; {known}, commit {commit[:10]}{dirty}; {row['timestamp'][:10]}"


def to_markdown(rows: Iterable[Row]) -> str:
    """Render all tables of some rows."""
    return "\n\n".join(tables(rows)) + "\n"


def one_line(row: Row) -> str:
    """Describe a row while a benchmark runs."""
    setting = ", ".join(describe(name, value) for name, value in row["setting"].items())
    shown = {name: metric for name, metric in row["metrics"].items() if not isinstance(metric, list)}
    metrics = ", ".join(f"{label(name)} {format_metric(name, m)}" for name, m in shown.items())
    mark = "  FAILED its check" if row["ok"] is False else ""
    return f"{row['benchmark']} {row['case']} [{setting}] {row['variant']}: {metrics}{mark}"
