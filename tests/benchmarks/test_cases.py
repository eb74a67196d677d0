"""A tiny run of every benchmark: rows are complete, and all checks pass. Broken variants fail."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import models, rows, trainers
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.cases import data, overlap, roofline, shards, speedtorch, step, topk
from benchmarks.harness import Options, each
from benchmarks.models import Model
from benchmarks.report import newest
from benchmarks.trained_tables import Checker, FlatbedTable, SparseTable
from tests.cases import DEVICES

CPU = torch.device("cpu")
FEW = Options(CPU, quick=True, steps=2, report=lambda line: None)
TINY = Model(
    "tiny",
    partial(models.linear100, layers=3, width=8),
    partial(models._linear_batch, size=4, width=8),
    models._squared_error,
    steps=2,
)
CASES = {
    "step": ("linear100:adamw", "linear100:sgd"),
    "roofline": ("linear100", "linear100:bf16-master"),
    "trace": ("linear100",),
}
N_ROWS = dict(zip(BENCHMARKS, (18, 6, 3, 6, 12, 13, 35, 4, 24, 10, 5, 40, 8), strict=True))
"""Rows of each benchmark on a CPU: its cases and variants."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "linear100", lambda device: TINY)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch.compile itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("tiny")
@DEVICES
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_variant_passes_its_check(
    name: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU with captured variants."""
    (tmp_path / "tables").mkdir()
    words = [name, *CASES.get(name, ()), "--quick", "--device", device, "--steps", "4"]
    words += ["--folder", str(tmp_path / "tables"), "--json", str(tmp_path / "rows.json")]
    assert main(words) == 0
    assert f"**{name} " in capsys.readouterr().out
    listed = rows.read_rows(tmp_path / "rows.json")
    assert {row["benchmark"] for row in listed} == {name}
    for row in listed:
        for spread in row["metrics"].values():
            assert not isinstance(spread, dict) or 0 < spread["p20"] <= spread["p50"] <= spread["p80"], row
    assert list((tmp_path / "tables").iterdir()) == []
    if device == "cpu":
        assert len(listed) == N_ROWS[name]
    elif name in ("step", "roofline", "cache"):
        assert any("captured" in row["variant"] for row in listed)


# ---- broken variants, and numbers of the model


def not_clipping(model: nn.Module, loss: Any, name: str, max_norm: float) -> trainers.Trainer:
    return trainers.with_torch(model, loss, name, 1e9, foreach=True)


def idle(model: nn.Module, loss: Any, name: str, max_norm: float) -> trainers.Trainer:
    return replace(trainers.with_torch(model, loss, name, max_norm, foreach=True), step=lambda: None)


@pytest.mark.parametrize("broken", [not_clipping, idle])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_broken_variants_are_found(optimizer: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainers.VARIANTS, "flat broken", broken)
    (row,) = step.run_model(TINY, optimizer, replace(FEW, variants=("flat broken",)))
    assert row["ok"] is False
    assert row["metrics"]["max_rel_error"] > trainers.TOLERANCE


def test_bounds_are_computed() -> None:
    """The bytes of a step per element, and the larger of the times of a model and a table alone."""
    assert [p.bytes_per_element for p in roofline.PRECISIONS.values()] == [32, 30]
    metrics = {"back_to_back_ms": {"p50": 6.0}, "model_alone_ms": 2.0}
    row = overlap.with_bounds({"metrics": metrics}, table_alone_ms=3.0)
    assert row["metrics"]["bound_ratio"] == 2.0


def test_captured_steps_are_steps() -> None:
    """On a CPU, where a capture calls the function."""
    setup = trainers.CAPTURED[f"{trainers.OPTIM}, captured"]
    assert trainers.max_rel_error(setup, "adam", CPU) < trainers.TOLERANCE


def test_speedtorch_finds_rows_that_are_not_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedtorch.Original, "after", lambda self, ids: None)
    assert not speedtorch.is_right(speedtorch.Original, "host", FEW)


def test_the_model_of_shards_agrees_with_stored_measurements() -> None:
    """On one rank, and on one of 8 and of 64. Stored rows have the numbers of the present model."""
    seen = set()
    for row in newest(rows.read_rows(rows.RESULTS / "h200-shards.json")):
        setting, metrics, n_ranks = row["setting"], row["metrics"], row["setting"].get("ranks", 1)
        if row["case"] == "world" and setting["distribution"] == "uniform":
            metrics = {"hit_rate": setting["cache_rows"] / setting["rows"], **metrics}
        if (
            row["case"] in ("headers", "balance")
            or "prefetched" in row["variant"]
            or "hit_rate" not in metrics
        ):
            continue
        spec = shards.TableSpec(setting["rows"], setting["dim"], setting["ids"])
        model = shards.modelled(spec, n_ranks, metrics["hit_rate"])
        if n_ranks > 1:
            stored = {name: metrics[name] for name in model}
            assert stored == pytest.approx(model, rel=1e-9), "python -m benchmarks shards"
        assert 1 / 1.5 < rows.value_of(metrics["back_to_back_ms"]) / model["model_ms"] < 1.5, row
        seen.add(n_ranks)
    assert seen >= {1, 8, 64}


def test_a_rank_that_drops_gradients_of_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = shards.Share._asked_of_us

    def without_repeats(self: shards.Share, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, repeats = draw(self, ids)
        return rows, repeats.clamp(max=1)

    assert shards.share_is_right(4, FEW)
    monkeypatch.setattr(shards.Share, "_asked_of_us", without_repeats)
    assert not shards.share_is_right(4, FEW)


def test_wrong_neighbours_are_found() -> None:
    table, queries = torch.randn(50, 4), torch.randn(2, 4)
    values, ids = topk.by_torch(queries, table, 3)
    assert topk.is_right((values, ids), queries, table, 3)
    assert not topk.is_right((values, ids.roll(1)), queries, table, 3)
    assert not topk.is_right((values.roll(1), ids), queries, table, 3)


def test_cached_and_captured_steps_agree_bitwise() -> None:
    checker = Checker(FEW, 8)
    assert checker.check(FlatbedTable, cache_rows=0).ok
    assert checker.check(FlatbedTable, lambda t: each(t.captured_step), cache_rows=checker.cache_rows).ok


def test_a_table_that_loses_repeated_updates_is_found() -> None:
    class Lossy(SparseTable):
        """Updates each row once per batch, as SpeedTorch does."""

        def step(self, ids: Any) -> None:
            positions = {row: i for i, row in enumerate(ids.tolist())}  # the last of equal ids wins
            kept = torch.zeros(len(ids), 1)
            kept[list(positions.values())] = 1
            target, self._target = self._target, self._target * kept
            super().step(ids)
            self._target = target

    assert not Checker(FEW, 8).check(Lossy).ok


def test_bytes_that_do_not_arrive_are_found() -> None:
    batches = data.make_batches(2, 64, 3)
    right = [[torch.from_numpy(array) for array in batch] for batch in batches]
    assert data.all_arrive(right, batches, CPU)
    right[1][0] = right[1][0].clone()
    right[1][0][-1] += 1
    assert not data.all_arrive(right, batches, CPU)


def test_unknown_cases_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown cases stepp; there are step, sizes"):
        main(["cache", "stepp", "--device", "cpu"])
    with pytest.raises(ValueError, match="unknown case 'linear100:lion'"):
        main(["step", "linear100:lion", "--device", "cpu"])
    with pytest.raises(ValueError, match="unknown ids 'zipf 2' of mlp; there are uniform"):
        main(["overlap", "mlp:zipf 2", "--device", "cpu"])
