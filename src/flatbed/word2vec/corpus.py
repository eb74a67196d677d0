"""Texts as arrays of word ids: from lists of words, from files, or from Python's standard library."""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import re
import sysconfig
import warnings
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LONGEST_SENTENCE = 1000
"""Longer sentences are split, as in word2vec: a file without line ends is one long sentence."""
READ_CHARS = 1 << 20
REPLACEMENT = "\ufffd"
"""The character that decoding puts in place of bytes that the encoding does not know."""
IDENTIFIER = re.compile(r"(?:[^\W\d]|\ufffd)(?:\w|\ufffd)*")  # bytes that were replaced do not split words
BLANK_LINES = re.compile(r"\n\s*\n")
SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "turtledemo"),  # not installed on every machine
    *("site-packages", "dist-packages", "ensurepip", "__pycache__"),  # not the standard library
    *("lib2to3", "distutils"),  # not in every version
    *("encodings", "pydoc_data"),  # character tables, and a copy of the manual
}

ReadProgress = Callable[[int, int], None]


def warn_of_replaced_bytes(words: Iterable[str], remedy: str) -> None:
    """Warn of words whose bytes could not be decoded."""
    if n_words := sum(REPLACEMENT in word for word in words):
        warnings.warn(
            f"{n_words:,} different words have U+FFFD in place of bytes that could not be decoded: {remedy}",
            stacklevel=3,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Sentences of word ids.

    - `words`: the unique words, most frequent first; `counts`: occurrences of each, (words,) int64.
    - `ids`: the text, (n,) int32. `ends`: the end of each sentence in the text, (sentences,) int64.

    >>> from flatbed.word2vec import Corpus
    >>> corpus = Corpus.from_sentences([["to", "be"], ["or", "not", "to", "be"]])
    >>> corpus.words, corpus.counts.tolist(), corpus.ends.tolist()
    (['be', 'to', 'not', 'or'], [2, 2, 1, 1], [2, 6])
    """

    words: list[str]
    counts: np.ndarray
    ids: np.ndarray
    ends: np.ndarray

    @classmethod
    def from_sentences(cls, sentences: Iterable[Sequence[str]], *, max_words: int | None = None) -> Corpus:
        """Count the words of sentences, up to `max_words` words of text, and number them by frequency.

        Words of equal count are in alphabetical order.
        """
        number: defaultdict[str, int] = defaultdict(lambda: len(number))
        text, ends = array("i"), array("q")
        for sentence in sentences:
            if isinstance(sentence, str):
                raise TypeError(
                    f"a sentence must be a list of words; found the string {sentence[:40]!r}: use split()"
                )
            words = sentence if max_words is None else sentence[: max_words - len(text)]
            for begin in range(0, len(words), LONGEST_SENTENCE):
                text.extend([number[word] for word in words[begin : begin + LONGEST_SENTENCE]])
                ends.append(len(text))
            if len(text) == max_words:
                break
        found = list(number)
        for word in found:
            if not isinstance(word, str):
                raise TypeError(f"words must be strings; found {word!r}: use str(word)")
        ids = np.frombuffer(text, np.int32)
        counts = np.bincount(ids, minlength=len(found)).astype(np.int64)
        order = sorted(range(len(found)), key=lambda word: (-int(counts[word]), found[word]))
        new_id = np.empty(len(found), np.int32)
        new_id[order] = np.arange(len(found), dtype=np.int32)
        return cls([found[word] for word in order], counts[order], new_id[ids], np.array(ends, np.int64))

    def __repr__(self) -> str:
        words = ", ".join([*self.words[:4], *(["…"] if len(self.words) > 4 else [])])
        return f"Corpus({len(self):,} words of text, {len(self.words):,} distinct: {words})"

    def __len__(self) -> int:
        """Return the number of words of text."""
        return len(self.ids)

    def frequent(self, min_count: int) -> Corpus:
        """Return the corpus without words that occur less than `min_count` times.

        The words on both sides of a removed word become neighbours.
        """
        n_words = int(np.searchsorted(-self.counts, -min_count, side="right"))
        if n_words == len(self.words):
            return self
        is_kept = self.ids < n_words
        n_kept_before = np.concatenate(([0], np.cumsum(is_kept)))
        ends = n_kept_before[self.ends]
        has_words = np.diff(ends, prepend=0) > 0
        return Corpus(self.words[:n_words], self.counts[:n_words], self.ids[is_kept], ends[has_words])

    def fingerprint(self) -> str:
        """Return a hash of words and text: equal for equal corpora."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\n".join(self.words).encode("utf-8", "surrogatepass"))
        for part in (self.ids, self.ends):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


