"""Words with their vectors: neighbours, word2vec's file formats, and plots."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flatbed import FlatbedError
from flatbed.word2vec.corpus import warn_of_replaced_bytes

MAP_WORDS = 150
"""Words in the map: the most frequent."""
COLOUR = "#e4572e"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Vectors:
    """Words and their vectors.

    - `words`: unique, most frequent first. `matrix`: (words, dim) float32.
    - `counts`: occurrences of each word; None for vectors from a file.

    >>> import numpy as np
    >>> from flatbed.word2vec import Vectors
    >>> matrix = np.array([[0, 1], [0, -1], [1, 0.5]])
    >>> vectors = Vectors(["up", "down", "sideways"], matrix)
    >>> vectors.neighbors("up", n=1)[0][0]
    'sideways'
    """

    words: list[str]
    matrix: np.ndarray
    counts: np.ndarray | None = None
    _index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        matrix = np.ascontiguousarray(self.matrix, np.float32)
        if matrix.ndim != 2 or len(matrix) != len(self.words):
            raise ValueError(f"matrix must be ({len(self.words)} words, dim); found {matrix.shape}")
        index = {word: row for row, word in enumerate(self.words)}
        if len(index) < len(self.words):
            repeated = next(word for row, word in enumerate(self.words) if index[word] != row)
            raise ValueError(f"words must be unique; found {repeated!r} more than once")
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "_index", index)

    def __repr__(self) -> str:
        words = ", ".join([*self.words[:4], *(["…"] if len(self) > 4 else [])])
        return f"Vectors({len(self):,} words, dim {self.matrix.shape[1]}: {words})"

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._index

    def __getitem__(self, word: str) -> np.ndarray:
        """Return a word's vector, (dim,)."""
        row: np.ndarray = self.matrix[self._row(word)]
        return row

    def neighbors(self, word: str, n: int = 8) -> list[tuple[str, float]]:
        """Return the words with the greatest cosine to this one, with the cosines. Skips vectors of NaN."""
        row = self._row(word)
        with np.errstate(invalid="ignore", over="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", self.matrix, self.matrix))
            cosines = self.matrix @ self.matrix[row] / np.maximum(norms * norms[row], 1e-30)
        cosines[row] = np.nan
        finite = np.flatnonzero(np.isfinite(cosines))
        best = finite[np.argsort(-cosines[finite], kind="stable")[:n]]
        return [(self.words[other], float(cosines[other])) for other in best]

    def _row(self, word: str) -> int:
        if word not in self._index:
            similar = difflib.get_close_matches(word, self.words, n=4, cutoff=0.7)
            hint = f"; did you mean {', '.join(similar)}?" if similar else ""
            raise FlatbedError(f"{word!r} is not among the {len(self):,} words{hint}")
        return self._index[word]

    # ---- files

    def save(self, path: str | Path, *, binary: bool = False) -> None:
        """Write word2vec's text or binary format: a line "words dim", then each word with its numbers."""
        for word in self.words:
            if word.split() != [word]:
                raise FlatbedError(f"{word!r} has white space, which separates words in this format")
        with Path(path).open("wb") as file:
            file.write(f"{len(self)} {self.matrix.shape[1]}\n".encode())
            line = " ".join(["%.9g"] * self.matrix.shape[1])  # nine digits read as the same float32
            for word, row in zip(self.words, self.matrix, strict=True):
                numbers = row.astype("<f4").tobytes() if binary else (line % tuple(row.tolist())).encode()
                file.write(word.encode() + b" " + numbers + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Vectors:
        """Read word2vec's text or binary format, recognised by the contents.

        For a word that occurs more than once, the first vector counts, as in gensim. Bytes of words that are
        not UTF-8 become U+FFFD. Warnings give the numbers of such words.
        """
        with Path(path).open("rb") as file:
            try:
                n_words, dim = (int(number) for number in file.readline().split())
            except ValueError as error:
                raise FlatbedError(
                    f"{path} does not begin with a line of two numbers, words and dim: give a word2vec file"
                ) from error
            begin = file.tell()
            is_text = _is_text(file.readline(), dim)
            file.seek(begin)
            try:
                pairs = list(_read_text(file, dim) if is_text else _read_binary(file, n_words, dim))
                if len(pairs) != n_words:
                    raise ValueError(f"it has {len(pairs):,} words")
            except ValueError as error:
                raise FlatbedError(
                    f"{path} should have {n_words:,} words of {dim} numbers: {error}"
                ) from error
        first: dict[str, np.ndarray] = {}
        for word, row in pairs:
            first.setdefault(word, row)
        warn_of_replaced_bytes(first, f"write the words of {path} as UTF-8")
        if n_repeated := len(pairs) - len(first):
            warnings.warn(
                f"{n_repeated:,} vectors of {path} were left out: their words had occurred before. "
                "Make the words unique",
                stacklevel=2,
            )
        return cls(list(first), np.array(list(first.values()), np.float32).reshape(len(first), dim))


def _is_text(line: bytes, dim: int) -> bool:
    try:
        return len([float(number) for number in line.split()[1:]]) == dim
    except ValueError:
        return False


def _read_text(file: BinaryIO, dim: int) -> Iterator[tuple[str, np.ndarray]]:
    for line in file:
        word, *numbers = line.decode("utf-8", "replace").rstrip().split(" ")
        if len(numbers) != dim:
            raise ValueError(f"{word!r} has {len(numbers)}")
        yield word, np.array(numbers, np.float32)


def _read_binary(file: BinaryIO, n_words: int, dim: int) -> Iterator[tuple[str, np.ndarray]]:
    content, begin = file.read(), 0
    for _ in range(n_words):
        space = content.find(b" ", begin)
        end = space + 1 + 4 * dim
        if space < 0 or len(content) < end:
            raise ValueError("it ends early")
        word = content[begin:space].lstrip(b"\n").decode("utf-8", "replace")
        yield word, np.frombuffer(content[space + 1 : end], "<f4")
        begin = end


# ---- plots; they need matplotlib, the extra `plot`


def plot_loss(losses: Sequence[tuple[int, float]], path: Path) -> None:
    """Plot the loss over the number of words trained."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.plot([words / 1e6 for words, _ in losses], [loss for _, loss in losses], color=COLOUR)
    axis.set(xlabel="million words trained", ylabel="loss per pair")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(str(path), dpi=160, facecolor="white")


def plot_map(vectors: Vectors, path: Path) -> None:
    """Plot the most frequent words on a plane."""
    from matplotlib.figure import Figure

    plane = principal_plane(vectors.matrix[:MAP_WORDS])
    figure = Figure(figsize=(11, 11), layout="constrained")
    axis = figure.subplots()
    axis.scatter(plane[:, 0], plane[:, 1], s=6, color=COLOUR)
    for word, position in zip(vectors.words, plane, strict=False):
        text = word.replace("$", r"\$")  # $ would start a formula
        axis.annotate(text, position, fontsize=8, xytext=(3, 2), textcoords="offset points")
    axis.set(xticks=[], yticks=[])
    figure.savefig(str(path), dpi=130, facecolor="white")


def principal_plane(matrix: np.ndarray) -> np.ndarray:
    """Project normalized rows to their first two principal components, (words, dim) → (words, 2)."""
    rows = matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-30)
    centered = np.pad(rows - rows.mean(0), ((0, 0), (0, 1)))  # vectors of one number have a plane, too
    left, sizes, _ = np.linalg.svd(centered, full_matrices=False)
    plane: np.ndarray = left[:, :2] * sizes[:2]
    return plane
