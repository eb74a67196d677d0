"""Training steps of a table with a cache on the GPU, by distribution and by size of the cache.

- step: a table on the host, eager and captured, for uniform and skewed ids (`overlap` has prefetched steps).
- sizes: caches of several sizes.

The baseline is `torch sparse`: the whole table on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Options, Plan, Steps, each, time_in_turns
from benchmarks.rows import Row
from benchmarks.trained_tables import (
    DISTRIBUTIONS,
    SPARSE,
    Beside,
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

CASES = ("step", "sizes")
SPECS = {"host": TableSpec(20_000_000, 128, 65_536), "disk": TableSpec(4_000_000, 128, 65_536)}
CACHE_ROWS = {"host": 2_000_000, "disk": 1_000_000}
SIZES = (131_072, 524_288, 2_097_152, 4_194_304)
PLAN = Plan(warm_up=200, turns=4, settle=5, synchronized=25, blocks=3, block_steps=20)
SMALL_PLAN = Plan(warm_up=2, turns=2, settle=1, synchronized=2, blocks=1, block_steps=3)
EAGER, PREFETCHED, CAPTURED = "flatbed", "flatbed, prefetched", "flatbed, captured"
PREFETCHED_CAPTURED = "flatbed, prefetched, captured"
MODEL_ALONE = "model alone"
VARIANTS: dict[str, Callable[[FlatbedTable], Steps]] = {
    EAGER: lambda table: each(table.step),
    PREFETCHED: lambda table: table.prefetched(depth=2),
    CAPTURED: lambda table: each(table.captured_step),
    PREFETCHED_CAPTURED: lambda table: table.prefetched_and_captured(depth=2),
}


def idle(rows: Tensor) -> None:
    """Compute nothing beside a table."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A cache, ids, and the variants that take turns. A captured table admits no rows ahead of time."""

    name: str
    """A benchmark and its case."""
    distribution: str
    cache_rows: int
    variants: tuple[str, ...]
    plan: Plan
    fill_steps: int = 0
    """Steps that are taken before the first turn."""
    model: Beside = idle


def settings(spec: TableSpec, options: Options) -> Iterator[Setting]:
    """List what is measured with a table on the host."""
    plan = SMALL_PLAN if options.is_small else PLAN
    captured = ((CAPTURED,),) if options.on_gpu else ()
    for ids in DISTRIBUTIONS if options.wants("step") else ():
        yield Setting("cache step", ids, 0, (EAGER,), plan)
        for variants in ((EAGER, SPARSE), *captured):
            yield Setting("cache step", ids, default_rows("host", spec, options), variants, plan)
    for ids in ("zipf 1.05", "zipf 1.2") if options.wants("sizes") else ():
        for size in (4 * spec.n_ids, 8 * spec.n_ids) if options.is_small else SIZES:
            for variants in ((EAGER,), *captured):
                yield Setting("cache sizes", ids, size, variants, plan, fill_steps=16 * size // spec.n_ids)


def default_rows(storage: str, spec: TableSpec, options: Options) -> int:
    """Return the size of a cache, where it is not what is compared."""
    return 8 * spec.n_ids if options.is_small else CACHE_ROWS[storage]


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for, over one table per storage: filling one takes long."""
    bench = Bench(options)
    spec = scaled(SPECS["host"], options)
    if wanted := list(settings(spec, options)):
        with made_table(spec, "host", options) as table:
            for setting in wanted:
                yield from bench.run(table, setting)


def counted(steps: Steps, table: FlatbedTable, counts: list[Any]) -> Steps:
    """Append hits and misses of the table's cache during each turn."""

    def run_turn(batches: Sequence[Ids]) -> Iterator[Any]:
        before = np.array(table.counts())
        yield from steps(batches)
        counts.append(np.array(table.counts()) - before)

    return run_turn


class Bench:
    """Measures variants over one table at a time."""

    def __init__(self, options: Options) -> None:
        self.options, self.device = options, options.device
        self.checker = Checker(options, scaled(SPECS["host"], options).dim)
        self.check = cache(self._check)

    def fill(self, table: FlatbedTable, setting: Setting) -> IdSource:
        """Begin with an empty cache and take the first steps; returns the source of further ids."""
        spec = table.spec
        source = IdSource(setting.distribution, spec.n_rows, spec.n_ids, device=self.device)
        table.model = idle
        table.use_cache(setting.cache_rows)
        for ids in source.draw(setting.fill_steps):
            table.step(ids)
        return source

    def run(self, table: FlatbedTable, setting: Setting) -> Iterator[Row]:
        """Time all variants of a setting in turns."""
        spec, options, plan = table.spec, self.options, setting.plan
        chosen = [*options.choose(dict.fromkeys(setting.variants))]
        table.use_cache(0)
        before = harness.allocated_bytes(self.device)  # graphs of earlier settings keep their caches
        source = self.fill(table, setting)
        table.model = setting.model
        counts: dict[str, list[Any]] = {name: [] for name in chosen if name != SPARSE}
        steps = {name: counted(VARIANTS[name](table), table, counts[name]) for name in counts}
        if setting.model is not idle:
            steps[MODEL_ALONE] = table.model_alone
        with ExitStack() as peers:
            if SPARSE in chosen:
                peer = SparseTable(spec, self.device)
                peers.callback(peer.close)
                peer.model = setting.model
                steps[SPARSE] = each(peer.step)
            found = time_in_turns(steps, source.draw, plan, options)
            held = spec.nbytes if SPARSE in chosen else 0
            kept = harness.allocated_bytes(self.device) - before - held
        alone = None if setting.model is idle else found.pop(MODEL_ALONE)
        fresh = source.draw(1)[0]
        table.step(fresh)
        is_flushed = table.survives_flush(np.unique(fresh)[:1024])
        shared = {"distribution": setting.distribution, **spec.setting}
        own = {**shared, "storage": table.emb.table.storage, "cache_rows": setting.cache_rows}
        for name, readings in found.items():
            result = self.check(name, own["storage"], setting.cache_rows > 0)
            metrics = self.checker.metrics(readings, held if name == SPARSE else kept, result)
            if setting.cache_rows and name != SPARSE:
                hits, misses = sum(counts[name][1:])  # without warming up
                metrics["hit_rate"] = hits / (hits + misses)
                metrics["misses_per_step"] = misses / (plan.turns * plan.n_steps)
            if alone is not None:
                metrics["model_alone_ms"] = median(alone.back_to_back)
            where = shared if name == SPARSE else own
            n, ok = len(readings.back_to_back), result.ok and (is_flushed or name == SPARSE)
            yield options.row(setting.name, name, where, metrics, n_samples=n, ok=ok)

    def _check(self, name: str, storage: str, is_cached: bool) -> Result:
        """Check a variant on a small table."""
        if name == SPARSE:
            return self.checker.check(SparseTable)
        rows = self.checker.cache_rows if is_cached else 0
        return self.checker.check(FlatbedTable, VARIANTS[name], storage=storage, cache_rows=rows)
