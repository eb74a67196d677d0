"""GloVe: word vectors from a co-occurrence matrix, counted by SpeedTorch's COM.

The text is the source of a few modules of Python's standard library.

Run: python examples/glove.py [--steps 800] [WORD …]
"""

from __future__ import annotations

import argparse
import keyword
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import flatbed
import flatbed.compat.speedtorch as SpeedTorch

MODULES = (
    *("argparse", "ast", "asyncio/base_events", "calendar", "configparser", "datetime", "difflib", "doctest"),
    *("email/message", "fractions", "http/client", "inspect", "ipaddress", "locale", "mailbox", "optparse"),
    *("os", "pdb", "pickle", "platform", "random", "shutil", "smtplib", "socket", "ssl", "statistics"),
    *("subprocess", "tarfile", "tempfile", "threading", "typing", "zipfile"),
)
WINDOW, DIM, BATCH_SIZE, N_WORDS = 4, 48, 4096, 1500


class Glove(nn.Module):
    """log(count) ≈ word · context + both biases. A row has a vector, and a bias as the last element."""

    def __init__(self, n_words: int) -> None:
        super().__init__()
        small = ("uniform", -0.5 / DIM, 0.5 / DIM)
        self.words = flatbed.Embedding(n_words, DIM + 1, init=small, seed=1)
        self.contexts = flatbed.Embedding(n_words, DIM + 1, init=small, seed=2)

    def forward(self, words: Tensor, contexts: Tensor, counts: Tensor) -> Tensor:
        word, context = self.words(words), self.contexts(contexts)
        guess = (word[:, :-1] * context[:, :-1]).sum(1) + word[:, -1] + context[:, -1]
        weight = (counts / 20.0).clamp(max=1.0) ** 0.75  # rare pairs have small weights
        loss: Tensor = (weight * (guess - counts.log()) ** 2).mean()
        return loss

    def vectors(self) -> Tensor:
        both = self.words.weight.detach()[:, :-1] + self.contexts.weight.detach()[:, :-1]
        return nn.functional.normalize(both.clone(), dim=1)


def read_words() -> list[str]:
    """Return the identifiers of the modules, without comments, docstrings and keywords."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{name}.py" for name in MODULES]
    text = "\n".join(file.read_text("utf-8") for file in files if file.exists())
    text = re.sub(r'""".*?"""|#[^\n]*', " ", text, flags=re.S)
    skipped = {*map(str.lower, keyword.kwlist), "self"}
    return [word for word in re.findall(r"[a-z][a-z_]+", text.lower()) if word not in skipped]


def count(words: list[str]) -> tuple[list[str], SpeedTorch.COM]:
    """Return the most frequent words, and how often they occur together; close pairs count for more."""
    names = [word for word, _ in Counter(words).most_common(N_WORDS)]
    number = {word: i for i, word in enumerate(names)}
    text = np.array([number[word] for word in words if word in number], dtype=np.int32)
    matrix = SpeedTorch.COM(total_classes=len(names), datatype="float32")
    matrix.comInit()
    for distance in range(1, WINDOW + 1):
        counts = np.full(len(text) - distance, 1.0 / distance, dtype=np.float32)
        matrix.addCounts(text[:-distance], text[distance:], counts)
        matrix.addCounts(text[distance:], text[:-distance], counts)
    return names, matrix


def train(model: Glove, entries: tuple[Any, Any, Any], steps: int, device: str) -> list[float]:
    rows, columns, counts = (torch.from_numpy(array).to(device) for array in entries)
    optimizer = flatbed.optim.Adagrad(model, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        batch = torch.randint(len(rows), (BATCH_SIZE,), generator=generator).to(device)
        loss = model(rows[batch], columns[batch], counts[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=["start", "read", "open", "list", "year", "key"])
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = read_words()
    names, matrix = count(words)
    entries = matrix.getEntries()
    print(f"{len(words)} words of text, {len(names)} in the vocabulary, {len(entries[0])} pairs")
    model = Glove(len(names)).to(device)
    losses = train(model, entries, options.steps, device)
    part = max(1, len(losses) // 10)
    print(f"loss {np.mean(losses[:part]):.4f} → {np.mean(losses[-part:]):.4f} in {options.steps} steps")
    vectors = model.vectors()
    for word in options.words:
        if word not in names:
            print(f"{word}: not among the {len(names)} most frequent words")
            continue
        nearest = (vectors @ vectors[names.index(word)]).topk(6).indices.tolist()
        print(f"{word}: {', '.join(names[i] for i in nearest if names[i] != word)}")


if __name__ == "__main__":
    main()
