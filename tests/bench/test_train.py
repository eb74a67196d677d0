from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flatbed.bench import train
from flatbed.bench.rows import read_rows, this_machine, write_rows
from flatbed.bench.train_rows import WordsRow, file_name, groups, panels, sheets, summary, to_markdown

CPU = torch.device("cpu")
TINY = train.Case("n-grams", 300, 6000, 500, 16, 512, 1)


@pytest.fixture(scope="module")
def rows() -> list[WordsRow]:
    return list(train.run(TINY, CPU, this_machine("cpu"), stage=lambda _: None))


def test_all_ways_train_alike(rows: list[WordsRow]) -> None:
    assert [row.way for row in rows] == list(train.WAYS)
    assert all(row.ok for row in rows)
    for row in rows:
        assert 0 < row.p20_words_per_s <= row.p50_words_per_s <= row.p80_words_per_s
        assert row.n_buckets == 500
        assert row.peak_memory_bytes is None
        assert row.table_bytes >= (500 + 2 * row.n_words) * 16 * 3 * 4


def test_rows_are_stored_and_shown(rows: list[WordsRow], tmp_path: Path) -> None:
    write_rows(rows, tmp_path / "rows.json")
    again = read_rows(tmp_path / "rows.json", WordsRow)
    assert again == rows
    (sheet,) = sheets(again)
    assert [line[0] for line in sheet.lines] == list(train.WAYS)
    assert "| torch sparse |" in to_markdown(again)
    assert "words/s" in summary(rows[0])
    assert "FAILED" in sheets([replace(rows[0], ok=False)])[0].lines[0][3]
    (case,) = groups(again)
    assert [panel.unit for panel in panels(case)] == ["words/s"]
    on_gpu = [replace(row, peak_memory_bytes=10**9, hit_rate=0.5) for row in rows]
    assert [panel.unit for panel in panels(on_gpu)] == ["words/s", "GB"]
    assert sheets(on_gpu)[0].columns[-2:] == ["GPU memory", "hits"]
    assert file_name(replace(rows[0].machine, device="NVIDIA H200"), "words") == "h200-train-words"


def test_a_way_that_trains_otherwise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = train.torch_tables

    def slower(settings: train.Settings, n_words: int) -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
        model, optimizer = real(settings, n_words)
        optimizer.param_groups[0]["lr"] *= 30
        return model, optimizer

    monkeypatch.setattr(train, "torch_tables", slower)
    found = list(train.run(TINY, CPU, this_machine("cpu"), ways=train.WAYS[:2], stage=lambda _: None))
    assert [row.ok for row in found] == [True, False]


def test_the_text_is_skewed_and_always_the_same() -> None:
    corpus = train.made_up(TINY)
    assert len(corpus) == 6000
    assert corpus.fingerprint() == train.made_up(TINY).fingerprint()
    assert corpus.counts[0] > 20 * np.median(corpus.counts)


def test_names() -> None:
    assert [case.name for case in train.find_cases(CPU)] == ["words", "n-grams"]
    assert train.find_cases(CPU, ["n-grams"], buckets=77)[0].buckets == 77
    assert train.find_ways(["flatbed device", "torch sparse"]) == ["torch sparse", "flatbed device"]
    with pytest.raises(ValueError, match="no case 'x'; known are words, n-grams"):
        train.find_cases(CPU, ["x"])
    with pytest.raises(ValueError, match="no way 'x'; known are torch sparse"):
        train.find_ways(["x"])


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    found = list(train.run(TINY, device, this_machine("cuda"), stage=lambda _: None))
    assert all(row.ok for row in found)
    assert all(row.peak_memory_bytes for row in found)
