"""word2vec: words per second with several tables, and the quality of vectors beside gensim's.

- words, n-grams: one epoch over synthetic text; the final loss must be that of torch's sparse tables.
- runs: whole runs beside gensim's, and the quality of both, `benchmarks/whole_runs.py`; only when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import flatbed
from benchmarks import whole_runs
from benchmarks.harness import Options, free_memory, peak_bytes, reset_peak, synchronize
from benchmarks.rows import Row, percentiles
from flatbed.word2vec import Corpus, Settings, Trainer

CASES = ("words", "n-grams", "runs")
SPARSE, HOST, DEVICE = "torch sparse", "flatbed host", "flatbed device"
PREFETCHED = f"{HOST}, prefetched"
LR = 0.002
SYLLABLES = [a + b for a in "bcdfghklmnprstvwz" for b in "aeiou"]
TOLERANCE = 0.02
WARM_UP = 0.25
"""Share of the reports that are not counted, since caches are cold."""


@dataclass(frozen=True, slots=True)
class Text:
    """Size of a synthetic text and of its training."""

    n_words: int
    n_text: int
    buckets: int
    batch_words: int


TEXTS = {
    "words": Text(300_000, 6_000_000, 0, 65_536),
    "n-grams": Text(300_000, 3_000_000, 10_000_000, 32_768),
}
SMALL_TEXTS = {"words": Text(500, 8_000, 0, 1024), "n-grams": Text(500, 4_000, 1_000, 1024)}


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for; runs only by name."""
    for case, text in (SMALL_TEXTS if options.is_small else TEXTS).items():
        if options.wants(case):
            yield from run_text(case, text, options)
    if "runs" in options.cases:
        yield from whole_runs.run(options)


def run_text(case: str, text: Text, options: Options) -> Iterator[Row]:
    """Train one epoch per variant, one after another: tables of two variants need not fit side by side."""
    corpus = synthetic_text(text)
    expected: float | None = None
    for name in options.choose(dict.fromkeys((SPARSE, HOST, PREFETCHED, DEVICE))):
        metrics, n_samples, n_words = train(name, text, corpus, options)
        loss = metrics["final_loss"]
        expected = loss if name == SPARSE else expected
        ok = bool(np.isfinite(loss)) and (expected is None or abs(loss / expected - 1) < TOLERANCE)
        setting = {"text": case, "optimizer": "sparseadam", "words": n_words, "buckets": text.buckets}
        setting |= {"dim": 128, "batch_words": text.batch_words}
        yield options.row("word2vec speed", name, setting, metrics, n_samples=n_samples, ok=ok)
        free_memory(options.device)


def synthetic_text(text: Text) -> Corpus:
    """Make a text of words of a few syllables, about as skewed as a language."""
    random = np.random.default_rng(0)
    lengths = random.integers(2, 6, text.n_words)
    parts = random.integers(0, len(SYLLABLES), (text.n_words, 5))
    words = [
        "".join(SYLLABLES[part] for part in row[:length]) + str(number % 10)
        for number, (row, length) in enumerate(zip(parts.tolist(), lengths.tolist(), strict=True))
    ]
    weights = 1 / (np.arange(text.n_words) + 3.0)
    drawn = np.searchsorted(np.cumsum(weights / weights.sum()), random.random(text.n_text))
    chosen = [words[i] for i in np.minimum(drawn, text.n_words - 1).tolist()]
    return Corpus.from_sentences(chosen[start : start + 20] for start in range(0, len(chosen), 20))


def train(name: str, text: Text, corpus: Corpus, options: Options) -> tuple[dict[str, Any], int, int]:
    """Train one epoch; returns metrics, the number of timed stretches and of different words."""
    device = options.device
    reset_peak(device)
    settings = Settings(
        dim=128,
        epochs=1,
        min_count=1,
        optimizer="sparseadam",
        lr=LR,
        batch_words=text.batch_words,
        buckets=text.buckets,
        storage="device" if name == DEVICE else "host",
        device=str(device),
    )
    peer: dict[str, Any] = {"make_tables": torch_tables} if name == SPARSE else {}
    every = 2 if options.is_small else 3
    trainer = Trainer(corpus, settings, prefetch=name == PREFETCHED, steps_per_report=every, **peer)
    speeds, losses = [], []
    before, begin = 0, time.perf_counter()
    for progress in trainer:
        synchronize(device)
        now = time.perf_counter()
        speeds.append((progress.words - before) / (now - begin))
        losses.append(progress.loss)
        before, begin = progress.words, now
    timed = speeds[int(len(speeds) * WARM_UP) :]
    ours = flatbed.tables(trainer.model)
    has_cache = options.on_gpu and name in (HOST, PREFETCHED)
    metrics = {
        "words_per_s": percentiles(timed),
        "final_loss": float(np.mean(losses[-max(len(losses) // 4, 1) :])),
        "peak_memory_bytes": peak_bytes(device) if options.on_gpu else None,
        "hit_rate": float(ours[0].cache_stats().hit_rate) if has_cache else None,
    }
    trainer.close()
    return metrics, len(timed), len(trainer.corpus.words)


def torch_tables(settings: Settings, n_words: int) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """Make `nn.Embedding` tables with sparse gradients, all of them on the device."""
    options: dict[str, Any] = {"sparse": True, "device": settings.device}
    inputs: nn.Embedding | nn.EmbeddingBag
    if settings.buckets:
        n_rows = n_words + settings.buckets
        inputs = nn.EmbeddingBag(n_rows, settings.dim, mode="mean", include_last_offset=True, **options)
    else:
        inputs = nn.Embedding(n_words, settings.dim, **options)
    outputs = nn.Embedding(n_words, settings.dim, **options)
    nn.init.uniform_(inputs.weight, -1 / settings.dim, 1 / settings.dim)
    nn.init.zeros_(outputs.weight)
    model = nn.ModuleDict({"inputs": inputs, "outputs": outputs})
    return model, torch.optim.SparseAdam(list(model.parameters()), lr=LR)
