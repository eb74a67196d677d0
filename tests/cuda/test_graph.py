"""CUDA graphs that are captured beside the user's own work."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from flatbed.cuda import graph as graphs
from flatbed.cuda import host_memory, streams
from flatbed.cuda.graph import Graph, can_capture


def captured(function: Callable[[], object]) -> Graph:
    function()  # loads its kernels
    return Graph(function, torch.device("cuda", torch.cuda.current_device()), "decisions")


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
        Graph(fail, x.device, "decisions")
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


def test_nothing_is_freed_and_nobody_waits_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """By other threads: freeing, and waiting for the whole GPU, would end it."""
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: freed.append(2))
    waits = threading.Thread(target=streams.synchronize, args=(torch.device("cuda", 0),))
    with streams.capture_lock:
        host_memory.free_after_captures(lambda: freed.append(1))
        waits.start()
        waits.join(0.05)
        assert not freed
    waits.join()
    host_memory.free_after_captures(lambda: None)
    assert freed == [2, 1]


def test_nothing_is_freed_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By other threads, whose streams capture nothing."""
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "stream_for", mock.Mock())
    other = threading.Thread(target=host_memory.free_after_captures, args=(lambda: freed.append(1),))
    with graphs.capture_step(mock.Mock(), torch.device("cuda", 0)):
        other.start()
        other.join()
        assert not freed
    host_memory.free_after_captures(lambda: None)
    assert freed == [1]


@pytest.mark.parametrize(
    ("device", "backend", "settings", "expected"),
    [
        ("cpu", "native", "", False),
        ("cuda", "native", "expandable_segments:True", True),
        ("cuda", "native", "max_split_size_mb:128", False),
        ("cuda", "cudaMallocAsync", "", False),
        ("cuda", "native", "off", False),
    ],
)
def test_where_graphs_are_captured(
    device: str, backend: str, settings: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None, raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setenv("FLATBED_PREFETCH_GRAPHS", "0" if settings == "off" else "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    assert can_capture(torch.device(device)) == expected


@pytest.mark.parametrize("address", [99, 100, 149, 150])
def test_memory_must_come_from_the_pool(address: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = mock.Mock(
        snapshot=lambda: [{"address": 0, "total_size": 9}, {"address": 100, "total_size": 50}]
    )
    monkeypatch.setattr(torch, "empty", lambda *_, **__: mock.Mock(data_ptr=lambda: address))
    with nullcontext() if 100 <= address < 150 else pytest.raises(RuntimeError, match="another pool"):
        graphs._check_in_use(pool)


class Driver:
    """Records what is called, and fails at one call."""

    def __init__(self, failing: str) -> None:
        self.failing, self.called = failing, [""] * 0

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            self.called.append(name)
            if name == self.failing:
                raise KeyboardInterrupt
            return 5

        return call


@pytest.mark.parametrize("failing", ["begin_capture", "function", "end_capture", "none"])
def test_an_interrupted_capture_ends(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(failing)
    monkeypatch.setattr(graphs, "driver", lambda: driver)
    for name in ("_pool_of", "_check_in_use"):
        monkeypatch.setattr(graphs, name, mock.Mock())
    monkeypatch.setattr(graphs, "stream_for", mock.Mock())
    for name in ("stream", "use_mem_pool"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    with nullcontext() if failing == "none" else pytest.raises(KeyboardInterrupt):
        graph = Graph(driver.function, torch.device("cuda", 0), "decisions")
        del graph
    calls = ["begin_capture", "function", "end_capture"]
    if failing == "none":
        assert driver.called == [*calls, "destroy_graph"]
    else:
        assert driver.called == [*calls[: calls.index(failing) + 1], "drop_capture"]
    assert gc.isenabled()
    assert not streams.capture_lock.locked()
