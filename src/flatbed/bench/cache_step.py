"""Whole steps through a cache: the cases `step`, `sizes` and `rows`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from flatbed.bench.cache_check import Checker, sample
from flatbed.bench.cache_ids import HALF_HITS, UNIFORM, ZIPF_105, ZIPF_120, Distribution, Source
from flatbed.bench.cache_measure import LeftOut, Plan, Readings, Stage, read_in_turns, warm_up
from flatbed.bench.cache_rows import BENCHMARK, CacheRow
from flatbed.bench.cache_ways import (
    CAPTURED,
    CAPTURED_PREFETCHED,
    EAGER,
    PREFETCHED,
    SPARSE,
    CachedTable,
    Shape,
    SparseTable,
    Trainee,
    Way,
)
from flatbed.bench.host import Host
from flatbed.bench.measure import allocated_bytes, free_memory, percentiles
from flatbed.bench.rows import Machine

LAWS = (UNIFORM, ZIPF_105, ZIPF_120)
FILLS = 16  # ids that are drawn before readings, for each slot of a cache whose hits are of interest


@dataclass(frozen=True, slots=True)
class StepSetting:
    """What the cases of steps have in common."""

    case: str
    shape: Shape
    plan: Plan
    device: torch.device
    machine: Machine
    checker: Checker
    host: Host
    stage: Stage
    left_out: LeftOut


@dataclass(frozen=True, slots=True)
class Mix:
    """A cache, and the ways in which steps go through it, group after group: those of a group in turns."""

    cache_rows: int
    policy: str
    groups: tuple[tuple[Way, ...], ...] = ((EAGER,),)

    @property
    def ways(self) -> list[Way]:
        """All of them."""
        return [way for group in self.groups for way in group]


def step_mixes(law: Distribution, shape: Shape, cache_rows: int, device: torch.device) -> list[Mix]:
    """What `step` measures for one distribution."""
    # Graphs change how others prefetch, so that all that is captured comes last.
    groups: tuple[tuple[Way, ...], ...] = ((EAGER, PREFETCHED),)
    if device.type == "cuda":
        groups = (*groups, (CAPTURED, CAPTURED_PREFETCHED))
    mixes = [Mix(0, "lru")]
    if law is UNIFORM:
        mixes.append(Mix(min(4 * shape.n_ids, shape.n_rows), "lfu"))
    return [*mixes, Mix(cache_rows, "lru"), Mix(cache_rows, "lfu", groups)]


def run_step(setting: StepSetting, cache_rows: int) -> Iterator[CacheRow]:
    """All ways, for each distribution; torch's own last, when the table has made room."""
    with _table(setting) as trainee:
        for law in LAWS:
            source = _source(setting, law)
            for mix in step_mixes(law, setting.shape, cache_rows, setting.device):
                yield from _measured(setting, trainee, mix, source)
    try:
        before = allocated_bytes(setting.device)
        sparse = SparseTable(setting.shape, device=setting.device)
        for law in LAWS:
            source, mix = _source(setting, law), Mix(0, "lru", ((SPARSE,),))
            yield from _measured(setting, sparse, mix, source, baseline_bytes=before + source.nbytes)
        sparse.close()
    except torch.OutOfMemoryError as error:
        setting.left_out(SPARSE.name, str(error))
    free_memory(setting.device)


