"""Mistakes with embedding modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatbed import Embedding, EmbeddingBag, FlatbedError
from tests.mistakes.mistake import Mistake, assign, embedding, mistake

ids = torch.tensor


def of_each(kind: Any) -> list[Mistake]:
    """Mistakes that both modules have."""
    of = kind.__name__
    made = f"{of}.from_pretrained"

    def missing(folder: Any) -> Any:
        return kind(10, 4, storage="disk", path=folder / "missing" / "items.bed")

    return [
        mistake(
            of, "weights", lambda _: kind(torch.ones(10, 4), 4), TypeError, r"\(10, 4\).*from_pretrained"
        ),
        mistake(of, "an unknown storage", lambda _: kind(10, 4, storage="gpu"), ValueError, r"host.*'gpu'"),
        mistake(of, "disk without a path", lambda _: kind(10, 4, storage="disk"), ValueError, r"path="),
        mistake(of, "a missing folder", missing, FlatbedError, r"missing: make it"),
        mistake(of, "a wrong device", lambda _: kind(10, 4, device="gpu"), ValueError, r"\"cuda\".*'gpu'"),
        mistake(of, "a misspelt option", lambda _: kind(10, 4, cash_rows=3), TypeError, r"cash_rows"),
        mistake(of, "an option of torch", lambda _: kind(10, 4, sparse=True), TypeError, r"sparse"),
        mistake(of, "a share of rows", lambda _: kind(10, 4, cache_rows=0.1), TypeError, r"cache_rows.*0\.1"),
        mistake(made, "one row", lambda _: kind.from_pretrained(torch.ones(3)), ValueError, r"\(3,\)"),
        mistake(
            f"{of}.from_table",
            "weights",
            lambda _: kind.from_table(torch.ones(3, 2)),
            TypeError,
            r"found Tensor.*from_pretrained",
        ),
        mistake(
            f"{of}.from_table",
            "an option of the table",
            lambda _: kind.from_table(embedding().table, storage="disk"),
            TypeError,
            r"storage",
        ),
        mistake(
            f"{of}.forward", "a large id", lambda _: kind(10, 4)(ids([[3, 10]])), IndexError, r"10.*\(0, 1\)"
        ),
        mistake(f"{of}.forward", "floats", lambda _: kind(10, 4)(ids([[1.0]])), TypeError, r"torch.float32"),
        mistake(
            f"{of}.forward",
            "ragged lists",
            lambda _: kind(10, 4)([[1], [1, 2]]),
            ValueError,
            r"inhomogeneous shape",
        ),
        mistake(f"{of}.read_rows", "a large id", lambda _: kind(10, 4).read_rows([10]), IndexError, r"id 10"),
        mistake(
            f"{of}.topk",
            "five of four",
            lambda _: kind(10, 4).topk(torch.ones(1, 5), 2),
            ValueError,
            r"\(1, 5\)",
        ),
        mistake(
            f"{of}.write_rows",
            "a row for two",
            lambda _: kind(10, 4).write_rows([1, 2], torch.ones(1, 4)),
            ValueError,
            r"\(2, 4\); found \(1, 4\)",
        ),
        mistake(
            of,
            "another weight",
            lambda _: assign("weight", nn.Parameter(torch.ones(10, 4)))(kind(10, 4)),
            AttributeError,
            r"from_pretrained",
        ),
        mistake(
            of, "more rows", lambda _: assign("num_embeddings", 20)(kind(10, 4)), AttributeError, r"num_emb"
        ),
    ]


FORWARD = "EmbeddingBag.forward"
BAG = [
    mistake(
        "EmbeddingBag", "an unknown mode", lambda _: EmbeddingBag(10, 4, mode="avg"), ValueError, r"'avg'"
    ),
    mistake(FORWARD, "no offsets", lambda _: EmbeddingBag(10, 4)(ids([1, 2])), ValueError, r"offsets"),
    mistake(
        FORWARD, "three axes", lambda _: EmbeddingBag(10, 4)(ids([[[1, 2]]])), ValueError, r"\(1, 1, 2\)"
    ),
]

EMBEDDINGS: list[Mistake] = [*of_each(Embedding), *of_each(EmbeddingBag), *BAG]
