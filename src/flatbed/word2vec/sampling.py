"""Training batches: which words are kept, how wide their windows are, and which negatives they share.

Pairs are never listed. The kept words are cut into blocks of `BLOCK` consecutive words. All contexts of a
block are among the words from `window` before it to `window` after it, and its words share their negatives.
So all scores of a block are one small matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flatbed.word2vec.corpus import Corpus
from flatbed.word2vec.settings import Settings

BLOCK = 32
"""Words in a block."""
NEGATIVE_POWER = 0.75
LEAST_WORDS = 128
"""Words of a step in the smallest texts."""
FNV_BASIS, FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a, over characters


# ---- character n-grams


@dataclass(frozen=True, slots=True)
class WordBags:
    """The rows of each word in one table: the word's own row, then those of its n-grams."""

    rows: np.ndarray
    """The rows of all words, concatenated, int64."""
    ends: np.ndarray
    """The end of each word's rows, (words,) int64."""

    def lookup(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of some words and the offsets of `EmbeddingBag(include_last_offset=True)`."""
        lengths = np.diff(self.ends, prepend=0)[words]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        shifts = np.repeat(self.ends[words] - offsets[1:], lengths)
        return self.rows[shifts + np.arange(offsets[-1])], offsets


def make_bags(
    words: Sequence[str], buckets: int, lengths: tuple[int, int], *, n_known: int | None = None
) -> WordBags:
    """Hash the n-grams of "<word>" to the `buckets` rows after those of the words; row i is word i's own.

    With `n_known`, the table has so many other words, and these words have no rows of their own.
    """
    framed = [f"<{word}>" for word in words]
    sizes = np.array([len(word) for word in framed])
    text = np.frombuffer("".join(framed).encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    ends = np.cumsum(sizes)
    word_at = np.repeat(np.arange(len(words)), sizes)
    n_left = ends[word_at] - np.arange(len(text))  # characters from here to the end of the word
    hashes = np.full(len(text), FNV_BASIS)
    own = np.arange(len(words) if n_known is None else 0)
    first_bucket = len(words) if n_known is None else n_known
    ngram_words, ngram_rows = [own], [own]
    for length in range(1, min(lengths[1], sizes.max()) + 1):
        begins = np.flatnonzero(n_left >= length)
        hashes[begins] = (hashes[begins] ^ text[begins + length - 1]) * FNV_PRIME
        if length >= lengths[0]:
            ngram_words.append(word_at[begins])
            ngram_rows.append(first_bucket + (hashes[begins] % np.uint64(buckets)).astype(np.int64))
    of_word, row = np.concatenate(ngram_words), np.concatenate(ngram_rows)
    order = np.argsort(of_word, kind="stable")
    return WordBags(row[order], np.cumsum(np.bincount(of_word, minlength=len(words))))


# ---- batches


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The text of one step, in B blocks."""

    inputs: Tensor
    """Table rows of the unique words: one each, (inputs,) int64, or with n-grams as `offsets` says."""
    offsets: Tensor | None
    """With n-grams, the offset of each unique word's rows, and the end; otherwise None."""
    outputs: Tensor
    """The unique words among contexts and negatives, (outputs,) int64."""
    centers: Tensor
    """Each word as an index into the unique inputs, (B, BLOCK) int32; the last block is padded."""
    candidates: Tensor
    """Nearby words, then negatives, of each block as indices into `outputs`, (B, nearby + negatives)."""
    n_nearby: int
    """Columns of nearby words: the block, and `window` words before and after it."""
    first_context: Tensor
    """Column of each word's first context in `candidates`, (B, BLOCK) int32."""
    last_context: Tensor
    """Column of each word's last context; less than the first for words without contexts."""
    n_words: int
    """Words of text that the batch was made from."""
    n_pairs: int
    """Pairs of a word and a context; with CBOW, words that have contexts."""


class BatchSampler:
    """The batches of a training run, each made from (seed, epoch, number in the epoch) alone.

    - `batch_words`: the most words of text in a step, up to whole sentences; an epoch's steps are equal.
    - `bags`: the rows of each word, with n-grams; otherwise None.
    """

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self._corpus, self._settings = corpus, settings
        self._lengths = np.diff(corpus.ends, prepend=0)
        self._keep = keep_probabilities(corpus.counts, settings.subsample)
        self._negatives = NegativeSampler(corpus.counts)
        self._order = lru_cache(maxsize=2)(self._shuffle)
        suited = settings.defaults
        self.batch_words = settings.batch_words or min(
            suited.batch_words, max(LEAST_WORDS, len(corpus) // suited.least_steps)
        )
        self.steps_per_epoch = -(-len(corpus) // self.batch_words)
        self.bags = make_bags(corpus.words, settings.buckets, settings.ngrams) if settings.buckets else None

    def make(self, step: int) -> TrainingBatch:
        """Make the batch of a step, counted from the first epoch."""
        epoch, number = divmod(step, self.steps_per_epoch)
        random = np.random.default_rng([self._settings.seed, epoch, 1 + number])
        words, sentences = self._text(epoch, number)
        is_kept = random.random(len(words), dtype=np.float32) < self._keep[words]
        return self._blocks(words[is_kept], sentences[is_kept], len(words), random)

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of sentences in an epoch, and the begin of each in the shuffled text.

        Shuffling spreads rare words, which are close together in the text.
        """
        order = np.random.default_rng([self._settings.seed, epoch, 0]).permutation(len(self._lengths))
        lengths = self._lengths[order]
        return order, np.cumsum(lengths) - lengths

    def _text(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the words of the sentences that begin in this step's part, and the sentence of each."""
        order, begins = self._order(epoch)
        # Parts of equal length: otherwise the last step of an epoch could have only a few words.
        part = np.array([number, number + 1]) * len(self._corpus) // self.steps_per_epoch
        chosen = order[slice(*np.searchsorted(begins, part))]
        lengths = self._lengths[chosen]
        sentences = np.repeat(np.arange(len(chosen)), lengths)
        shifts = self._corpus.ends[chosen] - np.cumsum(lengths)  # from positions in the batch to the corpus
        return self._corpus.ids[np.repeat(shifts, lengths) + np.arange(len(sentences))], sentences

    def _blocks(
        self, words: np.ndarray, sentences: np.ndarray, n_words: int, random: np.random.Generator
    ) -> TrainingBatch:
        n, window, n_shared = len(words), self._settings.window, self._settings.defaults.shared_negatives
        n_blocks = max(-(-n // BLOCK), 1)
        first, last = contexts(sentences, random.integers(1, window + 1, n))
        negatives = self._negatives.draw(n_blocks * n_shared, random)
        inputs, (centers,) = unique(len(self._keep), words)
        outputs, (contexts_at, negatives_at) = unique(len(self._keep), words, negatives)

        begins = np.arange(n_blocks, dtype=np.int64)[:, None] * BLOCK
        padded = np.zeros(n_blocks * BLOCK + 2 * window, np.int32)
        padded[window : window + n] = contexts_at
        nearby = padded[begins + np.arange(BLOCK + 2 * window)]
        candidates = np.concatenate((nearby, negatives_at.reshape(n_blocks, n_shared)), 1)
        first_context = (_in_blocks(first, n_blocks, n_blocks * BLOCK) - begins + window).astype(np.int32)
        last_context = (_in_blocks(last, n_blocks, -1) - begins + window).astype(np.int32)
        rows, offsets = (inputs, None) if self.bags is None else self.bags.lookup(inputs)
        return TrainingBatch(
            inputs=torch.from_numpy(rows),
            offsets=None if offsets is None else torch.from_numpy(offsets),
            outputs=torch.from_numpy(outputs),
            centers=torch.from_numpy(_in_blocks(centers, n_blocks, 0)),
            candidates=torch.from_numpy(candidates),
            n_nearby=nearby.shape[1],
            first_context=torch.from_numpy(first_context),
            last_context=torch.from_numpy(last_context),
            n_words=n_words,
            n_pairs=int(np.count_nonzero(last - first) if self._settings.cbow else (last - first).sum()),
        )


def keep_probabilities(counts: np.ndarray, subsample: float) -> np.ndarray:
    """Return the probability that an occurrence of each word stays: word2vec's sqrt(t / f) + t / f."""
    if subsample <= 0:
        return np.ones(len(counts), np.float32)
    ratio = subsample * counts.sum() / counts
    probabilities: np.ndarray = np.minimum(np.sqrt(ratio) + ratio, 1).astype(np.float32)
    return probabilities


class NegativeSampler:
    """Draws words with probability proportional to count**0.75."""

    def __init__(self, counts: np.ndarray) -> None:
        weights = np.asarray(counts, np.float64) ** NEGATIVE_POWER
        self._cumulative = np.cumsum(weights / weights.sum())
        self._cumulative[-1] = 1.0

    def draw(self, n: int, random: np.random.Generator) -> np.ndarray:
        """Draw words, (n,) int64, in random order.

        Stratified: one from each of n equal parts of the distribution. Each draw has the distribution, and
        together they are closer to it than independent draws.
        """
        points = (np.arange(n) + random.random(n)) / max(n, 1)
        # Ascending points read memory in order. The greatest point may round to 1.
        words = np.searchsorted(self._cumulative, points, side="right")
        return random.permutation(np.minimum(words, len(self._cumulative) - 1))


def contexts(sentences: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of each word's first and last context; the word itself lies between them.

    - `sentences`: the sentence of each word, ascending. `windows`: how far each word sees, at least 1.
    """
    n = len(sentences)
    heads = np.flatnonzero(np.diff(sentences, prepend=-1))
    lengths = np.diff(heads, append=n)
    positions = np.arange(n)
    first = np.maximum(positions - windows, np.repeat(heads, lengths))
    last = np.minimum(positions + windows, np.repeat(heads + lengths - 1, lengths))
    return first, last


def unique(n_words: int, *parts: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the unique words of several arrays, ascending, and the arrays as indices into them."""
    is_used = np.zeros(n_words, bool)  # faster than sorting, as np.unique does
    for part in parts:
        is_used[part] = True
    words = np.flatnonzero(is_used)
    index = np.empty(n_words, np.int32)
    index[words] = np.arange(len(words), dtype=np.int32)
    return words, [index[part] for part in parts]


def _in_blocks(values: np.ndarray, n_blocks: int, padding: int) -> np.ndarray:
    padded = np.full(n_blocks * BLOCK, padding, values.dtype)
    padded[: len(values)] = values
    return padded.reshape(n_blocks, BLOCK)
