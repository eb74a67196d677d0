"""Steps of a table on the host without a cache.

- step: beside tables on the GPU.
- fit: a table of 40 GB with state, on a GPU of which torch may use 4 GB.
- memory: host memory, GPU memory and disk that a trained table takes in each storage, with its default cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness import Options, Plan, allocated_bytes, each, free_memory, synchronize, time_in_turns
from benchmarks.rows import Row
from benchmarks.trained_tables import SPARSE, Checker, FlatbedTable, IdSource, SparseTable, TableSpec, scaled

CASES = ("step", "fit", "memory")
HOST, DEVICE = "flatbed host", "flatbed device"
VARIANTS: dict[str, Callable[..., Any]] = {
    HOST: partial(FlatbedTable, storage="host", cache_rows=0),
    DEVICE: partial(FlatbedTable, storage="device"),
    SPARSE: SparseTable,
}
SPEC = TableSpec(20_000_000, 128, 65_536)
FIT_SPEC = TableSpec(26_041_666, 128, 65_536)  # 40 GB with Adam's state
FIT_BYTES = 4 * 10**9
MEMORY_SPEC = TableSpec(10_000_000, 128, 65_536)
PLAN = Plan(warm_up=5, turns=5, settle=5, synchronized=6, blocks=2, block_steps=20)
SMALL_PLAN = Plan(warm_up=2, turns=2, settle=1, synchronized=2, blocks=1, block_steps=2)


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for."""
    if options.wants("step"):
        yield from run_steps("step", scaled(SPEC, options), options.choose(VARIANTS), options)
    if options.wants("fit") and options.on_gpu:
        total = torch.cuda.get_device_properties(options.device).total_memory
        torch.cuda.set_per_process_memory_fraction(FIT_BYTES / total, options.device)
        try:
            for row in run_steps("fit", scaled(FIT_SPEC, options), {HOST: VARIANTS[HOST]}, options):
                row["metrics"]["allowed_memory_bytes"] = FIT_BYTES
                yield row
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, options.device)
    if options.wants("memory"):
        yield from run_memory(scaled(MEMORY_SPEC, options), options)


def run_steps(
    case: str, spec: TableSpec, variants: dict[str, Callable[..., Any]], options: Options
) -> Iterator[Row]:
    """Time whole steps with uniform ids, in turns."""
    device = options.device
    checker = Checker(options, spec.dim)
    source = IdSource("uniform", spec.n_rows, spec.n_ids, device=device)
    tables, kept, results = {}, {}, {}
    for name, make in variants.items():
        try:
            results[name] = checker.check(make)
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
    setting = {**spec.setting, "table_bytes": spec.nbytes}
    for name, readings in found.items():
        metrics = checker.metrics(readings, kept[name], results[name])
        n, ok = len(readings.back_to_back), results[name].ok
        yield options.row(f"tables {case}", name, setting, metrics, n_samples=n, ok=ok)
    free_memory(device)


# ---- memory


def run_memory(spec: TableSpec, options: Options) -> Iterator[Row]:
    """Measure what tables take after some steps, one after another."""
    storages = ("host", "device", "disk") if options.on_gpu else ("host", "disk")
    variants: dict[str, Callable[..., Any]] = {
        f"flatbed {storage}": partial(FlatbedTable, storage=storage, init="normal") for storage in storages
    }
    for name, make in options.choose({**variants, SPARSE: SparseTable}).items():
        with TemporaryDirectory(dir=options.folder) as folder:
            path = {"path": Path(folder) / "rows.bed"} if "disk" in name else {}
            free_memory(options.device)
            before = memory_in_use(options.device)
            table = make(spec, options.device, **path)
            for ids in IdSource("uniform", spec.n_rows, spec.n_ids, device=options.device).draw(20):
                table.step(ids)
            synchronize(options.device)
            after = memory_in_use(options.device)
            metrics = {key: max(0, after[key] - before[key]) for key in after}
            metrics["disk_bytes"] = sum(file.stat().st_size for file in Path(folder).rglob("*.bed*"))
            table.close()
        setting = {**spec.setting, "table_bytes": spec.nbytes}
        yield options.row("tables memory", name, setting, metrics, n_samples=1, ok=True)
        del table
        free_memory(options.device)


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Return host memory that the machine uses, without its page cache, and GPU memory."""
    kilobytes = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
    in_use = int(kilobytes["MemTotal"]) - int(kilobytes["MemAvailable"])
    found = {"host_memory_bytes": 1024 * in_use}
    if device.type == "cuda":
        free, all_of_it = torch.cuda.mem_get_info(device)
        found["gpu_memory_bytes"] = all_of_it - free
    return found
