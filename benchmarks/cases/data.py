"""Numpy batches to the device, alone and beside a computation, and random rows of a large numpy array.

- batches: batches of several sizes, back to back.
- epoch: 64 MiB batches with a computation beside each, of half to twice the transfer's time.
- rows: random rows by ids on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import flatbed
from benchmarks import harness
from benchmarks.harness import SEED, Options, Plan, Products, Steps, each, time_in_turns
from benchmarks.rows import Row, percentiles

CASES = ("batches", "epoch", "rows")
MIB = 1 << 20
SHAPES = ((1, 256 * MIB, 16), (1, 64 * MIB, 64), (1, 16 * MIB, 128), (1, MIB, 1024), (500, 16 << 10, 60))
"""Arrays per batch, bytes per array, batches per reading."""
SMALL_SHAPES = ((1, 1 << 16, 8), (50, 1 << 10, 4))
FACTORS = (0.5, 1.0, 2.0)
SOURCE_BYTES = 512 * MIB  # more than caches hold
TO = "torch.from_numpy().to()"
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
    found: dict[str, Feed] = {
        TO: plain,
        "DataLoader(pin_memory=True), .to(non_blocking=True)" if options.on_gpu else "DataLoader": loaded,
        "flatbed Prefetcher, generator": lambda: prefetch(iter(batches)),
        "flatbed Prefetcher, list": lambda: from_list,
    }
    if options.on_gpu:
        found["flatbed Prefetcher, list, pin=True"] = lambda: from_pinned
    return found


def make_batches(n_arrays: int, array_bytes: int, n_batches: int) -> list[Batch]:
    """Make different batches, used in turns."""
    pattern = np.random.default_rng(SEED).integers(0, 1 << 30, array_bytes // 4, np.int32)
    n_sources = max(2, min(n_batches, -(-SOURCE_BYTES // (n_arrays * array_bytes))))
    sources = [[pattern + np.int32(n_arrays * i + k) for k in range(n_arrays)] for i in range(n_sources)]
    return list(islice(cycle(sources), n_batches))


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for."""
    bus, _ = harness.bus_gb_per_s(options.device)
    options.report(f"a plain copy: {bus:.1f} GB/s to the device")
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
    transfer_ms = sum(array.nbytes for array in batches[0]) / (1e6 * bus)
    variants = options.choose(feeds(batches, options))
    ok = {name: all_arrive(feed(), batches, device) for name, feed in variants.items()}
    passes = {name: each(partial(_drain, feed, compute)) for name, feed in variants.items()}
    if compute is not None:
        passes[ALONE] = each(lambda _: [compute() for _ in range(n)])
    found = time_in_turns(passes, lambda n: [None] * n, Plan(samples, synchronized=1), options)
    alone = found.pop(ALONE).synchronized if compute is not None else []
    for name, readings in found.items():
        middle = percentiles([time / n for time in readings.synchronized])
        metrics: dict[str, Any] = {"batch_ms": middle, "copy_gb_per_s": bus, "batches": n}
        if compute is None:
            share = transfer_ms / middle["p50"]
            metrics |= {"speed_gb_per_s": share * bus, "copy_share": share}
        else:
            compute_ms = median(alone) / n
            metrics |= {"compute_ms": compute_ms, "transfer_ms": transfer_ms}
            metrics["bound_ratio"] = middle["p50"] / max(compute_ms, transfer_ms)
        yield options.row(f"data {case}", name, setting, metrics, n_samples=samples, ok=ok[name])
    harness.free_memory(device)


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
    array_bytes, n_ids = (1 << 20, 64) if options.is_small else (2 << 30, 65_536)
    flat = np.arange(array_bytes // 4, dtype=np.int32)
    random = np.random.default_rng(SEED)
    plan = Plan(turns=options.steps or 10, warm_up=2, synchronized=1)
    for row_bytes in (512, 2048):
        array = flat.reshape(-1, row_bytes // 4)
        reader = flatbed.RowReader(array, device=options.device)
        found = time_in_turns(
            options.choose(readers(array, n_ids, reader, options)),
            lambda n: list(random.integers(0, len(array), (n, n_ids))),  # noqa: B023
            plan,
            options,
            check=lambda got, ids: np.array_equal(got.cpu().numpy(), array[ids]),  # noqa: B023
        )
        reader.close()
        setting = {"array_bytes": array_bytes, "row_bytes": row_bytes, "ids": n_ids}
        for name, readings in found.items():
            times = percentiles(readings.synchronized)
            speed = n_ids * row_bytes / (1e6 * times["p50"])
            metrics = {"read_ms": times, "speed_gb_per_s": speed}
            metrics |= {"copy_gb_per_s": bus, "copy_share": speed / bus}
            yield options.row("data rows", name, setting, metrics, n_samples=plan.turns, ok=readings.ok)
        harness.free_memory(options.device)


def readers(
    array: np.ndarray[Any, Any], n_ids: int, reader: flatbed.RowReader, options: Options
) -> dict[str, Steps]:
    """Make the variants."""
    device = options.device
    tensor = torch.from_numpy(array)
    found: dict[str, Callable[[Any], Tensor]] = {
        "torch index on the CPU, .to()": lambda ids: tensor[torch.from_numpy(ids)].to(device),
        "flatbed RowReader": lambda ids: reader[ids],
    }
    if options.on_gpu:
        staging = tensor[:n_ids].pin_memory()

        def staged(ids: Any) -> Tensor:
            np.take(array, ids, axis=0, out=staging.numpy(), mode="clip")  # "raise" would buffer
            return staging.to(device, non_blocking=True)

        def staged_by_torch(ids: Any) -> Tensor:
            torch.index_select(tensor, 0, torch.from_numpy(ids), out=staging)
            return staging.to(device, non_blocking=True)

        found |= {STAGED: staged, "torch index into pinned memory, .to(non_blocking=True)": staged_by_torch}
    return {name: each(read) for name, read in found.items()}
