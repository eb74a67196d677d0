"""The tables of README and docs: one short table per question, rendered from stored rows.

A page marks the place of a table with `<!-- table NAME -->` and `<!-- end table -->`, and
`python -m benchmarks fill` renders it. `python -m benchmarks show FILE` prints all rows of a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import format_value, label, merge_seeds, newest
from benchmarks.rows import RESULTS, ROOT, Row, fastest_peer, read_rows, speedup, value_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACE = re.compile(r"(<!-- table (?P<name>\S+) -->\n).*?(<!-- end table -->)", re.S)


def select(file: str, where: Mapping[str, Any]) -> list[Row]:
    """Read the newest rows of a case and setting; a row that lacks a key does not depend on it."""

    def matches(row: Row) -> bool:
        known = {**row["setting"], "case": row["case"], "variant": row["variant"]}
        return all(known.get(name, value) == value for name, value in where.items())

    return [row for row in merge_seeds(newest(read_rows(RESULTS / file))) if matches(row)]


def to_markdown(head: Sequence[str], lines: Sequence[Sequence[str]], rows: Sequence[Row], file: str) -> str:
    """Render a table, with file, commits and date of its rows below it."""
    table = [f"| {' | '.join(line)} |" for line in (head, *lines)]
    table.insert(1, "|---|" + "---:|" * (len(head) - 1))
    commits = ", ".join(dict.fromkeys(str(row["commit"])[:7] for row in rows))
    date = max(row["timestamp"] for row in rows)[:10]
    return "\n".join([*table, "", f"<sub>{file}, commit {commits}, {date}</sub>"])


def cell(row: Row, metric: str) -> str:
    """Format the median of a metric."""
    found = row["metrics"].get(metric)
    return "" if found is None else format_value(metric, value_of(found))


@dataclass(frozen=True, slots=True)
class Line:
    """A variant of flatbed beside the fastest correct variant without it, in the same setting and run.

    Eager variants are compared with eager ones. For those in a CUDA graph, all others count.
    """

    job: str
    file: str
    where: Mapping[str, Any]
    metric: str
    variant: str

    def cells(self) -> tuple[list[str], Row]:
        rows = select(self.file, self.where)
        found = [row for row in rows if row["variant"] == self.variant]
        if len(found) != 1:
            raise ValueError(f"{self.file} has {len(found)} rows of {self.variant!r}, {self.where}; need one")
        if "captured" not in self.variant:
            rows = [row for row in rows if "captured" not in row["variant"]]
        peer, ratio = fastest_peer(found[0], rows, self.metric), speedup(found[0], rows, self.metric)
        if peer is None or ratio is None:
            raise ValueError(f"{self.file} has no row without flatbed for {self.where}")
        ours, theirs = cell(found[0], self.metric), cell(peer, self.metric)
        return [self.job, ours, f"{peer['variant']}: {theirs}", f"{ratio:.2f}×"], found[0]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A line per job."""

    lines: tuple[Line, ...]

    def markdown(self) -> str:
        found = [line.cells() for line in self.lines]
        files = ", ".join(dict.fromkeys(line.file for line in self.lines))
        head = ["", "flatbed", "fastest without flatbed", "speed"]
        return to_markdown(head, [cells for cells, _ in found], [row for _, row in found], files)


@dataclass(frozen=True, slots=True)
class Grid:
    """A line per variant, or per value of the setting `down`.

    Columns are metrics, or the values of the setting `across`; cells then have all metrics.
    """

    file: str
    where: Mapping[str, Any]
    metrics: tuple[str, ...]
    across: str = ""
    down: str = "variant"
    variants: tuple[str, ...] = ()
    """Variants to show, in this order; by default all."""

    def markdown(self) -> str:
        rows = select(self.file, self.where)
        if self.variants:
            rows = [row for name in self.variants for row in rows if row["variant"] == name]
        lines: dict[str, dict[str, str]] = {self._name(row, self.down): {} for row in rows}
        for row in sorted(rows, key=self._column_order):
            line = lines[self._name(row, self.down)]
            if self.across:
                line[self._name(row, self.across)] = ", ".join(cell(row, name) for name in self.metrics)
            else:
                line |= {label(name): cell(row, name) for name in self.metrics}
        columns = list(dict.fromkeys(column for line in lines.values() for column in line))
        body = [[name, *(line.get(column, "") for column in columns)] for name, line in lines.items()]
        by_setting = self.across and self.down == "variant"
        corner = f"by {label(self.across.replace('_bytes', '_size'))}" if by_setting else label(self.down)
        return to_markdown([corner, *columns], body, rows, self.file)

    def _column_order(self, row: Row) -> float:
        value = row["setting"].get(self.across)
        return value if isinstance(value, int | float) else 0

    @staticmethod
    def _name(row: Row, setting: str) -> str:
        return row["variant"] if setting == "variant" else format_value(setting, row["setting"][setting])


