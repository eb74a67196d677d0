from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flatbed.bench import floor
from flatbed.bench.check import TOLERANCE
from flatbed.bench.floor import PRECISIONS, FloorRow, Precision, Setting, copy_speed, floor_ways, run
from flatbed.bench.rows import FOREACH, FUSED, LOOP, read_rows, write_rows
from flatbed.bench.ways import CAPTURED, OPTIM, OPTIMIZERS
from tests.bench.samples import CPU, TINY

FP32, MIXED = PRECISIONS["fp32"], PRECISIONS["bf16-master"]
CUDA = torch.device("cuda")
TORCH = [LOOP, FOREACH, FUSED]


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(floor.COPY_BYTES, "cpu", 1 << 20)


def test_the_floor_counts_every_byte_once() -> None:
    assert FP32.bytes_per_element == 4 + 4 + 8 + 16
    assert MIXED.bytes_per_element == 2 + 2 + 2 + 8 + 16


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_every_way_gives_a_row(precision: Precision, tmp_path: Path) -> None:
    stages: list[str] = []
    setting = Setting(TINY, precision, CPU, steps=3)
    rows = run(setting, progress=stages.append)
    assert len(stages) == setting.n_stages
    assert [row.way for row in rows] == ([*TORCH, OPTIM] if precision is FP32 else [OPTIM])
    for row in rows:
        assert (row.benchmark, row.model, row.precision) == ("floor", "tiny", precision.name)
        assert (row.n_params, row.n_elements, row.n_samples) == (4, 90, 3)
        assert row.ok
        assert 0 < row.wall_p20_ms <= row.wall_p50_ms <= row.wall_p80_ms
        assert row.gpu_p50_ms is row.host_p50_ms is row.step_memory_bytes is row.overhead_bytes is None
        traffic = 90 * precision.bytes_per_element
        assert row.floor_ms == pytest.approx(traffic / (1e6 * row.copy_gb_per_s))
        assert row.ratio_to_floor == pytest.approx(row.wall_p50_ms / row.floor_ms)
    fused = [row.wall_p50_ms for row in rows if row.way == FUSED]
    for row in rows:
        assert row.ratio_to_fused == (pytest.approx(row.wall_p50_ms / fused[0]) if fused else None)

    write_rows(rows, tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json", FloorRow) == rows


def test_the_ways_are_those_that_can_be_taken() -> None:
    assert list(floor_ways(Setting(TINY, FP32, CUDA, steps=1))) == [*TORCH, OPTIM, CAPTURED]
    assert list(floor_ways(Setting(TINY, MIXED, CUDA, steps=1))) == [OPTIM, CAPTURED]
    large = replace(TINY, one_at_a_time=True)
    assert list(floor_ways(Setting(large, FP32, CUDA, steps=1))) == [FUSED, OPTIM, CAPTURED]


def never_clipping(
    params: Sequence[Tensor], precision: Precision, max_norm: float
) -> tuple[torch.optim.Optimizer, floor.Step]:
    optimizer = OPTIMIZERS["adam"].make_flatbed(params, master_weights=precision.master_weights)
    return optimizer, optimizer.step


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_a_wrong_step_is_marked(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "_optim", never_clipping)
    rows = run(Setting(TINY, precision, CPU, steps=30))
    assert [row.ok for row in rows if row.way == FUSED] == [True] * (precision is FP32)
    (wrong,) = [row for row in rows if row.way == OPTIM]
    assert not wrong.ok
    assert wrong.max_rel_error > 5 * TOLERANCE


def test_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "_read_one", lambda call, device: 0.5)
    assert copy_speed(CPU) == 2 * (1 << 20) / 0.5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_on_a_gpu_rows_tell_times_and_memory(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(floor.COPY_BYTES, "cuda", 1 << 28)
    rows = {row.way: row for row in run(Setting(TINY, precision, CUDA, steps=5))}
    assert CAPTURED in rows
    for row in rows.values():
        assert row.ok
        assert 0 < row.gpu_p50_ms < row.wall_p80_ms
        assert 0 < row.host_p50_ms <= row.wall_p50_ms
        assert row.step_memory_bytes >= 0
        assert row.overhead_bytes >= 0
        assert row.copy_gb_per_s > 10
