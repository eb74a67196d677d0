"""Runs from a text file to a file of vectors, with gensim and flatbed in turns, and the quality of both.

A run reads the text, counts its words, trains and writes the vectors. Imports of both libraries are not part
of it. Each turn has its own seed and order of sentences, and ratios compare runs of one turn. After the
English text, a row says in which measures flatbed is "not worse" than gensim, "worse", or "undecided".
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Options
from benchmarks.quality import (
    OVERLAP,
    Judge,
    Sentences,
    Task,
    Text,
    Trained,
    neighbors,
    sentences,
    split,
    verdicts,
)
from benchmarks.rows import Row
from flatbed.word2vec import Settings, Trainer, python_corpus, read_corpus

GENSIM, DEFAULT, ENGLISH = "gensim", "flatbed default", "english"
THREADS, TURNS, REFERENCES = 2, 5, 3
"""Threads of a run, turns, and runs of gensim whose neighbours are those to be found."""
FIRST_SEED, FIRST_REFERENCE = 500, 1000
"""Nothing was tuned with these seeds."""


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return wall time, and processor time of all threads."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def run_gensim(path: Path, text: Text, task: Task, seed: int) -> Trained:
    """Use gensim's fastest way: `corpus_file`, which its workers read without Python's lock."""
    from gensim.models import Word2Vec

    shape = {"vector_size": task.dim, "window": task.window, "min_count": task.min_count, "alpha": task.lr}
    noise = {"negative": task.negatives, "sample": task.subsample, "min_alpha": 0.0001}
    model: Any = Word2Vec(sg=1, workers=THREADS, seed=seed, **shape, **noise)

    def run() -> None:
        model.build_vocab(corpus_file=str(path))
        size = {"total_words": model.corpus_total_words, "total_examples": model.corpus_count}
        model.train(corpus_file=str(path), epochs=task.epochs, **size)
        model.wv.save_word2vec_format(str(path.with_suffix(".gensim")))

    took = timed(run)
    rows = [model.wv.key_to_index[word] for word in text.words]
    return Trained(torch.from_numpy(model.wv.vectors[rows]), torch.from_numpy(model.syn1neg[rows]), *took)


def run_flatbed(path: Path, text: Text, task: Task, seed: int, **more: Any) -> Trained:
    """Do what the command `flatbed word2vec` does with two threads."""
    settings: dict[str, Any] = {**task._asdict(), "lr": None, "device": "cpu", "seed": seed, **more}
    made: list[Trainer] = []

    def run() -> None:
        trainer = Trainer(read_corpus(path), Settings(**settings, threads=THREADS))
        trainer.run()
        trainer.vectors().save(path.with_suffix(".flatbed"))
        made.append(trainer)

    took = timed(run)
    vectors, outputs = made[0].vectors(), made[0].model["outputs"]
    number = {word: i for i, word in enumerate(vectors.words)}
    rows = [number[word] for word in text.words]
    return Trained(torch.from_numpy(vectors.matrix[rows]), outputs.read_rows(rows), *took)  # type: ignore[operator]


VARIANTS: dict[str, Callable[[Path, Text, Task, int], Trained]] = {
    GENSIM: run_gensim,
    DEFAULT: run_flatbed,
    "flatbed sgd": partial(run_flatbed, optimizer="sgd"),
}


def python_sentences() -> Sentences:
    """Return the paragraphs of Python's standard library, in random order."""
    corpus = python_corpus()
    parts = np.split(corpus.ids, corpus.ends[:-1])
    order = np.random.default_rng(0).permutation(len(parts))
    return [[corpus.words[i] for i in parts[number]] for number in order]


TEXTS: dict[str, Callable[[], Sentences]] = {ENGLISH: sentences, "python": python_sentences}


def run(options: Options) -> Iterator[Row]:
    """Take `--steps` turns, by default 5, over each text."""
    torch.set_num_threads(1)
    task = Task(dim=100, epochs=1 if options.quick else 5)
    for name, lines in TEXTS.items():
        text = split(lines()[: 2000 if options.quick else None], min_count=task.min_count)
        judge = Judge(text, task)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.txt"
            for number in range(REFERENCES):
                write_text(path, text, FIRST_REFERENCE + number)
                judge.references.append(
                    neighbors(run_gensim(path, text, task, FIRST_REFERENCE + number).inputs)
                )
            rows: list[Row] = []
            for turn in range(options.steps or TURNS):
                for row in run_turn(judge, path, name, FIRST_SEED + turn, options):
                    rows.append(row)
                    yield row
        if name == ENGLISH:  # people judged pairs of English words
            yield from compare(rows, options)


def compare(rows: Sequence[Row], options: Options) -> Iterator[Row]:
    """Say in which measures each trainer is worse than gensim, if there are several turns.

    The default may be worse in the overlap, since another optimizer finds other neighbours.
    """
    by_variant: dict[str, list[Row]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], []).append(row)
    gensims = [row["metrics"] for row in by_variant.pop(GENSIM, [])]
    for variant, own in by_variant.items():
        if len(gensims) > 1 and len(own) > 1:
            found = verdicts([row["metrics"] for row in own], gensims)
            required = [found[name] for name in found if name != OVERLAP or variant != DEFAULT]
            ok = all(verdict == "not worse" for verdict in required)
            setting = {key: value for key, value in own[0]["setting"].items() if key != "seed"}
            yield options.row("word2vec verdict", variant, setting, found, n_samples=len(own), ok=ok)


def write_text(path: Path, text: Text, seed: int) -> None:
    """Write the sentences in random order: gensim's result depends on it."""
    order = np.random.default_rng(seed).permutation(len(text.training))
    path.write_text("".join(" ".join(text.training[i]) + "\n" for i in order), encoding="utf-8")


def run_turn(judge: Judge, path: Path, name: str, seed: int, options: Options) -> Iterator[Row]:
    """Run and judge every variant once."""
    task, text = judge.task, judge.text
    n_words = sum(map(len, text.training))
    setting = {"text": name, **{key: getattr(task, key) for key in ("dim", "window", "negatives", "epochs")}}
    setting |= {"vocabulary": len(text.words), "text_words": n_words, "workers": THREADS, "seed": seed}
    write_text(path, text, seed)
    gensim_seconds = None
    for variant, train in options.choose(VARIANTS).items():
        trained = train(path, text, task, seed)
        gensim_seconds = trained.seconds if variant == GENSIM else gensim_seconds
        metrics = {
            "words_per_s": n_words * task.epochs / trained.seconds,
            "gensim_ratio": gensim_seconds and gensim_seconds / trained.seconds,
            "cpu_seconds": trained.cpu_seconds,
            **{key: value for key, value in judge.judge(trained).items() if np.isfinite(value)},
        }
        yield options.row("word2vec runs", variant, setting, metrics, n_samples=1, ok=True)
