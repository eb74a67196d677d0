"""The nearest rows of a table: 1,024 queries over 20 million rows.

- host: against the speed of plain copies to the GPU, and torch with a pinned table, chunk by chunk.
- device: against torch.matmul and torch.topk, chunk by chunk.

Every result is compared with torch's: the values, and the products of the rows that the ids name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flatbed
from benchmarks import harness
from benchmarks.harness import SEED, Options, Plan, each, time_in_turns
from benchmarks.rows import Row, gb_per_s, percentiles, value_of

CASES = ("host", "device")
OURS = "flatbed topk"
PEERS = {"host": "torch, pinned chunks", "device": "torch matmul, topk"}
ON_CPU = "torch matmul, topk"  # where nothing is pinned
CHUNK_ROWS = 1 << 17
BLOCK_ROWS = 1 << 20  # that are filled at once
TOLERANCE = 1e-4  # of values, whose products are added in different orders

Found = tuple[Tensor, Tensor]


class Shape(NamedTuple):
    """Size of a table of fp32, number of queries, and rows per query."""

    n_rows: int
    dim: int
    n_queries: int
    k: int

    @property
    def nbytes(self) -> int:
        return 4 * self.n_rows * self.dim


SHAPES = (Shape(20_000_000, 128, 1024, 10), Shape(20_000_000, 128, 1024, 100))
SMALL = (Shape(5000, 16, 8, 3),)


def run(options: Options) -> Iterator[Row]:
    """Measure the storages that were asked for."""
    bus = harness.bus_gb_per_s(options.device)[0]
    options.report(f"a plain copy: {bus:.1f} GB/s to the device")
    for storage in CASES:
        if options.wants(storage):
            yield from run_storage(storage, bus, options)
            harness.free_memory(options.device)


def run_storage(storage: str, bus: float, options: Options) -> Iterator[Row]:
    """Measure both variants on the same rows."""
    device, shapes = options.device, SMALL if options.is_small else SHAPES
    n_rows, dim, n_queries, _ = shapes[0]
    emb = flatbed.Embedding(n_rows, dim, storage=storage, device=device, init="zeros")
    is_pinned = storage == "host" and options.on_gpu
    plain = torch.empty((n_rows, dim), device=device if storage == "device" else "cpu", pin_memory=is_pinned)
    generator = torch.Generator(device).manual_seed(SEED)
    for first in range(0, n_rows, BLOCK_ROWS):
        block = plain[first : first + BLOCK_ROWS]
        block.copy_(torch.randn(block.shape, generator=generator, device=device))
        emb.weight[first : first + BLOCK_ROWS] = block

    def draw(n: int) -> list[Tensor]:
        return [torch.randn((n_queries, dim), generator=generator, device=device) for _ in range(n)]

    plan = Plan(turns=options.steps or 4, warm_up=1, synchronized=1)
    for shape in shapes:
        variants = options.choose(
            variants_of(emb, plain, shape.k, PEERS[storage] if options.on_gpu else ON_CPU)
        )
        steps = {name: each(find) for name, find in variants.items()}

        def check(found: Found, queries: Tensor, k: int = shape.k) -> bool:
            return is_right(found, queries, plain, k)

        readings = time_in_turns(steps, draw, plan, options, check=check)
        setting = {"storage": storage, "rows": n_rows, "dim": dim, "queries": n_queries, "k": shape.k}
        for name, times in readings.items():
            read = gb_per_s(shape.nbytes, times.synchronized)
            metrics: dict[str, Any] = {"wall_ms": percentiles(times.synchronized), "scan_gb_per_s": read}
            if storage == "host":
                metrics |= {"bus_share": value_of(read) / bus, "copy_to_gb_per_s": bus}
            yield options.row(f"topk {storage}", name, setting, metrics, n_samples=plan.turns, ok=times.ok)
    emb.table.close()


def variants_of(emb: Any, plain: Tensor, k: int, peer: str) -> dict[str, Callable[[Tensor], Found]]:
    """Return the functions that are compared."""
    return {
        OURS: lambda queries: emb.topk(queries, k),
        peer: lambda queries: by_torch(queries, plain, k),
    }


def by_torch(queries: Tensor, table: Tensor, k: int) -> Found:
    """Multiply and select in chunks."""
    values, ids = [], []
    for first in range(0, len(table), CHUNK_ROWS):
        chunk = table[first : first + CHUNK_ROWS].to(queries.device, non_blocking=True)
        scores = queries @ chunk.T
        best = scores.topk(min(k, len(chunk)))
        values.append(best.values)
        ids.append(best.indices + first)
    best = torch.cat(values, 1).topk(k)
    return best.values, torch.cat(ids, 1).gather(1, best.indices)


def is_right(found: Found, queries: Tensor, table: Tensor, k: int) -> bool:
    """Tell whether values are the greatest, and ids name rows that have them."""
    values, ids = found
    expected, _ = by_torch(queries, table, k)
    rows = table[ids.to(table.device)].to(queries.device)
    products = torch.einsum("qd,qkd->qk", queries.double(), rows.double()).float()
    bound = TOLERANCE * float(expected.abs().max())
    return all(float((values - other).abs().max()) <= bound for other in (expected, products))
