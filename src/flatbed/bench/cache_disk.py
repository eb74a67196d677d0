"""A table on disk beside a model: how much of its time does the prefetcher hide?"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flatbed.bench.cache_ids import ZIPF_105, Source
from flatbed.bench.cache_measure import TURNS, Readings, read_in_turns, read_turn, warm_up
from flatbed.bench.cache_rows import FLATBED, CacheRow
from flatbed.bench.cache_step import Measured, Mix, StepSetting, came_home, rows_of
from flatbed.bench.cache_ways import EAGER, CachedTable, Way
from flatbed.bench.measure import allocated_bytes, free_memory, percentiles
from flatbed.bench.tables_measure import device_time

N_STAGES = 3
SIZES = {"cuda": (4096, torch.bfloat16), "cpu": (96, torch.float32)}


class Matmuls:
    """A model of so many products of matrices that a step takes about `wanted_ms`."""

    def __init__(self, wanted_ms: float, device: torch.device) -> None:
        n, dtype = SIZES[device.type]
        generator = torch.Generator(device).manual_seed(0)
        self._left, self._right = torch.randn((2, n, n), device=device, generator=generator).to(dtype)
        self._out = torch.empty_like(self._left)
        self.n_products = 4
        times = [device_time(self, device) for _ in range(20)][10:]
        self.n_products = max(1, round(4 * wanted_ms / percentiles(times)[1]))

    def __call__(self) -> None:
        for _ in range(self.n_products):
            torch.mm(self._left, self._right, out=self._out)

    def steps(self) -> Generator[None, None, None]:
        """A step whenever one is asked for."""
        while True:
            self()
            yield


def ways(depths: Sequence[int]) -> tuple[Way, ...]:
    """Without a prefetcher, and with some."""
    return (EAGER, *(Way(f"{FLATBED}, prefetched {depth}", depth=depth) for depth in depths))


def run(
    setting: StepSetting, cache_rows: int, *, depths: Sequence[int], model_ms: float, folder: Path | None
) -> Iterator[CacheRow]:
    """A row per way, in turns, beside the same model, which is measured alone before them."""
    device = setting.device
    setting.stage("the model alone")
    model = Matmuls(model_ms, device)
    alone = Readings()
    with closing(model.steps()) as steps:
        for _ in range(TURNS):
            read_turn(steps, setting.plan, alone, device, setting.host)
    with TemporaryDirectory(dir=folder) as made:
        shape = replace(setting.shape, storage="disk", path=Path(made) / "rows.table")
        setting = replace(setting, shape=shape)
        setting.stage(f"a file of {shape.n_rows:,} × {shape.dim}")
        free_memory(device)
        baseline = allocated_bytes(device)
        trainee = CachedTable(shape, device=device, model=model)
        try:
            source = Source(ZIPF_105, shape.n_rows, shape.n_ids, device=device)
            mix = Mix(cache_rows, "lfu", (ways(depths),))
            trainee.use(mix.cache_rows, mix.policy)
            warm_up(trainee, source, setting.plan.warm_up)
            setting.stage(", ".join(way.name for way in mix.ways))
            found = read_in_turns(
                trainee,
                mix.ways,
                source,
                setting.plan,
                device=device,
                host=setting.host,
                left_out=setting.left_out,
                baseline_bytes=baseline,
            )
            home = came_home(trainee, found)
            beside = percentiles(alone.in_row)[1]
            for way, readings in found.items():
                measured = Measured(
                    way, mix, source.law.name, readings, trainee.record_bytes, home, model_ms=beside
                )
                yield from rows_of(setting, measured)
        finally:
            trainee.close()
    free_memory(device)
