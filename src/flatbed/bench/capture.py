"""A call that is captured in a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Captured:
    """Does the same at every call: the first runs as it is, the second is captured, and all others replay it.

    What the first call makes for good, such as an optimizer's state, is there when the capture begins. What
    the call reads and writes has to stay where it is, until `forget`.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.forget()

    def forget(self) -> None:
        """Begin again with a call as it is."""
        self._has_run = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._has_run:
            self._run_aside()
            self._has_run = True
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # waits for the device; records the call and does not run it
                self._call()
            self._graph = graph
        self._graph.replay()

    def _run_aside(self) -> None:
        """On a stream of its own, since capturing will not be on the current one either."""
        here = torch.cuda.current_stream()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            self._call()
        here.wait_stream(self._side)
