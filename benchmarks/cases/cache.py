"""Training steps of a table with a cache on the GPU: distributions, cache sizes, and a model beside it.

- step: a table on the host, eager, prefetched and captured, for uniform and skewed ids.
- sizes: caches of several sizes.
- model: the step beside matrix products of about 2.3 ms, which a prefetcher can hide the bus behind.
- disk: a table on disk beside matrix products of about 6 ms.

The baseline is `torch sparse`: the whole table on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness import (
    Options,
    Plan,
    Products,
    Readings,
    Steps,
    allocated_bytes,
    each,
    free_memory,
    time_in_turns,
    wall_ms,
)
from benchmarks.id_sources import DISTRIBUTIONS, IdSource
from benchmarks.rows import Row, percentiles
from benchmarks.trained_tables import SPARSE, Checker, FlatbedTable, Result, SparseTable, TableSpec, scaled

CASES = ("step", "sizes", "model", "disk")
SPECS = {"host": TableSpec(20_000_000, 128, 65_536), "disk": TableSpec(4_000_000, 128, 65_536)}
CACHE_ROWS = {"host": 2_000_000, "disk": 1_000_000}
SIZES = (131_072, 524_288, 2_097_152, 4_194_304)
PLAN = Plan(warm_up=200, turns=4, synchronized=25, blocks=3, block_steps=20)
SMALL_PLAN = Plan(warm_up=2, turns=2, synchronized=2, blocks=1, block_steps=3, settle=1)
EAGER, PREFETCHED, PREFETCHED_4 = "flatbed", "flatbed, prefetched", "flatbed, prefetched 4"
CAPTURED = "flatbed, captured"
VARIANTS: dict[str, Callable[[FlatbedTable], Steps]] = {
    EAGER: lambda table: each(table.step),
    PREFETCHED: lambda table: table.prefetched(table.step, depth=2),
    PREFETCHED_4: lambda table: table.prefetched(table.step, depth=4),
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
        variants = (EAGER, PREFETCHED, PREFETCHED_4, SPARSE)
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
    for ids in DISTRIBUTIONS:
        yield Setting("model", ids, cache_rows, (EAGER, PREFETCHED, SPARSE), model_ms=2.3)


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for, over one table per storage: filling one takes long."""
    bench = Bench(options)
    for storage in SPECS:
        spec = scaled(SPECS[storage], small=options.is_small)
        wanted = [setting for setting in settings(storage, spec, options) if options.wants(setting.case)]
        if wanted:
            with bench.table(spec, storage) as table:
                for setting in wanted:
                    yield from bench.run(table, setting)


class HitCounter:
    """Counts hits and misses of a table's cache during the turns of each variant."""

    def __init__(self, table: FlatbedTable | None) -> None:
        self._table = table
        self.counts: dict[str, Any] = {}

    def around(self, name: str, turn: Callable[[], None]) -> None:
        """Run a turn, and add its counts; a table without a cache has none."""
        if self._table is None or name == SPARSE:
            turn()
            return
        before = np.array(self._table.counts())
        turn()
        self.counts[name] = self.counts.get(name, 0) + np.array(self._table.counts()) - before


