"""A table as plain arrays, and deterministic training, for the tests that end it at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.tables.record import Field, Record
from flatbed.tables.storage.disk import DiskStorage

Dense = NDArray[np.uint8]

RECORD = Record((Field("weight", torch.float32, 8), Field("moment", torch.bfloat16, 8, 0.5)))
WIDER = Record((*RECORD.fields, Field("other", torch.float32, 8)))
NBYTES = RECORD.nbytes


def filled(start: int, stop: int, nbytes: int) -> Dense:
    """The first records of rows: every byte depends on its row and its place."""
    place = np.arange(nbytes, dtype=np.int64)[None] * 31
    return ((np.arange(start, stop, dtype=np.int64)[:, None] * 7 + place + 1) % 251).astype(np.uint8)


def fill(start: int, stop: int, records: Tensor) -> None:
    records.copy_(torch.from_numpy(filled(start, stop, records.shape[1])))


def batch(step: int, n_rows: int, nbytes: int) -> tuple[NDArray[np.int64], Dense]:
    """Rows and records that a step of training writes: unique rows in any order."""
    generator = np.random.default_rng(step)
    n_ids = int(generator.integers(1, min(n_rows, 64)))
    ids = generator.permutation(n_rows)[:n_ids]
    return ids, generator.integers(0, 256, (n_ids, nbytes), np.uint8)


def train(model: Dense, step: int) -> None:
    ids, records = batch(step, *model.shape)
    model[ids] = records


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def made(folder: Path, n_rows: int = 100, record: Record = RECORD) -> DiskStorage:
    return DiskStorage.create(folder / "table", record, n_rows, fill=fill, meta={"step": 0})


def drop_prepared(storage: DiskStorage) -> None:
    """Take a prepared checkpoint back, as the next change does if its decision was not made."""
    storage.release()
    storage.settle()


def everything(storage: DiskStorage) -> Dense:
    return storage.read(0, storage.n_rows).numpy()


def random_records(n: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.randint(0, 256, (n, nbytes), dtype=torch.uint8)


@contextmanager
def failing(owner: Any, name: str, error: BaseException, *, at: int = 1) -> Iterator[None]:
    """Let a function raise at one of its calls."""
    real, calls = getattr(owner, name), count(1)

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise error
        return real(*args, **options)

    with mock.patch.object(owner, name, call):
        yield
