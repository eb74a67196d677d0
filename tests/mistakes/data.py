"""Mistakes with batches and rows on their way to the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from flatbed import Feeder, FlatbedError, Prefetcher, RowReader
from tests.mistakes.mistake import Mistake, embedding, mistake


def items(batch: Any) -> Any:
    return batch["items"]


def without_a_gpu(attempt: Any) -> Any:
    """The same on a machine that has none."""

    def alone(folder: Path) -> object:
        with patch.object(torch.cuda, "is_available", return_value=False):
            return attempt(folder)

    return alone


def reader() -> RowReader:
    return RowReader(np.ones((3, 2), np.float32), device="cpu")


def closed_reader() -> RowReader:
    found = reader()
    found.close()
    return found


def archive(folder: Path) -> Path:
    np.savez(folder / "rows.npz", rows=np.ones((3, 2)))
    return folder / "rows.npz"


def ids_of_a_batch(values: Any) -> Any:
    return lambda _: list(Prefetcher([{"items": values}], {embedding(): items}))


FEED: list[Mistake] = [
    mistake(
        "Feeder",
        "one batch",
        lambda _: Feeder(torch.ones(8, 4), "cpu"),
        TypeError,
        r"each item of a Tensor would be taken for one: give \[batch\] if it is one",
    ),
    mistake(
        "Feeder",
        "a dict",
        lambda _: Feeder({"x": torch.ones(8, 4)}, "cpu"),
        TypeError,
        r"each item of a dict would be taken for one: give \[batch\] if it is one",
    ),
    mistake(
        "Feeder",
        "a function",
        lambda _: Feeder(lambda: iter([1]), "cpu"),  # type: ignore[arg-type]
        TypeError,
        r"batches must be something to iterate over; found function: give a DataLoader",
    ),
    mistake(
        "Feeder",
        "a wrong device",
        lambda _: Feeder([1], "gpu"),
        FlatbedError,
        r"device must be \"cpu\", \"cuda\".*found 'gpu'",
    ),
    mistake(
        "Feeder",
        "a GPU that is not here",
        without_a_gpu(lambda _: Feeder([1], "cuda")),
        ValueError,
        r"torch sees no CUDA GPU, and \"cuda\" was asked for: give device=\"cpu\"",
    ),
    mistake(
        "Feeder",
        "no depth",
        lambda _: Feeder([1], "cpu", depth=0),
        ValueError,
        r"depth is how many batches are held ahead, 1 to \d+; found 0",
    ),
    mistake(
        "Feeder.__len__",
        "of a generator",
        lambda _: len(Feeder((x for x in [1]), "cpu")),
        TypeError,
        r"how many batches there are is not known: object of type 'generator'",
    ),
    mistake(
        "Feeder.__iter__",
        "next of it",
        lambda _: next(Feeder([1], "cpu")),  # type: ignore[call-overload]
        TypeError,
        r"'Feeder' object is not an iterator",
    ),
    mistake(
        "RowReader",
        "a tensor",
        lambda _: RowReader(torch.ones(3, 2)),  # type: ignore[arg-type]
        TypeError,
        r"from a numpy array or from the path of a \.npy file; found Tensor: give tensor.numpy\(\)",
    ),
    mistake(
        "RowReader",
        "a file that does not exist",
        lambda folder: RowReader(folder / "missing.npy", device="cpu"),
        FileNotFoundError,
        r"there is no file at .*missing.npy: check the path",
    ),
    mistake(
        "RowReader",
        "an archive",
        lambda folder: RowReader(archive(folder), device="cpu"),
        ValueError,
        r"is an .npz archive \(of rows\).*save one array with numpy.save",
    ),
    mistake(
        "RowReader",
        "a wrong device",
        lambda _: RowReader(np.ones((3, 2)), device="gpu"),
        FlatbedError,
        r"device must be \"cpu\", \"cuda\".*found 'gpu'",
    ),
    mistake(
        "RowReader.__getitem__",
        "a row too far",
        lambda _: reader()[[0, 3]],
        IndexError,
        r"id 3 at position 1 is out of range for a table of 3 rows \(0 to 2\)",
    ),
    mistake(
        "RowReader.__getitem__",
        "a mask",
        lambda _: reader()[np.array([True, False, True])],
        TypeError,
        r"ids must be integers; found a numpy array of bool",
    ),
    mistake(
        "RowReader.__call__",
        "after its end",
        lambda _: closed_reader()([0]),
        FlatbedError,
        r"this reader is closed: make it again to read rows",
    ),
    mistake(
        "Prefetcher",
        "a list of embeddings",
        lambda _: Prefetcher([], [embedding()]),  # type: ignore[arg-type]
        TypeError,
        r"which ids a batch has, \{emb: lambda batch: batch\['items'\]\}.*found list",
    ),
    mistake(
        "Prefetcher",
        "a key for a function",
        lambda _: Prefetcher([], {embedding(): "items"}),  # type: ignore[dict-item]
        TypeError,
        r"must be given as a function of the batch, lambda batch: batch\['items'\].*found str",
    ),
    mistake(
        "Prefetcher",
        "torch's embedding",
        lambda _: Prefetcher([], {nn.Embedding(3, 2): items}),  # type: ignore[dict-item]
        TypeError,
        r"for a Embedding, a EmbeddingBag or a Table; found Embedding",
    ),
    mistake(
        "Prefetcher",
        "nothing that says where to",
        lambda _: Prefetcher([], {}),
        ValueError,
        r"without tables, nothing says where batches go: give device=\"cuda\"",
    ),
    mistake(
        "Prefetcher",
        "a tensor",
        lambda _: Prefetcher(torch.ones(3), {embedding(): items}),
        TypeError,
        r"loader must be a DataLoader.*each item of a Tensor would be taken for one",
    ),
    mistake(
        "Prefetcher",
        "a GPU that is not here",
        without_a_gpu(lambda _: Prefetcher([], {}, device="cuda")),
        ValueError,
        r"torch sees no CUDA GPU, and \"cuda\" was asked for: give device=\"cpu\"",
    ),
    mistake(
        "Prefetcher.__len__",
        "of a generator",
        lambda _: len(Prefetcher((x for x in [1]), {}, device="cpu")),
        TypeError,
        r"how many batches there are is not known: object of type 'generator'",
    ),
    mistake(
        "Prefetcher.__iter__",
        "an id too large",
        ids_of_a_batch(torch.tensor([1, 10])),
        IndexError,
        r"the ids function for Table\(10 × 4.*id 10 at position 1 is out of range for a table of 10 rows",
    ),
    mistake(
        "Prefetcher.__iter__",
        "a key that batches do not have",
        lambda _: list(Prefetcher([{"ids": torch.tensor([1]), "y": 3}], {embedding(): items})),
        KeyError,
        r"the ids function for Table\(10 × 4.*failed on a batch of type dict with the keys 'ids', 'y' "
        r"\(KeyError: 'items'\): it must return the ids",
    ),
    mistake(
        "Prefetcher.__iter__",
        "a key of a list",
        lambda _: list(Prefetcher([[torch.tensor([1]), 3]], {embedding(): items})),
        TypeError,
        r"the ids function for Table\(10 × 4.*failed on a batch of type list of length 2 \(TypeError: list",
    ),
    mistake(
        "Prefetcher.__iter__",
        "floats",
        ids_of_a_batch(torch.tensor([0.5])),
        TypeError,
        r"the ids function for Table\(10 × 4.*must return integers.*found torch.float32",
    ),
]
