"""Streams beside the training's, one for each purpose; and the calls of torch's that cost least."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch

URGENT = ("rows",)
"""What little there is of it goes first: the next step waits for it."""

_held: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_lock = threading.Lock()
_known: dict[tuple[int, ...], torch.cuda.Stream] = {}
"""By what torch knows them by. It never gives one back."""


def stream_for(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream for a purpose, always the same: what is made for a stream is used again.

    torch hands out the same 32 streams in turns. Ours are different ones.
    """
    with _lock:
        key = (device, purpose)
        if key not in _held:
            others = {stream.cuda_stream for stream in _held.values()}
            _held[key] = another_than(device, others, priority=-1 if purpose in URGENT else 0)
        return _held[key]


def another_than(device: torch.device, handles: set[int], *, priority: int = 0) -> torch.cuda.Stream:
    """A stream that is none of these; after a few turns any will do."""
    for _ in range(64):
        stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call,unused-ignore]
        if stream.cuda_stream not in handles:
            break
    return stream


# ---- while others capture graphs


def relax_capture() -> None:
    """Let this thread allocate and wait while another one captures a graph, which that does not concern."""
    exchange = _exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(2)))  # CU_STREAM_CAPTURE_MODE_RELAXED, of this thread alone


@contextmanager
def relaxed_capture() -> Iterator[bool]:
    """The same for as long as it takes, in any thread: even in one that captures a graph itself. Yields
    whether there is such a thing.
    """
    exchange, mode = _exchange_capture_mode(), ctypes.c_int(2)
    if exchange is None:
        yield False
        return
    exchange(ctypes.byref(mode))  # which is, from here on, what it was before
    try:
        yield True
    finally:
        exchange(ctypes.byref(mode))


@lru_cache(maxsize=1)
def _exchange_capture_mode() -> Any:
    if torch.version.cuda is None:
        return None
    with suppress(OSError, AttributeError):
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return None


# ---- several times a batch, where every microsecond counts


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The same as `torch.cuda.current_stream`, but each stream is one object, and made once."""
    index: int | None = device.index
    if index is None:
        return torch.cuda.current_stream(device)
    key = torch._C._cuda_getCurrentStream(index)
    stream = _known.get(key)
    if stream is None:
        if len(_known) >= 1024:  # streams of others, made anew again and again
            _known.clear()
        stream = _known[key] = torch.cuda.current_stream(device)
    return stream


class Within:
    """The same as `torch.cuda.stream`, by few calls if the stream is of the current device; None: nothing."""

    __slots__ = ("_before", "_otherwise", "_stream")

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._before: tuple[int, int, int] | None = None
        self._otherwise: Any = None

    def __enter__(self) -> None:
        stream = self._stream
        if stream is None:
            return
        index = stream.device_index
        if torch._C._cuda_getDevice() != index:
            self._otherwise = torch.cuda.stream(stream)
            self._otherwise.__enter__()
            return
        before = torch._C._cuda_getCurrentStream(index)
        torch._C._cuda_setStream(
            stream_id=stream.stream_id, device_index=index, device_type=stream.device_type
        )
        self._before = before

    def __exit__(self, *error: object) -> None:
        before, otherwise = self._before, self._otherwise
        if before is not None:
            self._before = None
            torch._C._cuda_setStream(stream_id=before[0], device_index=before[1], device_type=before[2])
        elif otherwise is not None:
            self._otherwise = None
            otherwise.__exit__(*error)
