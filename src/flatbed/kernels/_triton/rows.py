"""Launches of the kernels on rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.kernels._triton import row_kernels
from flatbed.kernels._triton.launch import TYPES, Bound
from flatbed.kernels.rows import RecordLocation, UniqueRows, lead_of

if TYPE_CHECKING:
    from flatbed.kernels._triton.cache import AdmitScratch

# Programs at most, for what goes over the bus: these saturate it on an H200, and leave the GPU to others.
# More writers are slower.
READERS, WRITERS, UPDATERS = 132, 24, 132
SQUARES = 65536  # elements per partial sum
BLOCK = 1024  # keys per program
CHUNK = 64  # ids of a run that one program walks; of gradients, AT_ONCE are on their way at a time
AT_ONCE = 8


_NARROW = Bound(row_kernels.narrow, (BLOCK,))


class Workspace:
    """Memory for finding the distinct rows of so many keys."""

    def __init__(self, n: int, device: torch.device) -> None:
        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.n_blocks = -(-(n + 1) // BLOCK)
        self.counts = empty(self.n_blocks, torch.int32)
        self.rank = empty(n, torch.int32)
        self.inverse, self.rows = empty(n, torch.int64), empty(n, torch.int64)
        self.starts = empty(n + 1, torch.int64)


def narrow(ids: Tensor, n_rows: int, keys: Tensor | None = None) -> Tensor:
    ids, n = ids.contiguous(), len(ids)
    keys = torch.empty(n, dtype=torch.int32, device=ids.device) if keys is None else keys
    if n:
        _NARROW(-(-n // BLOCK), ids.device, ids, keys, n, n_rows)
    return keys


def unique(keys: Tensor, n_rows: int, bad: Tensor | None, turn: AdmitScratch | None = None) -> UniqueRows:
    n = len(keys)
    made = Workspace(n, keys.device)
    if n == 0:
        return UniqueRows(made.rows, made.inverse, made.rows, made.starts.zero_(), made.rank)
    in_order, order = torch.sort(keys, stable=True)
    mark(in_order, order, made, n_rows, bad, turn)
    return UniqueRows(made.rows, made.inverse, order, made.starts, made.rank)


def mark(
    in_order: Tensor,
    order: Tensor,
    made: Workspace,
    n_rows: int,
    bad: Tensor | None,
    turn: AdmitScratch | None,
) -> None:
    """From sorted keys to distinct rows."""
    n, grid = len(in_order), (made.n_blocks,)
    clock, n_missing = (made.counts, made.counts) if turn is None else (turn.clock, turn.n_missing)
    row_kernels.heads[grid](in_order, made.counts, clock, n_missing, n, TICKS=turn is not None, BLOCK=BLOCK)
    row_kernels.mark[grid](
        in_order, order, made.counts, made.rank, made.inverse, made.rows, made.starts,
        made.rows if bad is None else bad, n, n_rows, lead_of(in_order), made.n_blocks,
        CHECKED=bad is None, BLOCK=BLOCK,
    )  # fmt: skip


def segment_sum(grads: Tensor, found: UniqueRows, padding: int) -> tuple[Tensor, Tensor]:
    n, dim = len(found.rows), grads.shape[1]
    grads = grads if grads.is_contiguous() else grads.contiguous()
    wide = _wide(grads.dtype)
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
    """The least power of two that is not smaller."""
    return 1 << (n - 1).bit_length()


def tile(columns: int, elements: int) -> int:
    """How many rows a program has in flight at once."""
    return max(1, min(32, elements // columns))


def programs(n: int, most: int, place: RecordLocation) -> int:
    """Memory of the GPU's own is for all of it; the bus is for few."""
    return min(n, 1 << 16 if place.near else most)


def addresses(place: RecordLocation, other: Tensor) -> tuple[Any, ...]:
    """How kernels are told where records are; without a cache, some memory stands for its maps."""
    memory = 0 if place.memory is None else place.memory.data_ptr()
    if place.cached is None:
        return memory, 0, other, other
    return memory, place.cached.data_ptr(), place.slot_of_row, place.dirty


def gather(place: RecordLocation, rows: Tensor, nbytes: int) -> Tensor:
    words = -(-nbytes // 8)
    words += words % 2
    buffer = torch.empty((len(rows), words * 8), dtype=torch.uint8, device=rows.device)
    _move(place, rows, buffer, home=False)
    return buffer[:, :nbytes]


def scatter_(place: RecordLocation, rows: Tensor, records: Tensor) -> None:
    _move(place, rows, records.contiguous(), home=True)


def _move(place: RecordLocation, rows: Tensor, buffer: Tensor, *, home: bool) -> None:
    n, words = len(rows), buffer.shape[1] // 8
    if n == 0:
        return
    columns = min(power(words), 64) if home else power(words)
    n_rows = tile(columns, 512 if home else 1024)
    most = WRITERS if home else READERS
    row_kernels.move[(programs(-(-n // n_rows), most, place),)](
        *addresses(place, rows), rows, buffer.view(torch.int64), n,
        STRIDE=place.stride, WORDS=words, COLUMNS=columns, ROWS=n_rows, HOME=home,
        CACHED=place.cached is not None, num_warps=4,
    )  # fmt: skip


def squares(values: Tensor) -> Tensor:
    """Partial sums of squares in fp64."""
    n = values.numel()
    partials = torch.empty(max(1, -(-n // SQUARES)), dtype=torch.float64, device=values.device)
    row_kernels.squares[(len(partials),)](values, partials, n, SQUARES, BLOCK=1024)
    return partials