# ---- the tables

ROOFLINE, STEP, CACHE, ROWS = (f"h200-{name}.json" for name in ("roofline", "step", "cache", "rows"))
OVERLAP, SHARDS, DATA = (f"h200-{name}.json" for name in ("overlap", "shards", "data"))
TOPK, WORD2VEC = "h200-topk.json", "h200-word2vec.json"
OPTIM, GRAPH = "flatbed.optim", "flatbed.optim, captured"
EAGER, PREFETCHED, CAPTURED, SPARSE = "flatbed", "flatbed, prefetched", "flatbed, captured", "torch sparse"
TIME = "back_to_back_ms"
CACHED = {"case": "step", "cache_rows": 2_000_000}
ADAMW = {"optimizer": "adamw"}

GPT_STEP = Line(
    "GPT of 1.56 B parameters", ROOFLINE, {"model": "gpt-like", "precision": "fp32"}, "wall_ms", OPTIM
)
RESNET_STEP = Line("ResNet-50", ROOFLINE, {"model": "resnet-like"}, "wall_ms", OPTIM)
LINEAR_STEP = Line("100 × Linear(128, 128)", ROOFLINE, {"model": "linear100"}, "wall_ms", OPTIM)
RESNET_GRAPH = Line("ResNet-50, CUDA graph", STEP, {"model": "resnet-like", **ADAMW}, "step_ms", GRAPH)
ZIPF = Line("", CACHE, {**CACHED, "distribution": "zipf 1.05"}, TIME, EAGER)
NGRAMS = Line("10 M hashed n-grams", WORD2VEC, {"text": "n-grams"}, "words_per_s", "flatbed host, prefetched")


def in_graph(line: Line) -> Line:
    """Take the steps that are CUDA graphs."""
    return replace(line, job=f"{line.job}, CUDA graph", variant=GRAPH)


