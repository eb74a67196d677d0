"""Runs from a text file to a file of vectors, with flatbed and gensim in turns, and the quality of both.

A run reads the text, counts its words, trains and writes the vectors. Imports of both libraries are not part
of it. Each turn has its own seed, and its ratio compares two runs that followed each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Options
from benchmarks.quality import (
    GENSIM,
    OVERLAP,
    Judge,
    Sentences,
    Task,
    Text,
    Trained,
    gensim_model,
    of_flatbed,
    of_gensim,
    sentences,
    split,
    timed,
)
from benchmarks.rows import Row
from flatbed.word2vec import Settings, Trainer, python_corpus, read_corpus

FLATBED = "flatbed default"
THREADS = 2
TURNS = 5
FIRST_SEED = 500
"""Nothing was tuned with these seeds."""
Run = Callable[[Path, Text, Task, int], Trained]


def run_gensim(path: Path, text: Text, task: Task, seed: int) -> Trained:
    """Use gensim's fastest way: `corpus_file`, which its workers read without Python's lock."""
    model = gensim_model(task, seed, workers=THREADS)

    def run() -> None:
        model.build_vocab(corpus_file=str(path))
        size = {"total_words": model.corpus_total_words, "total_examples": model.corpus_count}
        model.train(corpus_file=str(path), epochs=task.epochs, **size)
        model.wv.save_word2vec_format(str(path.with_suffix(".gensim")))

    took = timed(run)
    return of_gensim(model, text, took)


def run_flatbed(path: Path, text: Text, task: Task, seed: int) -> Trained:
    """Do what the command `flatbed word2vec` does with two threads."""
    settings: dict[str, Any] = {**task._asdict(), "lr": None, "device": "cpu", "seed": seed}
    made: list[Trainer] = []

    def run() -> None:
        trainer = Trainer(read_corpus(path), Settings(**settings, threads=THREADS))
        trainer.run()
        trainer.vectors().save(path.with_suffix(".flatbed"))
        made.append(trainer)

    took = timed(run)
    return of_flatbed(made[0], made[0].vectors(), text, took)


VARIANTS: dict[str, Run] = {GENSIM: run_gensim, FLATBED: run_flatbed}


def python_sentences() -> Sentences:
    """Return the paragraphs of Python's standard library, in random order."""
    corpus = python_corpus()
    parts = np.split(corpus.ids, corpus.ends[:-1])
    order = np.random.default_rng(0).permutation(len(parts))
    return [[corpus.words[i] for i in parts[number]] for number in order]


TEXTS: dict[str, Callable[[], Sentences]] = {"english": sentences, "python": python_sentences}


def run(options: Options) -> Iterator[Row]:
    """Take `--steps` turns, by default 5, over each text."""
    torch.set_num_threads(1)
    task = Task(dim=100, epochs=1 if options.quick else 5)
    for name, lines in TEXTS.items():
        text = split(lines()[: 2000 if options.quick else None], min_count=task.min_count)
        judge = Judge(text, task)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.txt"
            path.write_text("".join(" ".join(words) + "\n" for words in text.training), encoding="utf-8")
            for turn in range(options.steps or TURNS):
                yield from run_turn(judge, path, name, FIRST_SEED + turn, options)


def run_turn(judge: Judge, path: Path, name: str, seed: int, options: Options) -> Iterator[Row]:
    """Run and judge every variant once."""
    task, text = judge.task, judge.text
    n_words = sum(map(len, text.training))
    setting = {"text": name, **{key: getattr(task, key) for key in ("dim", "window", "negatives", "epochs")}}
    setting |= {"vocabulary": len(text.words), "text_words": n_words, "workers": THREADS, "seed": seed}
    gensim_seconds = None
    for variant, train in options.choose(VARIANTS).items():
        trained = train(path, text, task, seed)
        gensim_seconds = trained.seconds if variant == GENSIM else gensim_seconds
        measured = {key: value for key, value in judge.judge(trained).items() if key != OVERLAP}
        metrics = {
            "words_per_s": n_words * task.epochs / trained.seconds,
            "gensim_ratio": gensim_seconds and gensim_seconds / trained.seconds,
            "cpu_seconds": trained.cpu_seconds,
            **{key: value for key, value in measured.items() if np.isfinite(value)},
        }
        yield options.row("word2vec runs", variant, setting, metrics, n_samples=1, ok=True)
