"""Norms of segments, summed the way torch sums them over separate parameters."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from flatbed.flat.buffer import Buffer


def check_max_norm(max_norm: Any) -> None:
    """Raise unless gradients can be clipped to this."""
    single = isinstance(max_norm, torch.Tensor) and max_norm.numel() == 1
    if not (single or isinstance(max_norm, numbers.Real)):
        raise TypeError(f"max_norm must be a number; found {max_norm!r} (parameters are not given again)")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative; found {max_norm}")


def as_norm_type(norm_type: Any) -> float:
    """The kind of norm as a number: torch takes "inf", too."""
    try:
        return float(norm_type)
    except (TypeError, ValueError):
        raise TypeError(
            f"norm_type must be a number such as 2.0, or 'inf' for the largest element; found {norm_type!r}"
        ) from None


def param_norms(buffer: Buffer, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of each original's values, in the order of the segments."""
    return _norms(buffer, buffer.originals, buffer.data, norm_type)


def grad_norms(buffer: Buffer, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of each original's gradient, 0 where there is none; gather first."""
    present = [p.grad is not None for p in buffer.originals]
    if buffer.grad is None or not any(present):
        return torch.zeros(len(buffer.segments), device=buffer.data.device)
    found = _norms(buffer, buffer.views, buffer.grad, norm_type)
    return found if all(present) else found * torch.tensor(present, device=found.device)


def total_norm(
    buffers: Sequence[Buffer], members: Sequence[tuple[int, ...]], norm_type: float = 2.0
) -> torch.Tensor:
    """The norm over all gradients; gather first.

    On the CPU bit for bit what torch gives for the parameters in their own order: `members` are the
    originals' positions in the source, buffer by buffer. Elsewhere one reduction per buffer.
    """
    if not buffers:
        return torch.tensor(0.0)
    if any(buffer.data.device.type != "cpu" for buffer in buffers) and norm_type > 0:
        device = buffers[0].data.device
        whole: list[torch.Tensor] = [
            torch.linalg.vector_norm(b.grad, norm_type).to(device) for b in buffers if b.grad is not None
        ]
        return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole), norm_type)
    parts: list[torch.Tensor] = []
    positions: list[int] = []
    for buffer, held in zip(buffers, members, strict=True):
        assert buffer.grad is not None
        found = _norms(buffer, buffer.views, buffer.grad, norm_type)
        if not buffer.complete:  # torch counts only what has a gradient, and zeros would shift its sum
            present = [i for i, p in enumerate(buffer.originals) if p.grad is not None]
            found, held = found[torch.tensor(present, device=found.device)], tuple(held[i] for i in present)
        parts.append(found.to(buffers[0].data.device))
        positions += held
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    if len(parts) > 1:
        order = sorted(range(len(positions)), key=positions.__getitem__)
        joined = joined[torch.tensor(order, device=joined.device)]
    total: torch.Tensor = torch.linalg.vector_norm(joined, norm_type)
    return total


@torch.no_grad()
def _norms(
    buffer: Buffer, tensors: Sequence[torch.Tensor], flat: torch.Tensor, norm_type: float
) -> torch.Tensor:
    if flat.device.type == "cpu" and 4 * len(buffer.runs) <= len(tensors):
        return _row_norms(buffer, flat, norm_type)
    filled = [t for t in tensors if t.numel()]  # of an empty tensor there is no largest element
    found = iter(torch._foreach_norm(filled, norm_type) if filled else ())
    return torch.stack([next(found) if t.numel() else flat.new_zeros(()) for t in tensors])


def _row_norms(buffer: Buffer, flat: torch.Tensor, norm_type: float) -> torch.Tensor:
    """One reduction per run of equal neighbours: a matrix's rows are summed as each would be alone."""
    parts = [
        torch.linalg.vector_norm(
            flat.as_strided((run.n_rows, run.length), (run.step, 1), flat.storage_offset() + run.offset),
            norm_type,
            dim=1,
        )
        if run.length
        else flat.new_zeros(run.n_rows)
        for run in buffer.runs
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
