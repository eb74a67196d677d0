"""Hashed character n-grams: the table rows whose mean is a word's vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FNV_BASIS, FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a, over characters


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


def make_bags(words: list[str], buckets: int, lengths: tuple[int, int]) -> WordBags:
    """Hash the n-grams of "<word>" to the `buckets` rows after those of the words; row i is word i's own."""
    framed = [f"<{word}>" for word in words]
    sizes = np.array([len(word) for word in framed])
    text = np.frombuffer("".join(framed).encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    ends = np.cumsum(sizes)
    word_at = np.repeat(np.arange(len(words)), sizes)
    n_left = ends[word_at] - np.arange(len(text))  # characters from here to the end of the word
    hashes = np.full(len(text), FNV_BASIS)
    ngram_words, ngram_rows = [np.arange(len(words))], [np.arange(len(words))]
    for length in range(1, lengths[1] + 1):
        begins = np.flatnonzero(n_left >= length)
        hashes[begins] = (hashes[begins] ^ text[begins + length - 1]) * FNV_PRIME
        if length >= lengths[0]:
            ngram_words.append(word_at[begins])
            ngram_rows.append(len(words) + (hashes[begins] % np.uint64(buckets)).astype(np.int64))
    of_word, row = np.concatenate(ngram_words), np.concatenate(ngram_rows)
    order = np.argsort(of_word, kind="stable")
    return WordBags(row[order], np.cumsum(np.bincount(of_word, minlength=len(words))))
