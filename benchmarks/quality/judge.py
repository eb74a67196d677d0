"""The judge: the same measures for whoever trained the vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quality.text import Text, judged_pairs

Ids = npt.NDArray[np.int64]
N_NEIGHBOURS = 10
N_ASKED = 1000
"""So many of the most frequent words are asked for their neighbours."""
CHUNK = 512  # rows of the words × words matrix at a time
PAIRS = 100_000  # at a time


@dataclass(frozen=True, slots=True)
class Measure:
    """Something to be compared; a trainer may be worse by `margin` and still count as not worse."""

    name: str
    higher_is_better: bool
    margin: float
    why: str


MEASURES = (
    Measure("loss", False, 0.02, "nats per pair on the training text"),
    Measure("held-out loss", False, 0.02, "nats per pair on other sentences"),
    Measure("overlap@10", True, 0.02, "neighbours shared with gensim"),
    Measure("WordSim-353", True, 0.02, "correlation with what people say"),
    Measure("SimLex-999", True, 0.02, "correlation with what people say"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What a training leaves: a row per word of `Text.words` in both tables, and the time it took."""

    inputs: Tensor
    outputs: Tensor
    seconds: float
    cpu_seconds: float


def pairs_of(text: Text, parts: Sequence[list[str]], *, window: int, subsample: float) -> tuple[Ids, Ids]:
    """One draw of (word, context) pairs as skip-gram sees them: thinned out, windows of random size.

    It is made with a generator of its own: every training is judged by the same pairs.
    """
    random = np.random.default_rng(0)
    number = {word: place for place, word in enumerate(text.words)}
    known = [[number[word] for word in words if word in number] for words in parts]
    ids = np.fromiter((i for words in known for i in words), dtype=np.int64)
    sentence = np.repeat(np.arange(len(known)), [len(words) for words in known])
    if subsample:
        threshold = subsample * text.counts.sum()
        kept = (np.sqrt(text.counts / threshold) + 1) * threshold / text.counts
        chosen = random.random(len(ids)) < kept[ids]
        ids, sentence = ids[chosen], sentence[chosen]
    reach = random.integers(1, window + 1, len(ids))
    found: list[tuple[Ids, Ids]] = []
    for distance in range(1, min(window, len(ids) - 1) + 1):
        left, right = np.arange(len(ids) - distance), np.arange(distance, len(ids))
        together = sentence[left] == sentence[right]
        for word, context in ((left, right), (right, left)):
            seen = together & (reach[word] >= distance)
            found.append((ids[word[seen]], ids[context[seen]]))
    return np.concatenate([pair[0] for pair in found]), np.concatenate([pair[1] for pair in found])


class Judge:
    """Knows the text, the settings and the neighbours that reference runs found."""

    def __init__(self, text: Text, *, window: int, subsample: float, negatives: int) -> None:
        self.text, self.negatives = text, negatives
        self.number = {word: place for place, word in enumerate(text.words)}
        options = {"window": window, "subsample": subsample}
        self.pairs = {
            "loss": pairs_of(text, text.training, **options),  # type: ignore[arg-type]
            "held-out loss": pairs_of(text, text.held_out, **options),  # type: ignore[arg-type]
        }
        noise = torch.from_numpy(text.counts).double() ** 0.75
        self.noise = (noise / noise.sum()).float()
        self.judged = {name: judged_pairs(name, text.words) for name in ("WordSim-353", "SimLex-999")}
        self.references: list[Tensor] = []

    def add_reference(self, trained: Trained) -> None:
        """Take the neighbours of this run as one opinion of what they should be."""
        self.references.append(neighbours(trained.inputs))

    def judge(self, trained: Trained) -> dict[str, float]:
        """All measures of a training, by name. With too few words judged by people, theirs is nan."""
        found = self.losses(trained)
        own = neighbours(trained.inputs)
        shared = [overlap(own, other) for other in self.references]
        found["overlap@10"] = sum(shared) / len(shared) if shared else float("nan")
        for name in self.judged:
            found[name] = self.likeness(trained, name)
        return found

    def losses(self, trained: Trained) -> dict[str, float]:
        """Of skip-gram with negative sampling; for the negatives it is the expected value, not a draw."""
        negative = torch.cat(
            [torch.nn.functional.softplus(rows) @ self.noise for rows in _products(trained)]
        )  # of each word, for one negative
        found = {}
        for name, (words, contexts) in self.pairs.items():
            of_words, of_contexts = torch.from_numpy(words), torch.from_numpy(contexts)
            total = self.negatives * float(negative[of_words].double().sum())
            for begin in range(0, len(words), PAIRS):
                some = slice(begin, begin + PAIRS)
                score = (trained.inputs[of_words[some]] * trained.outputs[of_contexts[some]]).sum(1)
                total += float(torch.nn.functional.softplus(-score).double().sum())
            found[name] = total / max(len(words), 1)
        return found

    def untrained_loss(self) -> float:
        """The loss of vectors that are zero."""
        return (1 + self.negatives) * log(2)

    def likeness(self, trained: Trained, name: str) -> float:
        """Spearman's correlation of cosines with people's judgements."""
        from scipy.stats import spearmanr

        pairs = self.judged[name]
        if len(pairs) < 10:
            return float("nan")
        vectors = torch.nn.functional.normalize(trained.inputs, dim=1)
        first = vectors[[self.number[pair[0]] for pair in pairs]]
        second = vectors[[self.number[pair[1]] for pair in pairs]]
        cosines = (first * second).sum(1).numpy()
        return float(spearmanr(cosines, [pair[2] for pair in pairs]).statistic)


def neighbours(inputs: Tensor) -> Tensor:
    """The words with the greatest cosine to each of the most frequent ones, (asked, 10), itself not."""
    vectors = torch.nn.functional.normalize(inputs, dim=1)
    asked = min(N_ASKED, len(vectors))
    cosines = vectors[:asked] @ vectors.T
    cosines[torch.arange(asked), torch.arange(asked)] = -2.0
    return cosines.topk(min(N_NEIGHBOURS, len(vectors) - 1), dim=1).indices


def overlap(one: Tensor, other: Tensor) -> float:
    """How many of the neighbours are the same, as a fraction."""
    return float((one[:, :, None] == other[:, None, :]).any(2).float().mean())


def _products(trained: Trained) -> Iterator[Tensor]:
    """Words × words, some rows at a time."""
    for begin in range(0, len(trained.inputs), CHUNK):
        yield trained.inputs[begin : begin + CHUNK] @ trained.outputs.T
