"""Streams beside the training's, one for each purpose."""

from __future__ import annotations

import threading

import torch

_held: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_lock = threading.Lock()


def stream_for(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream for a purpose, always the same: what is made for a stream is used again.

    torch hands out the same 32 streams in turns. Ours are different ones.
    """
    with _lock:
        key = (device, purpose)
        if key not in _held:
            _held[key] = another_than(device, {stream.cuda_stream for stream in _held.values()})
        return _held[key]


def another_than(device: torch.device, handles: set[int]) -> torch.cuda.Stream:
    """A stream that is none of these; after a few turns any will do."""
    for _ in range(64):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call,unused-ignore]
        if stream.cuda_stream not in handles:
            break
    return stream
