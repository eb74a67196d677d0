"""How the loss fell, and the most frequent words on a map. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from flatbed.word2vec.vectors import Vectors

MISSING = "matplotlib is not installed; install it with: pip install matplotlib"
MAP_WORDS = 150
COLOUR = "#e4572e"


def have_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    return find_spec("matplotlib") is not None


def draw_loss(losses: Sequence[tuple[int, float]], path: Path) -> None:
    """The loss over the words trained."""
    from matplotlib.figure import Figure  # a figure of its own, without pyplot: no global state, no display

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.plot([words / 1e6 for words, _ in losses], [loss for _, loss in losses], color=COLOUR)
    axis.set_xlabel("million words trained")
    axis.set_ylabel("loss per pair")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(str(path), dpi=160, facecolor="white")


def on_a_plane(matrix: np.ndarray) -> np.ndarray:
    """The two directions in which rows of equal length differ most, (words, dim) → (words, 2)."""
    rows = matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-30)
    rows = rows - rows.mean(0)
    left, sizes, _ = np.linalg.svd(rows, full_matrices=False)
    plane: np.ndarray = np.zeros((len(rows), 2), rows.dtype)
    n = min(2, len(sizes))
    plane[:, :n] = left[:, :n] * sizes[:n]
    return plane


def draw_map(vectors: Vectors, path: Path, n: int = MAP_WORDS) -> None:
    """The n most frequent words on a plane (principal components)."""
    from matplotlib.figure import Figure

    plane = on_a_plane(vectors.matrix[:n])
    figure = Figure(figsize=(11, 11), layout="constrained")
    axis = figure.subplots()
    axis.scatter(plane[:, 0], plane[:, 1], s=6, color=COLOUR)
    for word, (x, y) in zip(vectors.words[:n], plane, strict=True):
        # A $ would begin a formula.
        axis.annotate(word.replace("$", r"\$"), (x, y), fontsize=8, xytext=(3, 2), textcoords="offset points")
    axis.set_xticks([])
    axis.set_yticks([])
    figure.savefig(str(path), dpi=130, facecolor="white")
