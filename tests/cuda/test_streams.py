"""Order of locks, and streams by purpose."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

from flatbed.cuda import streams
from flatbed.cuda.streams import LOCK_ORDER, OrderedLock, relaxed_capture, stream_for

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
    purposes = ("rows", "batches", "files")
    found = [stream_for(device, purpose) for purpose in purposes]
    assert len({stream.cuda_stream for stream in found}) == 3
    assert [stream_for(device, purpose) for purpose in purposes] == found
