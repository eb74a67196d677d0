"""Word2vec of SpeedTorch's documentation, with one line changed: the import.

Host memory stores all embeddings and their Adagrad state; the model holds those of one batch.

Run: python examples/speedtorch_word2vec.py [--steps 400] [--gpu-rows]
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import flatbed.compat.speedtorch as SpeedTorch

# Text on every machine with Python.
MODULES = ("argparse", "inspect", "typing", "tempfile", "tarfile", "subprocess")
EMBED_DIMENSION, BATCH_SIZE, NEGATIVE, WINDOW = 64, 256, 5, 3


class SkipGramModel(nn.Module):
    """Embeddings with a slot for each id of a batch."""

    def __init__(self, u_rows: int, v_rows: int, embed_dimension: int) -> None:
        super().__init__()
        self.u_embeddings = nn.Embedding(u_rows, embed_dimension)
        self.v_embeddings = nn.Embedding(v_rows, embed_dimension)

    def forward(self, pos_u: Tensor, pos_v: Tensor, neg_v: Tensor) -> Tensor:
        u, v = self.u_embeddings(pos_u), self.v_embeddings(pos_v)  # (batch, 1, dim)
        near = nn.functional.logsigmoid((u * v).sum(2))
        far = nn.functional.logsigmoid(-torch.bmm(self.v_embeddings(neg_v), u.transpose(1, 2)))
        return -(near.sum() + far.sum()) / len(pos_u)


def read_words() -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{name}.py" for name in MODULES]
    text = "\n".join(file.read_text("utf-8") for file in files if file.exists())
    return [word.lower() for word in re.findall(r"[A-Za-z]{2,}", text)]


class Pairs:
    """Batches of words, neighbours and negative samples, as numpy ids of int32."""

    def __init__(self, words: list[str]) -> None:
        self.names = [word for word, _ in Counter(words).most_common()]
        number = {word: at for at, word in enumerate(self.names)}
        self.text = np.array([number[word] for word in words], dtype=np.int32)
        often = np.bincount(self.text) ** 0.75
        self.often = often / often.sum()
        self.random = np.random.default_rng(0)

    def batch(self) -> tuple[Any, Any, Any]:
        at = self.random.integers(WINDOW, len(self.text) - WINDOW, BATCH_SIZE)
        away = self.random.integers(1, WINDOW + 1, BATCH_SIZE) * self.random.choice([-1, 1], BATCH_SIZE)
        negative = self.random.choice(len(self.often), (BATCH_SIZE, NEGATIVE), p=self.often).astype(np.int32)
        return self.text[at], self.text[at + away], negative


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--gpu-rows", action="store_true", help="keep all rows on the GPU, if there is one")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    pairs = Pairs(read_words())
    total, pinned = len(pairs.names), not options.gpu_rows

    model = SkipGramModel(BATCH_SIZE, BATCH_SIZE * (1 + NEGATIVE), EMBED_DIMENSION).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    uEmbed_switcher = SpeedTorch.ModelFactory(
        model.u_embeddings, total_classes=total, embed_dimension=EMBED_DIMENSION, CPUPinn=pinned
    )
    uEmbed_switcher.uniformDistributionInit(-0.5 / EMBED_DIMENSION, 0.5 / EMBED_DIMENSION)
    vEmbed_switcher = SpeedTorch.ModelFactory(
        model.v_embeddings, total_classes=total, embed_dimension=EMBED_DIMENSION, CPUPinn=pinned
    )
    vEmbed_switcher.zerosInit()

    uAdagrad_switcher = SpeedTorch.OptimizerFactory(
        optimizer, total, EMBED_DIMENSION, model, variable_name="u_embeddings", CPUPinn=pinned
    )
    uAdagrad_switcher.optInit()
    vAdagrad_switcher = SpeedTorch.OptimizerFactory(
        optimizer, total, EMBED_DIMENSION, model, variable_name="v_embeddings", CPUPinn=pinned
    )
    vAdagrad_switcher.optInit()

    # Static inputs: slots of the variable, which hold other words in every batch
    pos_u = torch.from_numpy(uEmbed_switcher.variableTransformer(BATCH_SIZE, 1)).to(device)
    pos_v, neg_v = vEmbed_switcher.variableTransformer(BATCH_SIZE, 1, NEGATIVE)
    pos_v, neg_v = torch.from_numpy(pos_v).to(device), torch.from_numpy(neg_v).to(device)

    losses = []
    for _ in range(options.steps):
        u, v, negative = pairs.batch()

        uEmbed_switcher.beforeForwardPass(retrievedPosIndexes=u)
        vEmbed_switcher.beforeForwardPass(retrievedPosIndexes=v, retrievedNegIndexes=negative)
        uAdagrad_switcher.beforeForwardPass(retrievedPosIndexes=u)
        vAdagrad_switcher.beforeForwardPass(retrievedPosIndexes=v, retrievedNegIndexes=negative)

        optimizer.zero_grad()
        loss = model(pos_u, pos_v, neg_v)
        loss.backward()
        optimizer.step()

        uEmbed_switcher.afterOptimizerStep(retrievedPosIndexes=u)
        vEmbed_switcher.afterOptimizerStep(retrievedPosIndexes=v, retrievedNegIndexes=negative)
        uAdagrad_switcher.afterOptimizerStep(retrievedPosIndexes=u)
        vAdagrad_switcher.afterOptimizerStep(retrievedPosIndexes=v, retrievedNegIndexes=negative)
        losses.append(loss.item())

    part = max(1, len(losses) // 10)
    first, last = np.mean(losses[:part]), np.mean(losses[-part:])
    where = "on the GPU" if device == "cuda" and not pinned else "in host memory"
    print(f"{total} words {where}, {options.steps} steps on {device}: loss {first:.3f} → {last:.3f}")
    vectors = uEmbed_switcher.getNumpyVersion()
    print(f"vectors: {vectors.shape[0]} × {vectors.shape[1]}, of {vectors.dtype}")


if __name__ == "__main__":
    main()
