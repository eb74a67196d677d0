"""Training steps of a table with a cache on the GPU: distributions, cache sizes, and a table on disk.

- step: a table on the host, eager, prefetched and captured, for uniform and skewed ids.
- sizes: caches of several sizes.
- disk: a table on disk beside matrix products of about 6 ms.

The baseline is `torch sparse`: the whole table on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Options, Plan, Products, Steps, each, time_in_turns
from benchmarks.rows import Row
from benchmarks.trained_tables import (
    DISTRIBUTIONS,
    SPARSE,
    Checker,
    FlatbedTable,
    Ids,
    IdSource,
    Result,
    SparseTable,
    TableSpec,
    made_table,
    scaled,
)

CASES = ("step", "sizes", "disk")
SPECS = {"host": TableSpec(20_000_000, 128, 65_536), "disk": TableSpec(4_000_000, 128, 65_536)}
CACHE_ROWS = {"host": 2_000_000, "disk": 1_000_000}
SIZES = (131_072, 524_288, 2_097_152, 4_194_304)
PLAN = Plan(warm_up=200, turns=4, settle=5, synchronized=25, blocks=3, block_steps=20)
SMALL_PLAN = Plan(warm_up=2, turns=2, settle=1, synchronized=2, blocks=1, block_steps=3)
EAGER, PREFETCHED = "flatbed", "flatbed, prefetched"
CAPTURED = "flatbed, captured"
VARIANTS: dict[str, Callable[[FlatbedTable], Steps]] = {
    EAGER: lambda table: each(table.step),
    PREFETCHED: lambda table: table.prefetched(depth=2),
    CAPTURED: lambda table: each(table.captured_step),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A cache, ids, and the variants that take turns. A captured table admits no rows ahead of time."""

    case: str
    distribution: str
    cache_rows: int
    variants: tuple[str, ...]
    model_ms: float | None = None
    fills_cache: bool = False
    """Steps are taken until the cache is full."""


def settings(storage: str, spec: TableSpec, options: Options) -> Iterator[Setting]:
    """List what is measured with one table."""
    is_small = options.is_small
    cache_rows = 8 * spec.n_ids if is_small else CACHE_ROWS[storage]
    if storage == "disk":
        variants = (EAGER, PREFETCHED, SPARSE)
        yield Setting("disk", "zipf 1.05", cache_rows, variants, model_ms=6.0)
        return
    captured = ((CAPTURED,),) if options.on_gpu else ()
    for ids in DISTRIBUTIONS:
        yield Setting("step", ids, 0, (EAGER,))
        for variants in ((EAGER, PREFETCHED, SPARSE), *captured):
            yield Setting("step", ids, cache_rows, variants)
    for ids in ("zipf 1.05", "zipf 1.2"):
        for size in (4 * spec.n_ids, 8 * spec.n_ids) if is_small else SIZES:
            for variants in ((EAGER,), *captured):
                yield Setting("sizes", ids, size, variants, fills_cache=True)


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for, over one table per storage: filling one takes long."""
    bench = Bench(options)
    for storage, size in SPECS.items():
        spec = scaled(size, options)
        wanted = [setting for setting in settings(storage, spec, options) if options.wants(setting.case)]
        if wanted:
            with made_table(spec, storage, options) as table:
                for setting in wanted:
                    yield from bench.run(table, setting)


def counted(steps: Steps, table: FlatbedTable, counts: list[Any]) -> Steps:
    """Append hits and misses of the table's cache during each turn."""

    def run_turn(batches: Sequence[Ids]) -> Iterator[Any]:
        before = np.array(table.counts())
        yield from steps(batches)
        counts.append(np.array(table.counts()) - before)

    return run_turn


def idle(rows: Tensor) -> None:
    """Compute nothing beside a table."""


class Bench:
    """Measures variants over one table at a time, beside a model if the setting has one."""

    def __init__(self, options: Options) -> None:
        self.options, self.device = options, options.device
        self.checker = Checker(options, scaled(SPECS["host"], options).dim)
        self.check = cache(self._check)
        self.model = cache(self._model)

    def _model(self, ms: float) -> tuple[Products, float]:
        """Make a model that takes about so long; returns its measured time, too."""
        model = Products(ms / (20 if self.options.is_small else 1), self.device)
        return model, harness.time_alone(model, self.device)

    def run(self, table: FlatbedTable, setting: Setting) -> Iterator[Row]:
        """Time all variants of a setting in turns."""
        spec, options = table.spec, self.options
        source = IdSource(setting.distribution, spec.n_rows, spec.n_ids, device=self.device)
        chosen = [*options.choose(dict.fromkeys(setting.variants))]
        model, model_ms = (idle, None) if setting.model_ms is None else self.model(setting.model_ms)
        plan = SMALL_PLAN if options.is_small else PLAN
        if model_ms is not None:
            plan = replace(plan, synchronized=min(5, plan.synchronized), blocks=min(2, plan.blocks))
        table.model = model
        table.use_cache(setting.cache_rows)
        before = harness.allocated_bytes(self.device)  # graphs of earlier settings keep their caches
        for ids in source.draw(16 * setting.cache_rows // spec.n_ids if setting.fills_cache else 0):
            table.step(ids)
        counts: dict[str, list[Any]] = {name: [] for name in chosen if name != SPARSE}
        steps = {name: counted(VARIANTS[name](table), table, counts[name]) for name in counts}
        with ExitStack() as peers:
            if SPARSE in chosen:
                peer = SparseTable(spec, self.device)
                peers.callback(peer.close)
                peer.model = model
                steps[SPARSE] = each(peer.step)
            found = time_in_turns(steps, source.draw, plan, options)
            held = spec.nbytes if SPARSE in chosen else 0
            kept = harness.allocated_bytes(self.device) - before - held
        fresh = source.draw(1)[0]
        table.step(fresh)
        is_flushed = table.survives_flush(np.unique(fresh)[:1024])
        shared = {"distribution": setting.distribution, **spec.setting}
        shared |= {} if model_ms is None else {"model_ms": model_ms}
        own = {**shared, "storage": table.emb.table.storage, "cache_rows": setting.cache_rows}
        for name, readings in found.items():
            result = self.check(name, own["storage"], setting.cache_rows > 0)
            metrics = self.checker.metrics(readings, held if name == SPARSE else kept, result)
            if setting.cache_rows and name != SPARSE:
                hits, misses = sum(counts[name][1:])  # without warming up
                metrics["hit_rate"] = hits / (hits + misses)
                metrics["misses_per_step"] = misses / (plan.turns * plan.n_steps)
            if model_ms is not None:
                metrics["model_ratio"] = metrics["back_to_back_ms"]["p50"] / model_ms
            where = shared if name == SPARSE else own
            n, ok = len(readings.back_to_back), result.ok and (is_flushed or name == SPARSE)
            yield options.row(f"cache {setting.case}", name, where, metrics, n_samples=n, ok=ok)

    def _check(self, name: str, storage: str, is_cached: bool) -> Result:
        """Check a variant on a small table."""
        if name == SPARSE:
            return self.checker.check(SparseTable)
        rows = self.checker.cache_rows if is_cached else 0
        return self.checker.check(FlatbedTable, VARIANTS[name], storage=storage, cache_rows=rows)
