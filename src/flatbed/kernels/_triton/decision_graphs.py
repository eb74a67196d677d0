"""Decisions on the rows of a cache as CUDA graphs, for prefetches."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from flatbed.cuda.driver import DriverError
from flatbed.cuda.graph import Graph, can_capture
from flatbed.cuda.streams import stream_for
from flatbed.kernels import UniqueRows
from flatbed.kernels._triton import cache
from flatbed.kernels.cache import CacheIndex

N_EAGER = 4  # decisions of one kind, which is a number of keys and a window, before a graph is captured
MAX_KINDS = 64  # that are counted
MAX_GRAPHS, MAX_BYTES = 16, 1 << 28  # of one cache
KEY_BYTES = 68  # that a graph takes for each key, at most


class DecisionGraphs:
    """CUDA graphs of `cache.decide`, for numbers of keys and windows that occur often.

    Decisions are 20 launches of small kernels, which take the host longer than the GPU. Keys are in range.
    All graphs are replayed in the stream of one purpose.
    """

    def __init__(self, index: CacheIndex, key_dtype: torch.dtype, purpose: str) -> None:
        self._index, self._dtype, self._purpose = index, key_dtype, purpose
        self._n_uses: dict[tuple[int, int], int] = {}
        self._graphs: list[DecisionGraph] = []
        self._wanted: tuple[int, int] | None = None
        """The kind that another thread needs a graph for."""
        self._can_capture = can_capture(index.clock.device)

    def decide(self, ids: Tensor, window: int, graph: DecisionGraph | None) -> cache.Decisions:
        """Decide in the current stream, by a graph if one was found. The decisions have the keys."""
        if graph is not None and self.replay(graph, ids):
            return graph.lend()
        keys = ids.to(self._dtype)
        return cache.decide(self._index, keys, window)._replace(keys=keys)

    def find(self, n: int, window: int, *, captures: bool) -> DecisionGraph | None:
        """Return a graph for n keys whose last decisions are no longer in use; None if there is none.

        `captures`: capture one if they are frequent. That is for the training thread only: if another thread
        captured, a synchronization by the user's code could fail meanwhile. Another thread has one captured
        by `capture_wanted`.
        """
        kind = n, window
        if not self._can_capture:
            return None
        for graph in self._graphs:
            if graph.kind == kind and graph.is_free:
                return graph
        if not self._is_frequent(kind):
            return None
        if captures:
            return self._capture(kind)
        self._wanted = kind
        return None

    def capture_wanted(self) -> None:
        """Capture the graph that another thread has not found. In the training thread."""
        kind, self._wanted = self._wanted, None
        if kind is not None and all(graph.kind != kind for graph in self._graphs):
            self._capture(kind)

    def replay(self, graph: DecisionGraph, ids: Tensor) -> bool:
        """Decide in the current stream. Returns False, and uses no graphs any more, if nothing has run."""
        try:
            graph.replay(ids)
        except DriverError as error:
            self._stop(error)
            return False
        return True

    def _is_frequent(self, kind: tuple[int, int]) -> bool:
        n_bytes = sum(graph.out.memory.nbytes for graph in self._graphs)
        if not kind[0] or len(self._graphs) >= MAX_GRAPHS or n_bytes + kind[0] * KEY_BYTES > MAX_BYTES:
            return False
        if kind not in self._n_uses and len(self._n_uses) == MAX_KINDS:
            self._n_uses.clear()
        self._n_uses[kind] = self._n_uses.get(kind, 0) + 1
        # Beside a loop that waits, windows double. Each is used for half its size on the way.
        return self._n_uses[kind] > max(N_EAGER, kind[1] // 2)

    def _capture(self, kind: tuple[int, int]) -> DecisionGraph | None:
        try:
            graph = DecisionGraph(self._index, kind, self._dtype, self._purpose)
        except (DriverError, RuntimeError) as error:
            self._stop(error)
            return None
        self._graphs.append(graph)
        return graph

    def _stop(self, error: Exception) -> None:
        self._can_capture = False
        self._graphs = []
        warnings.warn(
            f"a CUDA graph could not be used ({error}): prefetching goes on, and takes the host longer",
            stacklevel=3,
        )


class DecisionGraph:
    """A CUDA graph of `cache.decide` for a kind: number of keys, and window. All replays write to `out`."""

    def __init__(self, index: CacheIndex, kind: tuple[int, int], dtype: torch.dtype, purpose: str) -> None:
        self.kind, self._index, self._dtype, device = kind, index, dtype, index.clock.device
        self._user: weakref.ref[UniqueRows] | None = None
        n, window = kind
        # Memory of the stream that replays it: other streams may still use theirs.
        stream = stream_for(device, purpose) if device.type == "cuda" else None
        try:
            with torch.inference_mode(False), torch.cuda.stream(stream):  # later replays may be outside
                self.out = out = cache.Decisions.allocate(n, device, dtype)
                self._keys = cast(Tensor, out.keys)
                self._graph = Graph(lambda: cache.decide(index, self._keys, window, out=out), device, purpose)
        finally:
            index.moving = False  # nothing has run

    @property
    def is_free(self) -> bool:
        """True if the decisions that were lent are gone, and `out` may be written to.

        The stream of the replays is ordered after all work that has used them: see `GpuCache`.
        """
        return self._user is None or self._user() is None

    def replay(self, ids: Tensor) -> None:
        """Decide in the current stream."""
        self._keys.copy_(ids)
        self._index.moving = True
        try:
            self._graph.replay()
        except DriverError:  # nothing has run
            self._index.moving = False
            raise

    def lend(self) -> cache.Decisions:
        """Return the decisions. The graph is not free while their unique rows are referred to."""
        lent = replace(self.out.unique)
        self._user = weakref.ref(lent)
        return self.out._replace(unique=lent)

    def copied(self) -> cache.Decisions:
        """Return a copy of the decisions, in memory of the current stream."""
        return cache.Decisions.of(self.out.memory.clone(), self.kind[0], self._dtype)
