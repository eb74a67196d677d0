"""Words with their vectors: neighbours, and the files that word2vec made customary."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flatbed.errors import FlatbedError


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Vectors:
    """Words and their vectors.

    - `words`: most frequent first. `matrix`: (words, dim) float32.
    - `counts`: how often each occurred; None if they came from a file, which does not say.

    >>> vectors = Vectors(["up", "down", "sideways"], np.array([[0, 1], [0, -1], [1, 0.5]]))
    >>> vectors.neighbors("up", n=1)[0][0]
    'sideways'
    """

    words: list[str]
    matrix: np.ndarray
    counts: np.ndarray | None = None
    _place: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        matrix = np.ascontiguousarray(self.matrix, np.float32)
        if matrix.ndim != 2 or len(matrix) != len(self.words):
            raise ValueError(f"matrix must be ({len(self.words)} words, dim); found {matrix.shape}")
        place = {word: at for at, word in enumerate(self.words)}
        if len(place) < len(self.words):
            twice = next(word for at, word in enumerate(self.words) if place[word] != at)
            raise ValueError(f"words must be distinct; found {twice!r} more than once")
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "_place", place)

    def __repr__(self) -> str:
        words = ", ".join([*self.words[:4], *(["…"] if len(self) > 4 else [])])
        return f"Vectors({len(self):,} words, dim {self.matrix.shape[1]}: {words})"

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._place

    def __getitem__(self, word: str) -> np.ndarray:
        """A word's vector, (dim,)."""
        row: np.ndarray = self.matrix[self._at(word)]
        return row

    def neighbors(self, word: str, n: int = 8) -> list[tuple[str, float]]:
        """The words with the greatest cosine to this one, and the cosines. Vectors of NaN have none."""
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"n must be 1 at least; found {n!r}")
        at = self._at(word)
        with np.errstate(invalid="ignore", over="ignore"):
            lengths = np.sqrt(np.einsum("ij,ij->i", self.matrix, self.matrix))
            cosines = self.matrix @ self.matrix[at] / np.maximum(lengths * lengths[at], 1e-30)
        cosines[at] = np.nan
        others = np.flatnonzero(np.isfinite(cosines))
        best = others[np.argsort(-cosines[others], kind="stable")[:n]]
        return [(self.words[found], float(cosines[found])) for found in best]

    def _at(self, word: str) -> int:
        if not isinstance(word, str):
            raise TypeError(f"a word is a string; found {word!r}")
        if word not in self._place:
            close = difflib.get_close_matches(word, self.words, n=4, cutoff=0.7)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise FlatbedError(f"{word!r} is not among the {len(self):,} words{hint}")
        return self._place[word]

    # ---- files

    def save(self, path: str | Path, *, binary: bool = False) -> None:
        """In word2vec's text or binary format: a line "words dim", then each word with its numbers."""
        for word in self.words:
            if not word or len(word.split()) != 1 or word.split()[0] != word:
                raise FlatbedError(f"{word!r} has white space, which separates words in this format")
        with Path(path).open("wb") as file:
            file.write(f"{len(self)} {self.matrix.shape[1]}\n".encode())
            for word, row in zip(self.words, self.matrix, strict=True):
                file.write(word.encode() + b" ")
                file.write(row.astype("<f4").tobytes() if binary else _numbers(row))
                file.write(b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Vectors:
        """A file in word2vec's text or binary format; which one is seen from its contents.

        Of a word that is there more than once, the first vector counts, as in gensim.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        with path.open("rb") as file:
            try:
                n_words, dim = (int(number) for number in file.readline().split())
            except ValueError as error:
                raise FlatbedError(
                    f"{path} does not begin with a line of two numbers, words and dim, as word2vec's files do"
                ) from error
            begin = file.tell()
            text = _is_text(file.readline(), dim)
            file.seek(begin)
            try:
                pairs = list(_read_text(file, dim) if text else _read_binary(file, n_words, dim))
                if len(pairs) != n_words:
                    raise ValueError(f"{len(pairs):,} words were found")
                first = dict(reversed(pairs))  # of words that are there twice; in their order below
                words = list(dict.fromkeys(word for word, _ in pairs))
                matrix = np.array([first[word] for word in words], np.float32).reshape(len(words), dim)
                return cls(words, matrix)
            except ValueError as error:
                raise FlatbedError(
                    f"{path} should have {n_words:,} words of {dim} numbers: {error}"
                ) from error


def _numbers(row: np.ndarray) -> bytes:
    """As short as they can be and still give the same float32."""
    return " ".join(map(str, row)).encode()


def _is_text(line: bytes, dim: int) -> bool:
    parts = line.split()
    try:
        return len([float(part) for part in parts[1:]]) == dim
    except ValueError:
        return False


def _read_text(file: BinaryIO, dim: int) -> Iterator[tuple[str, np.ndarray]]:
    for line in file:
        word, *numbers = line.decode("utf-8", "replace").rstrip().split(" ")
        if len(numbers) != dim:
            raise ValueError(f"{word!r} has {len(numbers)}")
        yield word, np.array(numbers, np.float32)


def _read_binary(file: BinaryIO, n_words: int, dim: int) -> Iterator[tuple[str, np.ndarray]]:
    content, at = file.read(), 0
    for _ in range(n_words):
        space = content.find(b" ", at)
        row = content[space + 1 : space + 1 + 4 * dim]
        if space < 0 or len(row) < 4 * dim:
            raise ValueError("it ends early")
        yield content[at:space].lstrip(b"\n").decode("utf-8", "replace"), np.frombuffer(row, "<f4")
        at = space + 1 + 4 * dim
