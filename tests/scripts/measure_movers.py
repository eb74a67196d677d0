"""Measure how fast movers fill a cache and write back, by record size, beside 96 and more thin programs.

Then the same for records of 1,536 bytes, one move after another, while an MLP trains in another stream.

python -m tests.scripts.measure_movers
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.cuda.host_memory import allocate
from flatbed.kernels import RecordLocation
from flatbed.kernels._triton.cache import fill_and_write_back
from flatbed.kernels._triton.rows import MoverShape, has_clusters, mover_shape

N_ROWS, N_SLOTS, N_MOVED = 500_000, 120_000, 58_880
THIN = (MoverShape(96, 4, 1), MoverShape(96, 4, 4), MoverShape(132, 4, 8), MoverShape(264, 4, 2))


def made(nbytes: int) -> tuple[RecordLocation, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Allocate host memory and a cache, and draw rows and slots."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = allocate(N_ROWS * nbytes, device=device).tensor.view(N_ROWS, nbytes)
    location = RecordLocation(memory, torch.zeros((N_SLOTS, nbytes), dtype=torch.uint8, device=device))
    missing, victims = torch.randperm(N_ROWS, device=device)[: 2 * N_MOVED].view(2, N_MOVED)
    slots = torch.randperm(N_SLOTS, device=device)[:N_MOVED].contiguous()
    return location, (missing, slots, victims, torch.tensor([N_MOVED], dtype=torch.int32, device=device))


def measure(nbytes: int, shapes: list[MoverShape]) -> list[float]:
    """Return the milliseconds in which programs of each shape move random records both ways."""
    location, lists = made(nbytes)

    def gpu_ms(shape: MoverShape) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]  # until all launches are queued
        begin.record()
        fill_and_write_back(location, *lists, shape)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return [median([*map(gpu_ms, [shape] * 8)][1:]) for shape in shapes]


def mlp() -> Callable[[], None]:
    """Return forward and backward of the MLP of `benchmarks.cases.overlap`."""
    width, device = 1024, "cuda"
    layers = [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 4 * width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(4 * width, 1)).to(device)
    rows = torch.randn(8 * width, width, device=device, requires_grad=True)

    def train() -> None:
        model.zero_grad()
        rows.grad = None
        with torch.autocast(device, torch.bfloat16):
            loss = -nn.functional.logsigmoid(model(rows)).mean()
        loss.backward()

    return train


def measure_beside(nbytes: int, shape: MoverShape, compute: Callable[[], None]) -> tuple[float, float]:
    """Return milliseconds of a move, and of a computation that runs at the same time."""
    location, lists = made(nbytes)
    moves = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    def event(stream: Any = None) -> Any:
        found = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        found.record(*([] if stream is None else [stream]))
        return found

    def run(n_moves: int = 8) -> tuple[float, float]:
        torch.cuda.synchronize()
        compute()
        begin, ends = event(moves), []
        for _ in range(n_moves):
            fill_and_write_back(location, *lists, shape, stream=moves)
        end = event(moves)
        while not end.query():
            compute()
            ends.append(event())
        torch.cuda.synchronize()
        ms = begin.elapsed_time(end)
        times = [at for one in ends if (at := begin.elapsed_time(one)) <= ms]
        return ms / n_moves, (times[-1] - times[0]) / (len(times) - 1)

    run()
    found = [run() for _ in range(3)]
    return median(ms for ms, _ in found), median(ms for _, ms in found)


if __name__ == "__main__":
    shape_of = partial(mover_shape, both_ways=True, in_clusters=has_clusters(torch.device("cuda")))
    for nbytes in (64, 128, 256, 512, 1024, 1536, 2048, 4096):
        own, *thin = measure(nbytes, [shape_of(nbytes), *THIN])
        gb_per_s = 2 * N_MOVED * nbytes / own / 1e6
        rate = f"{gb_per_s:.1f} GB/s, {min(thin) / own:.2f} of thin programs"
        print(f"{nbytes} bytes: {own:.3f} ms, {rate}, {shape_of(nbytes)}", flush=True)
    compute, nbytes = mlp(), 1536
    for shape in (shape_of(nbytes), *THIN):
        alone, (move, computation) = measure(nbytes, [shape])[0], measure_beside(nbytes, shape, compute)
        times = f"{alone:.2f} ms alone, {move:.2f} ms beside the MLP, which takes {computation:.2f} ms"
        print(f"{shape}: {times}", flush=True)
