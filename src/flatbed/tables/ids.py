"""Conversion and range checks of ids: lists, numpy or torch, any integer dtype and shape, host or GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

INT64 = np.dtype(np.int64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


def as_ids(ids: Any) -> Tensor:
    """Return ids as an int64 tensor on the device they are on."""
    if isinstance(ids, np.ndarray):
        if ids.dtype is INT64 and ids.flags.carray:
            return torch.from_numpy(ids)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers; found a numpy array of {ids.dtype}")
        if ids.dtype == np.uint64 and ids.size and ids.max() > np.iinfo(np.int64).max:
            at = int(ids.argmax())
            raise IndexError(f"id {ids.flat[at]} at {_position(at, ids.shape)} is larger than any table")
        return torch.from_numpy(np.require(ids, np.int64, ["C", "W"]))
    if not isinstance(ids, Tensor):
        if isinstance(ids, (list, tuple, range, int, np.integer)):
            return as_ids(_as_array(ids))
        raise TypeError(
            f"ids must be integers in a tensor, a numpy array or a list; found {type(ids).__name__}"
        )
    if ids.dtype == torch.uint64:
        if ids.device.type == "cpu":
            return as_ids(ids.numpy())
        return ids.view(torch.int64)  # too large ids become negative
    if ids.dtype not in INTEGERS:
        raise TypeError(f"ids must be integers; found a tensor of {ids.dtype}")
    found: Tensor = ids.detach()
    return found if found.dtype == torch.int64 else found.to(torch.int64)


def _as_array(ids: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(ids) if np.size(ids) else np.zeros(np.shape(ids), np.int64)
    except ValueError:
        raise ValueError(
            "ids in lists must have one shape; found lists of different lengths: pad them, or pass one flat "
            "list and offsets to an EmbeddingBag"
        ) from None


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


def out_of_range(value: int, at: int, shape: tuple[int, ...], n_rows: int) -> IndexError:
    """Return the error for an id that is not a row."""
    return IndexError(
        f"id {value} at {_position(at, shape)} is out of range for a table of {n_rows} rows "
        f"(0 to {n_rows - 1})"
    )


def _position(at: int, shape: tuple[int, ...]) -> str:
    index = tuple(int(i) for i in np.unravel_index(at, shape)) if shape else ()
    return f"position {index[0] if len(index) == 1 else index}"


def as_values(values: Any, shape: tuple[int, ...]) -> Tensor:
    """Return values for rows as a tensor of this shape, on the device they are on."""
    try:
        given = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"values must be a tensor, an array or lists of numbers, of shape {shape}; found "
            f"{type(values).__name__}"
        ) from None
    if tuple(given.shape) != shape:
        raise ValueError(f"values for these ids must have shape {shape}; found {tuple(given.shape)}")
    if not given.is_floating_point():
        raise TypeError(f"values must be floating point numbers; found {given.dtype}: convert with .float()")
    return given


def most_used(rows: Tensor, counts: Any, n_rows: int) -> tuple[Tensor, Tensor]:
    """Return unique rows, most frequent first, and how often they occur."""
    check_range(rows, n_rows)
    rows, which, times = torch.unique(rows, return_inverse=True, return_counts=True)
    if counts is not None:
        given = torch.as_tensor(counts, dtype=torch.float64, device="cpu").flatten()
        if len(given) != len(which):
            raise ValueError(
                f"counts are one per id, none of them negative; found {len(given)} for {len(which)} ids"
            )
        bad = given[~(given >= 0)]  # nan included
        if len(bad):
            raise ValueError(f"counts are one per id, none of them negative; found {bad[0].item():g}")
        times = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, which, given)
    order = times.argsort(descending=True, stable=True)
    return rows[order], times[order].clamp(min=1)


def to_device(ids: Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy ids to the computing device through pinned memory, without waiting."""
    if ids.device == device or device.type != "cuda" or ids.device.type != "cpu":
        return ids.to(device, dtype)
    pinned = torch.empty(ids.shape, dtype=dtype, device="cpu", pin_memory=True)
    pinned.copy_(ids)
    return pinned.to(device, non_blocking=True)
