"""Mistakes with batches and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from flatbed import FlatbedError, Prefetcher, RowReader
from tests.mistakes.mistake import Attempt, Mistake, embedding, mistake

FEATURES = np.ones((3, 2), np.float32)


def on_a_machine_without_gpu(attempt: Attempt) -> Attempt:
    def alone(folder: Path) -> object:
        with patch.object(torch.cuda, "is_available", return_value=False):
            return attempt(folder)

    return alone


def closed_reader() -> RowReader:
    found = RowReader(FEATURES, device="cpu")
    found.close()
    return found


def archive(folder: Path) -> Path:
    np.savez(folder / "rows.npz", rows=FEATURES)
    return folder / "rows.npz"


def of_rows(what: str, attempt: Attempt, error: type[Exception], message: str, method: str = "") -> Mistake:
    return mistake(f"RowReader{method}", what, attempt, error, message)


def of_batches(what: str, attempt: Attempt, error: type[Exception], message: str) -> Mistake:
    return mistake("Prefetcher", what, attempt, error, message)


def in_a_batch(what: str, batch: Any, error: type[Exception], message: str) -> Mistake:
    def attempt(_: Path) -> object:
        return list(Prefetcher([batch], {embedding(): "items"}))

    return mistake("Prefetcher.__iter__", what, attempt, error, rf"Table\(10 × 4.*{message}")


def make(*arguments: Any, **options: Any) -> Attempt:
    return lambda _: Prefetcher(*arguments, **options)


DATA: list[Mistake] = [
    of_rows("a tensor", lambda _: RowReader(torch.ones(3, 2)), TypeError, r"found Tensor.*tensor.numpy\(\)"),  # type: ignore[arg-type]
    of_rows(
        "a missing file", lambda folder: RowReader(folder / "missing.npy"), FileNotFoundError, "missing.npy"
    ),
    of_rows("an archive", lambda folder: RowReader(archive(folder)), ValueError, r"npz is not .*numpy\.save"),
    of_rows("a wrong device", lambda _: RowReader(FEATURES, device="gpu"), ValueError, "device.*gpu"),
    of_rows(
        "a row too far",
        lambda _: RowReader(FEATURES, device="cpu")[[0, 3]],
        IndexError,
        "id 3 at position 1.*3 rows",
        ".__getitem__",
    ),
    of_rows(
        "a mask",
        lambda _: RowReader(FEATURES, device="cpu")[np.array([True, False, True])],
        TypeError,
        "integers; found.*bool",
        ".__getitem__",
    ),
    of_rows("after its end", lambda _: closed_reader()([0]), FlatbedError, "closed: make", ".__call__"),
    of_batches("one batch", make(torch.ones(8, 4)), TypeError, r"found one Tensor: give \[batch\]"),
    of_batches("a dict", make({"x": torch.ones(8)}), TypeError, r"found one dict: give \[batch\]"),
    of_batches("a list of embeddings", make([], [embedding()]), TypeError, "a key of the batch.*found list"),
    of_batches(
        "torch's embedding", make([], {nn.Embedding(3, 2): "x"}), TypeError, r"found torch\.nn\..*Embedding"
    ),
    of_batches(
        "a model", make([], {nn.Sequential(embedding()): "x"}), TypeError, r"torch\.nn\..*Sequential: give"
    ),
    of_batches("a fraction", make([], depth=1.5), TypeError, "integer"),
    of_batches("a meta device", make([], device="meta"), FlatbedError, "meta"),
    of_batches("no key", make([], {embedding(): None}), TypeError, "key of the batch.*found NoneType"),
    of_batches("a negative depth", make([], depth=-1), ValueError, "0 or more; found -1"),
    of_batches("a wrong device", make([], device="gpu"), ValueError, "device.*gpu"),
    of_batches("all SMs", make([], reserve_sms="all"), ValueError, "number of SMs.*found 'all'"),
    of_batches("SMs below zero", make([], reserve_sms=-1), ValueError, "number of SMs.*found -1"),
    of_batches(
        "a generator to pin", make((x for x in [1]), pin=True), TypeError, "found generator: give a list"
    ),
    of_batches(
        "a GPU that is not here",
        on_a_machine_without_gpu(make([], device="cuda")),
        ValueError,
        'no CUDA GPU.*device="cpu"',
    ),
    mistake(
        "Prefetcher.__len__",
        "of a generator",
        lambda _: len(Prefetcher((x for x in [1]), device="cpu")),
        TypeError,
        "generator",
    ),
    in_a_batch("an id too large", {"items": torch.tensor([1, 10])}, IndexError, "id 10 at position 1"),
    in_a_batch("a missing key", {"ids": torch.tensor([1])}, KeyError, "'items'.*keys .'ids'.: give a key"),
    in_a_batch("a key of a list", [torch.tensor([1]), 3], AttributeError, "'items'.*batch of type list"),
    in_a_batch("floats", {"items": torch.tensor([0.5])}, TypeError, "integers; found .*torch.float32"),
]
