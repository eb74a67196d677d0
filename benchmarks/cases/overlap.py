"""Steps of a table beside models that a prefetcher can hide the bus behind.

- none: the table alone.
- gemm: three large matrix products.
- mlp: rows as 8,192 × 1,024 inputs of an MLP as in DLRM, with layers of 4,096, 4,096 and 1.
- conv: two convolutions.
- transformer: rows as 64 sequences of 128 tokens, two compiled blocks.
- disk: a table on disk, whose file is in the page cache, beside products of 5 ms.
- cold: a table on disk that is opened with no page of its file in memory, and a smaller cache on the GPU.

Variants are eager, prefetched, and prefetched with the step as a CUDA graph. A table on disk has
no graph; its third variant is torch sparse, with all rows on the GPU.

Append ids to a case, except `cold`, to choose them: `mlp:uniform`, `gemm:zipf 1.2`. `--steps` is the number
of turns.

Models compute forward and backward in bf16; only the table is updated. The bound ratio is the step against
the larger of two times. The model alone is eager, and takes turns with the steps (in `cold` it is measured
before them). The table alone is the fastest of its steps without a model. With uniform ids, the bus takes
nearly all of that time. A step from disk is compared with the model alone; a step from a cold file with the
larger of that and the time that 16 threads take to read as many pages at random as the step waited for.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import harness
from benchmarks.cases import cache
from benchmarks.cases.cache import (
    EAGER,
    PREFETCHED,
    PREFETCHED_CAPTURED,
    SPECS,
    Bench,
    Setting,
    default_rows,
    idle,
)
from benchmarks.harness import Options, Plan, Products
from benchmarks.models import attention_blocks
from benchmarks.rows import Row, percentiles
from benchmarks.trained_tables import (
    DISTRIBUTIONS,
    SPARSE,
    Beside,
    FlatbedTable,
    IdSource,
    TableSpec,
    made_table,
    scaled,
)

CASES = ("none", "gemm", "mlp", "conv", "transformer", "disk", "cold")
FILL_STEPS = 300
DISK_MS = 5.0
PLAN = Plan(turns=3, warm_up=10, settle=60, blocks=3, block_steps=20)
SMALL_PLAN = Plan(turns=2, warm_up=1, settle=1, blocks=1, block_steps=2)
VARIANTS = (EAGER, PREFETCHED)
COLD_FILL, COLD_SETTLE, COLD_BLOCKS, COLD_STEPS = 40, 2, 5, 6
COLD_CACHE, DEPTH = 300_000, 2
"""The filling steps use more rows than this cache holds, so that timed steps evict and write back."""
PAGE, N_READS, N_READERS = 4096, 20_000, 16
"""Random reads of a disk: bytes of each, how many, and from how many threads, as flatbed reads."""


# ---- models


def gemm(spec: TableSpec, options: Options) -> Beside:
    """Compute products that do not depend on the rows."""
    n, k = (64, 32) if options.is_small else (8192, 4096)
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device=options.device) for shape in ((n, k), (k, n)))
    out = torch.empty((n, n), dtype=torch.bfloat16, device=options.device)

    def compute(rows: Tensor) -> None:
        for _ in range(3):
            torch.mm(a, b, out=out)

    return compute


def mlp(spec: TableSpec, options: Options) -> Beside:
    """Compute a loss of all rows, eight of them as one input."""
    width = 8 * spec.dim
    layers = [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 4 * width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(4 * width, 1)).to(options.device)
    return in_bf16(model, lambda rows: -F.logsigmoid(model(rows.view(-1, width))).mean())


def conv(spec: TableSpec, options: Options) -> Beside:
    """Compute forward and backward of convolutions that do not depend on the rows."""
    n, channels, size = (2, 8, 8) if options.is_small else (64, 256, 56)
    layers = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
    model = nn.Sequential(*layers).to(options.device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn((n, channels, size, size), device=options.device, dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last)
    loss = in_bf16(model, lambda rows: model(images).mean())

    def compute(rows: Tensor) -> None:
        found = loss(rows)
        assert found is not None
        found.backward()  # type: ignore[no-untyped-call]

    return compute


def transformer(spec: TableSpec, options: Options) -> Beside:
    """Compute a loss of all rows, eight of them as one token; blocks are compiled on a GPU."""
    width, n_tokens = 8 * spec.dim, min(128, spec.n_ids // 8)
    model = attention_blocks(2, width, max(1, width // 64)).to(options.device)
    # Module.compile() would do nothing, without a word: dynamo skips the frames of torch.nn itself.
    blocks = [torch.compile(block) if options.on_gpu else block for block in model.layers]

    def loss(rows: Tensor) -> Tensor:
        tokens = rows.view(-1, n_tokens, width)
        for block in blocks:
            tokens = block(tokens)
        return -F.logsigmoid(tokens).mean()

    return in_bf16(model, loss)


def in_bf16(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Beside:
    """Compute a loss under autocast, after the gradients of the model were dropped."""

    def compute(rows: Tensor) -> Tensor:
        model.zero_grad()
        with torch.autocast(rows.device.type, torch.bfloat16):
            return loss(rows).float()

    return compute


def products(spec: TableSpec, options: Options) -> Beside:
    """Compute products for a given time."""
    return Products(DISK_MS / (20 if options.is_small else 1), options.device)


MODELS: dict[str, Callable[[TableSpec, Options], Beside]] = {
    "none": lambda spec, options: idle,
    "gemm": gemm,
    "mlp": mlp,
    "conv": conv,
    "transformer": transformer,
    "disk": products,
}
MODEL_NAMES = {"disk": "products"}


# ---- runs


def run(options: Options) -> Iterator[Row]:
    """Measure the models and ids that were asked for, over one table per storage."""
    asked = [case.partition(":")[::2] for case in options.cases or CASES]
    for name, ids in asked:
        if ids and (ids not in DISTRIBUTIONS or name == "cold"):
            raise ValueError(f"unknown ids {ids!r} of {name}; there are {', '.join(DISTRIBUTIONS)}")
    bench = Bench(options)
    if any(name == "cold" for name, _ in asked):
        yield from run_cold(bench, options)
    for storage, size in SPECS.items():
        spec = scaled(size, options)
        wanted = [(name, ids) for name, ids in asked if (name == "disk") == (storage == "disk")]
        wanted = [(name, ids) for name, ids in wanted if name != "cold"]
        models = {name: MODELS[name](spec, options) for name, _ in wanted}
        usual = ("zipf 1.05",) if storage == "disk" else tuple(DISTRIBUTIONS)
        graphs = (PREFETCHED_CAPTURED,) if options.on_gpu else ()
        variants = (*VARIANTS, SPARSE) if storage == "disk" else (*VARIANTS, *graphs)
        if not wanted:
            continue
        with made_table(spec, storage, options) as table:
            for ids in DISTRIBUTIONS:
                beside = [name for name, own in wanted if (own == ids if own else ids in usual)]
                plan = SMALL_PLAN if options.is_small else PLAN
                plan = replace(plan, turns=options.steps or plan.turns)
                rows, fill = default_rows(storage, spec, options), 10 if options.is_small else FILL_STEPS
                setting = Setting("overlap step", ids, rows, variants, plan, fill)
                table_ms = None
                if beside and storage == "host":
                    alone = [*bench.run(table, setting)]
                    table_ms = min(row["metrics"]["back_to_back_ms"]["p50"] for row in alone)
                    for row in alone if "none" in beside else ():
                        row["setting"]["model"] = "none"
                        yield with_bounds(row, table_alone_ms=table_ms)
                for name in beside:
                    if name != "none":
                        for row in bench.run(table, replace(setting, model=models[name])):
                            row["setting"] |= {"model": MODEL_NAMES.get(name, name), "storage": storage}
                            yield with_bounds(row, table_alone_ms=table_ms)


def with_bounds(row: Row, **alone: float | None) -> Row:
    """Add the times of table and disk alone, and the ratio to the largest of them and of the model alone."""
    metrics = row["metrics"]
    metrics |= {name: value for name, value in alone.items() if value is not None}
    bounds = [value for name, value in metrics.items() if name.endswith("_alone_ms")]
    metrics["bound_ratio"] = metrics["back_to_back_ms"]["p50"] / max(bounds)
    return row


# ---- a file that is not in the page cache


def run_cold(bench: Bench, options: Options) -> Iterator[Row]:
    """Measure a table on disk whose file was not in memory; its cache on the GPU has the frequent rows."""
    spec = scaled(SPECS["disk"], options)
    model, cache_rows = products(spec, options), 8 * spec.n_ids if options.is_small else COLD_CACHE
    model_ms = harness.time_alone(partial(model, torch.empty(0)), options.device)
    n_fill, n_steps = (4, 2) if options.is_small else (COLD_FILL, COLD_STEPS)
    source = IdSource("zipf 1.05", spec.n_rows, spec.n_ids, device=options.device)
    with TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "rows.bed"
        made = {"storage": "disk", "path": path, "cache_rows": cache_rows}
        table = FlatbedTable(spec, options.device, **made)
        table.step(source.draw(1)[0])
        table.emb.table.close()
        reads_per_s = random_reads_per_s(path)
        for name in options.choose(dict.fromkeys(VARIANTS)):
            drop_pages(path)  # before it is opened: pages of a mapped file stay
            table = FlatbedTable(spec, options.device, **made)
            for _ in table.prefetched(depth=DEPTH)(source.draw(n_fill)):
                pass
            table.model = model
            steps = cache.VARIANTS[name](table)(source.draw(COLD_SETTLE + COLD_BLOCKS * n_steps + DEPTH))
            times, n_reads = time_cold(steps, n_steps, options.device)
            table.close()
            is_cold = n_reads > 0 or options.is_small
            if not is_cold:
                options.report(f"{path} stayed in memory: choose a folder on a disk (--folder)")
            result = bench.check(name, "disk", True)
            setting = {"distribution": "zipf 1.05", **spec.setting, "storage": "disk"}
            setting |= {"cache_rows": cache_rows, "model": "products"}
            metrics = {"back_to_back_ms": percentiles(times), "max_abs_error": result.max_abs_error}
            metrics |= {"disk_reads_per_step": n_reads, "random_reads_per_s": reads_per_s}
            ok = result.ok and is_cold
            row = options.row("overlap cold", name, setting, metrics, n_samples=len(times), ok=ok)
            yield with_bounds(row, model_alone_ms=model_ms, disk_alone_ms=1e3 * n_reads / reads_per_s)


def time_cold(steps: Iterator[object], n_steps: int, device: torch.device) -> tuple[list[float], float]:
    """Time blocks of steps, not the last of all. Also returns how many pages of files a step waits for.

    A prefetcher reads ahead from the first step to the last that is timed.
    """
    for _ in range(COLD_SETTLE):
        next(steps)
    before, times = n_disk_reads(), list[float]()
    for _ in range(COLD_BLOCKS):
        took = harness.wall_ms(lambda: [next(steps) for _ in range(n_steps)], device)
        times.append(took / n_steps)
    n_reads = (n_disk_reads() - before) / (COLD_BLOCKS * n_steps)
    if isinstance(steps, Generator):
        steps.close()  # ends the prefetcher
    return times, n_reads


def drop_pages(path: Path) -> None:
    """Remove a file that is not mapped from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def n_disk_reads() -> int:
    """Return how many pages of files the threads of this process have waited for."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def random_reads_per_s(path: Path) -> float:
    """Measure random reads of a file that is not in memory, by threads."""
    drop_pages(path)
    n_pages = path.stat().st_size // PAGE
    offsets = PAGE * np.random.default_rng(harness.SEED).integers(n_pages, size=min(N_READS, n_pages))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

        def read(some: list[int]) -> None:
            for offset in some:
                os.pread(descriptor, PAGE, offset)

        begin = perf_counter()
        with ThreadPoolExecutor(N_READERS) as pool:
            list(pool.map(read, (part.tolist() for part in np.array_split(offsets, N_READERS))))
        return len(offsets) / (perf_counter() - begin)
    finally:
        os.close(descriptor)
