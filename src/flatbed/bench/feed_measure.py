"""Batches to the device in several ways, alone and beside a computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatbed.bench.feed_rows import BENCHMARK, FEEDER, GENERATED, LOADER, PLAIN, BandwidthRow, EpochRow
from flatbed.bench.measure import percentiles, synchronize
from flatbed.bench.rows import Machine
from flatbed.data import Feeder

Batch: TypeAlias = list[np.ndarray[Any, Any]]
Way: TypeAlias = Callable[[Sequence[Batch], torch.device], Iterable[list[Tensor]]]
SEED = 31
SLOW_BYTES = 1 << 30  # in a reading of the ways that are slower, and need not be watched for as long


class Ready(Dataset[Batch]):
    """Batches that are made."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> Batch:
        return self.batches[i]


@dataclass(frozen=True, slots=True)
class Plain:
    """Each array by itself, when it is asked for."""

    batches: Sequence[Batch]
    device: torch.device

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch in self.batches:
            yield [torch.from_numpy(array).to(self.device) for array in batch]


@dataclass(frozen=True, slots=True)
class Loaded:
    """torch's loader, whose thread pins."""

    batches: Sequence[Batch]
    device: torch.device

    def __iter__(self) -> Iterator[list[Tensor]]:
        pin = self.device.type == "cuda"
        for batch in DataLoader(Ready(self.batches), batch_size=None, pin_memory=pin):
            yield [tensor.to(self.device, non_blocking=True) for tensor in batch]


@dataclass(frozen=True, slots=True)
class Generated:
    """Batches of which nobody knows that they come again."""

    batches: Sequence[Batch]

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches


def _generated(batches: Sequence[Batch], device: torch.device) -> Iterable[list[Tensor]]:
    return Feeder(Generated(batches), device)


