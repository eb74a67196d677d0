"""Operations on rows: find the unique ones, move their records, sum their gradients.

Each operation has a torch version, which is the reference and runs on a CPU, and kernels in `_triton.rows`.
The kernels never wait for the GPU, so results have the greatest possible length. The row -1 fills the rest;
its gradient is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatbed.kernels import NONE, RecordLocation, UniqueRows, sentinel_of, use_triton

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
INT32_ROWS = (1 << 31) - 1  # tables of at most so many rows have int32 keys, which sort in half the time


def unique(keys: Tensor, n_rows: int, first_error: Tensor | None = None) -> UniqueRows:
    """Find the unique rows. Keys out of range, and the sentinel, become the row -1.

    The least position of a key out of range is stored in `first_error`, a tensor of one int64.
    """
    if use_triton(keys.device):
        from flatbed.kernels._triton import rows

        return rows.unique(keys, n_rows, first_error)
    found, inverse = torch.unique(keys, sorted=True, return_inverse=True)
    in_range = (found >= 0) & (found < n_rows)
    if first_error is not None and len(keys):
        wrong = ((keys < 0) | (keys >= n_rows)) & (keys != sentinel_of(keys))
        positions = torch.where(wrong, torch.arange(len(keys), device=keys.device), first_error)
        first_error.copy_(torch.minimum(first_error, positions.min()))
    return UniqueRows(torch.where(in_range, found, NONE).to(torch.int64), inverse)


def key_dtype(n_rows: int, device: torch.device) -> torch.dtype:
    """Return the dtype of keys: the one that kernels sort fastest, or int64."""
    return torch.int32 if n_rows <= INT32_ROWS and use_triton(device) else torch.int64


def to_int32_keys(ids: Tensor, n_rows: int) -> Tensor:
    """Convert ids, (n,), to int32 keys where kernels sort them and they fit; -1 for an id that is no row."""
    if ids.dtype != torch.int64 or key_dtype(n_rows, ids.device) != torch.int32:
        return ids
    from flatbed.kernels._triton.rows import BLOCK, TO_INT32_KEYS

    n = ids.numel()
    keys = torch.empty(n, dtype=torch.int32, device=ids.device)
    if n:
        TO_INT32_KEYS(-(-n // BLOCK), ids.device, ids.contiguous(), keys, n, n_rows)
    return keys


def segment_sum(grads: Tensor, found: UniqueRows, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each row: (n_ids, dim) → rows (n,) and sums (n, dim), at least in fp32.

    Gradients are added in the order of the ids, as in torch's embedding. The padding row becomes -1.
    """
    padding = NONE if padding_idx is None else padding_idx
    if found.order is not None:  # by the kernels of `unique`
        from flatbed.kernels._triton import rows

        return rows.segment_sum(grads, found, padding)
    wide = torch.promote_types(grads.dtype, torch.float32)
    sums = torch.ops.aten.embedding_dense_backward(grads.to(wide), found.inverse, len(found.rows), -1, False)
    if padding == NONE and not bool((found.rows < 0).any()):
        return found.rows, sums
    return mask_row(found.rows, sums, padding)


def mask_row(rows: Tensor, grads: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Replace one row by -1, and set the gradients of all rows -1 to zero."""
    kept = torch.where(rows == row, NONE, rows)
    return kept, torch.where((kept >= 0).unsqueeze(1), grads, grads.new_zeros(()))


def gather(location: RecordLocation, rows: Tensor, nbytes: int) -> Tensor:
    """Read the first bytes of records, on the device of `rows`; zeros for the row -1."""
    if use_triton(rows.device):
        from flatbed.kernels._triton import rows as kernels

        return kernels.gather(location, rows, nbytes)
    memory = _memory_of(location)
    word = _word(nbytes)
    found = memory[:, :nbytes].view(word).index_select(0, rows.clamp(min=0))
    if bool((rows < 0).any()):
        found[rows < 0] = 0
    return found.view(torch.uint8)


def scatter_(location: RecordLocation, rows: Tensor, records: Tensor) -> None:
    """Write records, or their first bytes, to unique rows; the row -1 is skipped."""
    if use_triton(rows.device):
        from flatbed.kernels._triton import rows as kernels

        kernels.scatter_(location, rows, records)
        return
    memory = _memory_of(location)
    present = rows >= 0
    if not bool(present.all()):
        rows, records = rows[present], records[present]
    nbytes = records.shape[1]
    memory[:, :nbytes].view(_word(nbytes)).index_copy_(0, rows, records.view(_word(nbytes)))


def _memory_of(location: RecordLocation) -> Tensor:
    assert location.memory is not None
    assert location.cached is None
    return location.memory


def _word(nbytes: int) -> torch.dtype:
    """Return the widest dtype to copy with: torch takes as long for a byte as for eight."""
    return next(dtype for dtype in WORDS if nbytes % dtype.itemsize == 0)
