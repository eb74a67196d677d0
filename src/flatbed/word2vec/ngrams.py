"""Hashed character n-grams: which rows a word's vector is the mean of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BASIS, PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # FNV-1a, over characters


@dataclass(frozen=True, slots=True)
class Bags:
    """For each word, the rows of one table: its own and those of its n-grams."""

    rows: np.ndarray
    """One word's after the other's, int64."""
    ends: np.ndarray
    """Where each word's rows end, (words,) int64."""

    def of(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of some words, and where each begins among them, with the end of the last one."""
        lengths = np.diff(self.ends, prepend=0)[words]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        steps = np.repeat(self.ends[words] - offsets[1:], lengths)
        return self.rows[steps + np.arange(offsets[-1])], offsets


def make_bags(words: list[str], buckets: int, lengths: tuple[int, int]) -> Bags:
    """Row i is word i's; n-grams of "<word>" are hashed to the `buckets` rows after those."""
    framed = [f"<{word}>" for word in words]
    sizes = np.array([len(word) for word in framed])
    text = np.frombuffer("".join(framed).encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    ends = np.cumsum(sizes)
    owner = np.repeat(np.arange(len(words)), sizes)
    left = ends[owner] - np.arange(len(text))  # characters from here to the end of the word
    hashes = np.full(len(text), BASIS)
    owners, rows = [np.arange(len(words))], [np.arange(len(words))]
    for length in range(1, lengths[1] + 1):
        there = np.flatnonzero(left >= length)
        hashes[there] = (hashes[there] ^ text[there + length - 1]) * PRIME
        if length >= lengths[0]:
            owners.append(owner[there])
            rows.append(len(words) + (hashes[there] % np.uint64(buckets)).astype(np.int64))
    of_word, row = np.concatenate(owners), np.concatenate(rows)
    order = np.argsort(of_word, kind="stable")
    return Bags(row[order], np.cumsum(np.bincount(of_word, minlength=len(words))))
