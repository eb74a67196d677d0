"""Who trains: gensim, flatbed, and flatbed with a mistake in it that the comparison must notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from quality.judge import Trained
from quality.text import Text

END_OF_LR = 0.0001
"""Where gensim's learning rate ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The settings that all trainers share."""

    dim: int = 64
    window: int = 5
    negatives: int = 5
    epochs: int = 10
    subsample: float = 1e-3
    min_count: int = 5
    lr: float = 0.025
    threads: int = 1


Train = Callable[[Text, Task, int], Trained]
"""From a text, settings and a seed to vectors."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A trainer by its name, and what it is there for (see `RunRow.role`)."""

    name: str
    role: str
    train: Train


def order(text: Text, seed: int) -> list[list[str]]:
    """The training sentences in an order of the seed's own: it is a part of what differs between runs."""
    places = np.random.default_rng(seed).permutation(len(text.training))
    return [text.training[place] for place in places]


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Seconds of the wall clock and of all cores together, in a list that is filled at the end."""
    took: list[float] = []
    wall, cores = time.perf_counter(), time.process_time()
    yield took
    took += [time.perf_counter() - wall, time.process_time() - cores]


def train_gensim(text: Text, task: Task, seed: int) -> Trained:
    """By the compiled loop of gensim."""
    from gensim.models import Word2Vec

    sentences = order(text, seed)
    model = Word2Vec(
        sg=1,
        vector_size=task.dim,
        window=task.window,
        negative=task.negatives,
        sample=task.subsample,
        min_count=task.min_count,
        alpha=task.lr,
        min_alpha=END_OF_LR,
        workers=task.threads,
        seed=seed,
    )
    model.build_vocab(sentences)
    with stopwatch() as took:
        model.train(sentences, total_examples=model.corpus_count, epochs=task.epochs)
    rows = [model.wv.key_to_index[word] for word in text.words]
    return Trained(torch.from_numpy(model.wv.vectors[rows]), torch.from_numpy(model.syn1neg[rows]), *took)


def train_flatbed(text: Text, task: Task, seed: int, **settings: Any) -> Trained:
    """By flatbed on the CPU; `settings` are its own, such as the optimizer."""
    from flatbed.word2vec import Corpus, Settings, Trainer

    corpus = Corpus.from_sentences(order(text, seed))
    known: dict[str, Any] = {
        "dim": task.dim,
        "window": task.window,
        "negatives": task.negatives,
        "epochs": task.epochs,
        "subsample": task.subsample,
        "min_count": task.min_count,
        "lr": task.lr,
    }
    trainer = Trainer(corpus, Settings(device="cpu", seed=seed, **{**known, **settings}))
    with stopwatch() as took:
        trainer.run()
    vectors = trainer.vectors()
    outputs: Any = trainer.model["outputs"]
    number = {word: place for place, word in enumerate(vectors.words)}
    rows = [number[word] for word in text.words]
    return Trained(torch.from_numpy(vectors.matrix[rows]), outputs.read_rows(rows), *took)


def with_sgd(text: Text, task: Task, seed: int) -> Trained:
    """The same algorithm as gensim's: plain steps with the same learning rate."""
    return train_flatbed(text, task, seed, optimizer="sgd")


def with_default(text: Text, task: Task, seed: int) -> Trained:
    """What `flatbed word2vec` does when nothing else is asked for: Adamax with a learning rate of its own."""
    return train_flatbed(text, task, seed, lr=None)


@contextmanager
def uniform_negatives() -> Iterator[None]:
    """The mistake: negatives are drawn from all words alike, however frequent they are."""
    from flatbed.word2vec.sampling import NegativeSampler

    def draw(self: NegativeSampler, n: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        return random.integers(len(self._cumulative), size=n)

    with patch.object(NegativeSampler, "draw", draw):
        yield


@contextmanager
def shifted_window() -> Iterator[None]:
    """The mistake: a word is given the contexts of the word that stands `window` places before it."""
    from flatbed.word2vec.sampling import BatchSampler, TrainingBatch

    make = BatchSampler.make

    def shifted(self: BatchSampler, *arguments: Any) -> TrainingBatch:
        batch = make(self, *arguments)
        centers = batch.centers.flatten().roll(-self._window).view_as(batch.centers)
        return replace(batch, centers=centers)

    with patch.object(BatchSampler, "make", shifted):
        yield


def broken(mistake: Callable[[], AbstractContextManager[None]] = nullcontext) -> Train:
    """The trainer of flatbed with a mistake in it."""

    def train(text: Text, task: Task, seed: int) -> Trained:
        with mistake():
            return with_sgd(text, task, seed)

    return train


REFERENCE = Contender("gensim", "reference", train_gensim)
COMPARED = (
    Contender("gensim", "compared", train_gensim),
    Contender("flatbed sgd", "compared", with_sgd),
    Contender("flatbed default", "default", with_default),
)
BROKEN = (
    Contender("broken: uniform negatives", "broken", broken(uniform_negatives)),
    Contender("broken: shifted window", "broken", broken(shifted_window)),
)
