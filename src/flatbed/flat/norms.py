"""Norms of segments, summed in the order in which torch sums them over separate parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatbed.flat.buffer import Buffer


def check_max_norm(max_norm: float) -> None:
    """Raise for a negative norm, with which clipping would reverse the gradients."""
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative; found {max_norm}")


@torch.no_grad()
def param_norms(buffer: Buffer) -> torch.Tensor:
    """The norm of the values of each original, in the order of the segments."""
    return _norms(buffer, buffer.originals, buffer.data, 2.0)


def grad_norms(buffer: Buffer, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of the gradient of each original, 0 where there is none; gather first."""
    present = [p.grad is not None for p in buffer.originals]
    if buffer.grad is None or not any(present):
        return torch.zeros(len(buffer.segments), device=buffer.data.device)
    found = _norms(buffer, buffer.views, buffer.grad, norm_type)
    return found if all(present) else found * torch.tensor(present, device=found.device)


@torch.no_grad()
def clip(buffers: Sequence[Buffer], max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale all gradients by the factor that torch would use, and return their norm; gather first."""
    total = total_norm(buffers, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for buffer in buffers:
        assert buffer.grad is not None
        buffer.grad.mul_(factor.to(buffer.grad.device))
    return total


def total_norm(buffers: Sequence[Buffer], norm_type: float) -> torch.Tensor:
    """The norm over all gradients; gather first.

    On the CPU it is bitwise equal to torch's norm over the parameters in the order of the source. On other
    devices it is one reduction per buffer.
    """
    if not buffers:
        return torch.tensor(0.0)
    device = buffers[0].data.device
    if any(buffer.data.device.type != "cpu" for buffer in buffers) and norm_type > 0:
        whole: list[torch.Tensor] = [
            torch.linalg.vector_norm(b.grad, norm_type).to(device) for b in buffers if b.grad is not None
        ]
        return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole), norm_type)
    parts: list[torch.Tensor] = []
    positions: list[int] = []
    for buffer in buffers:
        assert buffer.grad is not None
        found, held = _norms(buffer, buffer.views, buffer.grad, norm_type), buffer.positions
        if not buffer.complete:  # torch counts only present gradients, and zeros would change its sum
            present = [i for i, p in enumerate(buffer.originals) if p.grad is not None]
            found, held = found[torch.tensor(present, device=found.device)], tuple(held[i] for i in present)
        parts.append(found.to(device))
        positions += held
    order = sorted(range(len(positions)), key=positions.__getitem__)
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.tensor(order, device=device)]
    total: torch.Tensor = torch.linalg.vector_norm(joined, norm_type)
    return total


def _norms(
    buffer: Buffer, tensors: Sequence[torch.Tensor], flat: torch.Tensor, norm_type: float
) -> torch.Tensor:
    if flat.device.type == "cpu" and 4 * len(buffer.runs) <= len(tensors):
        return _row_norms(buffer, flat, norm_type)
    filled = [t for t in tensors if t.numel()]  # an empty tensor has no largest element
    found = iter(torch._foreach_norm(filled, norm_type) if filled else ())
    return torch.stack([next(found) if t.numel() else flat.new_zeros(()) for t in tensors])


def _row_norms(buffer: Buffer, flat: torch.Tensor, norm_type: float) -> torch.Tensor:
    """One reduction per run of equal neighbours: each row of a matrix is summed as it would be alone."""
    parts = []
    for run in buffer.runs:
        shape, stride = (run.n_rows, run.length), (run.step, 1)
        rows = flat.as_strided(shape, stride, flat.storage_offset() + run.offset)
        empty = flat.new_zeros(run.n_rows)
        parts.append(torch.linalg.vector_norm(rows, norm_type, dim=1) if run.length else empty)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
