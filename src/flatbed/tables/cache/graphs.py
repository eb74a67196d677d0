"""Batches that come through a cache as part of CUDA graphs: nobody on the host sees when."""

from __future__ import annotations

from typing import Any

import torch


class Graphs:
    """What was captured, and events by which graphs and batches that come early wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._entered = _external_event() if device.type == "cuda" else None
        self._left: list[Any] = []
        self._sizes: list[list[int]] = []
        self._another = True
        self.n_batches = 0
        """How many come in one of them, at most."""
        self.n_rows = 0
        """How many rows do, at most."""

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def told(self) -> bool:
        """Whether graphs and others can wait for each other: older versions of torch have no such events."""
        return self._entered is not None

    def outside(self) -> None:
        """Something happens outside of graphs: what is captured next is another one."""
        self._another = True

    def enter(self, stream: torch.cuda.Stream, n_rows: int) -> None:
        """While one is captured: a batch is about to come, after those that came early."""
        if self._another:
            self._sizes.append([])
            self._another = False
        self._sizes[-1].append(n_rows)
        self.n_batches = max(self.n_batches, len(self._sizes[-1]))
        self.n_rows = max(self.n_rows, sum(self._sizes[-1]))
        if self._entered is not None:
            stream.wait_event(self._entered)

    def leave(self, stream: torch.cuda.Stream) -> None:
        """And it has come. Each has an event of its own: which one would another stream wait for?"""
        if self.told:
            self._left.append(_external_event())
            self._left[-1].record(stream)

    def wait(self, stream: torch.cuda.Stream) -> None:
        """After the batches of the graph that was launched last have come."""
        for left in self._left:
            stream.wait_event(left)

    def tell(self, stream: torch.cuda.Stream) -> None:
        """A batch has come early: graphs that are launched now wait for it."""
        if self._entered is not None:
            self._entered.record(stream)


def _external_event() -> Any:
    """An event that graphs record and wait for when they run; None where torch has none."""
    try:
        return torch.cuda.Event(external=True)  # type: ignore[call-arg,no-untyped-call,unused-ignore]
    except TypeError:
        return None
