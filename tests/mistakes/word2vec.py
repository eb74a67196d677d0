"""Mistakes with word vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flatbed import FlatbedError
from flatbed.word2vec import Corpus, Settings, Trainer, Vectors, python_corpus, read_corpus
from tests.mistakes.mistake import Mistake, mistake

SENTENCES: Any = [["a", "b", "a", "c"]] * 9
CORPUS: Any = Corpus  # for calls that mypy would refuse
VECTORS: Any = Vectors(["up", "down"], np.array([[0, 1], [0, -1]]))


def trainer(**options: Any) -> Any:
    settings = Settings(dim=4, epochs=1, subsample=0, device="cpu", **options)
    return Trainer(Corpus.from_sentences(SENTENCES), settings)


def start_twice(folder: Path) -> None:
    """Start again over the files of an earlier run."""
    for _ in range(2):
        one = trainer(storage="disk", path=folder)
        try:
            one.run()
            one.save(folder / "run")
        finally:
            one.close()


def load_half(folder: Path) -> None:
    (folder / "v.txt").write_text("2 2\nup 0 1\n")
    Vectors.load(folder / "v.txt")


def of(name: str, what: str, attempt: Any, error: type[Exception], message: str) -> Mistake:
    return mistake(f"word2vec.{name}", what, attempt, error, message)


WORD_VECTORS: list[Mistake] = [
    of("Corpus", "sentences", lambda _: CORPUS(SENTENCES), TypeError, "missing 3 required"),
    of("Corpus.from_sentences", "a text", lambda _: Corpus.from_sentences("to be"), TypeError, r"split\(\)"),
    of("Corpus.from_sentences", "lines", lambda _: Corpus.from_sentences(["to be"]), TypeError, "'to be'"),
    of("Corpus.from_sentences", "numbers", lambda _: CORPUS.from_sentences([[1]]), TypeError, r"1: use str"),
    of(
        "Corpus.frequent",
        "a string",
        lambda _: CORPUS.from_sentences(SENTENCES).frequent("5"),
        TypeError,
        "str",
    ),
    of("read_corpus", "a folder", lambda folder: read_corpus([folder]), IsADirectoryError, "Is a directory"),
    of("python_corpus", "no source", lambda f: python_corpus(folder=f), FileNotFoundError, "give text files"),
    of("Settings", "no size", lambda _: Settings(dim=0), ValueError, "at least 1; found 0"),
    of("Settings", "no path", lambda _: Settings(storage="disk"), ValueError, r"--path.*path=None"),
    of("Settings", "unknown", lambda _: Settings(optimizer="adm"), ValueError, "'adm'; known are .*adam"),
    of(
        "Trainer",
        "rare words",
        lambda _: trainer(min_count=99),
        ValueError,
        "^0 words .* lower min_count .--min-count",
    ),
    of("Trainer.run", "a number of steps", lambda _: trainer().run(100), TypeError, "not callable"),
    of("Trainer.__iter__", "over another run", start_twice, FlatbedError, r"earlier training.*outputs\.bed"),
    of(
        "Trainer.save",
        "no folder",
        lambda _: trainer().save(None),
        TypeError,
        "folder must be .*; found None",
    ),
    of(
        "Trainer.resume", "nothing there", lambda f: trainer().resume(f), FlatbedError, "no checkpoint: check"
    ),
    of("Trainer.vectors", "unknown", lambda _: trainer().vectors(["z"]), FlatbedError, "'z' .*n-grams"),
    of("Vectors", "too many", lambda _: Vectors(["up"], np.ones((2, 2))), ValueError, r"found \(2, 2\)"),
    of(
        "Vectors",
        "a word twice",
        lambda _: Vectors(["up"] * 2, np.ones((2, 2))),
        ValueError,
        "'up' more than",
    ),
    of(
        "Vectors.__getitem__",
        "unknown",
        lambda _: VECTORS["dwn"],
        FlatbedError,
        r"'dwn' .*did you mean down\?",
    ),
    of("Vectors.neighbors", "a number", lambda _: VECTORS.neighbors(1), TypeError, "int"),
    of(
        "Vectors.save",
        "white space",
        lambda folder: Vectors(["New York"], np.ones((1, 2))).save(folder / "v.txt"),
        FlatbedError,
        "'New York' has white space",
    ),
    of("Vectors.load", "half a file", load_half, FlatbedError, "should have 2 words .* it has 1"),
]
