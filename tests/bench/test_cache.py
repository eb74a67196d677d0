"""`flatbed bench cache` as a whole: every case on a CPU, its command, and what it finds to be wrong."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from flatbed.bench import cache, cache_check, cache_disk, cache_measure, cache_swap, cache_ways, plot
from flatbed.bench.cache_ids import UNIFORM, ZIPF_105, Source
from flatbed.bench.cache_measure import Plan
from flatbed.bench.cache_rows import CASES, CacheRow, Result, SwapRow, summary
from flatbed.bench.cache_ways import (
    CAPTURED,
    CAPTURED_PREFETCHED,
    EAGER,
    PREFETCHED,
    SPARSE,
    CachedTable,
    Shape,
)
from flatbed.bench.options import CacheCase
from flatbed.bench.rows import read_rows
from flatbed.cli import app
from tests.bench.samples import CPU, MACHINE

invoke = CliRunner().invoke
TINY = replace(
    cache.QUICK,
    n_rows=1000,
    n_ids=32,
    cache_rows=300,
    sizes=(128, 256),
    table_rows=(500, 1000),
    narrow_cache_rows=128,
    n_misses=20,
    disk_rows=400,
    disk_cache_rows=300,
    model_ms=0.1,
    check_rows=200,
    check_ids=24,
)
PLAN = Plan(warm_up=3, synced=2, blocks=2, block_steps=2)
SETTING = cache.Setting(CPU, MACHINE, TINY, PLAN)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "QUICK", TINY)
    monkeypatch.setattr(cache, "QUICK_PLAN", PLAN)
    monkeypatch.setattr(cache_measure, "SETTLE", 3)
    monkeypatch.setattr("flatbed.bench.cache_step.FILLS", 1)


def run(case: str, setting: cache.Setting = SETTING, *, said: list[str] | None = None) -> list[Result]:
    stages: list[str] = []

    def left_out(way: str, reason: str) -> None:
        if said is None:
            raise AssertionError(f"{way}: {reason}")
        said.append(f"{way}: {reason}")

    rows = list(cache.run(case, setting, stage=stages.append, left_out=left_out))
    assert len(stages) == cache.n_stages(case, setting) or said
    return rows


# ---- every case


@pytest.mark.parametrize("case", [case for case in CASES if case != "swap"])
def test_steps_are_right_in_every_case(case: str) -> None:
    rows = run(case)
    for row in rows:
        assert isinstance(row, CacheRow)
        assert row.ok, summary(row)
        assert row.max_abs_error < 1e-6
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert 0 < row.in_row_p20_ms <= row.in_row_p50_ms <= row.in_row_p80_ms
        assert (row.n_samples, row.n_blocks, row.block_steps) == (4, 4, 2)
        assert row.warm_up_steps >= 3
        assert (row.hits_per_step is None) == (row.cache_rows == 0)
        if row.hits_per_step is not None and row.misses_per_step is not None:
            assert 1 < row.hits_per_step + row.misses_per_step <= 32
    kinds = {(row.distribution, row.way, row.cache_rows, row.policy) for row in rows}  # type: ignore[union-attr]
    assert len(kinds) == len(rows) or case == "rows"


def test_step_takes_every_way_through_every_cache() -> None:
    rows = [row for row in run("step") if isinstance(row, CacheRow)]
    for law in ("uniform", "zipf 1.05", "zipf 1.2"):
        ways = [(row.way, row.cache_rows, row.policy) for row in rows if row.distribution == law]
        small = [("flatbed", 128, "lfu")] if law == "uniform" else []
        assert ways == [
            ("flatbed", 0, None),
            *small,
            ("flatbed", 300, "lru"),
            ("flatbed", 300, "lfu"),
            ("flatbed, prefetched", 300, "lfu"),
            ("torch sparse", 0, None),
        ]
    assert {row.storage for row in rows if row.way == SPARSE.name} == {"device"}


def test_on_a_gpu_steps_are_captured_after_all_others() -> None:
    from flatbed.bench.cache_step import step_mixes

    shape = Shape(cache.FULL.n_rows, cache.FULL.dim, cache.FULL.n_ids)
    mixes = step_mixes(UNIFORM, shape, cache.FULL.cache_rows, torch.device("cuda"))
    assert [mix.cache_rows for mix in mixes] == [0, 262_144, 2_000_000, 2_000_000]
    assert mixes[-1].groups == ((EAGER, PREFETCHED), (CAPTURED, CAPTURED_PREFETCHED))
    assert len(step_mixes(ZIPF_105, shape, 2_000_000, torch.device("cuda"))) == 3


def test_hits_are_fixed_where_they_should_be() -> None:
    rows = [row for row in run("rows") if isinstance(row, CacheRow)]
    fixed = [row for row in rows if row.distribution == "half hits"]
    assert [row.cache_rows for row in fixed] == [128, 256]
    for row in fixed:
        assert (row.hits_per_step, row.misses_per_step) == (16, 16)
    assert {(row.n_rows, row.distribution) for row in rows if row not in fixed} == {
        (n, law) for n in (500, 1000) for law in ("uniform", "zipf 1.05")
    }


def test_longer_caches_are_warmed_up_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in run("sizes") if isinstance(row, CacheRow)]
    assert {(row.cache_rows, row.warm_up_steps) for row in rows} == {(128, 4), (256, 8)}
    assert {row.policy for row in rows} == {"lru", "lfu"}
    assert len(rows) == 8


def test_disk_has_a_model_beside_it() -> None:
    rows = [row for row in run("disk") if isinstance(row, CacheRow)]
    assert [row.depth for row in rows] == [0, 2, 4]
    for row in rows:
        assert row.storage == "disk"
        assert row.model_ms is not None
        assert row.model_ratio == pytest.approx(row.in_row_p50_ms / row.model_ms)


def test_a_model_has_as_many_products_as_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_disk, "device_time", lambda call, device: 0.8)  # of four
    assert cache_disk.Matmuls(5.0, CPU).n_products == 25
    assert cache_disk.Matmuls(0.01, CPU).n_products == 1
    steps = cache_disk.Matmuls(1.0, CPU).steps()
    for _ in range(3):
        next(steps)


@pytest.mark.parametrize("interpreted", [False, True])
def test_records_are_swapped(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    setting = replace(SETTING, sizes=replace(TINY, n_rows=100, cache_rows=40, n_misses=9))
    (row,) = run("swap", setting)
    assert isinstance(row, SwapRow)
    assert row.ok
    assert (row.memory, row.record_bytes, row.n_misses, row.n_samples) == ("plain", 384, 9, 3)
    assert row.gb_per_s == pytest.approx(2 * 9 * 384 / (1e6 * row.p50_ms))
    assert row.share_of_dma == pytest.approx(row.gb_per_s / row.dma_gb_per_s)


def test_lost_records_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cache_swap.launcher

    def half(table: Tensor, cached: Tensor) -> object:
        launch = whole(table, cached)

        def lossy(lists: cache_swap.Lists) -> None:
            some = (lists.missing[::2], lists.slots[::2], lists.victims[::2], lists.n_missing)
            launch(cache_swap.Lists(*some))

        return lossy

    monkeypatch.setattr(cache_swap, "launcher", half)
    (row,) = run("swap")
    assert not row.ok
    assert "FAILED" in summary(row)


# ---- ways


class CalledAgain:
    """In the place of a CUDA graph."""

    n_made = 0

    def __init__(self, call: object) -> None:
        CalledAgain.n_made += 1
        self.call = call

    def __call__(self) -> None:
        self.call()  # type: ignore[operator]


@pytest.fixture
def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    CalledAgain.n_made = 0
    monkeypatch.setattr(cache_ways, "Captured", CalledAgain)
    monkeypatch.setattr(cache_ways, "pinned", torch.from_numpy)


@pytest.mark.usefixtures("without_graphs")
@pytest.mark.parametrize("way", [CAPTURED, CAPTURED_PREFETCHED])
def test_ids_are_copied_to_where_a_graph_reads_them(way: cache_ways.Way) -> None:
    checker = cache_check.Checker(4, CPU, n_rows=200, n_ids=24)
    assert checker.check(way, cached=True, policy="lru").ok
    assert CalledAgain.n_made == 1


@pytest.mark.usefixtures("without_graphs")
def test_another_cache_needs_another_graph() -> None:
    trainee = CachedTable(Shape(100, 4, 8), device=CPU)
    source = Source(UNIFORM, 100, 8, device=CPU)
    for way in (CAPTURED, CAPTURED_PREFETCHED):
        assert len(list(trainee.steps(way, source.draw(5)))) == 5
    assert CalledAgain.n_made == 1
    trainee.use(20, "lru")
    assert len(list(trainee.steps(CAPTURED_PREFETCHED, source.draw(5)))) == 5
    assert CalledAgain.n_made == 2
    trainee.close()


@pytest.mark.parametrize("way", [EAGER, PREFETCHED])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_checks_reach_the_kernels(way: cache_ways.Way, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(cache_check, "N_STEPS", 3)
    checker = cache_check.Checker(4, CPU, n_rows=60, n_ids=10)
    verdict = checker.check(way, cached=True, policy=policy)
    assert verdict.ok
    assert verdict.max_abs_error < 1e-6


def test_a_step_is_taken_when_it_is_asked_for() -> None:
    trainee = CachedTable(Shape(100, 4, 8), device=CPU)
    batches = Source(UNIFORM, 100, 8, device=CPU).draw(3)
    for way in (EAGER, PREFETCHED):
        steps = trainee.steps(way, batches)
        before = trainee.read(batches[0])
        next(steps)
        assert not torch.equal(trainee.read(batches[0]), before)
        steps.close()  # the prefetcher ends with it
    trainee.close()


# ---- wrong results are found


def test_steps_that_are_too_long_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import flatbed.optim

    adam = flatbed.optim.Adam
    monkeypatch.setattr(flatbed.optim, "Adam", lambda module, lr: adam(module, lr=1.02 * lr))
    checker = cache_check.Checker(4, CPU, n_rows=200, n_ids=24)
    assert not checker.check(EAGER, cached=True, policy="lru").ok
    assert not checker.check(SPARSE, cached=False, policy="lru").ok


def test_a_cache_that_changes_a_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = CachedTable.read

    def other(self: CachedTable, rows: object) -> Tensor:
        found = read(self, rows)  # type: ignore[arg-type]
        if self.emb.table.store.cache is not None:
            found[0, 0] += 1e-7
        return found

    monkeypatch.setattr(CachedTable, "read", other)
    checker = cache_check.Checker(4, CPU, n_rows=200, n_ids=24)
    assert checker.check(EAGER, cached=False, policy="lru").ok
    assert not checker.check(EAGER, cached=True, policy="lru").ok


def test_rows_that_do_not_come_home_are_found() -> None:
    trainee = CachedTable(Shape(100, 4, 8), device=CPU)
    trainee.use(50, "lru")
    (batch,) = Source(UNIFORM, 100, 8, device=CPU).draw(1)
    for _ in trainee.steps(EAGER, [batch]):
        pass
    others = np.setdiff1d(np.arange(100), batch)
    assert not trainee.at_home(others)  # no step has been there
    trainee.use(50, "lru")
    for _ in trainee.steps(EAGER, [batch]):
        pass
    held = trainee.emb.table.store.cache
    assert held is not None
    held.tags.dirty.zero_()  # so that nothing is written
    assert not trainee.at_home(np.unique(batch))
    trainee.close()


def test_a_way_that_fails_is_named_and_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no thread")

    monkeypatch.setattr(cache_ways, "Prefetcher", fail)
    said: list[str] = []
    rows = run("step", said=said)
    assert {row.way for row in rows} == {"torch sparse", "flatbed"}
    assert {row.cache_rows for row in rows if isinstance(row, CacheRow) and row.policy == "lfu"} == {128, 300}
    assert said == ["flatbed, prefetched: RuntimeError: no thread"] * 3
    assert all(row.ok for row in rows)
    result = invoke(app, ["bench", "cache", "step", "--device", "cpu"])
    assert result.exit_code == 1
    assert "FAILED: not what the reference gives, in step: flatbed, prefetched" in result.output


# ---- the command


def test_the_command_measures_stores_and_draws_every_case(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folders = ["--out", str(tmp_path), "--plots", str(tmp_path), "--folder", str(tmp_path)]
    result = invoke(app, ["bench", "cache", "--device", "cpu", *folders])
    assert result.exit_code == 0, result.output
    names = [f"cpu-cache-{case}" for case in CASES]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}.{kind}" for name in names for kind in ("json", "png")
    )
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        rows = read_rows(tmp_path / f"{name}.json", CacheRow, SwapRow)
        assert rows
        for row in rows:
            assert summary(row) in result.output


def test_some_cases_can_be_asked_for(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--quick", "--scale", "0.5", "--warm-up", "2", "--steps", "3"]
    result = invoke(app, ["bench", "cache", "swap", "sizes", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "cpu-cache-sizes.json", CacheRow)
    assert [row.cache_rows for row in rows[:2]] == [64, 128]
    assert {row.n_rows for row in rows} == {500}
    (swap,) = read_rows(tmp_path / "cpu-cache-swap.json", SwapRow)
    assert swap.n_misses == 10


def test_the_defaults_are_those_of_the_stated_targets() -> None:
    setting = cache.make_setting(torch.device("cuda"), MACHINE)
    assert (setting.sizes, setting.plan) == (cache.FULL, Plan(200, 100, 10, 20))
    sizes = setting.sizes
    assert (sizes.n_rows, sizes.dim, sizes.n_ids, sizes.cache_rows) == (20_000_000, 128, 65_536, 2_000_000)
    assert (sizes.record_bytes, sizes.n_misses) == (1536, 59_000)
    assert sizes.n_rows in sizes.table_rows
    assert (setting.short.synced, setting.short.blocks) == (20, 6)
    assert cache.make_setting(torch.device("cuda"), MACHINE, quick=True).sizes is not cache.FULL
    longer = cache.make_setting(torch.device("cuda"), MACHINE, steps=200, warm_up=7).plan
    assert (longer.synced, longer.blocks, longer.warm_up) == (200, 20, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "'nothing'"),
        (["--out", "/no/such/folder"], "does not exist"),
        (["--plots", "/no/such/folder"], "does not exist"),
        (["--scale", "0"], "--scale"),
        (["--warm-up", "0"], "--warm-up"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: list[str], message: str) -> None:
    result = invoke(app, ["bench", "cache", "--device", "cpu", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_plots_are_refused_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    result = invoke(app, ["bench", "cache", "--device", "cpu", "--plots", str(tmp_path)])
    assert result.exit_code == 2
    assert "matplotlib is not installed" in result.output


def test_the_choices_are_those_that_exist() -> None:
    assert [case.value for case in CacheCase] == list(CASES)
    assert cache.find_cases(["disk", "step"]) == ["step", "disk"]
    with pytest.raises(ValueError, match="no case named 'stop'; there are step, sizes"):
        cache.find_cases(["stop"])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_every_case_is_right(case: str) -> None:
    sizes = replace(cache.scaled(cache.FULL, 0.002), n_ids=1024, sizes=(4096, 8192), cache_rows=8192)
    sizes = replace(sizes, narrow_cache_rows=8192, disk_rows=20_000, disk_cache_rows=10_240)
    setting = cache.Setting(torch.device("cuda"), MACHINE, sizes, Plan(5, 4, 2, 5))
    rows = run(case, setting)
    assert rows
    for row in rows:
        assert row.ok, summary(row)
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
    if case == "step":
        assert CAPTURED_PREFETCHED.name in {row.way for row in rows}