def run_sizes(setting: StepSetting, sizes: Sequence[int]) -> Iterator[CacheRow]:
    """Caches of several sizes under both policies, which meet the same ids, after a long warm-up."""
    with _table(setting) as trainee:
        for law in (ZIPF_105, ZIPF_120):
            source = _source(setting, law)
            for policy in ("lru", "lfu"):
                for cache_rows in sizes:
                    n_warm = max(setting.plan.warm_up, FILLS * cache_rows // setting.shape.n_ids)
                    longer = replace(setting, plan=replace(setting.plan, warm_up=n_warm))
                    source.begin_anew()
                    yield from _measured(longer, trainee, Mix(cache_rows, policy), source)


def run_rows(
    setting: StepSetting, table_rows: Sequence[int], cache_rows: int, sizes: Sequence[int]
) -> Iterator[CacheRow]:
    """Tables of several sizes behind the same cache; then caches of several sizes with the same hits."""
    for n_rows in table_rows:
        sized = replace(setting, shape=replace(setting.shape, n_rows=n_rows))
        with _table(sized) as trainee:
            groups = row_groups(setting.device)
            for law in (UNIFORM, ZIPF_105):
                mix = Mix(min(cache_rows, n_rows), "lfu", groups)
                yield from _measured(sized, trainee, mix, _source(sized, law))
            if n_rows == setting.shape.n_rows:
                for size in sizes:
                    mix = Mix(size, "lfu", groups)
                    yield from _measured(sized, trainee, mix, _source(sized, HALF_HITS))


def row_groups(device: torch.device) -> tuple[tuple[Way, ...], ...]:
    """Steps as they come, which the host may bound; and captured, which only the GPU can."""
    return ((EAGER,), (CAPTURED,)) if device.type == "cuda" else ((EAGER,),)


@contextmanager
def _table(setting: StepSetting) -> Iterator[CachedTable]:
    """One table for all: laying it out takes longer than the steps."""
    setting.stage(f"a table of {setting.shape.n_rows:,} × {setting.shape.dim}")
    free_memory(setting.device)
    trainee = CachedTable(setting.shape, device=setting.device)
    try:
        yield trainee
    finally:
        trainee.close()
        del trainee
        free_memory(setting.device)


def _source(setting: StepSetting, law: Distribution) -> Source:
    return Source(law, setting.shape.n_rows, setting.shape.n_ids, device=setting.device)


def _measured(
    setting: StepSetting, trainee: Trainee, mix: Mix, source: Source, *, baseline_bytes: int | None = None
) -> Iterator[CacheRow]:
    """Fill the cache, read all ways through it, look whether its rows come home."""
    if setting.device.type == "cuda":
        free_memory(setting.device)
    baseline = allocated_bytes(setting.device) if baseline_bytes is None else baseline_bytes
    trainee.use(mix.cache_rows, mix.policy)
    cache = f"{mix.policy} {mix.cache_rows:,}" if mix.cache_rows else "no cache"
    setting.stage(f"{source.law.name}, {cache}: {', '.join(way.name for way in mix.ways)}")
    warm_up(trainee, source, setting.plan.warm_up)
    found: dict[Way, Readings] = {}
    for group in mix.groups:
        found |= read_in_turns(
            trainee,
            group,
            source,
            setting.plan,
            device=setting.device,
            host=setting.host,
            left_out=setting.left_out,
            baseline_bytes=baseline,
        )
    home = came_home(trainee, found)
    for way, readings in found.items():
        measured = Measured(way, mix, source.law.name, readings, trainee.record_bytes, home)
        yield from rows_of(setting, measured)


def came_home(trainee: Trainee, found: dict[Way, Readings]) -> bool:
    """Whether rows of the last steps are the same without the cache."""
    batches = [readings.last for readings in found.values() if readings.last is not None]
    return all(trainee.at_home(sample(batch)) for batch in batches[-1:])


@dataclass(frozen=True, slots=True)
class Measured:
    """One way through one cache."""

    way: Way
    mix: Mix
    law: str
    readings: Readings
    record_bytes: int
    home: bool
    """Whether the large table's rows came home."""
    model_ms: float | None = None


def rows_of(setting: StepSetting, measured: Measured) -> Iterator[CacheRow]:
    """What was read, as a row; none if the check of the way cannot be carried out."""
    try:
        yield row_of(setting, measured)
    except Exception as error:
        setting.left_out(measured.way.name, f"its check failed: {type(error).__name__}: {error}")


def row_of(setting: StepSetting, measured: Measured) -> CacheRow:
    """What was read, as a row, and whether the way is right."""
    shape, way, mix, readings = setting.shape, measured.way, measured.mix, measured.readings
    verdict = setting.checker.check(way, cached=mix.cache_rows > 0, policy=mix.policy, storage=shape.storage)
    (p20, p50, p80), in_row = percentiles(readings.synced), percentiles(readings.in_row)
    return CacheRow(
        benchmark=BENCHMARK,
        case=setting.case,
        way=way.name,
        distribution=measured.law,
        optimizer="adam",
        storage="device" if way == SPARSE else shape.storage,
        n_rows=shape.n_rows,
        dim=shape.dim,
        record_bytes=measured.record_bytes,
        n_ids=shape.n_ids,
        cache_rows=mix.cache_rows,
        policy=mix.policy if mix.cache_rows else None,
        depth=way.depth,
        captured=way.captured,
        warm_up_steps=setting.plan.warm_up,
        n_samples=len(readings.synced),
        p20_ms=p20,
        p50_ms=p50,
        p80_ms=p80,
        block_steps=setting.plan.block_steps,
        n_blocks=len(readings.in_row),
        in_row_p20_ms=in_row[0],
        in_row_p50_ms=in_row[1],
        in_row_p80_ms=in_row[2],
        host_pace_p50=percentiles(readings.paces)[1],
        hits_per_step=readings.per_step("hits"),
        misses_per_step=readings.per_step("misses"),
        written_per_step=readings.per_step("written"),
        model_ms=measured.model_ms,
        peak_memory_bytes=readings.peak_bytes,
        max_abs_error=verdict.max_abs_error,
        ok=verdict.ok and measured.home,
        machine=setting.machine,
    )
