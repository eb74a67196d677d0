"""A batch's way through a cache as CUDA graphs: sort, distinct rows, who is here, who goes, both ways, and
what was asked for.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.streams import relaxed_capture, stream_for
from flatbed.kernels._triton import cache, row_kernels, rows
from flatbed.kernels._triton.chain import Chain, chained
from flatbed.kernels.cache import CacheIndex
from flatbed.kernels.rows import RecordLocation, UniqueRows

_LOADED: set[Any] = set()
"""Kinds of lookups whose kernels have run."""
_KEPT: list[Any] = []
"""What must not go: memory of the host that a GPU may still use, and graphs that torch may."""
SHORT, LONG = 5e-5, 1.0  # seconds: between two looks at what the GPU says, and until it is asked why not


class Passage:
    """Memory for batches of so many ids, and the graphs that work on it; one batch has it at a time.

    Ids come from the host, and their weights are looked up on the way, where the host says; or ids are in
    `keys` already, with `bad` for those out of range if they were not looked at. With `early`, finding the
    rows is a graph of its own, which has nobody to wait for and goes to another stream.
    """

    def __init__(
        self,
        tags: CacheIndex,
        place: RecordLocation,
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
        self.in_order = torch.empty(n, dtype=torch.int32, device=device)
        self.order = torch.empty(n, dtype=torch.int64, device=device)
        self.staged: Staged | None = Staged(n, device) if from_host else None
        self.keys = torch.empty_like(self.in_order) if self.staged is None else self.staged.keys
        self.bad = None if checked else torch.empty(1, dtype=torch.int64, device=device)
        self.made, self.turn = rows.Workspace(n, device), cache.AdmitScratch(tags, n)
        made = self.made
        self.found = UniqueRows(made.rows, made.inverse, self.order, made.starts, made.rank)
        self.done, self.known = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._place, self._tags, self._window, self._dim, self._dtype = place, tags, window, dim, dtype
        parts = [[self._find], [self._begin, self._admit]] if early else [[self._find_anew, self._admit]]
        if self.staged is not None:
            parts[0].append(self._look)
            self._load(self.staged)
        self.graphs = [Graph(part, device, pool) for part in parts]
        if early:  # its memory may have been somebody's in this stream, and is first used in another one
            self.done.record()

    def _load(self, staged: Staged) -> None:
        """Run what only graphs of this kind run, once: nothing can be loaded while they are captured."""
        kind = (self.device, self._place.stride, self._dim, self._dtype, staged.told.data_ptr() % 16)
        if kind not in _LOADED:
            room = self._room()
            staged.give(room)  # its ids are zeros
            staged.bring()
            self._look()
            _LOADED.add(kind)

    # ---- what the graphs do

    def _find(self) -> None:
        self._sort(None)

    def _find_anew(self) -> None:
        """The clock ticks on the way."""
        self._sort(self.turn)

    def _sort(self, turn: cache.AdmitScratch | None) -> None:
        if self.staged is not None:
            self.staged.bring()
        if self.bad is not None:
            self.bad.fill_((1 << 63) - 1)
        torch.sort(self.keys, stable=True, out=(self.in_order, self.order))
        rows.mark(self.in_order, self.order, self.made, self.n_rows, self.bad, turn)

    def _begin(self) -> None:
        """Nothing from here on may be allocated: `find` of another batch, at work, has the same pool."""
        cache.begin(self.turn)

    def _admit(self) -> None:
        cache.admit(self._tags, self.found.rows, self.turn, self._place, window=self._window)

    def _look(self) -> None:
        assert self.staged is not None
        told, seen = self.staged.told, self.staged.seen
        cache.look_there(self._place, self.keys, told, seen, self._dim, self._dtype, self.n_rows)

    # ---- what is done with a batch

    @property
    def free(self) -> bool:
        """Whether the last batch is through, as far as the host is concerned."""
        return bool(self.done.query()) if self.staged is None else self.staged.taken  # type: ignore[no-untyped-call,unused-ignore]

    def look(self) -> Tensor:
        """Let the batch pass whose ids were taken from the host: their weights, (n, dim)."""
        assert self.staged is not None
        out = self._room()
        try:
            self.staged.give(out)
            self.run()
        except BaseException:  # whether or not it was launched
            self.staged.settle()
            raise
        return out

    def _room(self) -> Tensor:
        return torch.empty((len(self.keys), self._dim), dtype=self._dtype, device=self.device)

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


class Staged:
    """Ids that a graph takes from the host, and where it is to put their weights. It says when it has.

    By memory, and not by an event: to record one behind a graph takes the host longer than to launch it.
    """

    def __init__(self, n: int, device: torch.device) -> None:
        n_even = n + n % 2
        self._arrives = torch.empty(n_even + 4, dtype=torch.int32, device=device)
        self.keys, self.told = self._arrives[:n], self._arrives[n_even:].view(torch.int64)
        self._memory = torch.zeros(len(self._arrives), dtype=torch.int32, device="cpu", pin_memory=True)
        self.seen = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        memory = self._memory.numpy()
        self._ids, self._number = memory[:n], 0
        self._told, self._seen = memory[n_even:].view(np.int64).data, self.seen.numpy().data

    def take(self, ids: np.ndarray[Any, Any]) -> None:
        """Copy ids, once the last graph has `taken` those that it was given."""
        self.wait()
        np.copyto(self._ids, ids, casting="unsafe")

    def give(self, out: Tensor) -> None:
        """Tell the next graph that is launched where weights go; the ids are there."""
        self._number += 1
        self._told[0], self._told[1] = out.data_ptr(), self._number

    def bring(self) -> None:
        """As part of the graph."""
        n = len(self._arrives)
        row_kernels.bring[(-(-n // 1024),)](self._memory.data_ptr(), self._arrives, n, BLOCK=1024)

    @property
    def taken(self) -> bool:
        """Whether the last graph has."""
        return self._seen[0] == self._number

    def wait(self) -> None:
        """Until it has; raises if the GPU has failed meanwhile."""
        until = time.monotonic() + LONG
        while not self.taken:
            if time.monotonic() > until:
                self.settle()
            time.sleep(SHORT)

    def settle(self) -> None:
        """Wait for all that was launched: nothing is at work then, whatever became of it."""
        number = self._number
        with relaxed_capture():  # of another thread
            torch.cuda.synchronize(self.keys.device)
        self._seen[0] = number

    def __del__(self) -> None:
        """The GPU's memory goes in the order of its stream; the host's must not go before it was used."""
        try:
            if not self.taken:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("to wait would spoil it")
                self.settle()
        except Exception:
            _KEPT.append((self._memory, self.seen))


class Graph:
    """Something that was captured once, to be done again and again."""

    def __init__(self, parts: list[Callable[[], None]], device: torch.device, pool: Any) -> None:
        self._index = device.index
        self._graph = _kept_graph()
        aside = stream_for(device, "captures")
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside), _uncollected():
            # Other threads may go on with whatever they do.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for part in parts:
                    part()
                self._graph.capture_end()
            except BaseException:
                _end_capture(self._graph, device, pool)
                raise
            self.chain: Chain | None = chained(self._graph)

    def launch(self) -> None:
        """Have it done in the current stream."""
        chain = self.chain
        if chain is not None and torch._C._cuda_getDevice() == self._index:
            if chain.launch(torch._C._cuda_getCurrentRawStream(self._index)):
                return
        self._graph.replay()


@contextmanager
def _uncollected() -> Iterator[None]:
    """What is garbage stays until later: some of it gives memory back, which would spoil a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _end_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """After one that has failed: torch would think that it goes on, and neither draw random numbers nor use
    memory again. The pool is not for others any more.
    """
    with suppress(Exception):
        graph.capture_end()
        return
    _KEPT.append(graph)  # torch goes on to ask it whether memory is its own
    with suppress(Exception):
        torch._C._cuda_endAllocateToPool(device.index, pool)
    with suppress(Exception):
        again, some = torch.cuda.CUDAGraph(), torch.empty(1, device=device)
        again.capture_begin(capture_error_mode="thread_local")
        some.zero_()
        again.capture_end()


def _kept_graph() -> torch.cuda.CUDAGraph:
    """One that can be looked into; before torch 2.8 there is none."""
    try:
        return torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return torch.cuda.CUDAGraph()
