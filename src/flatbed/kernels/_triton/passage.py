"""A batch's way through a cache as CUDA graphs: sort, distinct rows, who is here, who goes, both ways, and
what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.kernels._triton import cache, row_kernels, rows
from flatbed.kernels._triton.chain import Chain, chained
from flatbed.kernels.cache import Tags
from flatbed.kernels.rows import Distinct, Place
from flatbed.kernels.streams import stream_for


class Passage:
    """Memory for batches of so many ids, and the graphs that work on it; one batch has it at a time.

    Ids come from the host, and their weights are looked up on the way, where the host says; or ids are in
    `keys` already, with `bad` for those out of range if they were not looked at. With `early`, finding the
    rows is a graph of its own, which has nobody to wait for and goes to another stream.
    """

    def __init__(
        self,
        tags: Tags,
        place: Place,
        n: int,
        *,
        dim: int,
        dtype: torch.dtype,
        window: int,
        from_host: bool,
        checked: bool,
        early: bool,
        pool: Any,
    ) -> None:
        self.device = device = tags.clock.device
        self.n_rows = len(tags.slot_of_row)
        n_even = n + n % 2
        arrives = torch.empty(n_even + 2, dtype=torch.int32, device=device)
        self.keys, self._where = arrives[:n], arrives[n_even:].view(torch.int64)
        self._arrives = arrives
        self.in_order = torch.empty(n, dtype=torch.int32, device=device)
        self.order = torch.empty(n, dtype=torch.int64, device=device)
        self.staging: Tensor | None = None
        if from_host:
            self.staging = torch.zeros(len(arrives), dtype=torch.int32, device="cpu", pin_memory=True)
            self._given = self.staging.numpy()[:n]
            self._address = self.staging.numpy()[n_even:].view(np.int64)
        self.bad = None if checked else torch.empty(1, dtype=torch.int64, device=device)
        self.made, self.turn = rows.Workspace(n, device), cache.Turn(tags, n)
        made = self.made
        self.found = Distinct(made.rows, made.inverse, self.order, made.starts, made.rank)
        self.done, self.known = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._place, self._tags, self._window, self._dim, self._dtype = place, tags, window, dim, dtype
        parts = [[self._find], [self._begin, self._admit]] if early else [[self._find_anew, self._admit]]
        if from_host:
            parts[0].append(self._look)
            made_for_it = self._room()
            self._bring()  # all other kernels have run before: none can be loaded during a capture
            self._look()
            del made_for_it
        self.graphs = [Graph(part, device, pool) for part in parts]
        # Its memory may have been somebody's in this stream, and be used in another one first; and what was
        # staged here must have been read before a batch is.
        self.done.record()

    # ---- what the graphs do

    def _find(self) -> None:
        self._sort(None)

    def _find_anew(self) -> None:
        """The clock ticks on the way."""
        self._sort(self.turn)

    def _sort(self, turn: cache.Turn | None) -> None:
        self._bring()
        if self.bad is not None:
            self.bad.fill_((1 << 63) - 1)
        torch.sort(self.keys, stable=True, out=(self.in_order, self.order))
        rows.mark(self.in_order, self.order, self.made, self.n_rows, self.bad, turn)

    def _bring(self) -> None:
        """Keys, and where their weights are wanted."""
        if self.staging is not None:
            n = len(self._arrives)
            row_kernels.bring[(-(-n // 1024),)](self.staging.data_ptr(), self._arrives, n, BLOCK=1024)

    def _begin(self) -> None:
        """Nothing from here on may be allocated: `find` of another batch, at work, has the same pool."""
        cache.begin(self.turn)

    def _admit(self) -> None:
        cache.admit(self._tags, self.found.rows, self.turn, self._place, window=self._window)

    def _look(self) -> None:
        cache.look_there(self._place, self.keys, self._where, self._dim, self._dtype, self.n_rows)

    # ---- what is done with a batch

    def look(self, ids: Tensor) -> Tensor:
        """Let a batch pass, of ids on the host: (n,) → (n, dim), their weights."""
        self.done.synchronize()  # the last batch's may still be on their way
        np.copyto(self._given, ids.numpy(), casting="unsafe")
        out = self._room()
        for graph in self.graphs:
            graph.launch()
        self.done.record()
        return out

    def _room(self) -> Tensor:
        """Memory for weights, which the next batch's go to."""
        out = torch.empty((len(self.keys), self._dim), dtype=self._dtype, device=self.device)
        self._address[0] = out.data_ptr()
        return out

    def run(self) -> None:
        """Let a batch pass, of ids in `keys`."""
        for graph in self.graphs:
            graph.launch()

    def find(self) -> None:
        """With `early`: find the rows of the ids in `keys`, in the current stream."""
        self.graphs[0].launch()
        self.known.record()

    def bring(self) -> None:
        """With `early`: bring the rows that were found, in the current stream."""
        self.known.wait()
        self.graphs[1].launch()
        self.done.record()


class Graph:
    """Something that was captured once, to be done again and again."""

    def __init__(self, parts: list[Callable[[], None]], device: torch.device, pool: Any) -> None:
        self._index = device.index
        self._graph = _kept_graph()
        aside = stream_for(device, "captures")
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            # Other threads may go on with whatever they do.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for part in parts:
                    part()
            finally:
                self._graph.capture_end()
            self.chain: Chain | None = chained(self._graph)

    def launch(self) -> None:
        """Have it done in the current stream."""
        chain = self.chain
        if chain is not None and torch._C._cuda_getDevice() == self._index:
            if chain.launch(torch._C._cuda_getCurrentRawStream(self._index)):
                return
        self._graph.replay()


def _kept_graph() -> torch.cuda.CUDAGraph:
    """One that can be looked into; before torch 2.8 there is none."""
    try:
        return torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return torch.cuda.CUDAGraph()
