"""A small case of all kernels of tables, for NVIDIA's compute-sanitizer, which is slow:

compute-sanitizer --tool memcheck python -m tests.tables.compute_sanitizer_case
compute-sanitizer --tool racecheck python -m tests.tables.compute_sanitizer_case
"""

from __future__ import annotations

import torch

import flatbed

ROWS = 500


def main() -> None:
    cached, plain = (flatbed.Embedding(ROWS, 16, device="cuda", seed=1, cache_rows=n) for n in (64, 0))
    both = [(emb, flatbed.optim.Adam(emb, lr=0.1)) for emb in (cached, plain)]
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.rand(60 if i % 2 else 20, generator=generator) ** 2 * ROWS).long() for i in range(10)]
    for ids in [*batches, *flatbed.Prefetcher(batches, {cached: lambda batch: batch}, depth=2)]:
        for emb, optimizer in both:
            emb(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    every = torch.arange(ROWS)
    if not torch.equal(cached.read_rows(every), plain.read_rows(every)):
        raise SystemExit("rows differ")


if __name__ == "__main__":
    main()
