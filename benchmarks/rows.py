"""The row schema: one dict per variant and setting, with machine, versions and commit.

    {"benchmark": "cache", "case": "step",             what was measured
     "setting": {"ids": "zipf 1.05", "rows": 20000000}, equal for all variants that are compared
     "variant": "flatbed, captured",
     "metrics": {"back_to_back_ms": {"p20": ..., "p50": ..., "p80": ...}, "hit_rate": 0.74},
     "n_samples": 10,
     "ok": true,                                        result of its check; null: known to be wrong
     "machine": {...}, "versions": {...}, "commit": "...", "timestamp": "..."}

A metric is a number, a text, or three percentiles. Its suffix is its unit: `_ms`, `_gb_per_s`, `_bytes`, ...
A variant that lacks a key of `setting` does not depend on it: `torch sparse` has no `cache_rows`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flatbed

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS = ("flat", "broken")
"""Beginnings of names of variants that use flatbed; trainers that are broken on purpose do, too."""
FIELDS = (
    *("benchmark", "case", "setting", "variant", "metrics", "n_samples", "ok"),
    *("machine", "versions", "commit", "timestamp"),
)


def percentiles(readings: Sequence[float]) -> dict[str, float]:
    """Compute p20, p50 and p80 of some readings."""
    p20, p50, p80 = np.percentile(readings, [20, 50, 80]).tolist()
    return {"p20": p20, "p50": p50, "p80": p80}


def gb_per_s(nbytes: int, times_ms: Sequence[float]) -> dict[str, float]:
    """Convert times of moving `nbytes` to percentiles of 10⁹ bytes per second."""
    return percentiles([nbytes / (1e6 * time) for time in times_ms])


def value_of(metric: Any) -> Any:
    """Return the median of percentiles, and any other metric unchanged."""
    return metric["p50"] if isinstance(metric, dict) else metric


@cache
def environment(device_type: str) -> dict[str, Any]:
    """Describe machine, versions and commit of this process."""
    return {
        "machine": {
            "device": torch.cuda.get_device_name() if device_type == "cuda" else "cpu",
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "flatbed": flatbed.__version__,
        },
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Return the checkout's commit; `FLATBED_COMMIT` names it where a copy has no history."""
    if told := os.environ.get("FLATBED_COMMIT"):
        return told
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)", path.read_text() if path.exists() else "", re.M)
    return found[1] if found else platform.processor() or platform.machine()


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Write rows as a JSON list, one row per line, replacing the file in one step."""
    new = path.with_name(f".{path.name}.new")
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    new.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    new.replace(path)


def read_rows(path: Path) -> list[Row]:
    """Read rows; ValueError for a file that does not follow the schema."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    for row in rows:
        if wrong := sorted(set(row) ^ set(FIELDS)):
            raise ValueError(f"{path}: a row has missing or unknown fields {wrong}")
    return rows


def is_ours(row: Row) -> bool:
    """Tell whether a variant uses flatbed."""
    return bool(row["variant"].startswith(OURS))


def is_comparable(other: Row, row: Row) -> bool:
    """Tell whether `other` was measured in the setting of `row`, on the same device."""
    same = all(row[name] == other[name] for name in ("benchmark", "case"))
    setting = all(row["setting"].get(name) == value for name, value in other["setting"].items())
    return same and setting and row["machine"]["device"] == other["machine"]["device"]


def fastest_peer(row: Row, rows: Iterable[Row], metric: str) -> Row | None:
    """Return the fastest correct variant without flatbed in the setting of a row."""
    others = [
        other
        for other in rows
        if not is_ours(other) and other["ok"] and metric in other["metrics"] and is_comparable(other, row)
    ]
    fastest = min if metric.endswith("_ms") else max
    return fastest(others, key=lambda other: value_of(other["metrics"][metric]), default=None)


def speedup(row: Row, rows: Iterable[Row], metric: str) -> float | None:
    """Return how many times as fast a row is as the fastest correct variant without flatbed."""
    other = fastest_peer(row, rows, metric)
    if other is None or metric not in row["metrics"]:
        return None
    value, peer = (float(value_of(each["metrics"][metric])) for each in (row, other))
    return peer / value if metric.endswith("_ms") else value / peer
