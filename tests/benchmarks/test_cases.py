"""A tiny run of every benchmark on the CPU: rows are complete, and all checks pass. Broken variants fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import models, rows, trainers
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.cases import (
    cache,
    data,
    fsdp,
    overlap,
    roofline,
    shards,
    speedtorch,
    step,
    tables,
    topk,
    trace,
    word2vec,
)  # fmt: skip
from benchmarks.cases import rows as random_rows
from benchmarks.harness import Options, each
from benchmarks.models import Model
from benchmarks.plot import write_plot
from benchmarks.report import newest
from benchmarks.rows import Row
from benchmarks.trained_tables import Checker, FlatbedTable, SparseTable

CPU = torch.device("cpu")
FEW = Options(CPU, quick=True, steps=2, report=lambda line: None)
TINY = Model(
    "tiny",
    partial(models.linear100, layers=3, width=8),
    partial(models._linear_batch, size=4, width=8),
    models._squared_error,
    steps=2,
)
TINY_PARAMETERS = 6


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "linear100", lambda device: TINY)


def check(found: Iterator[Row], benchmark: str, *metrics: str) -> list[Row]:
    """All rows passed their checks, and have these metrics with sensible percentiles."""
    listed = list(found)
    assert listed
    for row in listed:
        assert row["benchmark"] == benchmark
        assert row["ok"], row
        for name in metrics:
            spread = row["metrics"][name]
            assert 0 < spread["p20"] <= spread["p50"] <= spread["p80"], row
    return listed


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("benchmark", "cases", "metrics", "variants"),
    [
        (fsdp, (), ("host_ms",), [fsdp.SHARDED, fsdp.PLAIN, fsdp.TORCH]),
        (step, ("linear100:adamw",), ("optimizer_ms", "step_ms"), list(trainers.VARIANTS)),
        (step, ("linear100:sgd",), ("optimizer_ms", "step_ms"), list(trainers.VARIANTS)),
        (speedtorch, (), ("back_to_back_ms",), 2 * list(speedtorch.VARIANTS)),
        (tables, ("step", "fit"), (), [tables.HOST, tables.DEVICE, tables.SPARSE]),
        (topk, (), ("wall_ms", "scan_gb_per_s"), 2 * [topk.OURS, topk.ON_CPU]),  # nothing is pinned
    ],
)
def test_every_variant_is_measured(
    benchmark: Any, cases: tuple[str, ...], metrics: tuple[str, ...], variants: list[str]
) -> None:
    name = benchmark.__name__.split(".")[-1]
    listed = check(benchmark.run(replace(FEW, cases=cases)), name, *metrics)
    assert [row["variant"] for row in listed] == variants


# ---- dense steps


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


def test_captured_steps_are_steps() -> None:
    """On a CPU, where a capture calls the function."""
    setup = trainers.CAPTURED[f"{trainers.OPTIM}, captured"]
    assert trainers.max_rel_error(setup, "adam", CPU) < trainers.TOLERANCE


@pytest.mark.usefixtures("tiny")
def test_trace(tmp_path: Path) -> None:
    """A loop has an operator per parameter and more; the picture shows all of them."""
    listed = check(trace.run(replace(FEW, cases=("linear100",))), "trace")
    counts = {row["variant"]: row["metrics"]["kernels"] for row in listed}
    assert [*counts] == list(trace.VARIANTS)
    assert counts[trainers.LOOP] > 10 * TINY_PARAMETERS > counts["flatbed ContiguousParams"]
    for row in listed:
        intervals = row["metrics"]["timeline"]
        assert len(intervals) == row["metrics"]["kernels"]
        assert 1e3 * row["metrics"]["span_ms"] == pytest.approx(max(map(sum, intervals)), abs=0.2)
    pytest.importorskip("matplotlib")
    write_plot(listed, tmp_path / "trace.png")


@pytest.mark.usefixtures("tiny")
def test_roofline() -> None:
    options = replace(FEW, cases=("linear100", "linear100:bf16-master"), steps=5)
    listed = check(roofline.run(options), "roofline", "wall_ms")
    assert {row["setting"]["precision"] for row in listed} == {"fp32", "bf16-master"}
    for row in listed:
        assert row["metrics"]["roofline_ratio"] > 0
    assert [p.bytes_per_element for p in roofline.PRECISIONS.values()] == [32, 30]


# ---- tables


def test_memory_of_tables(tmp_path: Path) -> None:
    listed = check(tables.run(replace(FEW, cases=("memory",), folder=tmp_path)), "tables")
    on_disk = {row["variant"]: row["metrics"]["disk_bytes"] for row in listed}
    assert [*on_disk] == ["flatbed host", "flatbed disk", tables.SPARSE]
    assert on_disk["flatbed disk"] > 0
    assert on_disk["flatbed host"] == on_disk[tables.SPARSE] == 0


def test_speedtorch_finds_rows_that_are_not_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedtorch.Original, "after", lambda self, ids: None)
    assert not speedtorch.is_right(speedtorch.Original, "host", FEW)


def test_rows(tmp_path: Path) -> None:
    listed = check(random_rows.run(replace(FEW, folder=tmp_path)), "rows", "read_gb_per_s", "write_gb_per_s")
    assert {row["setting"]["storage"] for row in listed} == set(random_rows.CASES)
    assert list(tmp_path.iterdir()) == []


def test_cache(tmp_path: Path) -> None:
    listed = check(cache.run(replace(FEW, folder=tmp_path)), "cache", "back_to_back_ms", "synchronized_ms")
    assert {row["case"] for row in listed} == set(cache.CASES)
    for row in listed:
        assert not row["setting"].get("cache_rows") or 0 < row["metrics"]["hit_rate"] < 1
        assert row["case"] == "sizes" or rows.speedup(row, listed, "back_to_back_ms")
        assert ("model_ratio" in row["metrics"]) == (row["case"] == "disk")
    assert list(tmp_path.iterdir()) == []


def test_shards() -> None:
    listed = check(shards.run(replace(FEW, cases=("world", "share", "host"))), "shards", "back_to_back_ms")
    ratios = [row["metrics"].get("unsharded_ratio") for row in listed if row["case"] == "world"]
    assert [ratio is not None for ratio in ratios] == [False, False, True, True] * 3
    share = [row for row in listed if row["case"] == "share"]
    assert [row["setting"]["ranks"] for row in share] == [8] * 3 + [64] * 3
    for row in share:
        model = {name: row["metrics"][name] for name in row["metrics"] if name.startswith("not_measured_")}
        assert 0 < model["not_measured_wire_ms"] < model["not_measured_step_ms"]
    host = {row["setting"]["ranks"]: row["metrics"]["model_ms"] for row in listed if row["case"] == "host"}
    assert host[1] < host[8] < host[64] < host[512]


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


def test_balance_of_shards() -> None:
    listed = check(shards.run(replace(FEW, cases=("balance",))), "shards")
    worst = {(row["variant"], row["setting"]["ranks"]): row["metrics"]["busiest_ratio"] for row in listed}
    assert worst[shards.CYCLIC, 8] < 1.05
    assert worst[shards.RANGES, 8] > 5


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


def test_overlap(tmp_path: Path) -> None:
    cases = ("none:uniform", "gemm", "mlp:zipf 1.2", "conv:zipf 1.05", "transformer:uniform", "disk")
    options = replace(FEW, cases=cases, folder=tmp_path / "tables")
    (tmp_path / "tables").mkdir()
    listed = check(overlap.run(options), "overlap", "back_to_back_ms")
    found = [(row["setting"]["model"], row["setting"]["distribution"]) for row in listed]
    assert len(found) == len(overlap.VARIANTS) * (1 + 3 + 1 + 1 + 1 + 1)
    assert ("products", "zipf 1.05") in found
    for row in listed:
        bounds = [row["metrics"].get(name, 0.0) for name in ("model_alone_ms", "table_alone_ms")]
        ratio = row["metrics"]["back_to_back_ms"]["p50"] / max(bounds)
        assert row["metrics"]["bound_ratio"] == pytest.approx(ratio)
    assert list((tmp_path / "tables").iterdir()) == []
    pytest.importorskip("matplotlib")
    write_plot(listed, tmp_path / "overlap.png")
    with pytest.raises(ValueError, match="unknown ids 'zipf 2' of mlp; there are uniform"):
        list(overlap.run(replace(FEW, cases=("mlp:zipf 2",))))


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


# ---- data and word vectors


def test_data() -> None:
    listed = check(data.run(FEW), "data")
    assert {row["case"] for row in listed} == set(data.CASES)
    for row in filter(rows.is_ours, listed):
        assert rows.speedup(row, listed, "read_ms" if row["case"] == "rows" else "batch_ms")
    assert not any("pin" in row["variant"] for row in listed)  # nothing is pinned on a CPU


def test_bytes_that_do_not_arrive_are_found() -> None:
    batches = data.make_batches(2, 64, 3)
    right = [[torch.from_numpy(array) for array in batch] for batch in batches]
    assert data.all_arrive(right, batches, CPU)
    right[1][0] = right[1][0].clone()
    right[1][0][-1] += 1
    assert not data.all_arrive(right, batches, CPU)


def test_word2vec() -> None:
    listed = check(word2vec.run(FEW), "word2vec", "words_per_s")
    for case in word2vec.SMALL_TEXTS:
        losses = [row["metrics"]["final_loss"] for row in listed if row["setting"]["text"] == case]
        assert len(losses) == 4
        assert max(losses) / min(losses) < 1 + word2vec.TOLERANCE


# ---- command line


@pytest.mark.usefixtures("tiny")
def test_rows_are_printed_stored_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"rows.{name}" for name in ("json", "png")}
    words = ["step", "linear100:adam", "--device", "cpu", "--steps", "2", "--variant", "torch fused"]
    words += ["--variant", "flatbed.optim", "--json", str(files["json"]), "--png", str(files["png"])]
    assert main(words) == 0
    assert "**step train: tiny, adam" in capsys.readouterr().out
    assert [row["variant"] for row in rows.read_rows(files["json"])] == ["torch fused", "flatbed.optim"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch.compile itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_variant_passes_its_check_on_a_gpu(name: str, tmp_path: Path) -> None:
    """With captured variants, on tiny sizes."""
    path = tmp_path / "rows.json"
    cases = ["linear100"] if name in ("step", "roofline", "trace") else []
    words = [name, *cases, "--quick", "--device", "cuda", "--steps", "4", "--folder", str(tmp_path)]
    assert main([*words, "--json", str(path)]) == 0
    variants = {row["variant"] for row in rows.read_rows(path)}
    assert name not in ("step", "roofline", "cache") or any("captured" in variant for variant in variants)


def test_unknown_cases_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown cases stepp; there are step, sizes"):
        main(["cache", "stepp", "--device", "cpu"])
    with pytest.raises(ValueError, match="unknown case 'linear100:lion'"):
        main(["step", "linear100:lion", "--device", "cpu"])