TABLES: dict[str, Comparison | Grid] = {
    "summary": Comparison(
        (
            replace(GPT_STEP, job="clip + Adam, GPT of 1.56 B parameters, both eager"),
            replace(RESNET_GRAPH, job="training step, ResNet-50, both in a CUDA graph"),
            replace(ZIPF, job="step of a 31 GB table, cache of 10 %, Zipf 1.05 ids"),
            replace(ZIPF, job="the same, flatbed in a CUDA graph", variant=CAPTURED),
            Line(
                "the same in a CUDA graph, uniform ids",
                CACHE,
                {**CACHED, "distribution": "uniform"},
                TIME,
                CAPTURED,
            ),
            replace(NGRAMS, job="word2vec with 10 M hashed n-grams (16 GB), words/s"),
        )
    ),
    "optimizer": Comparison(
        tuple(each for line in (GPT_STEP, RESNET_STEP, LINEAR_STEP) for each in (line, in_graph(line)))
    ),
    "training": Comparison(
        (
            Line("GPT, 1.56 B parameters, eager", STEP, {"model": "gpt-like"}, "step_ms", OPTIM),
            RESNET_GRAPH,
            Line("ViT-B/16, CUDA graph", STEP, {"model": "vit-b16"}, "step_ms", GRAPH),
            Line("100 × Linear(128, 128), CUDA graph", STEP, {"model": "linear100"}, "step_ms", GRAPH),
        )
    ),
    "flat": Grid(
        *(STEP, {"model": "resnet-like", **ADAMW}, ("optimizer_ms", "step_ms", "peak_memory_bytes")),
        variants=(
            *("torch for-loop", "torch fused", "flatbed ContiguousParams", "flat following", "flat bound"),
            *("flat bound, one call", OPTIM, "torch fused, captured", GRAPH),
        ),
    ),
    "cache": Grid(*(CACHE, CACHED, (TIME,), "distribution"), variants=(SPARSE, EAGER, CAPTURED)),
    "no-cache": Grid(CACHE, {"case": "step", "cache_rows": 0}, (TIME,), "distribution"),
    "device": Grid("h200-tables.json", {"case": "step"}, (TIME, "peak_memory_bytes")),
    "memory": Grid("h200-memory.json", {}, ("host_memory_bytes", "gpu_memory_bytes", "disk_bytes")),
    "fsdp": Grid("h200-fsdp.json", {}, ("host_ms",), "parameters"),
    "cache-sizes": Grid(CACHE, {"case": "sizes"}, (TIME, "hit_rate"), "distribution", "cache_rows"),
    "disk": Grid(
        OVERLAP,
        {"case": "step", "storage": "disk"},
        (TIME, "bound_ratio", "model_alone_ms", "peak_memory_bytes"),
    ),
    "cold": Grid(
        *(OVERLAP, {"case": "cold"}, (TIME, "disk_reads_per_step", "disk_alone_ms", "bound_ratio")),
        variants=(EAGER, PREFETCHED),
    ),
    "overlap-uniform": Grid(OVERLAP, {"distribution": "uniform"}, (TIME, "bound_ratio"), "model"),
    "overlap-zipf": Grid(
        OVERLAP, {"distribution": "zipf 1.05", "storage": "host"}, (TIME, "bound_ratio"), "model"
    ),
    "rows": Grid(*(ROWS, {"storage": "host", "table_bytes": 8_000_000_000}, ("read_gb_per_s",), "row_bytes")),
    "rows-sizes": Grid(ROWS, {"storage": "host", "row_bytes": 512}, ("read_gb_per_s",), "table_bytes"),
    "shards": Grid(SHARDS, {"case": "world"}, (TIME,), "distribution"),
    "share": Grid(SHARDS, {"case": "share"}, (TIME, "model_ms"), "distribution", "ranks"),
    "balance": Grid(SHARDS, {"case": "balance", "distribution": "zipf 1.05"}, ("busiest_ratio",), "ranks"),
    "topk": Comparison(
        tuple(
            Line(f"{storage} memory, k = {k}", TOPK, {"case": storage, "k": k}, "wall_ms", "flatbed topk")
            for storage in ("host", "device")
            for k in (10, 100)
        )
    ),
    "batches": Grid(DATA, {"case": "batches", "arrays": 1}, ("batch_ms",), "batch_bytes"),
    "epoch": Grid(DATA, {"case": "epoch"}, ("batch_ms",), "compute_factor"),
    "speedtorch": Grid("h200-speedtorch.json", {}, (TIME,)),
    "speedtorch-cpu": Grid("cpu-speedtorch.json", {"storage": "host"}, (TIME,), "ids"),
    "word2vec-gpu": Comparison(
        (NGRAMS, Line("words only", WORD2VEC, {"text": "words"}, "words_per_s", "flatbed host"))
    ),
    "word2vec-runs": Grid("cpu-word2vec-runs.json", {"case": "runs"}, ("words_per_s",), "text"),
    "word2vec-quality": Grid(
        *("cpu-word2vec-runs.json", {"case": "runs", "text": "english"}),
        ("loss", "held-out loss", "overlap@10", "WordSim-353", "SimLex-999"),
    ),
    "cpu": Comparison(
        tuple(
            Line(f"{name}, {what}", "cpu-step.json", {"model": model}, metric, OPTIM)
            for model, name in (
                ("linear100", "100 × Linear(128, 128)"),
                ("many-small", "2,000 vectors of 64"),
            )
            for what, metric in (("optimizer", "optimizer_ms"), ("training step", "step_ms"))
        )
    ),
}


def filled(text: str) -> str:
    """Render the tables of a page."""
    return PLACE.sub(lambda match: f"{match[1]}{TABLES[match['name']].markdown()}\n{match[3]}", text)


def fill(pages: Sequence[Path] = PAGES, *, check: bool = False) -> list[Path]:
    """Rewrite tables that are out of date; returns their pages. `check` only looks."""
    stale = [page for page in pages if filled(page.read_text()) != page.read_text()]
    if not check:
        for page in stale:
            page.write_text(filled(page.read_text()))
    return stale
