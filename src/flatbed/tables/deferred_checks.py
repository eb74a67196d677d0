"""Ids that are on a GPU: their range is checked there, and what was found is asked for without waiting."""

from __future__ import annotations

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.tables.ids import out_of_range
from flatbed.tables.storage.table_storage import TableStorage

NO_ERROR = (1 << 63) - 1
"""The place of the first bad id, where there is none."""


class DeferredIdChecks:
    """The batches of a table whose range was checked on the GPU, and of which the host does not know yet."""

    def __init__(self, store: TableStorage) -> None:
        self.store = store
        self._batches: list[PendingCheck] = []
        self._graph_bad: Tensor | None = None
        self._in_graphs = False

    def __len__(self) -> int:
        return len(self._batches)

    def error_slot(self, *, capturing: bool) -> Tensor:
        """Where kernels write the place of the first bad id; graphs have one in common."""
        if not capturing:
            return torch.full((1,), NO_ERROR, dtype=torch.int64, device=self.store.device)
        if self._graph_bad is None:
            raise FlatbedError("take a training step with this table before the capture of a CUDA graph")
        self._in_graphs = True
        return self._graph_bad

    # ---- lookups

    def add(self, ids: Tensor, bad: Tensor) -> None:
        """Remember a batch, and where the place of its first bad id will be."""
        self._batches.append(PendingCheck(ids, bad, self.store.config.n_rows))

    def error(self, *, wait: bool) -> IndexError | None:
        """What to raise if ids were out of range, as far as is known; batches after those are dropped."""
        batches, self._batches = self._batches, []
        for batch in batches:
            if not (wait or batch.known):
                self._batches.append(batch)
                continue
            error = batch.error()
            if error is not None:
                return error
        return None

    # ---- CUDA graphs

    def prepare_capture(self) -> None:
        """Make what a CUDA graph needs of the table before it is captured."""
        if self._graph_bad is None and self.store.device.type == "cuda":
            self._graph_bad = torch.full((1,), NO_ERROR, dtype=torch.int64, device=self.store.device)

    def of_graphs(self, bad: Tensor) -> bool:
        """Whether this is the place that graphs have in common."""
        return bad is self._graph_bad

    def check_graphs(self) -> None:
        """Raise if a CUDA graph was replayed with ids out of range. Waits for the GPU, if there was one."""
        bad = self._graph_bad
        if bad is None or not self._in_graphs:
            return
        at = int(bad)
        if at != NO_ERROR:
            bad.fill_(NO_ERROR)
            n_rows = self.store.config.n_rows
            raise IndexError(
                f"a CUDA graph was replayed with ids out of range for a table of {n_rows} rows "
                f"(0 to {n_rows - 1}), the first of them at position {at} of its lookup: they "
                f"were taken for rows of zeros, and got no gradient"
            )


class PendingCheck:
    """A batch of ids on a GPU, and the place of the first bad one, on its way to the host."""

    def __init__(self, ids: Tensor, bad: Tensor, n_rows: int) -> None:
        self.ids = ids.clone() if ids.is_cuda else ids  # the user may write others into them
        self.n_rows = n_rows
        self.bad = bad
        self.arrived: torch.cuda.Event | None = None
        if bad.is_cuda:
            self.bad = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self.bad.copy_(bad, non_blocking=True)
            self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call,unused-ignore]
            self.arrived.record()

    @property
    def known(self) -> bool:
        """Whether the place has arrived."""
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call,unused-ignore]

    def error(self) -> IndexError | None:
        """What to raise, if anything. Waits."""
        if self.arrived is not None:
            self.arrived.synchronize()
        at = int(self.bad)
        if at == NO_ERROR:
            return None
        return out_of_range(int(self.ids.flatten()[at]), at, tuple(self.ids.shape), self.n_rows)
