"""No test of feeding may leave a thread or a process behind, nor hang."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import flatbed
from flatbed.feed import lookups
from flatbed.rows.table import Table
from tests.feed.fakes import ROWS, FakeAhead, running, wait_until, watched, workers


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with watched(200):
        yield
        assert wait_until(lambda: not running()), "a thread is left"
        assert wait_until(lambda: not workers()), "a process is left"


@pytest.fixture
def emb() -> flatbed.HostEmbedding:
    return flatbed.HostEmbedding(ROWS, 4)


@pytest.fixture
def aheads(monkeypatch: pytest.MonkeyPatch) -> list[FakeAhead]:
    """Those that iterations have made, in order."""
    made: list[FakeAhead] = []

    def make(table: Table) -> FakeAhead:
        made.append(FakeAhead(table))
        return made[-1]

    monkeypatch.setattr(lookups, "ahead_of", make)
    return made
