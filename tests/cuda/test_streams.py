"""Order of locks, and streams by purpose."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flatbed.cuda import streams
from flatbed.cuda.streams import LOCK_ORDER, InStream, OrderedLock, relaxed_capture, stream_for

SOURCE = Path(streams.__file__).parents[1]


def test_locks_are_taken_in_order() -> None:
    first, second, third = (OrderedLock(name) for name in LOCK_ORDER[:3])
    with first, second, first, third:
        pass
    with third, pytest.raises(AssertionError, match=f"{first.name}.*{third.name}"), first:
        pass
    with first, third:  # the failed attempt has left nothing behind
        pass


def test_locks_exclude_other_threads() -> None:
    lock, entered = OrderedLock("cache"), threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    with lock:
        other = threading.Thread(target=enter)
        other.start()
        assert not entered.wait(0.05)
    other.join(20)
    assert entered.is_set()


def test_locks_of_the_package_are_listed() -> None:
    """Every `OrderedLock` has a name of `LOCK_ORDER`, and the docstring explains each."""
    names = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "OrderedLock":
                names.add(ast.literal_eval(node.args[0]))
    assert names <= set(LOCK_ORDER)
    assert all(f'| "{name}" |' in (streams.__doc__ or "") for name in LOCK_ORDER)


def test_relaxed_capture_without_a_gpu() -> None:
    with relaxed_capture() as relaxed:
        assert relaxed == torch.cuda.is_available()


@pytest.mark.gpu
def test_streams_are_different_and_kept() -> None:
    device = torch.device("cuda", 0)
    purposes = ("decisions", "batches", "files")
    found = [stream_for(device, purpose) for purpose in purposes]
    assert len({stream.cuda_stream for stream in found}) == 3
    assert [stream_for(device, purpose) for purpose in purposes] == found


@pytest.mark.gpu
def test_the_context_of_a_stream_is_that_of_torch() -> None:
    device = torch.device("cuda", 0)
    rows, user = stream_for(device, "decisions"), torch.cuda.Stream(device)
    context = InStream(rows)
    with torch.cuda.stream(user):
        for _ in range(2):
            with context:
                assert torch.cuda.current_stream(device) == rows
            assert torch.cuda.current_stream(device) == user


def test_the_context_of_a_stream_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the current GPU and the streams of both GPUs are those of before at the end."""
    gpu, current = [0], {0: (7, 0, 1), 1: (8, 1, 1)}

    def set_stream(*stream: int) -> None:
        gpu[0], current[stream[1]] = stream[1], stream  # type: ignore[assignment]

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: gpu[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: current[index], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", set_stream, raising=False)
    before = dict(current)
    for index in (0, 1):
        with InStream(SimpleNamespace(stream_id=9, device_index=index, device_type=1)):  # type: ignore[arg-type]
            assert (gpu[0], current[index]) == (index, (9, index, 1))
        assert (gpu[0], current) == (0, before)
