"""Conversion and range checks of ids: lists, numpy or torch, any integer dtype and shape, host or GPU.

Ids on the host are checked at once. Kernels check ids on a GPU while they read them: `DeferredIdChecks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels.rows import key_dtype, to_int32_keys

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


def as_ids(ids: Any, *, name: str = "ids") -> Tensor:
    """Return ids as an int64 tensor on the device they are on. Errors call them `name`.

    Ids that are too large for int64 raise on the host. On a GPU they become negative, and so out of range.
    """
    if not isinstance(ids, Tensor):
        if isinstance(ids, (list, tuple, range, int, np.integer)):
            try:
                ids = np.asarray(ids)
            except ValueError as error:
                raise ValueError(
                    f"{name} must be lists of equal length: pad them with padding_idx, or give EmbeddingBag "
                    f"one list and offsets ({error})"
                ) from None
            ids = ids if ids.size else ids.astype(np.int64)
        if not isinstance(ids, np.ndarray):
            raise TypeError(
                f"{name} must be integers in a tensor, a numpy array or a list; found {type(ids).__name__}"
            )
        if ids.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers; found {ids.dtype}: convert them (a mask by nonzero)")
        _check_uint64(ids)
        return torch.from_numpy(np.require(ids, np.int64, ["C", "W"]))
    if ids.dtype == torch.uint64:
        if ids.device.type == "cpu":
            _check_uint64(ids.numpy())
        return ids.view(torch.int64)
    if ids.dtype not in INTEGERS:
        raise TypeError(f"{name} must be integers; found {ids.dtype}: use .long(), or nonzero() of a mask")
    found: Tensor = ids.detach()
    return found if found.dtype == torch.int64 else found.to(torch.int64)


def _check_uint64(ids: NDArray[Any]) -> None:
    if ids.dtype == np.uint64 and ids.size and ids.max() > NO_ERROR:
        at = int((ids > NO_ERROR).argmax())
        raise out_of_range(int(ids.flat[at]), at, ids.shape)


def check_range(ids: Tensor, n_rows: int) -> None:
    """Raise IndexError for the first id out of range. Waits for the GPU if the ids are on one."""
    if ids.numel() == 0:
        return
    if ids.device.type == "cpu":
        # numpy is faster than torch, which wakes its threads. Negative ids are large as uint64.
        good = ids.numpy().view(np.uint64).max() < n_rows
    else:
        low, high = torch.stack(torch.aminmax(ids)).tolist()
        good = low >= 0 and high < n_rows
    if good:
        return
    at = int(((ids < 0) | (ids >= n_rows)).flatten().nonzero()[0])
    raise out_of_range(int(ids.flatten()[at]), at, tuple(ids.shape), n_rows)


def out_of_range(value: int, at: int, shape: tuple[int, ...], n_rows: int | None = None) -> IndexError:
    """Return the error for an id that is not a row; of any table, without `n_rows`."""
    index = tuple(int(i) for i in np.unravel_index(at, shape)) if shape else ()
    position = index[0] if len(index) == 1 else index
    bound = f"any table (0 to {NO_ERROR})"
    if n_rows is not None:
        bound = f"a table of {n_rows} rows (0 to {n_rows - 1})"
    return IndexError(f"id {value} at position {position} is out of range for {bound}")


def as_floats(values: Any, name: str) -> Tensor:
    """Return numbers as a tensor, on the device they are on. Errors call them `name`."""
    given = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    if not given.is_floating_point():
        raise TypeError(f"{name} must be floating point numbers; found {given.dtype}: convert with .float()")
    return given


def most_used(rows: Tensor, counts: Any) -> tuple[Tensor, Tensor]:
    """Return unique rows, most frequent first, and how often they occur."""
    unique, which, times = torch.unique(rows, return_inverse=True, return_counts=True)
    if counts is not None:
        given = torch.as_tensor(counts, dtype=torch.float64, device="cpu").flatten()
        if len(given) != len(rows) or not bool((given >= 0).all()):  # nan included
            raise ValueError(
                f"counts are one per id, none of them negative; found {len(given)} for {len(rows)} ids, the "
                f"smallest {float(given.min()) if len(given) else 0:g}"
            )
        none = torch.zeros(len(unique), dtype=torch.float64, device="cpu")
        times = none.index_add_(0, which, given)
    order = times.argsort(descending=True, stable=True)
    return unique[order], times[order].clamp(min=1)


def to_device(ids: Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy ids to the computing device through pinned memory, without waiting."""
    if ids.device == device or device.type != "cuda" or ids.device.type != "cpu":
        return ids.to(device, dtype)
    pinned = torch.empty(ids.shape, dtype=dtype, device="cpu", pin_memory=True)
    pinned.copy_(ids)
    return pinned.to(device, non_blocking=True)


