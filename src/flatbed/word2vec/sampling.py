"""Batches of text: which words are kept, how far they see, and which random words they are held against.

Pairs are not listed. Words that are kept stand in blocks of `BLOCK` in a row; the contexts of all of a block
are among the words from `window` before it to `window` after it, and its negatives are shared: all scores of
a block are one small product of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flatbed.word2vec.corpus import Corpus
from flatbed.word2vec.ngrams import Bags
from flatbed.word2vec.vocabulary import Unigrams, keep_probabilities

BLOCK = 32
"""Words in a block."""
SHARED = 64
"""Negatives that the words of a block share. They count as much as `negatives` of its own for each pair."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's text. B blocks, of `BLOCK` words each; the last is filled up with words without pairs."""

    inputs: np.ndarray
    """The rows of its distinct words: one each, (inputs,) int64, or as many as `offsets` say."""
    offsets: np.ndarray | None
    """With n-grams, where each distinct word's rows begin, and the end of the last one's."""
    outputs: np.ndarray
    """The distinct words among contexts and negatives, (outputs,) int64."""
    words: np.ndarray
    """The words in blocks, as places in `inputs`, (B, BLOCK) int64."""
    others: np.ndarray
    """What each block is held against, as places in `outputs`, (B, BLOCK + 2 * window + SHARED) int64."""
    first: np.ndarray
    """For each word its first context among `others`, (B, BLOCK) int32."""
    last: np.ndarray
    """And its last one; before the first if there is none."""
    n_words: int
    """Words of the text that it was made from."""
    n_pairs: int


@dataclass(frozen=True, slots=True)
class Order:
    """An epoch's order of the sentences: neighbours in the text share their rare words."""

    epoch: int
    sentences: np.ndarray
    begins: np.ndarray
    """Where each begins in the text in this order."""


class Batches:
    """The steps of a training, each made from (seed, epoch, number in the epoch) alone.

    - `batch_words`: the most words of text in a step, up to whole sentences; an epoch's steps are equal.
    - `bags`: the rows of each word, with n-grams.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        window: int,
        subsample: float,
        batch_words: int,
        seed: int = 0,
        bags: Bags | None = None,
    ) -> None:
        self._corpus = corpus
        self._lengths = np.diff(corpus.ends, prepend=0)
        self._keep = keep_probabilities(corpus.counts, subsample)
        self._unigrams = Unigrams(corpus.counts)
        self._window = window
        self._seed = seed
        self._bags = bags
        self.per_epoch = -(-len(corpus) // batch_words)

    def range(self, begin: int, end: int) -> Iterator[Batch]:
        """The batches of these steps."""
        order = None
        for step in range(begin, end):
            if order is None or order.epoch != step // self.per_epoch:
                order = self.order(step // self.per_epoch)
            yield self.make(order, step % self.per_epoch)

    def order(self, epoch: int) -> Order:
        """The sentences as an epoch has them."""
        chosen = np.random.default_rng([self._seed, epoch, 0]).permutation(len(self._lengths))
        lengths = self._lengths[chosen]
        return Order(epoch, chosen, np.cumsum(lengths) - lengths)

    def make(self, order: Order, number: int) -> Batch:
        """The batch of this number in an epoch."""
        random = np.random.default_rng([self._seed, order.epoch, 1 + number])
        words, sentences = self._text(order, number)
        kept = random.random(len(words), dtype=np.float32) < self._keep[words]
        return self._blocks(words[kept], sentences[kept], len(words), random)

    def _text(self, order: Order, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The words of the sentences that begin in a stretch of text, and which sentence each is in."""
        # Of equal steps: a remainder would be one of a few words.
        stretch = np.array([number, number + 1]) * len(self._corpus) // self.per_epoch
        chosen = order.sentences[slice(*np.searchsorted(order.begins, stretch))]
        lengths = self._lengths[chosen]
        sentences = np.repeat(np.arange(len(chosen)), lengths)
        # From a place in this text to one in the corpus: what to add is the same in all of a sentence.
        offsets = self._corpus.ends[chosen] - np.cumsum(lengths)
        return self._corpus.ids[np.repeat(offsets, lengths) + np.arange(len(sentences))], sentences

    def _blocks(
        self, words: np.ndarray, sentences: np.ndarray, n_words: int, random: np.random.Generator
    ) -> Batch:
        n, window = len(words), self._window
        n_blocks = max(-(-n // BLOCK), 1)
        first, last = contexts(sentences, random.integers(1, window + 1, n))
        negatives = self._unigrams.draw(n_blocks * SHARED, random)
        inputs, (words_at,) = distinct(len(self._keep), words)
        outputs, (contexts_at, negatives_at) = distinct(len(self._keep), words, negatives)

        begins = np.arange(n_blocks, dtype=np.int64)[:, None] * BLOCK  # of blocks among the words
        around = np.zeros(n_blocks * BLOCK + 2 * window, np.int32)
        around[window : window + n] = contexts_at
        seen = around[begins + np.arange(BLOCK + 2 * window)]
        rows, offsets = (inputs, None) if self._bags is None else self._bags.of(inputs)
        return Batch(
            inputs=rows,
            offsets=offsets,
            outputs=outputs,
            words=_filled(words_at, n_blocks, 0),
            others=np.concatenate((seen, negatives_at.reshape(n_blocks, SHARED)), 1),
            first=(_filled(first, n_blocks, n_blocks * BLOCK) - begins + window).astype(np.int32),
            last=(_filled(last, n_blocks, -1) - begins + window).astype(np.int32),
            n_words=n_words,
            n_pairs=int((last - first).sum()),
        )


def contexts(sentences: np.ndarray, reach: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each word the first and the last one that it sees (itself in between), as places in the text.

    - `sentences`: which sentence each word is in, ascending. `reach`: how far it sees, at least 1.
    """
    n = len(sentences)
    heads = np.flatnonzero(np.diff(sentences, prepend=-1))
    lengths = np.diff(heads, append=n)
    at = np.arange(n)
    first = np.maximum(at - reach, np.repeat(heads, lengths))
    last = np.minimum(at + reach, np.repeat(heads + lengths - 1, lengths))
    return first, last


def distinct(n_words: int, *parts: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """The distinct words of several arrays, ascending, and the arrays as places among them."""
    there = np.zeros(n_words, bool)
    for part in parts:
        there[part] = True
    found = np.flatnonzero(there)
    place = np.empty(n_words, np.int32)
    place[found] = np.arange(len(found), dtype=np.int32)
    return found, [place[part] for part in parts]


def _filled(values: np.ndarray, n_blocks: int, filler: int) -> np.ndarray:
    """In blocks, the last one filled up."""
    made = np.full(n_blocks * BLOCK, filler, values.dtype)
    made[: len(values)] = values
    return made.reshape(n_blocks, BLOCK)
