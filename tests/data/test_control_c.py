"""Control-C while a `DataLoader` makes its workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

import flatbed
from flatbed.data.prefetcher import control_c_later


class ForkingLoader(DataLoader[Any]):
    """Control-C comes while its workers are made."""

    def _get_iterator(self) -> Any:
        signal.raise_signal(signal.SIGINT)
        self.is_begun = True
        return iter(())


@pytest.fixture(autouse=True)
def raising() -> Iterator[None]:
    """Control-C raises, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_control_c_waits_for_the_fork_of_workers() -> None:
    """Otherwise Python may lose it there, and keep a lock that the loader thread needs."""
    loader = ForkingLoader([1, 2], num_workers=1)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        iter(flatbed.Prefetcher(loader))
    assert loader.is_begun
    assert signal.getsignal(signal.SIGINT) is before


def test_control_c_acts_at_once_in_forked_processes_and_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with control_c_later():
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        monkeypatch.undo()
    handlers = []

    def run() -> None:
        with control_c_later():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
