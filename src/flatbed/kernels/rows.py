"""Operations on rows: find the distinct ones, move them, sum up their gradients.

Each is given twice: for torch, which is the reference and the way on a CPU, and in `_triton.rows` for GPUs.
There nothing may wait for the GPU, so that results are as long as they can be at most; the row -1 stands for
"none", and its gradient is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatbed.kernels.dispatch import use_triton

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
NONE = -1
SENTINEL = -(1 << 63)  # a key that is sorted before all ids and stands for no row
NARROW = (1 << 31) - 1  # rows up to which keys can be int32, which are sorted in half the time


@dataclass(frozen=True, slots=True)
class UniqueRows:
    """The distinct rows among ids, in ascending order."""

    rows: Tensor
    """int64; -1 for a key that is no row."""
    inverse: Tensor
    """For every id, where its row stands in `rows`."""
    order: Tensor | None = None
    """The ids' positions, sorted by row; equal ones in their own order."""
    starts: Tensor | None = None
    """Where each row's run begins in `order`; one more at the end."""
    rank: Tensor | None = None
    """For every place in `order`, where its row stands in `rows`."""


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Where the records of rows are, (n, record) of uint8: at home, unless a cache has them."""

    memory: Tensor | None
    """All of them, on the computing device or on the host where its kernels can reach it. None if they
    cannot: the cache has all that are asked for."""
    cached: Tensor | None = None
    slot_of_row: Tensor | None = None
    """Where each row is in the cache; -1: at home."""
    dirty: Tensor | None = None
    """For each record in the cache, whether it has changed since it was at home."""

    @property
    def stride(self) -> int:
        """From a record to the next."""
        held = self.memory if self.cached is None else self.cached
        assert held is not None
        return held.stride(0)

    @property
    def near(self) -> bool:
        """Whether most of it is in the computing device's own memory."""
        held = self.memory if self.cached is None else self.cached
        return held is not None and held.is_cuda


def unique(keys: Tensor, n_rows: int, bad: Tensor | None = None) -> UniqueRows:
    """Find the distinct rows. Keys out of range (and the leading one) become -1; with `bad`, a tensor of one
    int64, the least position of a key that is out of range is stored there, if there is one.
    """
    if use_triton(keys.device):
        from flatbed.kernels._triton import rows

        return rows.unique(keys, n_rows, bad)
    found, inverse = torch.unique(keys, sorted=True, return_inverse=True)
    in_range = (found >= 0) & (found < n_rows)
    if bad is not None:
        wrong = ((keys < 0) | (keys >= n_rows)) & (keys != lead_of(keys))
        positions = torch.where(wrong, torch.arange(len(keys), device=keys.device), bad)
        bad.copy_(torch.minimum(bad, positions.min()) if len(keys) else bad)
    return UniqueRows(torch.where(in_range, found, NONE).to(torch.int64), inverse)


def narrow(ids: Tensor, n_rows: int) -> Tensor:
    """Ids, (n,), as keys that are sorted in half the time, where that pays and they fit; -1: no row."""
    if n_rows > NARROW or ids.dtype != torch.int64 or not use_triton(ids.device):
        return ids
    from flatbed.kernels._triton import rows

    return rows.narrow(ids, n_rows)


def lead_of(keys: Tensor) -> int:
    """The key of no row: the least there is."""
    return SENTINEL if keys.dtype == torch.int64 else torch.iinfo(keys.dtype).min


def segment_sum(grads: Tensor, found: UniqueRows, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """The rows with the sum of their gradients: (n_ids, dim) → (n,), (n, dim), at least in fp32.

    Summed in the order of the ids, as torch does for an embedding. The padding row becomes -1, with zeros.
    """
    padding = NONE if padding_idx is None else padding_idx
    if use_triton(grads.device):
        from flatbed.kernels._triton import rows

        return rows.segment_sum(grads, found, padding)
    wide = torch.promote_types(grads.dtype, torch.float32)
    sums = torch.ops.aten.embedding_dense_backward(grads.to(wide), found.inverse, len(found.rows), -1, False)
    return without(found.rows, sums, padding)


def without(rows: Tensor, grads: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """The same with one row left out; and the gradient of no row is zero."""
    kept = torch.where(rows == row, NONE, rows)
    return kept, torch.where((kept >= 0).unsqueeze(1), grads, grads.new_zeros(()))


def gather(place: RecordLocation, rows: Tensor, nbytes: int) -> Tensor:
    """The first bytes of the records of these rows, on the device of `rows`; zeros where there is no row."""
    if use_triton(rows.device):
        from flatbed.kernels._triton import rows as kernels

        return kernels.gather(place, rows, nbytes)
    memory = _all_at_home(place)
    word = _word(nbytes)
    found = memory[:, :nbytes].view(word).index_select(0, rows.clamp(min=0))
    if bool((rows < 0).any()):
        found[rows < 0] = 0
    return found.view(torch.uint8)


def scatter_(place: RecordLocation, rows: Tensor, records: Tensor) -> None:
    """Write records, or their beginnings, to these rows, which are distinct; those of no row go nowhere."""
    if use_triton(rows.device):
        from flatbed.kernels._triton import rows as kernels

        kernels.scatter_(place, rows, records)
        return
    memory = _all_at_home(place)
    present = rows >= 0
    if not bool(present.all()):
        rows, records = rows[present], records[present]
    nbytes = records.shape[1]
    memory[:, :nbytes].view(_word(nbytes)).index_copy_(0, rows, records.view(_word(nbytes)))


def _all_at_home(place: RecordLocation) -> Tensor:
    assert place.memory is not None
    assert place.cached is None
    return place.memory


def _word(nbytes: int) -> torch.dtype:
    """What is copied at a time: torch moves elements, and a byte takes it as long as eight."""
    return next(dtype for dtype in WORDS if nbytes % dtype.itemsize == 0)
