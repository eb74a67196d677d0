"""The kernel that reads missing records and writes those they replace, against copies both ways at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.bench.cache_measure import Stage
from flatbed.bench.cache_rows import BENCHMARK, FLATBED, SwapRow
from flatbed.bench.measure import percentiles
from flatbed.bench.rows import Machine
from flatbed.bench.tables_measure import (
    SEED,
    WARM_UP,
    device_time,
    distinct_ids,
    number_,
    same_bits,
    sample,
)
from flatbed.cuda.host_memory import HostMemory, allocate
from flatbed.errors import FlatbedError
from flatbed.kernels.dispatch import use_triton
from flatbed.kernels.rows import RecordLocation

SWAP = f"{FLATBED} swap"
N_STAGES = 2


@dataclass(frozen=True, slots=True)
class SwapSetting:
    """How much is moved, how often, between which sizes of memory."""

    n_rows: int
    n_slots: int
    record_bytes: int
    n_misses: int
    repeats: int
    device: torch.device
    machine: Machine
    stage: Stage


@dataclass(frozen=True, slots=True)
class Lists:
    """Rows that come, the slots that they get, and the rows that leave these; all distinct."""

    missing: Tensor
    slots: Tensor
    victims: Tensor
    n_missing: Tensor


def run(setting: SwapSetting) -> Iterator[SwapRow]:
    """One row."""
    setting.stage("copies both ways at once")
    dma = both_ways_speed(setting.n_misses * setting.record_bytes, setting.repeats, setting.device)
    setting.stage(f"a table of {setting.n_rows:,} records")
    nbytes = setting.n_rows * setting.record_bytes
    with closing(allocate(nbytes, device=setting.device)) as held:
        if not held.addressable:
            raise FlatbedError(
                f"kernels do not reach {held.kind} host memory, so that nothing can be swapped"
            )
        number_(held.tensor)
        times, ok = _swapped(setting, held)
        p20, p50, p80 = percentiles(times)
        speed = 2 * setting.n_misses * setting.record_bytes / (1e6 * p50)
        yield SwapRow(
            benchmark=BENCHMARK,
            case="swap",
            way=SWAP,
            memory=held.kind,
            table_bytes=nbytes,
            record_bytes=setting.record_bytes,
            n_misses=setting.n_misses,
            n_samples=len(times),
            p20_ms=p20,
            p50_ms=p50,
            p80_ms=p80,
            gb_per_s=speed,
            dma_gb_per_s=dma,
            share_of_dma=speed / dma,
            ok=ok,
            machine=setting.machine,
        )


def both_ways_speed(nbytes: int, repeats: int, device: torch.device) -> float:
    """What copies of pinned memory reach in both directions at once, together, in 10⁹ bytes a second."""
    on_gpu = device.type == "cuda"
    homes = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    theres = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    copies = [(theres[0], homes[0]), (homes[1], theres[1])]
    streams: list[Any] = [torch.cuda.Stream(device) for _ in copies] if on_gpu else []  # type: ignore[no-untyped-call]

    def copy() -> None:
        if not on_gpu:
            for target, source in copies:
                target.copy_(source)
            return
        here = torch.cuda.current_stream(device)
        for stream, (target, source) in zip(streams, copies, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            here.wait_stream(stream)

    times = [device_time(copy, device) for _ in range(WARM_UP + repeats)][WARM_UP:]
    return 2 * nbytes / (1e6 * percentiles(times)[1])


def _swapped(setting: SwapSetting, held: HostMemory) -> tuple[list[float], bool]:
    """Times in ms, and whether records of the last swap are where they should be."""
    device, n = setting.device, setting.n_misses
    table = held.tensor.view(setting.n_rows, setting.record_bytes)
    generator = torch.Generator(device).manual_seed(SEED)
    words = (setting.n_slots, setting.record_bytes // 8)
    cached = torch.randint(1 << 62, words, dtype=torch.int64, device=device, generator=generator)
    cached = cached.view(torch.uint8)
    launch = launcher(table, cached)
    lists = [_lists(setting, generator) for _ in range(WARM_UP + setting.repeats)]
    times = [device_time(lambda one=one: launch(one), device) for one in lists[:-1]]  # type: ignore[misc]
    last, looked_at = lists[-1], sample(n)
    there = looked_at.to(device)
    comes = table[last.missing[there].cpu()].clone()
    goes = cached[last.slots[there]].clone()
    times.append(device_time(lambda: launch(last), device))
    ok = same_bits(cached[last.slots[there]], comes) and same_bits(table[last.victims[there].cpu()], goes)
    return times[WARM_UP:], ok


def _lists(setting: SwapSetting, generator: torch.Generator) -> Lists:
    n = setting.n_misses
    rows = distinct_ids(setting.n_rows, 2 * n, generator)
    slots = distinct_ids(setting.n_slots, n, generator)
    n_missing = torch.full((1,), n, dtype=torch.int32, device=setting.device)
    return Lists(rows[:n].contiguous(), slots, rows[n:].contiguous(), n_missing)


def launcher(table: Tensor, cached: Tensor) -> Callable[[Lists], object]:
    """The kernel as the cache launches it; on a CPU, the same as torch operations."""
    if not use_triton(cached.device):

        def swap(lists: Lists) -> None:
            old = cached[lists.slots]
            cached[lists.slots] = table[lists.missing]
            table[lists.victims] = old

        return swap
    from flatbed.kernels._triton import cache

    place = RecordLocation(table, cached)
    return lambda lists: cache.swap(place, lists, len(lists.missing))
