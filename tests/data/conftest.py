"""No test of feeding may leave a thread or a process behind, nor hang."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import flatbed
from flatbed.data import lookups
from flatbed.tables.table import Table
from tests.data.fakes import ROWS, FakeAhead, running, wait_until, watched, workers


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with watched(200):
        yield
        assert wait_until(lambda: not running()), "a thread is left"
        assert wait_until(lambda: not workers()), "a process is left"


@pytest.fixture
def emb() -> flatbed.Embedding:
    return flatbed.Embedding(ROWS, 4)


@pytest.fixture(params=[False, True], ids=["one thread", "two threads"])
def aheads(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[FakeAhead]:
    """Those that iterations have made, in order; as of tables in memory, and as of tables on disk."""
    made: list[FakeAhead] = []

    def make(table: Table) -> FakeAhead:
        made.append(FakeAhead(table, brings=request.param))
        return made[-1]

    monkeypatch.setattr(lookups, "ahead_of", make)
    return made