def read_corpus(
    paths: str | Path | Iterable[str | Path],
    *,
    encoding: str = "utf-8",
    max_words: int | None = None,
    progress: ReadProgress | None = None,
) -> Corpus:
    """Read text files with a sentence per line and white space between words.

    Bytes that the encoding does not know become U+FFFD, and a warning gives the number of words that have
    it. A file with NUL characters raises: it is compressed, in UTF-16, or no text.
    `progress(bytes read, bytes in total)` is called after each block.
    """
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    try:
        "".encode(encoding)  # raises for codecs of bytes, which lookup finds, too
        codec = codecs.lookup(encoding).name
    except LookupError as error:
        raise ValueError(f"{error}: give the name of a codec of Python, such as latin-1") from error
    codec = "utf-8-sig" if codec == "utf-8" else codec  # drops a byte order mark
    corpus = Corpus.from_sentences(_lines(files, codec, progress), max_words=max_words)
    remedy = f"the text is not {encoding}; give its encoding (--encoding latin-1 for example)"
    warn_of_replaced_bytes(corpus.words, remedy)
    return corpus


def _lines(files: Sequence[Path], codec: str, progress: ReadProgress | None) -> Iterator[list[str]]:
    """Yield the words of each line. Lines and words that are longer than a block are yielded in parts."""
    sizes = [file.stat().st_size for file in files]
    n_done = 0
    for file, size in zip(files, sizes, strict=True):
        with file.open("rb") as binary, io.TextIOWrapper(binary, codec, "replace", newline="") as opened:
            rest = ""
            while block := opened.read(READ_CHARS):
                if "\0" in block:
                    raise ValueError(
                        f"{file} is no text in this encoding: it has NUL characters. If it is compressed, "
                        "unpack it; if its encoding is another, utf-16 for example, give that (--encoding)"
                    )
                *lines, rest = (rest + block).split("\n")
                yield from map(str.split, lines)
                if len(rest) > READ_CHARS:
                    words = rest.split()
                    may_continue = not rest[-1].isspace() and len(words[-1]) <= READ_CHARS
                    rest = words.pop() if may_continue else ""
                    yield words
                if progress is not None:
                    progress(n_done + binary.tell(), sum(sizes))
            yield rest.split()
        n_done += size


def python_corpus(
    *, max_words: int | None = None, progress: ReadProgress | None = None, folder: str | Path | None = None
) -> Corpus:
    """Read the identifiers and words in the source of Python's standard library, or of `folder`.

    A sentence is the text between blank lines: a function, a paragraph of a docstring. Identifiers are
    neither split nor changed. Bytes that are not UTF-8 become U+FFFD, and a warning gives the number of
    words that have it. `progress(files read, files in total)` is called after each file.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    files = source_files(root)
    if not files:
        raise FileNotFoundError(f"there is no Python source in {root}: give text files")
    corpus = Corpus.from_sentences(_paragraphs(files, progress), max_words=max_words)
    warn_of_replaced_bytes(corpus.words, "convert the source to UTF-8")
    return corpus


def source_files(root: Path) -> list[Path]:
    """List Python files, folder by folder in the order of their names, without `SKIPPED_FOLDERS`."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS and name[0] != ".")
        found += [Path(folder) / name for name in sorted(names) if name.endswith(".py")]
    return found


def _paragraphs(files: list[Path], progress: ReadProgress | None) -> Iterator[list[str]]:
    for n_read, file in enumerate(files, start=1):
        for paragraph in BLANK_LINES.split(file.read_text(encoding="utf-8", errors="replace")):
            if words := IDENTIFIER.findall(paragraph):
                yield words
        if progress is not None:
            progress(n_read, len(files))
