"""A text as numbers: sentences of word ids, most frequent words first."""

from __future__ import annotations

import codecs
import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LONGEST_SENTENCE = 1000
"""Longer ones are cut, as by word2vec itself: a text without line ends is one, too."""

READ_BYTES = 1 << 20

ReadProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Sentences over words.

    - `words`: all distinct ones, the most frequent first; `counts`: how often each occurs, (words,) int64.
    - `ids`: the text, (n,) int32. `ends`: where each sentence ends in it, (sentences,) int64.

    >>> corpus = Corpus.from_sentences([["to", "be"], ["or", "not", "to", "be"]])
    >>> corpus.words, corpus.counts.tolist(), corpus.ends.tolist()
    (['be', 'to', 'not', 'or'], [2, 2, 1, 1], [2, 6])
    """

    words: list[str]
    counts: np.ndarray
    ids: np.ndarray
    ends: np.ndarray

    def __post_init__(self) -> None:
        n_words, n_text = len(self.words), len(self.ids)
        end = self.ends[-1] if len(self.ends) else 0
        if len(self.counts) != n_words or end != n_text:
            raise ValueError(
                f"a corpus has a count for each word, and its last sentence ends with the text; found "
                f"{len(self.counts)} counts of {n_words} words, and the end {end} in a text of {n_text}: "
                "Corpus.from_sentences makes one of lists of words"
            )

    @classmethod
    def from_sentences(cls, sentences: Iterable[Sequence[str]], *, max_words: int | None = None) -> Corpus:
        """Count and number the words of sentences, up to `max_words` of text."""
        if isinstance(sentences, str):
            raise TypeError("sentences are lists of words; found one string: use text.split() for each line")
        if not isinstance(sentences, Iterable):
            raise TypeError(f"sentences are lists of words; found {sentences!r}")
        if max_words is not None and (not isinstance(max_words, int) or max_words < 1):
            raise ValueError(f"max_words must be 1 at least; found {max_words!r}")
        number: defaultdict[str, int] = defaultdict(lambda: len(number))
        text, ends = array("i"), array("q")
        for sentence in sentences:
            if isinstance(sentence, str):
                raise TypeError(f"a sentence is a list of words; found the string {sentence[:40]!r}")
            if not isinstance(sentence, Sequence | np.ndarray):
                raise TypeError(f"a sentence is a list of words; found {_shown(sentence)}")
            words = sentence if max_words is None else sentence[: max_words - len(text)]
            for begin in range(0, len(words), LONGEST_SENTENCE):
                part = words[begin : begin + LONGEST_SENTENCE]
                try:
                    text.extend([number[word] for word in part])
                except TypeError as error:  # lists in lists, say
                    raise _not_words(part) from error
                ends.append(len(text))
            if len(text) == max_words:
                break
        if not all(isinstance(word, str) for word in number):
            raise _not_words(number)
        return _by_frequency(list(number), np.frombuffer(text, np.int32), np.array(ends, np.int64))

    def __len__(self) -> int:
        """How many words of text there are."""
        return len(self.ids)

    def frequent(self, min_count: int) -> Corpus:
        """The same without words that occur less often; sentences close up over them."""
        if not isinstance(min_count, int):
            raise TypeError(f"min_count must be an integer; found {min_count!r}")
        n_words = int(np.searchsorted(-self.counts, -min_count, side="right"))
        if n_words == len(self.words):
            return self
        kept = self.ids < n_words
        n_before = np.concatenate(([0], np.cumsum(kept)))
        ends = n_before[self.ends]
        some = np.diff(ends, prepend=0) > 0
        return Corpus(self.words[:n_words], self.counts[:n_words], self.ids[kept], ends[some])

    def fingerprint(self) -> str:
        """Of the words and the text: equal for the same corpus."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\n".join(self.words).encode("utf-8", "surrogatepass"))
        for part in (self.ids, self.ends):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


def _not_words(found: Iterable[Any]) -> TypeError:
    wrong = next(word for word in found if not isinstance(word, str))
    return TypeError(f"words are strings; found {_shown(wrong)} among them: str(word) makes it one")


def _shown(found: object) -> str:
    """Short, and without an address."""
    shown = repr(found)
    return type(found).__name__ if " at 0x" in shown or len(shown) > 40 else shown


def _by_frequency(words: list[str], ids: np.ndarray, ends: np.ndarray) -> Corpus:
    """Numbers by falling count, and words of equal count by the alphabet."""
    counts = np.bincount(ids, minlength=len(words)).astype(np.int64)
    order = sorted(range(len(words)), key=lambda at: (-int(counts[at]), words[at]))
    renumbered = np.empty(len(words), np.int32)
    renumbered[order] = np.arange(len(words), dtype=np.int32)
    return Corpus([words[at] for at in order], counts[order], renumbered[ids], ends)


def read_corpus(
    paths: Iterable[str | Path], *, max_words: int | None = None, progress: ReadProgress | None = None
) -> Corpus:
    """Text files in UTF-8, a sentence per line, words between white space.

    Bytes that are not UTF-8 are skipped. `progress(bytes read, bytes in all)` is called now and then.
    """
    given: Any = [paths] if isinstance(paths, str | Path) else paths
    if not isinstance(given, Iterable):
        raise TypeError(f"paths are those of text files; found {given!r}")
    files = [Path(path) for path in given]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} {'is a folder' if file.is_dir() else 'does not exist'}: give text files"
            )
    corpus = Corpus.from_sentences(_lines(files, progress), max_words=max_words)
    if not len(corpus):
        raise ValueError(f"there are no words in {', '.join(map(str, files)) or 'no files'}")
    return corpus


def _lines(files: Sequence[Path], progress: ReadProgress | None) -> Iterator[list[str]]:
    """The words of each line; of one that does not end, as many as a sentence may have."""
    n_bytes, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        with file.open("rb") as opened:
            words: list[str] = []
            rest = b""
            if opened.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:  # a mark, and no part of the first word
                done += len(codecs.BOM_UTF8)
            else:
                opened.seek(0)
            while block := opened.read(READ_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    yield words + line.decode("utf-8", "ignore").split()
                    words = []
                cut = rest.rfind(b" ") + 1  # a word may go on in the next block
                words += rest[:cut].decode("utf-8", "ignore").split()
                rest = rest[cut:]
                while len(words) >= LONGEST_SENTENCE:
                    yield words[:LONGEST_SENTENCE]
                    words = words[LONGEST_SENTENCE:]
                done += len(block)
                if progress is not None:
                    progress(done, n_bytes)
            yield words + rest.decode("utf-8", "ignore").split()
