"""A judge of word vectors, whatever trained them, and the English text that they are trained on.

Text and judged word pairs come with gensim; nothing is downloaded.
"""

from __future__ import annotations

import bz2
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
PLAIN = ("lee_background.cor", "lee.cor", "pang_lee_polarity.cor")
JUDGED = {"WordSim-353": "wordsim353.tsv", "SimLex-999": "simlex999.txt"}
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
HELD_OUT = 20  # one sentence of so many is kept from the trainers
N_ASKED, N_NEIGHBORS = 1000, 10
OVERLAP = "overlap@10"
MARGIN = 0.02  # fixed before the first comparison
SIGNS = {"loss": -1, "held-out loss": -1, OVERLAP: 1, **dict.fromkeys(JUDGED, 1)}
"""Signs that make higher values of a measure better."""

Ids = npt.NDArray[np.int64]
Sentences = list[list[str]]


# ---- text


class Text(NamedTuple):
    """Sentences to train on, sentences for the judge, and the frequent words, most frequent first."""

    training: Sentences
    held_out: Sentences
    words: list[str]
    counts: Ids


def path_of(name: str) -> Path:
    """Return the path of a file that comes with gensim."""
    from gensim.test.utils import datapath

    return Path(datapath(name))


@lru_cache(maxsize=1)
def sentences() -> Sentences:
    """Read the whole text, shuffled once: gensim's result depends on the order of a text."""
    from gensim.corpora.wikicorpus import extract_pages, filter_wiki

    lines: list[str] = []
    with bz2.open(path_of(WIKIPEDIA)) as file:
        for _, article, _ in extract_pages(file, ("0",)):
            if not article.lstrip().upper().startswith("#REDIRECT"):
                lines += filter_wiki(article).splitlines()
    for name in PLAIN:
        lines += path_of(name).read_text(encoding="utf-8", errors="replace").splitlines()
    split = (WORD.findall(line.lower().removeprefix("__label__")) for line in lines)
    found = [words for words in split if len(words) >= 5]  # shorter lines are headings
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def split(lines: Sequence[list[str]], *, min_count: int) -> Text:
    """Hold out every twentieth sentence, and count the words of the others."""
    training = [words for i, words in enumerate(lines) if i % HELD_OUT]
    counted = Counter(word for words in training for word in words)
    kept = {word: count for word, count in counted.most_common() if count >= min_count}
    return Text(training, list(lines[::HELD_OUT]), [*kept], np.array([*kept.values()], dtype=np.int64))


# ---- judge


class Trained(NamedTuple):
    """A row per word of `Text.words` in both tables, and the time of training."""

    inputs: Tensor
    outputs: Tensor
    seconds: float = 1.0
    cpu_seconds: float = 1.0


class Task(NamedTuple):
    """Settings that all trainers share."""

    dim: int = 64
    window: int = 5
    negatives: int = 5
    epochs: int = 10
    subsample: float = 1e-3
    min_count: int = 5
    lr: float = 0.025


def pairs_of(text: Text, parts: Sentences, *, window: int, subsample: float) -> tuple[Ids, Ids]:
    """Draw (word, context) pairs as skip-gram sees them; the same pairs for every training."""
    random = np.random.default_rng(0)
    number = {word: i for i, word in enumerate(text.words)}
    known = [[number[word] for word in words if word in number] for words in parts]
    ids = np.fromiter((i for words in known for i in words), dtype=np.int64)
    sentence = np.repeat(np.arange(len(known)), [len(words) for words in known])
    if subsample:
        threshold = subsample * text.counts.sum()
        kept = (np.sqrt(text.counts / threshold) + 1) * threshold / text.counts
        chosen = random.random(len(ids)) < kept[ids]
        ids, sentence = ids[chosen], sentence[chosen]
    reach = random.integers(1, window + 1, len(ids))
    words, contexts = [], []
    for distance in range(1, min(window, len(ids) - 1) + 1):
        left, right = np.arange(len(ids) - distance), np.arange(distance, len(ids))
        together = sentence[left] == sentence[right]
        for word, context in ((left, right), (right, left)):
            seen = together & (reach[word] >= distance)
            words.append(ids[word[seen]])
            contexts.append(ids[context[seen]])
    return np.concatenate(words), np.concatenate(contexts)


class Judge:
    """Measures vectors, whatever trained them."""

    def __init__(self, text: Text, task: Task) -> None:
        self.text, self.task = text, task
        parts = {"loss": text.training, "held-out loss": text.held_out}
        shape: dict[str, Any] = {"window": task.window, "subsample": task.subsample}
        self.pairs = {name: pairs_of(text, part, **shape) for name, part in parts.items()}
        noise = torch.from_numpy(text.counts).double() ** 0.75
        self.noise = (noise / noise.sum()).float()
        self.references: list[Tensor] = []

    def judge(self, trained: Trained) -> dict[str, float]:
        """Compute all measures."""
        own = neighbors(trained.inputs)
        shared = [overlap(own, other) for other in self.references]
        similar = {name: self.similarity(trained, file) for name, file in JUDGED.items()}
        return {**self.losses(trained), OVERLAP: fmean(shared) if shared else float("nan"), **similar}

    def losses(self, trained: Trained) -> dict[str, float]:
        """Compute the loss of negative sampling, with the expected value over negatives."""
        products = (part @ trained.outputs.T for part in torch.split(trained.inputs, 512))
        negative = torch.cat([F.softplus(part) @ self.noise for part in products])
        found = {}
        for name, pairs in self.pairs.items():
            words, contexts = map(torch.from_numpy, pairs)
            total = self.task.negatives * float(negative[words].double().sum())
            parts = (torch.split(words, 100_000), torch.split(contexts, 100_000))
            for word, context in zip(*parts, strict=True):
                score = (trained.inputs[word] * trained.outputs[context]).sum(1)
                total += float(F.softplus(-score).double().sum())
            found[name] = total / max(len(words), 1)
        return found

    def similarity(self, trained: Trained, file: str) -> float:
        """Compute Spearman's correlation of cosines with people's judgements; nan if no pair is known."""
        from gensim.models import KeyedVectors

        vectors = KeyedVectors(trained.inputs.shape[1])
        vectors.add_vectors(self.text.words, trained.inputs.numpy())
        try:
            return float(vectors.evaluate_word_pairs(path_of(file))[1][0])
        except ValueError:
            return float("nan")


def neighbors(inputs: Tensor) -> Tensor:
    """Return the words with the greatest cosine to each of the most frequent ones."""
    vectors = F.normalize(inputs, dim=1)
    n_asked = min(N_ASKED, len(vectors))
    cosines = vectors[:n_asked] @ vectors.T
    cosines[:, :n_asked].fill_diagonal_(-2.0)
    return cosines.topk(min(N_NEIGHBORS, len(vectors) - 1), dim=1).indices


def overlap(one: Tensor, other: Tensor) -> float:
    """Return the share of equal neighbors."""
    return float((one[:, :, None] == other[:, None, :]).any(2).float().mean())


def verdicts(own: Sequence[dict[str, Any]], gensims: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Compare runs in every measure, by the 95% interval of the difference of means (Welch's t)."""
    from scipy.stats import ttest_ind

    found = {}
    for measure in (name for name in SIGNS if name in own[0] and name in gensims[0]):
        values = [[SIGNS[measure] * run[measure] for run in side] for side in (own, gensims)]
        low, high = ttest_ind(*values, equal_var=False).confidence_interval(0.95)
        found[measure] = "not worse" if low > -MARGIN else "worse" if high < -MARGIN else "undecided"
    return found
