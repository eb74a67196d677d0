"""Measure how fast movers fill a cache and write back, by record size, beside 96 and more thin programs.

python -m tests.scripts.measure_movers
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch

from flatbed.cuda.host_memory import allocate
from flatbed.kernels import RecordLocation
from flatbed.kernels._triton.cache import fill_and_write_back
from flatbed.kernels._triton.rows import MoverShape, has_clusters, mover_shape

N_ROWS, N_SLOTS, N_MOVED = 500_000, 120_000, 58_880
THIN = (MoverShape(96, 4, 1), MoverShape(96, 4, 4), MoverShape(132, 4, 8), MoverShape(264, 4, 2))


def measure(nbytes: int, shapes: list[MoverShape]) -> list[float]:
    """Return the milliseconds in which programs of each shape move random records both ways."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = allocate(N_ROWS * nbytes, device=device).tensor.view(N_ROWS, nbytes)
    location = RecordLocation(memory, torch.zeros((N_SLOTS, nbytes), dtype=torch.uint8, device=device))
    missing, victims = torch.randperm(N_ROWS, device=device)[: 2 * N_MOVED].view(2, N_MOVED)
    slots = torch.randperm(N_SLOTS, device=device)[:N_MOVED].contiguous()
    lists = missing, slots, victims, torch.tensor([N_MOVED], dtype=torch.int32, device=device)

    def gpu_ms(shape: MoverShape) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]  # until all launches are queued
        begin.record()
        fill_and_write_back(location, *lists, shape)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return [median([*map(gpu_ms, [shape] * 8)][1:]) for shape in shapes]


if __name__ == "__main__":
    shape_of = partial(mover_shape, both_ways=True, in_clusters=has_clusters(torch.device("cuda")))
    for nbytes in (64, 128, 256, 512, 1024, 1536, 2048, 4096):
        own, *thin = measure(nbytes, [shape_of(nbytes), *THIN])
        gb_per_s = 2 * N_MOVED * nbytes / own / 1e6
        rate = f"{gb_per_s:.1f} GB/s, {min(thin) / own:.2f} of thin programs"
        print(f"{nbytes} bytes: {own:.3f} ms, {rate}, {shape_of(nbytes)}", flush=True)
