"""Where the steps of tables run: as for other parameters.

With FLATBED_TEST_SHARD=row, all tables are made with `shard="row"`: one rank must not notice it.
"""

import functools
import os

import pytest

import flatbed
from tests.optim.conftest import interpreted, kernel_device, where

__all__ = ["interpreted", "kernel_device", "where"]


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync nothing: it takes long, and only a loss of power shows the difference, which tests simulate."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("FLATBED_TEST_SHARD") != "row":
        return
    for kind in (flatbed.Embedding, flatbed.EmbeddingBag):
        make = kind.__init__

        @functools.wraps(make)
        def init(self, *args, make=make, **options):  # type: ignore[no-untyped-def]
            shard = "row" if options.get("replicate", True) is True else None
            make(self, *args, **{"shard": shard, **options})

        monkeypatch.setattr(kind, "__init__", init)
