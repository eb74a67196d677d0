"""Mistakes with word vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flatbed import FlatbedError
from flatbed.word2vec import Corpus, Settings, Trainer, Vectors, python_corpus, read_corpus
from tests.mistakes.mistake import Mistake, mistake

SENTENCES = [["a", "b", "a", "c"]] * 9


def trainer(**options: Any) -> Trainer:
    return Trainer(Corpus.from_sentences(SENTENCES), Settings(dim=4, epochs=1, device="cpu", **options))


def vectors() -> Vectors:
    return Vectors(["up", "down"], np.array([[0, 1], [0, -1]]))


def begun_twice(folder: Path) -> None:
    """Over files of a training that is not known to be finished."""
    for _ in range(2):
        one = trainer(storage="disk", path=folder)
        try:
            one.run()
            one.save(folder / "run")
        finally:
            one.close()


def damaged(folder: Path) -> None:
    (folder / "v.txt").write_text("2 2\nup 0 1\n")
    Vectors.load(folder / "v.txt")


TEXTS = [
    mistake(
        "word2vec.Corpus",
        "not counted",
        lambda _: Corpus(["a", "b"], np.array([1]), np.array([0, 1]), np.array([2])),
        ValueError,
        r"a count for each word.*found 1 counts of 2 words.*Corpus.from_sentences makes one",
    ),
    mistake(
        "word2vec.Corpus.from_sentences",
        "a text",
        lambda _: Corpus.from_sentences("to be or not to be"),
        TypeError,
        r"sentences are lists of words; found one string: use text.split\(\) for each line",
    ),
    mistake(
        "word2vec.Corpus.from_sentences",
        "lines",
        lambda _: Corpus.from_sentences(["to be", "or not"]),
        TypeError,
        r"a sentence is a list of words; found the string 'to be'",
    ),
    mistake(
        "word2vec.Corpus.from_sentences",
        "numbers",
        lambda _: Corpus.from_sentences([[1, "a"]]),  # type: ignore[list-item]
        TypeError,
        r"words are strings; found 1 among them: str\(word\) makes it one",
    ),
    mistake(
        "word2vec.Corpus.frequent",
        "a frequency",
        lambda _: Corpus.from_sentences(SENTENCES).frequent(0.1),  # type: ignore[arg-type]
        TypeError,
        r"min_count must be an integer; found 0.1",
    ),
    mistake(
        "word2vec.read_corpus",
        "a folder",
        lambda folder: read_corpus([folder]),
        FileNotFoundError,
        r"is a folder: give text files",
    ),
    mistake(
        "word2vec.read_corpus",
        "a number",
        lambda _: read_corpus(5),  # type: ignore[arg-type]
        TypeError,
        r"paths are those of text files; found 5",
    ),
    mistake(
        "word2vec.python_corpus",
        "no source there",
        lambda folder: python_corpus(folder=folder),
        FileNotFoundError,
        r"there is no Python source in .*: give text files",
    ),
]

TRAINING = [
    mistake(
        "word2vec.Settings",
        "no optimizer",
        lambda _: Settings(optimizer=None),  # type: ignore[arg-type]
        TypeError,
        r"optimizer must be a name such as 'adamax'; found None",
    ),
    mistake(
        "word2vec.Settings",
        "one length",
        lambda _: Settings(ngrams=3),  # type: ignore[arg-type]
        TypeError,
        r"ngrams are the least and the greatest length, \(3, 6\) say; found 3",
    ),
    mistake(
        "word2vec.Settings",
        "a number as text",
        lambda _: Settings(subsample="1"),  # type: ignore[arg-type]
        TypeError,
        r"subsample must be a number; found '1'",
    ),
    mistake(
        "word2vec.Trainer",
        "sentences",
        lambda _: Trainer(SENTENCES),  # type: ignore[arg-type]
        TypeError,
        r"corpus must be a Corpus; found list: Corpus.from_sentences makes one",
    ),
    mistake(
        "word2vec.Trainer",
        "options as a dict",
        lambda _: Trainer(Corpus.from_sentences(SENTENCES), {"dim": 4}),  # type: ignore[arg-type]
        TypeError,
        r"settings must be Settings\(...\); found dict",
    ),
    mistake(
        "word2vec.Trainer.run",
        "a number of steps",
        lambda _: trainer().run(100),  # type: ignore[arg-type]
        TypeError,
        r"progress must be a function of a Progress; found 100",
    ),
    mistake(
        "word2vec.Trainer.__iter__",
        "over another training",
        begun_twice,
        FlatbedError,
        r"inputs.bed holds an earlier training: resume that one, give another path, or delete .*outputs.bed",
    ),
    mistake(
        "word2vec.Trainer.save",
        "no folder",
        lambda _: trainer().save(None),  # type: ignore[arg-type]
        TypeError,
        r"folder must be .*; found None",
    ),
    mistake(
        "word2vec.Trainer.resume",
        "nothing there",
        lambda folder: trainer().resume(folder / "none"),
        FlatbedError,
        r"none holds no checkpoint of a training of word vectors: check the path",
    ),
]

RESULTS = [
    mistake(
        "word2vec.Vectors",
        "too many",
        lambda _: Vectors(["up"], np.ones((2, 2))),
        ValueError,
        r"matrix must be \(1 words, dim\); found \(2, 2\)",
    ),
    mistake(
        "word2vec.Vectors",
        "the same word twice",
        lambda _: Vectors(["up", "up"], np.ones((2, 2))),
        ValueError,
        r"words must be distinct; found 'up' more than once",
    ),
    mistake(
        "word2vec.Vectors.__getitem__",
        "unknown",
        lambda _: vectors()["dwn"],
        FlatbedError,
        r"'dwn' is not among the 2 words; did you mean down\?",
    ),
    mistake(
        "word2vec.Vectors.neighbors",
        "a number",
        lambda _: vectors().neighbors(1),  # type: ignore[arg-type]
        TypeError,
        r"a word is a string; found 1",
    ),
    mistake(
        "word2vec.Vectors.save",
        "white space",
        lambda folder: Vectors(["New York"], np.ones((1, 2))).save(folder / "v.txt"),
        FlatbedError,
        r"'New York' has white space, which separates words in this format",
    ),
    mistake(
        "word2vec.Vectors.load",
        "half a file",
        damaged,
        FlatbedError,
        r"v.txt should have 2 words of 2 numbers: 1 words were found",
    ),
]

WORD_VECTORS: list[Mistake] = [*TEXTS, *TRAINING, *RESULTS]
