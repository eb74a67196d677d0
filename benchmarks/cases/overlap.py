"""Steps of a table beside models that a prefetcher can hide the bus behind.

- none: the table alone.
- gemm: three large matrix products.
- mlp: rows as 8,192 × 1,024 inputs of an MLP as in DLRM, with layers of 4,096, 4,096 and 1.
- conv: two convolutions.
- transformer: rows as 64 sequences of 128 tokens, two compiled blocks.
- disk: a table on disk, whose file is in the page cache, beside products of 5 ms.

Append ids to a case to choose them: `mlp:uniform`, `gemm:zipf 1.2`. Models compute forward and backward in
bf16; only the table is updated. The bound ratio is the step against the larger of the model alone and the
table alone: the GPU time of its eager step, most of which is the bus. A step from disk is compared with the
model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import harness
from benchmarks.harness import Options, Plan, Products, Steps, each, time_in_turns
from benchmarks.models import attention_blocks
from benchmarks.rows import Row, percentiles
from benchmarks.trained_tables import (
    DISTRIBUTIONS,
    Beside,
    Checker,
    FlatbedTable,
    IdSource,
    TableSpec,
    made_table,
    scaled,
)

CASES = ("none", "gemm", "mlp", "conv", "transformer", "disk")
SPECS = {"host": TableSpec(20_000_000, 128, 65_536), "disk": TableSpec(4_000_000, 128, 65_536)}
CACHE_ROWS = {"host": 2_000_000, "disk": 1_000_000}
FILL_STEPS = 300
DISK_MS = 5.0
PLAN = Plan(turns=3, warm_up=10, settle=5, blocks=3, block_steps=20)
SMALL_PLAN = Plan(turns=2, warm_up=1, settle=1, blocks=1, block_steps=2)
EAGER, PREFETCHED = "flatbed", "flatbed, prefetched"
VARIANTS: dict[str, Callable[[FlatbedTable], Steps]] = {
    EAGER: lambda table: each(table.step),
    PREFETCHED: lambda table: table.prefetched(),
    f"{PREFETCHED}, SMs reserved": lambda table: table.prefetched(reserve_sms=12),
}


# ---- models


def no_model(spec: TableSpec, options: Options) -> Beside:
    """Compute nothing."""
    return lambda rows: None


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
    "none": no_model,
    "gemm": gemm,
    "mlp": mlp,
    "conv": conv,
    "transformer": transformer,
    "disk": products,
}


# ---- runs


def run(options: Options) -> Iterator[Row]:
    """Measure the models and ids that were asked for, over one table per storage."""
    asked = [case.partition(":")[::2] for case in options.cases or CASES]
    for name, ids in asked:
        if ids and ids not in DISTRIBUTIONS:
            raise ValueError(f"unknown ids {ids!r} of {name}; there are {', '.join(DISTRIBUTIONS)}")
    checker = Checker(options, scaled(SPECS["host"], options).dim)
    for storage, size in SPECS.items():
        wanted = [(name, ids) for name, ids in asked if (name == "disk") == (storage == "disk")]
        if wanted:
            bench = Bench(storage, scaled(size, options), checker, options)
            yield from bench.run(wanted)


class Bench:
    """Measures one table beside several models."""

    def __init__(self, storage: str, spec: TableSpec, checker: Checker, options: Options) -> None:
        self.storage, self.spec, self.checker, self.options = storage, spec, checker, options
        self.cache_rows = 8 * spec.n_ids if options.is_small else CACHE_ROWS[storage]
        self.plan = SMALL_PLAN if options.is_small else PLAN

    def run(self, wanted: list[tuple[str, str]]) -> Iterator[Row]:
        """Measure models with the ids that each is wanted with; the cache is filled once per kind of ids."""
        models = {name: MODELS[name](self.spec, self.options) for name, _ in wanted}
        alone = {name: self.time_model(name, model) for name, model in models.items()}
        variants = self.options.choose(VARIANTS)
        checks = {
            name: self.checker.check(
                FlatbedTable, steps, storage=self.storage, cache_rows=self.checker.cache_rows
            )
            for name, steps in variants.items()
        }
        usual = ("zipf 1.05",) if self.storage == "disk" else tuple(DISTRIBUTIONS)
        with made_table(self.spec, self.storage, self.options) as table:
            for ids in DISTRIBUTIONS:
                beside = [name for name, own in wanted if (own == ids if own else ids in usual)]
                for row in self.run_ids(table, ids, {name: models[name] for name in beside}, alone):
                    row["ok"] = checks[row["variant"]].ok and row["ok"]
                    yield row

    def time_model(self, name: str, model: Beside) -> float | None:
        """Measure a model alone, with rows that are always the same."""
        if name == "none":
            return None
        self.options.report(f"measuring {name} alone")
        spec = self.spec
        rows = torch.zeros((spec.n_ids, spec.dim), device=self.options.device, requires_grad=True)

        def call() -> None:
            loss = model(rows)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
                rows.grad = None

        for _ in range(5):
            call()
        return harness.time_alone(call, self.options.device)

    def time_table(self, table: FlatbedTable, source: IdSource) -> float:
        """Measure the GPU time of the table's eager step alone; on a CPU, its time."""
        device = self.options.device
        batches = [torch.from_numpy(ids).to(device) for ids in source.draw(20)]
        return median(harness.gpu_ms(partial(table.step, ids), device, host_ms=5.0) for ids in batches)

    def run_ids(
        self, table: FlatbedTable, distribution: str, models: dict[str, Beside], alone: dict[str, Any]
    ) -> Iterator[Row]:
        """Measure all variants beside each model, with ids of one distribution."""
        if not models:
            return
        spec, options = self.spec, self.options
        source = IdSource(distribution, spec.n_rows, spec.n_ids, device=options.device)
        table.model = no_model(spec, options)
        table.use_cache(self.cache_rows)
        for ids in source.draw(10 if options.is_small else FILL_STEPS):
            table.step(ids)
        table_ms = None if self.storage == "disk" else self.time_table(table, source)
        setting = {"distribution": distribution, **spec.setting}
        setting |= {"storage": self.storage, "cache_rows": self.cache_rows}
        for name, model in models.items():
            table.model = model
            steps = {variant: VARIANTS[variant](table) for variant in options.choose(VARIANTS)}
            before = np.array(table.counts())
            found = time_in_turns(steps, source.draw, self.plan, options)
            hits, misses = np.array(table.counts()) - before
            label = "products" if name == "disk" else name
            bound = max(alone[name] or 0.0, table_ms or 0.0)
            for variant, readings in found.items():
                times = percentiles(readings.back_to_back)
                metrics = {
                    "back_to_back_ms": times,
                    "model_alone_ms": alone[name],
                    "table_alone_ms": table_ms,
                    "bound_ratio": times["p50"] / bound,
                    "hit_rate": float(hits / (hits + misses)),
                }
                n = len(readings.back_to_back)
                yield options.row(
                    "overlap step", variant, {**setting, "model": label}, metrics, n_samples=n, ok=True
                )
        table.model = no_model(spec, options)
        fresh = source.draw(1)[0]
        table.step(fresh)
        if not table.survives_flush(np.unique(fresh)[:1024]):
            raise AssertionError(f"rows of {distribution} ids changed when the cache was written back")
