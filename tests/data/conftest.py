"""Fixtures: no test of the data pipeline leaves a thread or a process behind, nor hangs."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from typing import Any

import pytest

import flatbed
from flatbed.data import pipeline, prefetcher
from tests.data.fakes import ROWS, FakePrefetch, Fakes, threads, wait_until, workers
from tests.optim.conftest import kernel_device, where

__all__ = ["kernel_device", "where"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    try:
        assert wait_until(lambda: not threads()), "a thread is left"
        assert wait_until(lambda: not workers()), "a process is left"
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def no_batch_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any batch could be, and threads would begin."""
    monkeypatch.setattr(pipeline, "INLINE_SECONDS", 1e9)


@pytest.fixture
def emb() -> flatbed.Embedding:
    return flatbed.Embedding(ROWS, 4)


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
def prefetches(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Fakes:
    """Stand-ins for `RowPrefetch` in the order in which iterations made them: with one and two threads."""
    made: Fakes = []

    def make(table: flatbed.Table, depth: int, keys: Any) -> FakePrefetch:
        made.append(FakePrefetch(table, depth, keys, reads_disk=request.param))
        return made[-1]

    monkeypatch.setattr(prefetcher, "RowPrefetch", make)
    return made
