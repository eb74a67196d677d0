"""The row schema: what a row holds, how it is stored, and what rows are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import rows
from benchmarks.harness import Options
from benchmarks.rows import Row, percentiles, read_rows, speedup, write_rows

CPU = torch.device("cpu")


def row(variant: str, metrics: dict[str, Any], *, ok: bool | None = True, **setting: Any) -> Row:
    return Options(CPU).row("cache step", variant, setting, metrics, n_samples=3, ok=ok)


def test_percentiles_of_few_and_of_many_readings() -> None:
    assert percentiles([7.0]) == {"p20": 7.0, "p50": 7.0, "p80": 7.0}
    assert percentiles([float(i) for i in range(11)]) == {"p20": 2.0, "p50": 5.0, "p80": 8.0}


def test_a_row_says_where_it_was_measured() -> None:
    made = row("flatbed", {"step_ms": 1.0, "hit_rate": None}, rows=10)
    assert set(made) == set(rows.FIELDS)
    assert made["metrics"] == {"step_ms": 1.0}
    assert made["machine"]["device"] == "cpu"
    assert made["versions"]["torch"] == torch.__version__


def test_the_commit_of_a_copy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATBED_COMMIT", "abc")
    rows.environment.cache_clear()
    assert row("flatbed", {})["commit"] == "abc"
    rows.environment.cache_clear()


def test_rows_are_stored_and_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    made = [row("flatbed", {"step_ms": percentiles([1.0, 2.0])}, rows=10), row("torch sparse", {})]
    write_rows(made, path)
    assert read_rows(path) == made
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_does_not_follow_the_schema_is_refused(tmp_path: Path) -> None:
    wrong_type = json.dumps([{**row("flatbed", {}), "n_samples": "three"}])
    cases = {
        "rows": "not JSON",
        "{}": "not a list",
        '[{"benchmark": "step"}]': "missing or unknown fields",
        wrong_type: "n_samples is 'three'",
    }
    path = tmp_path / "rows.json"
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_rows(path)


def test_speed_is_relative_to_the_fastest_correct_variant_without_flatbed() -> None:
    ours = row("flatbed, captured", {"step_ms": 2.0, "words_per_s": 30.0}, rows=10, cache_rows=5)
    beside = [
        ours,
        row("torch sparse", {"step_ms": 3.0, "words_per_s": 10.0}, rows=10),
        row("torch loop", {"step_ms": 9.0, "words_per_s": 15.0}, rows=10),
        row("SpeedTorch", {"step_ms": 1.0}, rows=10, ok=None),  # known to be wrong
        row("torch broken", {"step_ms": 1.0}, rows=10, ok=False),
        row("torch sparse", {"step_ms": 1.0}, rows=20),  # of another table
        row("flatbed", {"step_ms": 1.0}, rows=10),
    ]
    assert speedup(ours, beside, "step_ms") == 1.5
    assert speedup(ours, beside, "words_per_s") == 2.0
    assert speedup(ours, beside, "read_ms") is None
    assert speedup(ours, [ours], "step_ms") is None
