"""Mistakes with embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatbed import Embedding, EmbeddingBag, FlatbedError
from tests.mistakes.mistake import Mistake, assign, mistake

ids = torch.tensor


def of_each(kind: Any) -> list[Mistake]:
    """What can be done wrong with both modules."""
    of = kind.__name__
    return [
        mistake(
            of,
            "weights",
            lambda _: kind(torch.ones(10, 4), 4),
            TypeError,
            r"num_embeddings must be an integer; found a tensor of shape \(10, 4\): from_pretrained",
        ),
        mistake(
            of,
            "a storage that there is not",
            lambda _: kind(10, 4, storage="gpu"),
            ValueError,
            r"storage must be one of host, disk, device; found 'gpu'",
        ),
        mistake(
            of,
            "disk without a path",
            lambda _: kind(10, 4, storage="disk"),
            ValueError,
            r'storage="disk" needs a path',
        ),
        mistake(
            of,
            "a folder that does not exist",
            lambda folder: kind(10, 4, storage="disk", path=folder / "missing" / "items.bed"),
            FlatbedError,
            r"there is no folder .*missing: make it first",
        ),
        mistake(
            of,
            "a wrong device",
            lambda _: kind(10, 4, device="gpu"),
            RuntimeError,
            r"device string: gpu",
        ),
        mistake(
            of,
            "an option of torch",
            lambda _: kind(10, 4, sparse=True),
            TypeError,
            r"unexpected keyword argument 'sparse'",
        ),
        mistake(
            of,
            "a share of rows",
            lambda _: kind(10, 4, cache_rows=0.1),
            TypeError,
            r"cache_rows must be an integer; found 0\.1",
        ),
        mistake(
            f"{of}.from_pretrained",
            "one row",
            lambda _: kind.from_pretrained(torch.ones(3)),
            ValueError,
            r"embeddings must be \(num_embeddings, embedding_dim\); found \(3,\)",
        ),
        mistake(
            f"{of}.from_table",
            "weights",
            lambda _: kind.from_table(torch.ones(3, 2)),
            TypeError,
            r"takes a flatbed.Table; found Tensor \(weights: from_pretrained\)",
        ),
        mistake(
            f"{of}.forward",
            "an id too large",
            lambda _: kind(10, 4)(ids([[3, 10]])),
            IndexError,
            r"id 10 at position \(0, 1\) is out of range for a table of 10 rows \(0 to 9\)",
        ),
        mistake(
            f"{of}.forward",
            "floats",
            lambda _: kind(10, 4)(ids([[1.0]])),
            TypeError,
            r"ids must be integers; found a tensor of torch.float32",
        ),
        mistake(
            f"{of}.forward",
            "lists of several lengths",
            lambda _: kind(10, 4)([[1], [1, 2]]),
            ValueError,
            r"must have one shape; found lists of different lengths: pad them.*offsets",
        ),
        mistake(
            f"{of}.read_rows",
            "an id too large",
            lambda _: kind(10, 4).read_rows([10]),
            IndexError,
            r"id 10 at position 0 is out of range for a table of 10 rows",
        ),
        mistake(
            f"{of}.write_rows",
            "a row for two",
            lambda _: kind(10, 4).write_rows([1, 2], torch.ones(1, 4)),
            ValueError,
            r"values for these ids must have shape \(2, 4\); found \(1, 4\)",
        ),
        mistake(
            of,
            "another weight",
            lambda _: assign("weight", nn.Parameter(torch.ones(10, 4)))(kind(10, 4)),
            AttributeError,
            r"weight is a view of the table.*write into it.*or use from_pretrained",
        ),
    ]


BAG = [
    mistake(
        "EmbeddingBag",
        "a mode that there is not",
        lambda _: EmbeddingBag(10, 4, mode="avg"),
        ValueError,
        r"mode must be 'sum', 'mean' or 'max'; found 'avg'",
    ),
    mistake(
        "EmbeddingBag.forward",
        "no offsets",
        lambda _: EmbeddingBag(10, 4)(ids([1, 2])),
        ValueError,
        r"offsets has to be a 1D Tensor but got None",
    ),
    mistake(
        "EmbeddingBag.forward",
        "three dimensions",
        lambda _: EmbeddingBag(10, 4)(ids([[[1, 2]]])),
        ValueError,
        r"bags are \(bags, length\), or \(n,\) with offsets; found \(1, 1, 2\)",
    ),
    mistake(
        "EmbeddingBag.forward",
        "a list of weights",
        lambda _: EmbeddingBag(10, 4, mode="sum")(ids([[1, 2]]), per_sample_weights=[[1.0, 2.0]]),
        TypeError,
        r"per_sample_weights must be a tensor of the ids' shape; found list",
    ),
]

EMBEDDINGS: list[Mistake] = [*of_each(Embedding), *of_each(EmbeddingBag), *BAG]
