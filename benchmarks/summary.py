"""One table of what flatbed does beside what a user would otherwise pick, from stored rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A job, flatbed's row, and the row beside it: each the only one of the file with these values."""

    job: str
    file: str
    ours: str
    peer: str
    key: str = "p50_ms"
    also: Mapping[str, Any] = field(default_factory=dict)
    ours_also: Mapping[str, Any] = field(default_factory=dict)
    more_is_better: bool = False
    unit: str = "ms"

    def markdown(self) -> str:
        rows = json.loads((RESULTS / self.file).read_text())
        ours = _only(rows, {"way": self.ours, **self.also, **self.ours_also}, self.file)[self.key]
        peer = _only(rows, {"way": self.peer, **self.also}, self.file)[self.key]
        ratio = ours / peer if self.more_is_better else peer / ours
        speed = (
            f"**{ratio:.1f}×**" if ratio >= 9.95 else f"**{ratio:.2f}×**" if ratio >= 1 else f"{ratio:.2f}×"
        )
        return (
            f"| {self.job} | {self.ours}: {_number(ours)} {self.unit} | "
            f"{self.peer}: {_number(peer)} {self.unit} | {speed} |"
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _only(rows: list[Row], wanted: Mapping[str, Any], file: str) -> Row:
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{file} has {len(found)} rows with {dict(wanted)}, not one")
    return found[0]


OPTIM, FUSED = "flatbed.optim", "torch fused"
STEP, OPTIMIZER = {"part": "step"}, {"part": "optimizer"}
UNIFORM, ZIPF_105, ZIPF_12 = ({"distribution": name} for name in ("uniform", "zipf 1.05", "zipf 1.2"))
LARGE = {"policy": "lfu", "cache_rows": 2_000_000}
FEED = "h200-feed.json"
BATCH = {"case": "bandwidth", "batch_bytes": 64 << 20}
HALF, EQUAL, TWICE = ({"case": "epoch", "factor": factor} for factor in (0.5, 1.0, 2.0))
SMALL = {"case": "bandwidth", "n_arrays": 500}
ROWS = {"case": "rows", "row_bytes": 512}
SPARSE = "torch sparse"
TABLES = "h200-tables-step.json"
GENERATED = "flatbed Feeder, from a generator"
TO, LOADER = "torch.from_numpy().to()", "DataLoader(pin_memory=True), .to(non_blocking=True)"

LINES = [
    Line(
        "clip + Adam, 1.56 billion parameters",
        "h200-floor-gpt-like.json",
        "flatbed.optim",
        "torch fused",
        key="wall_p50_ms",
    ),
    Line(
        "the same, ResNet-50",
        "h200-floor-resnet-like.json",
        "flatbed.optim",
        "torch fused",
        key="wall_p50_ms",
    ),
    Line(
        "the same, 200 parameters of 128 × 128",
        "h200-floor-linear100.json",
        "flatbed.optim",
        "torch fused",
        key="wall_p50_ms",
    ),
    Line("whole training step, GPT", "h200-gpt-like.json", "flatbed.optim", "torch fused", also=STEP),
    Line(
        "whole training step, ResNet-50", "h200-resnet-like.json", "flatbed.optim", "torch fused", also=STEP
    ),
    Line("clip + AdamW, 2,000 small ones, 2 CPU cores", "cpu-many-small.json", OPTIM, FUSED, also=OPTIMIZER),
    Line(
        "the same with `FlatParams`, gradients bound",
        "cpu-many-small.json",
        "flat bound, one call",
        FUSED,
        also=OPTIMIZER,
    ),
    Line("step of a table of 31 GB, no cache", TABLES, "flatbed host", "SpeedTorch's way", "together_ms"),
    Line("the same, beside a table that is all on the GPU", TABLES, "flatbed host", SPARSE, "together_ms"),
    Line(
        "the same with a cache of 2 M rows, uniform ids",
        "h200-cache-step.json",
        "flatbed",
        SPARSE,
        "in_row_p50_ms",
        UNIFORM,
        LARGE,
    ),
    Line("Zipf 1.05", "h200-cache-step.json", "flatbed", SPARSE, "in_row_p50_ms", ZIPF_105, LARGE),
    Line(
        "Zipf 1.05, in a CUDA graph",
        "h200-cache-step.json",
        "flatbed, captured",
        SPARSE,
        "in_row_p50_ms",
        ZIPF_105,
    ),
    Line(
        "the same, prefetched (at worst a tenth more)",
        "h200-cache-step.json",
        "flatbed, captured, prefetched",
        SPARSE,
        "in_row_p50_ms",
        ZIPF_105,
    ),
    Line("Zipf 1.2", "h200-cache-step.json", "flatbed", SPARSE, "in_row_p50_ms", ZIPF_12, LARGE),
    Line(
        "Zipf 1.2, in a CUDA graph",
        "h200-cache-step.json",
        "flatbed, captured",
        SPARSE,
        "in_row_p50_ms",
        ZIPF_12,
    ),
    Line("numpy batches of 64 MiB to the GPU", FEED, "flatbed Feeder", TO, also=BATCH),
    Line("the same", FEED, "flatbed Feeder", LOADER, also=BATCH),
    Line("the same, from a generator: each is staged", FEED, GENERATED, LOADER, also=BATCH),
    Line("an epoch of them, 0.7 ms of products beside each", FEED, "flatbed Feeder", LOADER, also=HALF),
    Line("the same with 1.4 ms, about the transfer's time", FEED, "flatbed Feeder", LOADER, also=EQUAL),
    Line("the same, from a generator", FEED, GENERATED, LOADER, also=EQUAL),
    Line("a list again, with 2.6 ms", FEED, "flatbed Feeder", LOADER, also=TWICE),
    Line("numpy batches of 1 MiB", FEED, "flatbed Feeder", LOADER, also={**BATCH, "batch_bytes": 1 << 20}),
    Line("500 arrays of 16 KiB", FEED, "flatbed Feeder", TO, also=SMALL),
    Line(
        "65,536 rows of 512 B out of a numpy array",
        FEED,
        "flatbed RowReader, in place",
        "torch index on the CPU, .to()",
        also=ROWS,
    ),
    Line(
        "word2vec with 10 M × 128 hashed n-grams (16 GB)",
        "h200-train-n-grams.json",
        "flatbed host, prefetched",
        SPARSE,
        "p50_words_per_s",
        more_is_better=True,
        unit="words/s",
    ),
    Line(
        "word2vec, tables that fit",
        "h200-train-words.json",
        "flatbed host, prefetched",
        SPARSE,
        "p50_words_per_s",
        more_is_better=True,
        unit="words/s",
    ),
]


def table() -> str:
    """All lines as markdown."""
    head = "| job | flatbed | beside it | speed |\n|---|---|---|---:|"
    return "\n".join([head, *(line.markdown() for line in LINES)])
