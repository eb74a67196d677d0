"""Range checks for GPU ids. Kernels record the first bad position; the host raises later, without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels.rows import to_int32_keys
from flatbed.tables.ids import out_of_range
from flatbed.tables.storage.table_storage import TableStorage

NO_ERROR = (1 << 63) - 1

_captured: list[DeferredIdChecks] | None = None


@contextmanager
def checks_in_capture() -> Iterator[list[DeferredIdChecks]]:
    """Collect the checks of all tables that are looked up while a CUDA graph is captured in the body."""
    global _captured
    found: list[DeferredIdChecks] = []
    _captured = found
    try:
        yield found
    finally:
        _captured = None


class DeferredIdChecks:
    """Lookups of a table whose ids were checked on the GPU, and whose results the host has not read yet."""

    def __init__(self, store: TableStorage) -> None:
        self.store = store
        self._pending: list[PendingCheck] = []
        self.graph_slot: Tensor | None = None
        self._in_graphs = False

    def __len__(self) -> int:
        return len(self._pending)

    def error_slot(self, *, capturing: bool) -> Tensor:
        """Return a tensor where kernels record the first bad position; all CUDA graphs share one."""
        if not capturing:
            return torch.full((1,), NO_ERROR, dtype=torch.int64, device=self.store.device)
        if self.graph_slot is None:
            raise FlatbedError("take a training step with this table before the capture of a CUDA graph")
        self._in_graphs = True
        if _captured is not None and self not in _captured:
            _captured.append(self)
        return self.graph_slot

    def add(self, ids: Tensor, error_slot: Tensor, *, offset: int = 0) -> None:
        """Remember a lookup; `offset` is subtracted from the recorded position."""
        self._pending.append(PendingCheck(ids, error_slot, n_rows=self.store.config.n_rows, offset=offset))

    def error(self, *, wait: bool) -> IndexError | None:
        """Return the first error that is known; with `wait`, of all lookups. Later lookups are dropped."""
        pending, self._pending = self._pending, []
        for check in pending:
            if not (wait or check.is_known):
                self._pending.append(check)
                continue
            error = check.error()
            if error is not None:
                return error
        return None

    # ---- CUDA graphs

    def prepare_capture(self) -> None:
        """Allocate and load what a captured lookup needs: neither is possible during a capture."""
        if self.graph_slot is None and self.store.device.type == "cuda":
            self.graph_slot = torch.full((1,), NO_ERROR, dtype=torch.int64, device=self.store.device)
            to_int32_keys(self.graph_slot, self.store.config.n_rows)

    def check_graphs(self) -> None:
        """Raise if a CUDA graph was replayed with ids out of range. Waits for the GPU, if there was one."""
        if self.graph_slot is not None and self._in_graphs:
            self._raise_graph_error(int(self.graph_slot))

    def _raise_graph_error(self, position: int) -> None:
        if position == NO_ERROR:
            return
        assert self.graph_slot is not None
        self.graph_slot.fill_(NO_ERROR)
        n_rows = self.store.config.n_rows
        raise IndexError(
            f"a CUDA graph was replayed with ids out of range for a table of {n_rows} rows "
            f"(0 to {n_rows - 1}), the first of them at position {position} of its lookup: they were "
            f"read as rows of zeros, and got no gradient"
        )


class PendingCheck:
    """A lookup of GPU ids; the position of its first bad id is being copied to the host."""

    def __init__(self, ids: Tensor, error_slot: Tensor, *, n_rows: int = 0, offset: int = 0) -> None:
        self.ids = ids.clone() if ids.is_cuda else ids  # the user may overwrite them
        self.n_rows, self.offset = n_rows, offset
        self.position = error_slot
        self.copied: torch.cuda.Event | None = None
        if error_slot.is_cuda:
            self.position = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self.position.copy_(error_slot, non_blocking=True)
            self.copied = torch.cuda.current_stream(error_slot.device).record_event()

    @property
    def is_known(self) -> bool:
        """True if the position is on the host."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call,unused-ignore]

    def wait(self) -> int:
        """Return the position of the first bad id, or NO_ERROR."""
        if self.copied is not None:
            self.copied.synchronize()
        return int(self.position)

    def error(self) -> IndexError | None:
        """Return the error to raise, if any. Waits."""
        position = self.wait()
        if position == NO_ERROR:
            return None
        at = position - self.offset
        return out_of_range(int(self.ids.flatten()[at]), at, tuple(self.ids.shape), self.n_rows)
