"""Numpy batches to the device, alone and beside a computation, and random rows of a large numpy array.

- batches: batches of several sizes, back to back.
- epoch: 64 MiB batches with a computation beside each, of half to twice the transfer's time.
- rows: random rows by ids on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import flatbed
from benchmarks.harness import SEED, Options, Products, bus_gb_per_s, call_in_turns, free_memory, pinned
from benchmarks.rows import Row, percentiles

CASES = ("batches", "epoch", "rows")
MIB = 1 << 20
SHAPES = ((1, 256 * MIB, 16), (1, 64 * MIB, 64), (1, 16 * MIB, 128), (1, MIB, 1024), (500, 16 << 10, 60))
"""Arrays per batch, bytes per array, batches per reading."""
SMALL_SHAPES = ((1, 1 << 16, 8), (50, 1 << 10, 4))
FACTORS = (0.5, 1.0, 2.0)
SOURCE_BYTES = 512 * MIB  # more than caches hold
TO, LOADER = "torch.from_numpy().to()", "DataLoader(pin_memory=True), .to(non_blocking=True)"
ALONE = "the computation alone"
STAGED = "numpy.take into pinned memory, .to(non_blocking=True)"

Batch = list[np.ndarray[Any, Any]]
Feed = Callable[[], Iterable[list[Tensor]]]


def feeds(batches: list[Batch], options: Options) -> dict[str, Feed]:
    """Make the variants; each call starts a new pass over the batches."""
    device = options.device

    def plain() -> Iterator[list[Tensor]]:
        for batch in batches:
            yield [torch.from_numpy(array).to(device) for array in batch]

    loader: Iterable[list[Tensor]] = DataLoader(
        batches,  # type: ignore[arg-type]
        batch_size=None,
        pin_memory=options.on_gpu,
    )

    def loaded() -> Iterator[list[Tensor]]:
        for batch in loader:
            yield [tensor.to(device, non_blocking=True) for tensor in batch]

    prefetch = partial(flatbed.Prefetcher, device=device)
    from_list, from_pinned = prefetch(batches), prefetch(batches, pin=True)
    return {
        TO: plain,
        LOADER: loaded,
        "flatbed Prefetcher, generator": lambda: prefetch(iter(batches)),
        "flatbed Prefetcher, list": lambda: from_list,
        "flatbed Prefetcher, list, pin=True": lambda: from_pinned,
    }


def make_batches(n_arrays: int, array_bytes: int, n_batches: int) -> list[Batch]:
    """Make different batches, used in turns."""
    pattern = np.random.default_rng(SEED).integers(0, 1 << 30, array_bytes // 4, np.int32)
    n_sources = max(2, min(n_batches, -(-SOURCE_BYTES // (n_arrays * array_bytes))))
    sources = [[pattern + np.int32(n_arrays * i + k) for k in range(n_arrays)] for i in range(n_sources)]
    return list(islice(cycle(sources), n_batches))


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for."""
    bus, _ = bus_gb_per_s(options.device)
    options.report(f"a plain copy of pinned memory: {bus:.1f} GB/s to the device")
    shapes = SMALL_SHAPES if options.is_small else SHAPES
    if options.wants("batches"):
        for n_arrays, array_bytes, n_batches in shapes:
            setting: dict[str, Any] = {"arrays": n_arrays, "batch_bytes": n_arrays * array_bytes}
            batches = make_batches(n_arrays, array_bytes, n_batches)
            yield from run_feeds("batches", setting, batches, None, bus, options)
    if options.wants("epoch"):
        n_arrays, array_bytes, n_batches = SMALL_SHAPES[0] if options.is_small else (1, 64 * MIB, 64)
        batches = make_batches(n_arrays, array_bytes, n_batches)
        for factor in FACTORS:
            setting = {"batch_bytes": n_arrays * array_bytes, "compute_factor": factor}
            compute = Products(factor * n_arrays * array_bytes / (1e6 * bus), options.device)
            yield from run_feeds("epoch", setting, batches, compute, bus, options)
    if options.wants("rows"):
        yield from run_rows(bus, options)


