"""What the cases of `flatbed bench tables` have in common: ids, contents that tell rows apart, clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.bench.measure import synchronize

SEED = 20
WARM_UP = 3
DMA_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
DMA_COPIES = 15
N_SAMPLE = 1024  # records that are looked at after a case
BUSY_CYCLES = 2_000_000  # about a millisecond: longer than it takes to issue what is timed
PATTERN_WORDS = 1 << 24
PATTERN_LIMIT = 1 << 30  # read as fp32, no number below it is infinite or none


@dataclass(frozen=True, slots=True)
class Dma:
    """What a plain copy of pinned memory reaches, in 10⁹ bytes a second."""

    to: float
    back: float


def dma_speed(device: torch.device) -> Dma:
    """Measure it; on a CPU, where nothing is pinned, a copy from memory to memory."""
    nbytes, on_gpu = DMA_BYTES[device.type], device.type == "cuda"
    home = torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    speeds = []
    for target, source in ((there, home), (home, there)):
        readings = [
            device_time(lambda t=target, s=source: t.copy_(s, non_blocking=True), device)  # type: ignore[misc]
            for _ in range(WARM_UP + DMA_COPIES)
        ]
        speeds.append(nbytes / (1e6 * sorted(readings[WARM_UP:])[DMA_COPIES // 2]))
    return Dma(*speeds)


def distinct_ids(n_rows: int, n_ids: int, generator: torch.Generator) -> Tensor:
    """Random rows in random order, none twice, on the generator's device."""
    options = {"generator": generator, "device": generator.device}
    if n_rows < 16 * n_ids:
        return torch.randperm(n_rows, **options)[:n_ids]  # type: ignore[call-overload,no-any-return]
    found = torch.empty(0, dtype=torch.int64, device=generator.device)
    while len(found) < n_ids:
        more = torch.randint(n_rows, (n_ids + n_ids // 8 + 16,), **options)  # type: ignore[call-overload]
        found = torch.unique(torch.cat([found, more]))
    return found[torch.randperm(len(found), **options)[:n_ids]]  # type: ignore[call-overload]


def number_(memory: Tensor) -> None:
    """Fill host memory (uint8) with counting words, so that no two records are equal."""
    words = memory.view(torch.int32)
    counting = torch.arange(PATTERN_WORDS, dtype=torch.int32)
    for start in range(0, len(words), PATTERN_WORDS):
        part = words[start : start + PATTERN_WORDS]
        torch.add(counting[: len(part)], start % PATTERN_LIMIT, out=part)


def sample(n_ids: int) -> Tensor:
    """Places in a batch whose records are looked at."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randperm(n_ids, generator=generator)[:N_SAMPLE]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors hold the same bytes, wherever they are."""
    bits = [t.detach().cpu().contiguous().view(torch.uint8) for t in (found, expected)]
    return torch.equal(*bits)


def device_time(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call in ms; on a GPU by its own clock, with everything issued before it begins."""
    if device.type != "cuda":
        return wall_time(call, device)
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def wall_time(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call in ms, from an idle device until it is idle again."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def read_each(
    call: Callable[[Any], object],
    batches: Iterable[Any],
    device: torch.device,
    *,
    clock: Callable[[Callable[[], object], torch.device], float],
) -> list[float]:
    """Times of a call for each batch; the first few only warm up."""
    return [clock(lambda b=batch: call(b), device) for batch in batches][WARM_UP:]  # type: ignore[misc]
