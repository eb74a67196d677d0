from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from flatbed.bench.capture import Captured


class Stream:
    def wait_stream(self, other: Stream) -> None:
        HISTORY.append("wait")


class Graph:
    """Records what is issued while it is captured."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.issued: list[Callable[[], None]] = []

    def replay(self) -> None:
        HISTORY.append("replay")
        for kernel in self.issued:
            kernel()


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    HISTORY.append("capture")
    Graph.capturing = graph
    yield
    Graph.capturing = None


HISTORY: list[str] = []


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    HISTORY.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)


@pytest.mark.usefixtures("fake_cuda")
def test_every_call_runs_once_and_one_of_them_is_captured() -> None:
    done: list[int] = []
    amount = 1

    def call() -> None:
        constant = amount
        kernel = lambda: done.append(constant)  # noqa: E731
        if Graph.capturing is not None:
            Graph.capturing.issued.append(kernel)
        else:
            kernel()

    captured = Captured(call)
    for n_calls in range(1, 5):
        captured()
        assert done == [1] * n_calls
    assert HISTORY == ["wait", "wait", "capture", "replay", "replay", "replay"]

    amount = 2
    captured()
    assert done[-1] == 1  # a graph knows what was so when it was captured
    captured.forget()
    for _ in range(3):
        captured()
    assert done[-3:] == [2, 2, 2]
    assert HISTORY[-5:] == ["wait", "wait", "capture", "replay", "replay"]


@pytest.mark.gpu
def test_on_a_gpu_every_call_runs_once() -> None:
    count = torch.zeros((), device="cuda")
    captured = Captured(lambda: count.add_(1))
    for n_calls in range(1, 5):
        captured()
        assert int(count) == n_calls
    captured.forget()
    captured()
    captured()
    assert int(count) == 6
