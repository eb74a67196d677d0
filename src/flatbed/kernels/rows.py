"""Operations on rows: find the distinct ones, move them, sum up their gradients.

Each is given twice: for torch, which is the reference and the way on a CPU, and in `_triton.rows` for GPUs.
There nothing may wait for the GPU, so that results are as long as they can be at most; the row -1 stands for
"none", and its gradient is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatbed.kernels.choose import by_triton

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
NONE = -1
LEAD = -(1 << 63)  # a key that is sorted before all ids and stands for no row
NARROW = (1 << 31) - 1  # rows up to which keys can be int32, which are sorted in half the time


@dataclass(frozen=True, slots=True)
class Distinct:
    """The distinct rows among ids, in ascending order."""

    rows: Tensor
    """int64; -1 for a key that is no row."""
    inverse: Tensor
    """For every id, where its row stands in `rows`."""
    order: Tensor | None = None
    """The ids' positions, sorted by row; equal ones in their own order."""
    starts: Tensor | None = None
    """Where each row's run begins in `order`; one more at the end."""


def distinct(keys: Tensor, n_rows: int, bad: Tensor | None = None) -> Distinct:
    """Find the distinct rows. Keys out of range (and the leading one) become -1; with `bad`, a tensor of one
    int64, the least position of a key that is out of range is stored there, if there is one.
    """
    if by_triton(keys.device):
        from flatbed.kernels._triton import rows

        return rows.distinct(keys, n_rows, bad)
    found, inverse = torch.unique(keys, sorted=True, return_inverse=True)
    in_range = (found >= 0) & (found < n_rows)
    if bad is not None:
        wrong = ((keys < 0) | (keys >= n_rows)) & (keys != lead_of(keys))
        positions = torch.where(wrong, torch.arange(len(keys), device=keys.device), bad)
        bad.copy_(torch.minimum(bad, positions.min()) if len(keys) else bad)
    return Distinct(torch.where(in_range, found, NONE).to(torch.int64), inverse)


def lead_of(keys: Tensor) -> int:
    """The key of no row: the least there is."""
    return LEAD if keys.dtype == torch.int64 else torch.iinfo(keys.dtype).min


def sum_runs(grads: Tensor, found: Distinct, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """The rows with the sum of their gradients: (n_ids, dim) → (n,), (n, dim), at least in fp32.

    Summed in the order of the ids, as torch does for an embedding. The padding row becomes -1, with zeros.
    """
    padding = NONE if padding_idx is None else padding_idx
    wide = torch.promote_types(grads.dtype, torch.float32)
    if by_triton(grads.device):
        from flatbed.kernels._triton import rows

        return rows.sum_runs(grads, found, padding)
    sums = torch.ops.aten.embedding_dense_backward(grads.to(wide), found.inverse, len(found.rows), -1, False)
    return without(found.rows, sums, padding)


def without(rows: Tensor, grads: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """The same with one row left out; and the gradient of no row is zero."""
    kept = torch.where(rows == row, NONE, rows)
    return kept, torch.where((kept >= 0).unsqueeze(1), grads, grads.new_zeros(()))


def gather(memory: Tensor, rows: Tensor, nbytes: int) -> Tensor:
    """The first bytes of the records of these rows, on the device of `rows`; zeros where there is no row.

    `memory` is (n_rows, record) of uint8, on the same device, or on the host where kernels can read it.
    """
    if by_triton(rows.device):
        from flatbed.kernels._triton import rows as kernels

        return kernels.gather(memory, rows, nbytes)
    word = _word(nbytes)
    found = memory[:, :nbytes].view(word).index_select(0, rows.clamp(min=0))
    if bool((rows < 0).any()):
        found[rows < 0] = 0
    return found.view(torch.uint8)


def scatter_(memory: Tensor, rows: Tensor, records: Tensor) -> None:
    """Write records, or their beginnings, to these rows, which are distinct; those of no row go nowhere."""
    if by_triton(rows.device):
        from flatbed.kernels._triton import rows as kernels

        kernels.scatter_(memory, rows, records)
        return
    present = rows >= 0
    if not bool(present.all()):
        rows, records = rows[present], records[present]
    nbytes = records.shape[1]
    memory[:, :nbytes].view(_word(nbytes)).index_copy_(0, rows, records.view(_word(nbytes)))


def _word(nbytes: int) -> torch.dtype:
    """What is copied at a time: torch moves elements, and a byte takes it as long as eight."""
    return next(dtype for dtype in WORDS if nbytes % dtype.itemsize == 0)
