"""Steps of a table on the host without a cache.

- step: beside tables on the GPU.
- fit: a table of 40 GB with state, on a GPU of which torch may use 4 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.harness import (
    Options,
    Plan,
    allocated_bytes,
    each,
    free_memory,
    time_in_turns,
)
from benchmarks.id_sources import IdSource
from benchmarks.rows import Row, percentiles
from benchmarks.trained_tables import (
    SPARSE,
    Checker,
    FlatbedTable,
    SparseTable,
    TableSpec,
    scaled,
)

CASES = ("step", "fit")
HOST, DEVICE = "flatbed host", "flatbed device"
VARIANTS: dict[str, Callable[..., Any]] = {
    HOST: partial(FlatbedTable, storage="host", cache_rows=0),
    DEVICE: partial(FlatbedTable, storage="device"),
    SPARSE: SparseTable,
}
SPEC = TableSpec(20_000_000, 128, 65_536)
FIT_ROWS = 26_041_666  # 40 GB with Adam's state
FIT_BYTES = 4 * 10**9
PLAN = Plan(warm_up=5, turns=5, synchronized=6, blocks=2, block_steps=20)
SMALL_PLAN = Plan(warm_up=2, turns=2, synchronized=2, blocks=1, block_steps=2, settle=1)


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for."""
    spec = scaled(SPEC, small=options.is_small)
    if options.wants("step"):
        yield from run_steps("step", spec, options.choose(VARIANTS), options)
    if options.wants("fit") and options.on_gpu:
        fit = scaled(TableSpec(FIT_ROWS, 128, 65_536), small=options.is_small)
        with limited_memory(options.device, FIT_BYTES):
            host = {HOST: VARIANTS[HOST]}
            yield from run_steps("fit", fit, host, options, allowed_memory_bytes=FIT_BYTES)


def run_steps(
    case: str, spec: TableSpec, variants: dict[str, Callable[..., Any]], options: Options, **more: Any
) -> Iterator[Row]:
    """Time whole steps with uniform ids, in turns."""
    device = options.device
    checks = Checker(spec.dim, device, **({"n_rows": 500, "n_ids": 48} if options.is_small else {}))
    source = IdSource("uniform", spec.n_rows, spec.n_ids, device=device)
    tables, kept, results = {}, {}, {}
    for name, make in variants.items():
        try:
            results[name] = checks.check(make)
            free_memory(device)
            before = allocated_bytes(device)
            tables[name] = make(spec, device)
            tables[name].step(source.draw(1)[0])
            kept[name] = allocated_bytes(device) - before
        except Exception as error:
            options.skip(name, error)
    plan = SMALL_PLAN if options.is_small else PLAN
    steps = {name: each(table.step) for name, table in tables.items()}
    found = time_in_turns(steps, source.draw, plan, options)
    for table in tables.values():
        table.close()
    free_memory(device)
    for name, readings in found.items():
        result = results[name]
        metrics = {
            "back_to_back_ms": percentiles(readings.back_to_back),
            "synchronized_ms": percentiles(readings.synchronized),
            "peak_memory_bytes": kept[name] + (readings.step_bytes or 0) if options.on_gpu else None,
            "max_abs_error": result.max_abs_error,
            **more,
        }
        yield options.row(
            "tables",
            case,
            name,
            setting={**spec.setting, "table_bytes": spec.nbytes},
            metrics=metrics,
            n_samples=len(readings.back_to_back),
            ok=result.ok,
        )


@contextmanager
def limited_memory(device: torch.device, nbytes: int) -> Iterator[None]:
    """Keep torch from allocating more than `nbytes` of the GPU."""
    free_memory(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
