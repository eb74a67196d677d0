"""Rows of `flatbed bench train`: word vectors trained in one way; as tables and as bars."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rich.table import Table

from flatbed.bench.rows import Machine, Record
from flatbed.bench.sheet import Sheet, marked_down
from flatbed.bench.tables_plot import WayBars
from flatbed.bench.tables_rows import gigabytes

BENCHMARK = "train"


@dataclass(frozen=True, slots=True)
class WordsRow(Record):
    """A training of word vectors; speeds are words of text per second, over `n_samples` stretches."""

    case: str
    way: str
    optimizer: str
    n_words: int
    """In the vocabulary."""
    n_buckets: int
    dim: int
    batch_words: int
    n_samples: int
    p20_words_per_s: float
    p50_words_per_s: float
    p80_words_per_s: float
    table_bytes: int
    """Weights and state, wherever they are."""
    peak_memory_bytes: int | None
    """Memory of the GPU that tensors held at most."""
    hit_rate: float | None
    """Of the cache of the larger table, if it has one."""
    final_loss: float
    """Mean per pair of the last quarter: all ways train on the same text for as long."""
    ok: bool
    """Whether the loss is that of torch's way, but for rounding and the first weights."""


def summary(row: WordsRow) -> str:
    """A row as one line, for those who watch."""
    memory = "" if row.peak_memory_bytes is None else f", {gigabytes(row.peak_memory_bytes)} of the GPU"
    speeds = f"{row.p50_words_per_s:,.0f} words/s ({row.p20_words_per_s:,.0f} to {row.p80_words_per_s:,.0f})"
    mark = "" if row.ok else "  FAILED its check"
    return f"{row.case} {row.way}: {speeds}, loss {row.final_loss:.3f}{memory}{mark}"


def groups(records: Sequence[Record]) -> list[list[WordsRow]]:
    """Rows of one case, size and device together; a later one replaces an earlier one of its way."""
    found: dict[Hashable, dict[str, WordsRow]] = {}
    for row in records:
        if isinstance(row, WordsRow):
            key = (row.case, row.n_words, row.n_buckets, row.dim, row.batch_words, row.machine.device)
            found.setdefault(key, {})[row.way] = row
    return [list(ways.values()) for ways in found.values()]


def describe(row: WordsRow) -> str:
    """What was trained, for a title."""
    grams = f" + {row.n_buckets:,} n-gram rows" if row.n_buckets else ""
    size = gigabytes(row.table_bytes)
    return (
        f"{row.case}: {row.n_words:,} words{grams} × {row.dim} ({size} with state), {row.optimizer}, "
        f"{row.batch_words:,} words a step"
    )


def sheets(records: Sequence[Record]) -> list[Sheet]:
    """A table per case."""
    made = []
    for rows in groups(records):
        columns = ["way", "words/s", "p20 to p80", "loss"]
        columns += ["GPU memory"] if any(row.peak_memory_bytes is not None for row in rows) else []
        columns += ["hits"] if any(row.hit_rate is not None for row in rows) else []
        lines = []
        for row in rows:
            loss = f"{row.final_loss:.3f}" + ("" if row.ok else " FAILED")
            line = {
                "way": row.way,
                "words/s": f"{row.p50_words_per_s:,.0f}",
                "p20 to p80": f"{row.p20_words_per_s:,.0f} to {row.p80_words_per_s:,.0f}",
                "loss": loss,
                "GPU memory": "" if row.peak_memory_bytes is None else gigabytes(row.peak_memory_bytes),
                "hits": "" if row.hit_rate is None else f"{row.hit_rate:.1%}",
            }
            lines.append([line[name] for name in columns])
        made.append(Sheet(describe(rows[0]), rows[0].machine, columns, lines))
    return made


def tables(records: Sequence[Record]) -> list[Table]:
    """For the terminal."""
    return [sheet.drawn() for sheet in sheets(records)]


def to_markdown(records: Sequence[Record]) -> str:
    """A markdown table per case, with the machine under it."""
    return marked_down(sheets(records))


def panels(rows: Sequence[WordsRow]) -> list[WayBars]:
    """Of one case: its speeds, and memory where there is a GPU."""
    speeds = [(row.way, row.p50_words_per_s, row.ok) for row in rows]
    made = [WayBars("words per second", "words/s", speeds)]
    if all(row.peak_memory_bytes is not None for row in rows):
        held = [(row.way, (row.peak_memory_bytes or 0) / 1e9, row.ok) for row in rows]
        made.append(WayBars("memory of the GPU", "GB", held))
    return made


def file_name(machine: Machine, case: str) -> str:
    """What a case's rows are stored as, without the suffix: h200-train-words."""
    words = re.findall(r"[a-z0-9]+", machine.device.lower())
    brand = {"nvidia", "amd", "geforce", "instinct"}
    return f"{'-'.join(word for word in words if word not in brand)}-train-{case}"
