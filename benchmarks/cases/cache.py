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
SPEC = TableSpec(20_000_000, 128, 65_536)
DISK_SPEC = TableSpec(4_000_000, 128, 65_536)
CACHE_ROWS, DISK_CACHE_ROWS = 2_000_000, 1_000_000
SIZES = (131_072, 524_288, 2_097_152, 4_194_304)
MODEL_MS = {"host": 2.3, "disk": 6.0}
PLAN = Plan(warm_up=200, turns=4, synchronized=25, blocks=3, block_steps=20)
SLOW_PLAN = replace(PLAN, synchronized=5, blocks=2)
SMALL_PLAN = Plan(warm_up=2, turns=2, synchronized=2, blocks=1, block_steps=3, settle=1)
FLATBED = "flatbed"
CAPTURED = f"{FLATBED}, captured"

Variant = Callable[[FlatbedTable], Steps]
EAGER: dict[str, Variant] = {FLATBED: lambda table: each(table.step)}
PREFETCHED: dict[str, Variant] = {
    f"{FLATBED}, prefetched": lambda table: table.prefetched(table.step, depth=2),
    f"{FLATBED}, prefetched 4": lambda table: table.prefetched(table.step, depth=4),
}
GRAPHS: dict[str, Variant] = {
    CAPTURED: lambda table: each(table.captured_step),
    f"{CAPTURED}, prefetched": lambda table: table.prefetched(table.captured_step, depth=2),
}


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for."""
    small = options.is_small
    spec, disk_spec = scaled(SPEC, small=small), scaled(DISK_SPEC, small=small)
    checker = Checker(spec.dim, options.device, **({"n_rows": 500, "n_ids": 48} if small else {}))
    bench = Bench(options, checker, SMALL_PLAN if small else PLAN)
    cache_rows = 8 * spec.n_ids if small else CACHE_ROWS
    graphs = GRAPHS if options.on_gpu else {}
    if options.wants("step"):
        with bench.table(spec) as table:
            for ids in DISTRIBUTIONS:
                yield from bench.run("step", table, ids, 0, EAGER)
                prefetched = dict([*PREFETCHED.items()][:1])
                yield from bench.run("step", table, ids, cache_rows, {**EAGER, **prefetched}, sparse=True)
                if graphs:
                    yield from bench.run("step", table, ids, cache_rows, graphs)
    if options.wants("sizes"):
        with bench.table(spec) as table:
            for ids in ("zipf 1.05", "zipf 1.2"):
                for size in (4 * spec.n_ids, 8 * spec.n_ids) if small else SIZES:
                    yield from bench.run("sizes", table, ids, size, EAGER, longer=True)
                    if graphs:
                        captured = {CAPTURED: graphs[CAPTURED]}
                        yield from bench.run("sizes", table, ids, size, captured, longer=True)
    for case, storage in (("model", "host"), ("disk", "disk")):
        if options.wants(case):
            of_case, rows = (spec, cache_rows) if case == "model" else (disk_spec, DISK_CACHE_ROWS)
            slow = Bench(options, checker, SMALL_PLAN if small else SLOW_PLAN, model_ms=MODEL_MS[storage])
            with slow.table(of_case, storage) as table:
                for ids in DISTRIBUTIONS if case == "model" else ("zipf 1.05",):
                    variants = {**EAGER, **PREFETCHED}
                    rows = min(rows, 16 * of_case.n_ids) if small else rows
                    yield from slow.run(case, table, ids, rows, variants, sparse=True)


@dataclass(frozen=True, slots=True)
class OpenTable:
    """A table of flatbed, and GPU memory that was allocated before it."""

    trained: FlatbedTable
    spec: TableSpec
    storage: str
    before: int


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
    """Measures variants over one table at a time, with the model beside them if there is one."""

    def __init__(self, options: Options, checker: Checker, plan: Plan, model_ms: float | None = None) -> None:
        self.options, self.checker, self.plan = options, checker, plan
        self.device = options.device
        self.model = self.model_ms = None
        self.checked: dict[tuple[str, str, bool], Result] = {}
        if model_ms is not None:
            self.model = Products(model_ms / (20 if options.is_small else 1), self.device)
            self.model_ms = percentiles([wall_ms(self._block, self.device) / 20 for _ in range(5)])["p50"]

    def _block(self) -> None:
        assert self.model is not None
        for _ in range(20):
            self.model()

    @contextmanager
    def table(self, spec: TableSpec, storage: str = "host") -> Iterator[OpenTable]:
        """Make the table that variants share: filling it takes longer than the steps."""
        free_memory(self.device)
        before = allocated_bytes(self.device)
        with TemporaryDirectory(dir=self.options.folder) as folder:
            arguments: dict[str, Any] = {"storage": storage, "cache_rows": 0, "model": self.model}
            if storage == "disk":
                arguments["path"] = Path(folder) / "rows.bed"
            trained = FlatbedTable(spec, self.device, **arguments)
            try:
                yield OpenTable(trained, spec, storage, before)
            finally:
                trained.close()
                free_memory(self.device)

    def run(
        self,
        case: str,
        table: OpenTable,
        distribution: str,
        cache_rows: int,
        variants: dict[str, Variant],
        *,
        sparse: bool = False,
        longer: bool = False,
    ) -> Iterator[Row]:
        """Fill a cache and time all variants in turns, `torch sparse` among them if asked for."""
        spec, trained = table.spec, table.trained
        source = IdSource(distribution, spec.n_rows, spec.n_ids, device=self.device)
        chosen = self.options.choose({**variants, **({SPARSE: None} if sparse else {})})
        trained.use_cache(cache_rows)
        for ids in source.draw(16 * cache_rows // spec.n_ids if longer else 0):
            trained.step(ids)
        steps = {name: make(trained) for name, make in chosen.items() if make is not None}
        held = 0
        if SPARSE in chosen:
            held = spec.nbytes
            peer = SparseTable(spec, self.device, model=self.model)
            steps[SPARSE] = each(peer.step)
        counter = HitCounter(trained if cache_rows else None)
        found = time_in_turns(steps, source.draw, self.plan, self.options, around=counter.around)
        memory = dict.fromkeys(found, allocated_bytes(self.device) - table.before - source.nbytes - held)
        if SPARSE in chosen:
            memory[SPARSE] = held
            peer.close()
        setting = {"distribution": distribution, **spec.setting}
        setting |= {} if self.model_ms is None else {"model_ms": self.model_ms}
        fresh = source.draw(1)[0]
        trained.step(fresh)
        is_flushed = trained.survives_flush(np.unique(fresh)[:1024])
        for name, readings in found.items():
            own = {} if name == SPARSE else {"storage": table.storage, "cache_rows": cache_rows}
            result = self._check(name, chosen[name], table.storage, cache_rows > 0)
            metrics = self._metrics(readings, counter.counts.get(name), memory[name])
            yield self.options.row(
                "cache",
                case,
                name,
                setting={**setting, **own},
                metrics={**metrics, "max_abs_error": result.max_abs_error},
                n_samples=len(readings.back_to_back),
                ok=result.ok and (is_flushed or name == SPARSE),
            )

    def _metrics(self, readings: Readings, counts: Any, memory: int) -> dict[str, Any]:
        hits, misses = (0, 0) if counts is None else counts
        times = percentiles(readings.back_to_back)
        return {
            "back_to_back_ms": times,
            "synchronized_ms": percentiles(readings.synchronized),
            "hit_rate": hits / (hits + misses) if hits + misses else None,
            "misses_per_step": misses / readings.n_steps if hits + misses else None,
            "model_ratio": times["p50"] / self.model_ms if self.model_ms is not None else None,
            "peak_memory_bytes": memory + (readings.step_bytes or 0) if self.options.on_gpu else None,
        }

    def _check(self, name: str, variant: Variant | None, storage: str, is_cached: bool) -> Result:
        """Check a variant on a small table, once."""
        key = (name, storage, is_cached)
        if key not in self.checked:
            if variant is None:
                self.checked[key] = self.checker.check(SparseTable)
            else:
                rows = self.checker.small() if is_cached else 0
                self.checked[key] = self.checker.check(
                    FlatbedTable, variant, storage=storage, cache_rows=rows
                )
        return self.checked[key]
