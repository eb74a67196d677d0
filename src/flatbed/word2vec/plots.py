"""Plots of the loss and of the most frequent words. They need matplotlib, the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatbed.word2vec.vectors import Vectors

MAP_WORDS = 150
COLOUR = "#e4572e"


def plot_loss(losses: Sequence[tuple[int, float]], path: Path) -> None:
    """Plot the loss over the number of words trained."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.plot([words / 1e6 for words, _ in losses], [loss for _, loss in losses], color=COLOUR)
    axis.set_xlabel("million words trained")
    axis.set_ylabel("loss per pair")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
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
    axis.set_xticks([])
    axis.set_yticks([])
    figure.savefig(str(path), dpi=130, facecolor="white")


def principal_plane(matrix: np.ndarray) -> np.ndarray:
    """Project normalized rows to their first two principal components, (words, dim) → (words, 2)."""
    rows = matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-30)
    rows = rows - rows.mean(0)
    left, sizes, _ = np.linalg.svd(rows, full_matrices=False)
    plane: np.ndarray = np.zeros((len(rows), 2), rows.dtype)
    n = min(2, len(sizes))
    plane[:, :n] = left[:, :n] * sizes[:n]
    return plane
