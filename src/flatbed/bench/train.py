"""`flatbed bench train`: word vectors trained with tables on the host, on the device, and torch's way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

import flatbed
from flatbed.bench.measure import Progress, free_memory, percentiles, synchronize
from flatbed.bench.rows import Machine
from flatbed.bench.train_rows import BENCHMARK, WordsRow
from flatbed.word2vec import Corpus, Settings, Trainer
from flatbed.word2vec.tables import MakeTables, Tables, host_tables

SPARSE, HOST, PREFETCHED, DEVICE = (
    "torch sparse",
    "flatbed host",
    "flatbed host, prefetched",
    "flatbed device",
)
WAYS = (SPARSE, HOST, PREFETCHED, DEVICE)
OPTIMIZER = "sparseadam"  # the one that torch has for sparse gradients: the same step in all ways
LEARNING_RATE = 0.002
SENTENCE = 20
SYLLABLES = [a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u")]
TOLERANCE = 0.02
WARM_UP = 0.25
"""Of the stretches that a training is timed in: the first ones find cold caches."""


@dataclass(frozen=True, slots=True)
class Case:
    """How much is trained."""

    name: str
    n_words: int
    n_text: int
    buckets: int
    dim: int
    batch_words: int
    steps_per_stretch: int


CASES = {
    "cuda": (
        Case("words", 300_000, 6_000_000, 0, 128, 65_536, 3),
        Case("n-grams", 300_000, 3_000_000, 10_000_000, 128, 32_768, 3),
    ),
    "cpu": (
        Case("words", 20_000, 200_000, 0, 128, 4096, 2),
        Case("n-grams", 20_000, 100_000, 100_000, 128, 4096, 1),
    ),
}


def find_cases(device: torch.device, names: Sequence[str] = (), *, buckets: int | None = None) -> list[Case]:
    """Those of these names, or all; ValueError for a name that is none."""
    known = {case.name: case for case in CASES[device.type]}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no case {name!r}; known are {', '.join(known)}")
    found = [known[name] for name in dict.fromkeys(names or known)]
    if buckets is None:
        return found
    return [replace(case, buckets=buckets) if case.buckets else case for case in found]


def find_ways(names: Sequence[str] = ()) -> list[str]:
    """Those of these names, or all; ValueError for a name that is none."""
    for name in names:
        if name not in WAYS:
            raise ValueError(f"there is no way {name!r}; known are {', '.join(WAYS)}")
    return [way for way in WAYS if way in (names or WAYS)]


def run(
    case: Case, device: torch.device, machine: Machine, *, ways: Sequence[str] = WAYS, stage: Progress
) -> Iterator[WordsRow]:
    """A row per way. Torch's comes first, if at all: the others are checked against its loss."""
    stage(f"{case.name}: text")
    corpus = made_up(case)
    wanted: float | None = None
    for way in ways:
        stage(f"{case.name}: {way}")
        row = measure(way, case, corpus, device, machine)
        wanted = row.final_loss if way == SPARSE else wanted
        ok = np.isfinite(row.final_loss) and (wanted is None or abs(row.final_loss / wanted - 1) < TOLERANCE)
        yield replace(row, ok=bool(ok))
        free_memory(device)


def made_up(case: Case, seed: int = 0) -> Corpus:
    """A text of words of a few syllables, as skewed as those of a language, the same everywhere."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 6, case.n_words)
    parts = random.integers(0, len(SYLLABLES), (case.n_words, 5))
    words = [
        "".join(SYLLABLES[part] for part in row[:length]) + str(number % 10)
        for number, (row, length) in enumerate(zip(parts.tolist(), lengths.tolist(), strict=True))
    ]
    weights = 1 / (np.arange(case.n_words) + 3.0)
    drawn = np.searchsorted(np.cumsum(weights / weights.sum()), random.random(case.n_text))
    text = [words[at] for at in np.minimum(drawn, case.n_words - 1).tolist()]
    return Corpus.from_sentences(text[at : at + SENTENCE] for at in range(0, len(text), SENTENCE))


def measure(way: str, case: Case, corpus: Corpus, device: torch.device, machine: Machine) -> WordsRow:
    """Train one epoch in a way."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    settings = Settings(
        dim=case.dim,
        epochs=1,
        min_count=1,
        optimizer=OPTIMIZER,
        lr=LEARNING_RATE,
        batch_words=case.batch_words,
        buckets=case.buckets,
        storage="device" if way == DEVICE else "host",
        device=str(device),
    )
    trainer = Trainer(corpus, settings, make_tables=_maker(way), steps_per_report=case.steps_per_stretch)
    speeds, losses = [], []
    before, begin = 0, time.perf_counter()
    for progress in trainer:
        synchronize(device)
        now = time.perf_counter()
        speeds.append((progress.words - before) / (now - begin))
        losses.append(progress.loss)
        before, begin = progress.words, now
    timed = speeds[int(len(speeds) * WARM_UP) :]
    p20, p50, p80 = percentiles(timed)
    row = WordsRow(
        BENCHMARK,
        machine,
        case.name,
        way,
        OPTIMIZER,
        len(trainer.corpus.words),
        case.buckets,
        case.dim,
        case.batch_words,
        len(timed),
        p20,
        p50,
        p80,
        _table_bytes(trainer),
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        _hit_rate(trainer),
        float(np.mean(losses[-max(len(losses) // 4, 1) :])),
        True,
    )
    trainer.close()
    return row


def _maker(way: str) -> MakeTables:
    def ours(settings: Settings, n_words: int) -> Tables:
        return replace(host_tables(settings, n_words), prefetch=way == PREFETCHED)

    return torch_tables if way == SPARSE else ours


def torch_tables(settings: Settings, n_words: int) -> Tables:
    """The same as `nn.Embedding` with sparse gradients, all of it on the device."""
    options = {"sparse": True, "device": settings.where}
    inputs: nn.Module
    if settings.buckets:
        n_rows = n_words + settings.buckets
        inputs = nn.EmbeddingBag(n_rows, settings.dim, mode="mean", include_last_offset=True, **options)  # type: ignore[arg-type]
    else:
        inputs = nn.Embedding(n_words, settings.dim, **options)  # type: ignore[arg-type]
    outputs = nn.Embedding(n_words, settings.dim, **options)  # type: ignore[arg-type]
    nn.init.uniform_(inputs.weight, -0.5 / settings.dim, 0.5 / settings.dim)
    nn.init.zeros_(outputs.weight)
    model = nn.ModuleDict({"inputs": inputs, "outputs": outputs})
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=settings.lr or LEARNING_RATE)
    return Tables(model, optimizer, prefetch=False)


def _table_bytes(trainer: Trainer) -> int:
    ours = flatbed.tables(trainer.tables.model)
    if ours:
        return sum(table.nbytes for table in ours)
    return sum(3 * p.numel() * p.element_size() for p in trainer.tables.model.parameters())


def _hit_rate(trainer: Trainer) -> float | None:
    ours = list(flatbed.tables(trainer.tables.model))
    if not ours or trainer.settings.where.type != "cuda" or trainer.settings.storage != "host":
        return None
    return float(ours[0].cache_stats().hit_rate)
