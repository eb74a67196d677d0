"""A batch's way through a cache as one CUDA graph: sort, distinct rows, who is here, who goes, both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.kernels._triton import cache, row_kernels, rows
from flatbed.kernels.cache import Tags
from flatbed.kernels.rows import Distinct, Place
from flatbed.kernels.streams import stream_for


class Passage:
    """Memory for batches of so many ids, and the graph that works on it; one batch has it at a time.

    Ids come from the host through `staging`; or they are in `keys` already, with `bad` for those out of range
    if they were not looked at.
    """

    def __init__(
        self, tags: Tags, place: Place, n: int, *, window: int, from_host: bool, checked: bool, pool: Any
    ) -> None:
        device = tags.clock.device
        self.n_rows = len(tags.slot_of_row)
        self.keys, self.in_order = (torch.empty(n, dtype=torch.int32, device=device) for _ in range(2))
        self.order = torch.empty(n, dtype=torch.int64, device=device)
        self.staging = torch.empty(n, dtype=torch.int32, device="cpu", pin_memory=True) if from_host else None
        self.bad = None if checked else torch.empty(1, dtype=torch.int64, device=device)
        self.made, self.turn = rows.Workspace(n, device), cache.Turn(tags, n)
        made = self.made
        self.found = Distinct(made.rows, made.inverse, self.order, made.starts, made.rank)
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.graph = self._captured(tags, place, window, pool)

    def _captured(self, tags: Tags, place: Place, window: int, pool: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        device = tags.clock.device
        self._bring()  # all other kernels have run before: none can be loaded during a capture
        aside = stream_for(device, "captures")
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            # Other threads may go on with whatever they do.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._issue(tags, place, window)
            finally:
                graph.capture_end()
        return graph

    def _issue(self, tags: Tags, place: Place, window: int) -> None:
        self._bring()
        if self.bad is not None:
            self.bad.fill_((1 << 63) - 1)
        torch.sort(self.keys, stable=True, out=(self.in_order, self.order))
        rows.mark(self.in_order, self.order, self.made, self.n_rows, self.bad, self.turn)
        cache.admit(tags, self.found.rows, self.turn, place, window=window)

    def _bring(self) -> None:
        if self.staging is not None:
            n = len(self.keys)
            row_kernels.bring[(-(-n // 1024),)](self.staging.data_ptr(), self.keys, n, BLOCK=1024)

    def run(self, ids: Tensor | None) -> None:
        """Let a batch pass; ids on the host, if that is where they come from."""
        if ids is not None:
            assert self.staging is not None
            self.done.synchronize()  # the last batch's may still be on their way
            np.copyto(self.staging.numpy(), ids.numpy(), casting="unsafe")
        self.graph.replay()
        if ids is not None:
            self.done.record()