class Bench:
    """Measures variants over one table at a time, beside a model if the setting has one."""

    def __init__(self, options: Options) -> None:
        self.options, self.device = options, options.device
        is_small = options.is_small
        spec = scaled(SPECS["host"], small=is_small)
        self.checker = Checker(spec.dim, self.device, **({"n_rows": 500, "n_ids": 48} if is_small else {}))
        self.check = cache(self._check)
        self.model = cache(self._model)

    def _model(self, ms: float) -> tuple[Products, float]:
        """Make a model that takes about so long; returns its measured time, too."""
        model = Products(ms / (20 if self.options.is_small else 1), self.device)

        def block() -> None:
            for _ in range(20):
                model()

        return model, percentiles([wall_ms(block, self.device) / 20 for _ in range(5)])["p50"]

    @contextmanager
    def table(self, spec: TableSpec, storage: str) -> Iterator[FlatbedTable]:
        """Make the table that settings share."""
        free_memory(self.device)
        with TemporaryDirectory(dir=self.options.folder) as folder:
            path = {"path": Path(folder) / "rows.bed"} if storage == "disk" else {}
            table = FlatbedTable(spec, self.device, storage=storage, cache_rows=0, **path)
            try:
                yield table
            finally:
                table.close()
                free_memory(self.device)

    def run(self, table: FlatbedTable, setting: Setting) -> Iterator[Row]:
        """Time all variants of a setting in turns."""
        spec, storage = table.spec, table.emb.table.storage
        source = IdSource(setting.distribution, spec.n_rows, spec.n_ids, device=self.device)
        chosen = [*self.options.choose(dict.fromkeys(setting.variants))]
        model, model_ms = (None, None) if setting.model_ms is None else self.model(setting.model_ms)
        table.model = model
        table.use_cache(setting.cache_rows)
        before = allocated_bytes(self.device)  # graphs of earlier settings keep their caches
        for ids in source.draw(16 * setting.cache_rows // spec.n_ids if setting.fills_cache else 0):
            table.step(ids)
        steps = {name: VARIANTS[name](table) for name in chosen if name != SPARSE}
        held = 0
        if SPARSE in chosen:
            held = spec.nbytes
            peer = SparseTable(spec, self.device)
            peer.model = model
            steps[SPARSE] = each(peer.step)
        plan = SMALL_PLAN if self.options.is_small else PLAN
        if model is not None:
            plan = replace(plan, synchronized=min(5, plan.synchronized), blocks=min(2, plan.blocks))
        counter = HitCounter(table if setting.cache_rows else None)
        found = time_in_turns(steps, source.draw, plan, self.options, around=counter.around)
        memory = dict.fromkeys(found, allocated_bytes(self.device) - before - held)
        if SPARSE in chosen:
            memory[SPARSE] = held
            peer.close()
        fresh = source.draw(1)[0]
        table.step(fresh)
        is_flushed = table.survives_flush(np.unique(fresh)[:1024])
        shared = {"distribution": setting.distribution, **spec.setting}
        shared |= {} if model_ms is None else {"model_ms": model_ms}
        for name, readings in found.items():
            own = {} if name == SPARSE else {"storage": storage, "cache_rows": setting.cache_rows}
            result = self.check(name, storage, setting.cache_rows > 0)
            metrics = self._metrics(readings, counter.counts.get(name), memory[name], model_ms)
            yield self.options.row(
                "cache",
                setting.case,
                name,
                setting={**shared, **own},
                metrics={**metrics, "max_abs_error": result.max_abs_error},
                n_samples=len(readings.back_to_back),
                ok=result.ok and (is_flushed or name == SPARSE),
            )

    def _metrics(
        self, readings: Readings, counts: Any, memory: int, model_ms: float | None
    ) -> dict[str, Any]:
        hits, misses = (0, 0) if counts is None else counts
        times = percentiles(readings.back_to_back)
        return {
            "back_to_back_ms": times,
            "synchronized_ms": percentiles(readings.synchronized),
            "hit_rate": hits / (hits + misses) if hits + misses else None,
            "misses_per_step": misses / readings.n_steps if hits + misses else None,
            "model_ratio": times["p50"] / model_ms if model_ms is not None else None,
            "peak_memory_bytes": memory + (readings.step_bytes or 0) if self.options.on_gpu else None,
        }

    def _check(self, name: str, storage: str, is_cached: bool) -> Result:
        """Check a variant on a small table."""
        if name == SPARSE:
            return self.checker.check(SparseTable)
        rows = self.checker.small() if is_cached else 0
        return self.checker.check(FlatbedTable, VARIANTS[name], storage=storage, cache_rows=rows)
