"""Small texts with known structure, and batches as arrays."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from flatbed.word2vec import Corpus
from flatbed.word2vec.sampling import TrainingBatch

KINDS = {
    "animal": ["cat", "dog", "horse", "cow"],
    "colour": ["red", "green", "blue", "black"],
    "number": ["one", "two", "three", "four"],
}
SURROUNDINGS = {
    "animal": ["eats", "sleeps", "runs", "barn", "fur"],
    "colour": ["paint", "bright", "wall", "brush", "dark"],
    "number": ["plus", "minus", "count", "sum", "equals"],
}


def kinds_corpus(n_sentences: int = 1500, seed: int = 0) -> Corpus:
    """Sentences of words of one kind, each with words that occur only near that kind."""
    random = np.random.default_rng(seed)
    sentences = []
    for _ in range(n_sentences):
        kind = list(KINDS)[random.integers(len(KINDS))]
        words = random.choice(KINDS[kind], 3).tolist() + random.choice(SURROUNDINGS[kind], 5).tolist()
        sentences.append([words[at] for at in random.permutation(len(words))])
    return Corpus.from_sentences(sentences)


def random_corpus(n_words: int, n_text: int, seed: int = 0, longest: int = 30) -> Corpus:
    """Skewed words in sentences of random length."""
    random = np.random.default_rng(seed)
    words = np.minimum(random.zipf(1.3, n_text), n_words)
    cuts = np.cumsum(random.integers(1, longest + 1, n_text))
    parts = np.split(words, cuts[cuts < n_text])
    return Corpus.from_sentences([[f"w{word}" for word in part] for part in parts])


def as_arrays(batch: TrainingBatch) -> Any:
    """A batch with numpy arrays as attributes."""
    values = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return SimpleNamespace(**{n: v.numpy() if isinstance(v, Tensor) else v for n, v in values.items()})
