"""A rank that ends, fails or stops ends the lookups of the others, which name it. Three ranks."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from flatbed.distributed.channel import Channel
from tests.distributed.processes import run_script

REASONS = {
    "build-finished-1": "",
    "lookup-killed-1": "",
    "lookup-stuck-1": "",
    "lookup-damaged-1": "items.bed is damaged",
    "loop-killed-1": "",
    "loop-killed-0": "",  # hosts the store
    "loop-raised-1": "left the loop over its Prefetcher after 4 batches (break, or an exception in its body)",
    "with-raised-1": "failed after 4 batches of its Prefetcher (ValueError: the loss is nan)",
    # torch's signal handler raises wherever the training thread is, which may end before it can tell why.
    "workers-ended-1": "",
    "longer-failed-1": "failed after 9 batches of its Prefetcher (ValueError: a file is damaged)",
    "loop-again-1": "left the loop over its Prefetcher after 4",
    "late-again-1": "left the loop over its Prefetcher after 4",
    "loop-stuck-1": "",
    "loop-left-0": "left the loop over its Prefetcher after 4",
    "loop-left-1": "left the loop over its Prefetcher after 4",
    "other-left-1": "left the loop over its Prefetcher after 4",
    "last-left-1": "left the loop over its Prefetcher after 9",
    "threadless-left-1": "left the loop over its Prefetcher after 4",
}
"""What ranks iterate over, how one of them fails, its number, and the reason if the others know it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks have written."""
    found: Path = tmp_path_factory.mktemp("failures")
    run_script("rank_failures", found, *REASONS)
    return found


@pytest.mark.parametrize("case", REASONS)
def test_the_other_ranks_raise(case: str, folder: Path) -> None:
    """They raise within the timeout, and name the rank and, if it is known, the reason. Their threads end."""
    _, way, culprit = case.split("-")
    for rank in {"0", "1", "2"} - (set() if way == "again" else {culprit}):
        found = (folder / case / f"{rank}.txt").read_text()
        assert found.startswith("ExchangeError")
        assert f"rank {culprit} " in found
        assert REASONS[case] in found
        assert found.endswith("no thread left")


def test_a_lookup_goes_on_if_a_slow_collective_ends_just_after_a_wait() -> None:
    work = mock.Mock(
        **{"wait.side_effect": [RuntimeError("Wait timeout"), None], "is_completed.return_value": True}
    )
    Channel._wait_for(mock.Mock(), work)
    assert work.wait.call_count == 2