def run_feeds(
    case: str,
    setting: dict[str, Any],
    batches: list[Batch],
    compute: Products | None,
    bus: float,
    options: Options,
) -> Iterator[Row]:
    """Time whole passes in turns, beside `compute` if there is one. The first pass checks every byte."""
    device, n, samples = options.device, len(batches), options.steps or 5
    nbytes = sum(array.nbytes for array in batches[0])
    variants = options.choose(feeds(batches, options))
    ok = {name: all_arrive(feed(), batches, device) for name, feed in variants.items()}
    passes: dict[str, Callable[[Any], object]] = {
        name: partial(_drain, feed, compute) for name, feed in variants.items()
    }
    if compute is not None:
        passes[ALONE] = lambda _: [compute() for _ in range(n)]
    found = call_in_turns(passes, lambda: None, options, turns=samples)
    alone = found.pop(ALONE).times if compute is not None else []
    for name, calls in found.items():
        middle = percentiles([time / n for time in calls.times])
        metrics: dict[str, Any] = {"batch_ms": middle, "copy_gb_per_s": bus, "batches": n}
        if compute is None:
            speed = nbytes / (1e6 * middle["p50"])
            metrics |= {"speed_gb_per_s": speed, "copy_share": speed / bus}
        else:
            compute_ms, transfer_ms = percentiles(alone)["p50"] / n, nbytes / (1e6 * bus)
            bound = max(compute_ms, transfer_ms)
            metrics |= {
                "compute_ms": compute_ms,
                "transfer_ms": transfer_ms,
                "bound_ratio": middle["p50"] / bound,
            }
        yield options.row(
            "data", case, name, setting=setting, metrics=metrics, n_samples=samples, ok=ok[name]
        )
    free_memory(device)


def _drain(feed: Feed, compute: Products | None, _: object) -> None:
    for batch in feed():
        if compute is not None:
            compute()
            batch[0][-1:].add(1)  # uses the batch in the current stream


def all_arrive(found: Iterable[list[Tensor]], batches: Sequence[Batch], device: torch.device) -> bool:
    """Tell whether every byte of every batch arrived; the device compares."""
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for batch, tensors in zip(batches, found, strict=True):
        for array, tensor in zip(batch, tensors, strict=True):
            wrong += (tensor != torch.from_numpy(array).to(device)).sum()
    return int(wrong) == 0


# ---- rows of an array


def run_rows(bus: float, options: Options) -> Iterator[Row]:
    """Time random rows of a large array, in turns, with fresh ids in every call."""
    device, samples = options.device, options.steps or 10
    array_bytes, n_ids = (1 << 20, 64) if options.is_small else (2 << 30, 65_536)
    flat = np.arange(array_bytes // 4, dtype=np.int32)
    generator = np.random.default_rng(SEED)
    for row_bytes in (512, 2048):
        array = flat.reshape(-1, row_bytes // 4)
        reader = flatbed.RowReader(array, device=device)
        variants = options.choose(readers(array, n_ids, reader, options))
        found = call_in_turns(
            variants,
            lambda: generator.integers(0, len(array), n_ids),  # noqa: B023
            options,
            turns=samples,
            warm_up=2,
            check=lambda got, ids: np.array_equal(got.cpu().numpy(), array[ids]),  # noqa: B023
        )
        reader.close()
        setting = {"array_bytes": array_bytes, "row_bytes": row_bytes, "ids": n_ids}
        for name, calls in found.items():
            middle = percentiles(calls.times)
            speed = n_ids * row_bytes / (1e6 * middle["p50"])
            metrics = {
                "read_ms": middle,
                "speed_gb_per_s": speed,
                "copy_gb_per_s": bus,
                "copy_share": speed / bus,
            }
            yield options.row(
                "data", "rows", name, setting=setting, metrics=metrics, n_samples=samples, ok=calls.ok
            )
        free_memory(device)


def readers(
    array: np.ndarray[Any, Any], n_ids: int, reader: flatbed.RowReader, options: Options
) -> dict[str, Callable[[Any], Tensor]]:
    """Make the variants."""
    device = options.device
    tensor = torch.from_numpy(array)
    found: dict[str, Callable[[Any], Tensor]] = {
        "torch index on the CPU, .to()": lambda ids: tensor[torch.from_numpy(ids)].to(device),
        "flatbed RowReader": lambda ids: reader[ids],
    }
    if options.on_gpu:
        staging = pinned(array[:n_ids])

        def staged(ids: Any) -> Tensor:
            np.take(array, ids, axis=0, out=staging.numpy(), mode="clip")  # "raise" would buffer
            return staging.to(device, non_blocking=True)

        def staged_by_torch(ids: Any) -> Tensor:
            torch.index_select(tensor, 0, torch.from_numpy(ids), out=staging)
            return staging.to(device, non_blocking=True)

        found |= {STAGED: staged, "torch index into pinned memory, .to(non_blocking=True)": staged_by_torch}
    return found
