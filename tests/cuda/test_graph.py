"""CUDA graphs that are captured beside the user's own work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from flatbed.cuda import graph as graphs
from flatbed.cuda import host_memory
from flatbed.cuda.graph import Graph, can_capture


def captured(function: Callable[[], object]) -> Graph:
    function()  # loads its kernels
    return Graph(function, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.gpu
def test_replays_are_calls() -> None:
    x = torch.zeros(1000, device="cuda")
    graph = captured(lambda: x.add_(1))
    assert int(x[0]) == 1  # a capture runs nothing
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
        graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [3.0] * 1000


@pytest.mark.gpu
def test_replays_write_to_no_memory_of_others() -> None:
    """Memory that the function allocated and freed is not given to anyone else."""
    keys, out = torch.randperm(100_000, device="cuda").int(), torch.empty(100_000, device="cuda").int()
    graph = captured(lambda: out.copy_(torch.sort(keys + 1)[0] - 1))
    others = [torch.full((2**n,), 7, device="cuda") for n in range(4, 22) for _ in range(4)]
    for _ in range(3):
        graph.replay()
    assert all(bool((other == 7).all()) for other in others)
    assert torch.equal(out, torch.arange(100_000, device="cuda").int())


@pytest.mark.gpu
def test_a_capture_that_fails_changes_nothing() -> None:
    x, state = torch.zeros(4, device="cuda"), torch.cuda.get_rng_state()

    def fail() -> None:
        x.add_(1)
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        Graph(fail, x.device)
    torch.cuda.synchronize()
    assert x.tolist() == [0.0] * 4
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.rand(4, device="cuda")  # raises if torch takes the capture for unfinished
    captured(lambda: x.add_(1)).replay()
    assert x.tolist() == [2.0] * 4


@pytest.mark.gpu
def test_a_graph_may_go_while_the_user_captures() -> None:
    x = torch.zeros(4, device="cuda")
    graph, theirs = captured(lambda: x.add_(1)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs):
        del graph
        x.mul_(2)
    theirs.replay()
    assert x.tolist() == [2.0] * 4


def test_a_graph_is_destroyed_after_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    host_memory.free_after_captures(lambda: graphs._release(driver, 5))
    assert not driver.destroy_graph.called
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    host_memory.free_after_captures(lambda: None)
    driver.destroy_graph.assert_called_once_with(5)


def test_no_graphs_on_a_cpu() -> None:
    assert not can_capture(torch.device("cpu"))
