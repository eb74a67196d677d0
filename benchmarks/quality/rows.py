"""Results as rows: one per training, one per comparison; and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from flatbed.bench.rows import Record, read_rows
from flatbed.bench.sheet import Sheet, marked_down
from quality.intervals import Change, welch
from quality.judge import MEASURES

BENCHMARK = "word2vec-quality"
GENSIM = "gensim"
OVERLAP = "overlap@10"


@dataclass(frozen=True, slots=True)
class RunRow(Record):
    """One training and what the judge measured."""

    trainer: str
    """Who trained: "gensim", "flatbed sgd", …; a broken one says so."""
    role: str
    """What is asked of it. "compared": to be as good as gensim in everything. "default": in all but the
    overlap, since another optimizer finds other neighbours, which need not be worse. "broken": to be found
    worse. "reference": to tell the neighbours that all others' are held against."""
    seed: int
    dim: int
    window: int
    negatives: int
    epochs: int
    subsample: float
    min_count: int
    lr: float | None
    n_words: int
    """Words of training text."""
    vocabulary: int
    gensim: str
    seconds: float
    """Of training alone: reading, counting and judging are not in it."""
    cpu_seconds: float
    """Of all cores together: threads beside the training make batches."""
    words_per_second: float
    measures: dict[str, float]


@dataclass(frozen=True, slots=True)
class ComparisonRow(Record):
    """A trainer against gensim in one measure."""

    trainer: str
    role: str
    measure: str
    n_runs: int
    n_gensim_runs: int
    mean: float
    gensim_mean: float
    standard_error: float
    gensim_standard_error: float
    difference: float
    """Turned so that more is better; the interval is Welch's, of 95%."""
    low: float
    high: float
    margin: float
    verdict: Change


def compare(runs: Sequence[RunRow]) -> list[ComparisonRow]:
    """Each trainer against gensim, in each measure."""
    theirs = [run for run in runs if run.trainer == GENSIM and run.role == "compared"]
    rows = []
    for trainer in unique(run.trainer for run in runs if run.trainer != GENSIM):
        ours = [run for run in runs if run.trainer == trainer]
        for measure in MEASURES:
            mine = [run.measures[measure.name] for run in ours]
            gensims = [run.measures[measure.name] for run in theirs]
            difference = welch(mine, gensims, higher_is_better=measure.higher_is_better)
            row = ComparisonRow(
                benchmark=BENCHMARK,
                machine=ours[-1].machine,
                trainer=trainer,
                role=ours[0].role,
                measure=measure.name,
                n_runs=len(mine),
                n_gensim_runs=len(gensims),
                mean=fmean(mine),
                gensim_mean=fmean(gensims),
                standard_error=stdev(mine) / len(mine) ** 0.5,
                gensim_standard_error=stdev(gensims) / len(gensims) ** 0.5,
                difference=difference.mean,
                low=difference.low,
                high=difference.high,
                margin=measure.margin,
                verdict=difference.verdict(measure.margin),
            )
            rows.append(row)
    return rows


def failures(comparisons: Sequence[ComparisonRow]) -> list[str]:
    """What is not as it should be: ours not shown to be as good, or a broken one not shown to be worse."""
    found = [
        f"{row.trainer}: {row.verdict} in {row.measure}"
        for row in comparisons
        if row.verdict != "not worse"
        and (row.role == "compared" or (row.role == "default" and row.measure != OVERLAP))
    ]
    for trainer in unique(row.trainer for row in comparisons if row.role == "broken"):
        if not any(row.verdict == "worse" for row in comparisons if row.trainer == trainer):
            found.append(f"{trainer}: nobody noticed")
    return found


def sheets(runs: Sequence[RunRow], comparisons: Sequence[ComparisonRow]) -> list[Sheet]:
    """Quality, a line per trainer and measure; and speed, a line per trainer."""
    first = runs[0]
    settings = (
        f"{first.n_words:,} words of text, {first.vocabulary:,} distinct; dim {first.dim}, "
        f"window {first.window}, {first.negatives} negatives, {first.epochs} epochs"
    )
    quality = [
        [
            row.trainer,
            row.measure,
            f"{row.gensim_mean:.4f} ± {row.gensim_standard_error:.4f}",
            f"{row.mean:.4f} ± {row.standard_error:.4f}",
            f"{row.difference:+.4f}",
            f"{row.low:+.4f} to {row.high:+.4f}",
            f"−{row.margin:g}",
            row.verdict,
        ]
        for row in comparisons
    ]
    columns = ["trainer", "measure", f"gensim {first.gensim}", "this one", "better by", "95% interval"]
    return [
        Sheet(settings, first.machine, [*columns, "margin", "verdict"], quality, n_names=2),
        speed_sheet([run for run in runs if run.role in ("compared", "default")]),
    ]


def speed_sheet(runs: Sequence[RunRow]) -> Sheet:
    """Words of text per second: the middle one of the runs, the slowest and the fastest.

    Where others use the machine, too, those per second of a core tell more.
    """
    lines = []
    for trainer in unique(run.trainer for run in runs):
        own = sorted((run for run in runs if run.trainer == trainer), key=lambda run: run.words_per_second)
        slowest, middle, fastest = (own[at].words_per_second for at in (0, len(own) // 2, -1))
        of_a_core = fmean(run.n_words * run.epochs / run.cpu_seconds for run in own)
        line = [trainer, f"{middle:,.0f}", f"{slowest:,.0f} to {fastest:,.0f}", f"{of_a_core:,.0f}"]
        lines.append(line)
    title = f"Speed in the same run; threads for each: {runs[0].machine.threads}"
    columns = ["trainer", "words/s", "from, to", "words/s of a core"]
    return Sheet(title, runs[0].machine, columns, lines)


def read(path: Path) -> list[RunRow | ComparisonRow]:
    """Rows that were stored."""
    return read_rows(path, RunRow, ComparisonRow)


def to_markdown(path: Path) -> str:
    """Stored rows as markdown tables."""
    rows = read(path)
    runs = [row for row in rows if isinstance(row, RunRow)]
    return marked_down(sheets(runs, [row for row in rows if isinstance(row, ComparisonRow)]))


def unique(names: Iterable[str]) -> list[str]:
    """In the order of appearance."""
    return list(dict.fromkeys(names))