# ---- ids on a GPU

NO_ERROR = (1 << 63) - 1


def new_first_error(device: torch.device) -> Tensor:
    """Return a tensor of one number, where kernels record the position of the first bad id."""
    return torch.full((1,), NO_ERROR, dtype=torch.int64, device=device)


class DeferredIdChecks:
    """Lookups of a table whose ids kernels have checked, and whose results the host has not read yet.

    Kernels record the position of the first bad id; the host raises later, without waiting.
    """

    def __init__(self) -> None:
        self.pending: list[PendingCheck] = []
        self.graph_error: Tensor | None = None
        """Where the kernels of all captured lookups record the first bad position."""
        self._n_rows = 0
        self._in_graphs = False

    def add(self, ids: Tensor, first_error: Tensor, *, n_rows: int, offset: int = 0) -> None:
        """Remember a lookup; `offset` is subtracted from the recorded position."""
        if not first_error.is_cuda:
            self.pending.append(PendingCheck(ids, n_rows, offset, first_error))
            return
        position = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
        position.copy_(first_error, non_blocking=True)
        copied = torch.cuda.current_stream(first_error.device).record_event()
        # A copy of the ids: the user may overwrite them.
        self.pending.append(PendingCheck(ids.clone(), n_rows, offset, position, copied))

    def error(self, *, wait: bool) -> IndexError | None:
        """Return the first error that is known; with `wait`, of all lookups. Later lookups are dropped."""
        pending, self.pending = self.pending, []
        for check in pending:
            if not wait and check.copied is not None and not check.copied.query():  # type: ignore[no-untyped-call,unused-ignore]
                self.pending.append(check)
                continue
            if check.copied is not None:
                check.copied.synchronize()
            if int(check.position) != NO_ERROR:
                at = int(check.position) - check.offset
                return out_of_range(int(check.ids.flatten()[at]), at, tuple(check.ids.shape), check.n_rows)
        return None

    # ---- CUDA graphs

    def prepare_capture(self, device: torch.device, n_rows: int) -> None:
        """Allocate and load what a captured lookup needs: neither is possible during a capture."""
        self.graph_error = new_first_error(device)
        to_int32_keys(self.graph_error, n_rows)

    def first_error_of_graphs(self, n_rows: int) -> Tensor:
        """Return the tensor that the kernels of all captured lookups record the first bad position in."""
        if self.graph_error is None:
            raise FlatbedError("take a training step with this table before the capture of a CUDA graph")
        self._in_graphs, self._n_rows = True, n_rows
        return self.graph_error

    def check_graphs(self) -> None:
        """Raise if a CUDA graph was replayed with ids out of range. Waits for the GPU, if there was one."""
        if self.graph_error is None or not self._in_graphs or int(self.graph_error) == NO_ERROR:
            return
        position, n_rows = int(self.graph_error), self._n_rows
        self.graph_error.fill_(NO_ERROR)
        raise IndexError(
            f"a CUDA graph was replayed with ids out of range for a table of {n_rows} rows "
            f"(0 to {n_rows - 1}), the first of them at position {position} of its lookup: they were "
            f"read as rows of zeros, and got no gradient"
        )


@dataclass(slots=True)
class PendingCheck:
    """A lookup of GPU ids; the position of its first bad id is being copied to the host."""

    ids: Tensor
    n_rows: int
    offset: int
    position: Tensor
    copied: torch.cuda.Event | None = None


def as_keys(ids: Tensor, n_rows: int, device: torch.device, *, in_range: bool = False) -> Tensor:
    """Return ids as keys on the computing device, flat, in the dtype that kernels sort fastest."""
    if in_range:  # copied in that dtype
        return to_device(ids.flatten(), device, key_dtype(n_rows, device))
    return to_int32_keys(ids.flatten().to(device, non_blocking=device.type == "cuda"), n_rows)
