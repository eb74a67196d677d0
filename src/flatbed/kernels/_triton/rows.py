"""Launches of the kernels on rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.kernels._triton import row_kernels
from flatbed.kernels._triton.launch import TYPES, Bound
from flatbed.kernels.records import RecordLocation, UniqueRows, sentinel_of

if TYPE_CHECKING:
    from flatbed.kernels._triton.cache import AdmitScratch

# Programs at most, for kernels bound by the bus: these saturate it on an H200 and leave SMs to the model.
# More writers are slower.
READERS, WRITERS, UPDATERS = 132, 24, 132
SQUARES = 65536  # elements per partial sum
BLOCK = 1024  # keys per program
CHUNK = 64  # ids of a segment that one program adds up; AT_ONCE loads of gradients are in flight at a time
AT_ONCE = 8


_TO_INT32 = Bound(row_kernels.narrow, (BLOCK,))
_HEADS = [Bound(row_kernels.heads, (advances_clock, BLOCK)) for advances_clock in (False, True)]
_MARK = Bound(row_kernels.mark, (False, BLOCK))


def to_int32_keys(ids: Tensor, n_rows: int) -> Tensor:
    ids, n = ids.contiguous(), len(ids)
    keys = torch.empty(n, dtype=torch.int32, device=ids.device)
    if n:
        _TO_INT32(-(-n // BLOCK), ids.device, ids, keys, n, n_rows)
    return keys


def unique(
    keys: Tensor, n_rows: int, error_slot: Tensor | None, scratch: AdmitScratch | None = None
) -> UniqueRows:
    """Find the unique rows. With `scratch`, the first kernel also begins an admission into a cache."""

    def empty(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device=keys.device)

    n = len(keys)
    rows, inverse, starts, rank = empty(n), empty(n), empty(n + 1), empty(n, torch.int32)
    if n == 0:
        return UniqueRows(rows, inverse, rows, starts.zero_(), rank)
    in_order, order = torch.sort(keys.contiguous(), stable=True)
    n_blocks = -(-(n + 1) // BLOCK)
    counts = empty(n_blocks, torch.int32)
    clock, n_missing = (counts, counts) if scratch is None else (scratch.clock, scratch.n_missing)
    _HEADS[scratch is not None](n_blocks, keys.device, in_order, counts, clock, n_missing, n)
    # Always with a place for errors: a captured lookup must not need a kernel that no eager one has loaded.
    _MARK(
        n_blocks, keys.device, in_order, order, counts, rank, inverse, rows, starts,
        empty(1) if error_slot is None else error_slot, n, n_rows, sentinel_of(in_order), n_blocks,
    )  # fmt: skip
    return UniqueRows(rows, inverse, order, starts, rank)


def segment_sum(grads: Tensor, found: UniqueRows, padding: int) -> tuple[Tensor, Tensor]:
    n, dim = len(found.rows), grads.shape[1]
    grads, wide = grads.contiguous(), _wide(grads.dtype)
    kept, sums = torch.empty_like(found.rows), torch.empty((n, dim), dtype=wide, device=grads.device)
    if n == 0:
        return kept, sums
    n_windows, columns = -(-n // CHUNK), power(dim)
    partials = torch.empty((n_windows, dim), dtype=wide, device=grads.device)
    n_tiles = -(-n // tile(columns, 512))
    runs, chunks = _sums(dim, wide)
    runs(
        n_tiles + n_windows, grads.device,
        grads, found.order, found.rank, found.starts, found.rows, kept, sums, partials,
        n, padding, n_tiles,
    )  # fmt: skip
    chunks(n_windows, grads.device, found.rank, found.starts, kept, sums, partials, n)
    return kept, sums


@functools.cache
def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@functools.cache
def _sums(dim: int, wide: torch.dtype) -> tuple[Bound, Bound]:
    columns = power(dim)
    runs = (CHUNK, dim, columns, tile(columns, 512), TYPES[wide], AT_ONCE)
    chunks = (CHUNK, dim, columns, 2 * AT_ONCE)
    warps = min(4, max(1, columns // 128))
    return Bound(row_kernels.segment_sum, runs), Bound(row_kernels.sum_chunks, chunks, num_warps=warps)


def power(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def tile(columns: int, elements: int) -> int:
    """Return how many rows a program has in flight at once."""
    return max(1, min(32, elements // columns))


def programs(n: int, most: int, location: RecordLocation) -> int:
    """Return the number of programs: many for the GPU's own memory, few for the bus."""
    return min(n, 1 << 16 if location.near else most)


def addresses(location: RecordLocation, other: Tensor) -> tuple[Any, ...]:
    """Return the location as kernel arguments; `other` stands for the cache's index where there is none."""
    memory = 0 if location.memory is None else location.memory.data_ptr()
    if location.cached is None:
        return memory, 0, other, other
    return memory, location.cached.data_ptr(), location.slot_of_row, location.dirty


def gather(location: RecordLocation, rows: Tensor, nbytes: int) -> Tensor:
    words = -(-nbytes // 8)
    words += words % 2
    buffer = torch.empty((len(rows), words * 8), dtype=torch.uint8, device=rows.device)
    _move(location, rows, buffer, write=False)
    return buffer[:, :nbytes]


def scatter_(location: RecordLocation, rows: Tensor, records: Tensor) -> None:
    _move(location, rows, records.contiguous(), write=True)


def _move(location: RecordLocation, rows: Tensor, buffer: Tensor, *, write: bool) -> None:
    rows, n, words = rows.contiguous(), len(rows), buffer.shape[1] // 8
    if n == 0:
        return
    columns = min(power(words), 64) if write else power(words)
    n_rows = tile(columns, 512 if write else 1024)
    most = WRITERS if write else READERS
    row_kernels.move[(programs(-(-n // n_rows), most, location),)](
        *addresses(location, rows), rows, buffer.view(torch.int64), n,
        STRIDE=location.stride, WORDS=words, COLUMNS=columns, ROWS=n_rows, HOME=write,
        CACHED=location.cached is not None, num_warps=4,
    )  # fmt: skip


def squares(values: Tensor) -> Tensor:
    """Return partial sums of squares in fp64."""
    values, n = values.contiguous(), values.numel()
    partials = torch.empty(max(1, -(-n // SQUARES)), dtype=torch.float64, device=values.device)
    row_kernels.squares[(len(partials),)](values, partials, n, SQUARES, BLOCK=1024)
    return partials