WAYS: dict[str, Way] = {PLAIN: Plain, LOADER: Loaded, GENERATED: _generated, FEEDER: Feeder}
"""Each is made once and iterated over again and again: what a feeder has pinned it keeps."""
UNCOUNTED = {FEEDER: 2}
"""Iterations before the first that is measured; one for all others. A feeder's second one over a list pins
the arrays where they are, once and for all.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch is, and how many of them make a reading."""

    n_arrays: int
    array_bytes: int
    n_batches: int

    @property
    def nbytes(self) -> int:
        return self.n_arrays * self.array_bytes

    def n_for(self, way: str) -> int:
        """How many batches a way is given in a reading: fewer for the slowest, which keeps nothing ready."""
        return min(self.n_batches, max(4, SLOW_BYTES // self.nbytes)) if way == PLAIN else self.n_batches


@dataclass(frozen=True, slots=True)
class FeedSetting:
    """Where, how often, and beside which speed."""

    device: torch.device
    machine: Machine
    dma_gb_per_s: float
    source_bytes: int
    """All sources together: more than caches hold."""
    n_samples: int


def make_sources(shape: Shape, setting: FeedSetting) -> list[Batch]:
    """Different batches, used in turns."""
    generator = np.random.default_rng(SEED)
    n = max(2, min(shape.n_batches, -(-setting.source_bytes // shape.nbytes)))
    words = max(1, shape.array_bytes // 4)
    pattern = generator.integers(0, 1 << 30, words, np.int32)
    return [[pattern + np.int32(shape.n_arrays * i + k) for k in range(shape.n_arrays)] for i in range(n)]


def turns(sources: Sequence[Batch], n: int) -> list[Batch]:
    """So many batches, from the first on."""
    return list(islice(cycle(sources), n))


def all_arrive(feed: Iterable[list[Tensor]], sources: Sequence[Batch], device: torch.device) -> bool:
    """Whether each byte does, of each source once, compared on the device."""
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    n = 0
    for batch, found in zip(sources, feed, strict=True):
        for array, tensor in zip(batch, found, strict=True):
            wrong += (tensor != torch.from_numpy(array).to(device)).sum()
            n += tensor.numel()
    return int(wrong) == 0 and n == sum(array.size for batch in sources for array in batch)


def always_arrive(name: str, way: Way, sources: Sequence[Batch], device: torch.device) -> bool:
    """The same in each iteration until there is nothing new about them."""
    feed = way(sources, device)
    return all(all_arrive(feed, sources, device) for _ in range(_uncounted(name) + 1))


def bandwidth(shape: Shape, setting: FeedSetting) -> Iterator[BandwidthRow]:
    """All ways with one kind of batch."""
    sources = make_sources(shape, setting)
    for name, way in WAYS.items():
        n = shape.n_for(name)
        ok = always_arrive(name, way, sources[:8], setting.device)
        feed = way(turns(sources, n), setting.device)
        readings = _readings(lambda: _drain(feed), setting, uncounted=_uncounted(name))  # noqa: B023
        p20, p50, p80 = (1e3 * one / n for one in percentiles(readings))
        speed = shape.nbytes / (1e6 * p50)
        yield BandwidthRow(
            benchmark=BENCHMARK,
            case="bandwidth",
            way=name,
            n_arrays=shape.n_arrays,
            batch_bytes=shape.nbytes,
            n_batches=n,
            n_samples=setting.n_samples,
            p20_ms=p20,
            p50_ms=p50,
            p80_ms=p80,
            gb_per_s=speed,
            dma_gb_per_s=setting.dma_gb_per_s,
            share_of_dma=speed / setting.dma_gb_per_s,
            ok=ok,
            machine=setting.machine,
        )


def _uncounted(name: str) -> int:
    return UNCOUNTED.get(name, 1)


def _readings(call: Callable[[], object], setting: FeedSetting, *, uncounted: int = 1) -> list[float]:
    """Seconds of a call, from an idle device until it is idle again; the first ones are not counted."""
    readings = []
    for _ in range(uncounted + setting.n_samples):
        synchronize(setting.device)
        begin = time.perf_counter()
        call()
        synchronize(setting.device)
        readings.append(time.perf_counter() - begin)
    return readings[uncounted:]


def _drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


# ---- beside a computation


class Compute:
    """Products of matrices that take about so long; large ones, so that the GPU sets the pace."""

    def __init__(self, device: torch.device, milliseconds: float) -> None:
        size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (64, torch.float32)
        self.matrix = torch.eye(size, dtype=dtype, device=device)
        self.n_products = 1
        for n in (20, 200):  # warm, and then measured
            synchronize(device)
            begin = time.perf_counter()
            self.n_products = n
            self(None)
            synchronize(device)
        each = 1e3 * (time.perf_counter() - begin) / n
        self.n_products = max(1, round(milliseconds / each))

    def __call__(self, batch: list[Tensor] | None) -> Tensor:
        made = self.matrix
        for _ in range(self.n_products):
            made = made @ self.matrix
        one = made[0, 0]
        return one if batch is None else one.to(batch[0].dtype) + batch[0][-1]


def epoch(shape: Shape, factor: float, setting: FeedSetting) -> Iterator[EpochRow]:
    """All ways with a computation that takes so many times what a batch's transfer does."""
    sources = make_sources(shape, setting)
    transfer_ms = shape.nbytes / (1e6 * setting.dma_gb_per_s)
    compute = Compute(setting.device, factor * transfer_ms)
    for name, way in WAYS.items():
        n = shape.n_for(name)
        batches = turns(sources, n)
        feed = way(batches, setting.device)
        results: list[Tensor] = []

        def train() -> None:
            results.clear()  # noqa: B023
            for batch in feed:  # noqa: B023
                results.append(compute(batch))  # noqa: B023

        alone = _readings(lambda: [compute(None) for _ in range(n)], setting)  # noqa: B023
        readings = _readings(train, setting, uncounted=_uncounted(name))
        p20, p50, p80 = (1e3 * one / n for one in percentiles(readings))
        compute_ms = 1e3 * percentiles(alone)[1] / n
        expected = [int(one[0][-1]) + 1 for one in batches]
        yield EpochRow(
            benchmark=BENCHMARK,
            case="epoch",
            way=name,
            batch_bytes=shape.nbytes,
            n_batches=n,
            factor=factor,
            compute_ms=compute_ms,
            transfer_ms=transfer_ms,
            n_samples=setting.n_samples,
            p20_ms=p20,
            p50_ms=p50,
            p80_ms=p80,
            ratio=p50 / max(compute_ms, transfer_ms),
            ok=[int(one) for one in results] == expected,
            machine=setting.machine,
        )
