"""Launches of the kernels on rows."""

from __future__ import annotations

import torch
from torch import Tensor

from flatbed.kernels._triton import row_kernels
from flatbed.kernels._triton.launch import TYPES
from flatbed.kernels.rows import Distinct, lead_of

# Programs at most, for what goes over the bus: these saturate it on an H200, and leave the GPU to others.
# More writers are slower.
READERS, WRITERS, UPDATERS = 132, 24, 132
SQUARES = 65536  # elements per partial sum


def distinct(keys: Tensor, n_rows: int, bad: Tensor | None) -> Distinct:
    n = len(keys)
    rows, inverse = (torch.empty(n, dtype=torch.int64, device=keys.device) for _ in range(2))
    starts = torch.empty(n + 1, dtype=torch.int64, device=keys.device)
    if n == 0:
        return Distinct(rows, inverse, rows, starts.zero_())
    in_order, order = torch.sort(keys, stable=True)
    rank = (in_order[1:] != in_order[:-1]).cumsum(0)
    row_kernels.mark[(-(-(n + 1) // 1024),)](
        in_order, order, rank, inverse, rows, starts, rows if bad is None else bad, n, n_rows, lead_of(keys),
        CHECKED=bad is None, BLOCK=1024,
    )  # fmt: skip
    return Distinct(rows, inverse, order, starts)


def sum_runs(grads: Tensor, found: Distinct, padding: int) -> tuple[Tensor, Tensor]:
    n, dim = len(found.rows), grads.shape[1]
    wide = torch.promote_types(grads.dtype, torch.float32)
    kept, sums = torch.empty_like(found.rows), torch.empty((n, dim), dtype=wide, device=grads.device)
    if n:
        row_kernels.sum_runs[(n,)](
            grads.contiguous(), found.order, found.starts, found.rows, kept, sums, n, padding,
            DIM=dim, COLUMNS=power(dim), WIDE=TYPES[wide], num_warps=min(4, max(1, power(dim) // 128)),
        )  # fmt: skip
    return kept, sums


def power(n: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (n - 1).bit_length()


def tile(columns: int, elements: int) -> int:
    """How many rows a program has in flight at once."""
    return max(1, min(32, elements // columns))


def programs(n: int, most: int, memory: Tensor) -> int:
    """Memory of the GPU's own is for all of it; the bus is for few."""
    return min(n, 1 << 16 if memory.is_cuda else most)


def gather(memory: Tensor, rows: Tensor, nbytes: int) -> Tensor:
    words = -(-nbytes // 8)
    words += words % 2
    buffer = torch.empty((len(rows), words * 8), dtype=torch.uint8, device=rows.device)
    _move(memory, rows, buffer, home=False)
    return buffer[:, :nbytes]


def scatter_(memory: Tensor, rows: Tensor, records: Tensor) -> None:
    _move(memory, rows, records.contiguous(), home=True)


def _move(memory: Tensor, rows: Tensor, buffer: Tensor, *, home: bool) -> None:
    n, words = len(rows), buffer.shape[1] // 8
    if n == 0:
        return
    columns = min(power(words), 64) if home else power(words)
    n_rows = tile(columns, 512 if home else 1024)
    most = WRITERS if home else READERS
    row_kernels.move[(programs(-(-n // n_rows), most, memory),)](
        memory.data_ptr(), rows, buffer.view(torch.int64), n,
        STRIDE=memory.stride(0), WORDS=words, COLUMNS=columns, ROWS=n_rows, HOME=home, num_warps=4,
    )  # fmt: skip


def squares(values: Tensor) -> Tensor:
    """Partial sums of squares in fp64."""
    n = values.numel()
    partials = torch.empty(max(1, -(-n // SQUARES)), dtype=torch.float64, device=values.device)
    row_kernels.squares[(len(partials),)](values, partials, n, SQUARES, BLOCK=1024)
    return partials
