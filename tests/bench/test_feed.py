"""`flatbed bench feed`: every case and way is measured, checked, stored, shown and drawn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from torch import Tensor

from flatbed.bench import feed, feed_measure, feed_read, tables_measure
from flatbed.bench.feed_measure import Batch, Shape
from flatbed.bench.feed_plot import write_plot
from flatbed.bench.feed_rows import (
    CASES,
    FEEDER,
    GENERATED,
    LOADER,
    NUMPY,
    PLAIN,
    READER,
    READER_COPY,
    TORCH,
    BandwidthRow,
    EpochRow,
    FeedRow,
    ReadRow,
    file_name,
    summary,
)
from flatbed.bench.feed_table import tables, to_markdown
from flatbed.bench.rows import Record, read_rows, write_rows
from flatbed.data import Feeder
from tests.bench.samples import CPU, MACHINE

SMALL = feed.Sizes(
    shapes=(Shape(1, 4096, 5), Shape(7, 512, 5)),
    epoch=Shape(1, 4096, 6),
    factors=(1.0, 2.0),
    array_bytes=1 << 18,
    row_bytes=(512, 2048),
    n_ids=50,
    source_bytes=1 << 14,
    n_samples=3,
)
SETTING = feed.Setting(CPU, MACHINE, SMALL)
KINDS = (BandwidthRow, EpochRow, ReadRow)

BANDWIDTH = BandwidthRow(
    benchmark="feed",
    case="bandwidth",
    way=FEEDER,
    n_arrays=1,
    batch_bytes=64 << 20,
    n_batches=64,
    n_samples=5,
    p20_ms=1.25,
    p50_ms=1.3,
    p80_ms=1.4,
    gb_per_s=51.6,
    dma_gb_per_s=55.0,
    share_of_dma=51.6 / 55,
    ok=True,
    machine=MACHINE,
)
EPOCH = EpochRow(
    benchmark="feed",
    case="epoch",
    way=FEEDER,
    batch_bytes=64 << 20,
    n_batches=128,
    factor=2.0,
    compute_ms=2.44,
    transfer_ms=1.22,
    n_samples=5,
    p20_ms=2.45,
    p50_ms=2.48,
    p80_ms=2.5,
    ratio=2.48 / 2.44,
    ok=True,
    machine=MACHINE,
)
READ = ReadRow(
    benchmark="feed",
    case="rows",
    way=READER,
    memory="RowReader(8,388,608 × 128 float32, device='cuda:0', in place)",
    array_bytes=4 << 30,
    row_bytes=512,
    n_ids=65_536,
    n_samples=5,
    p20_ms=2.3,
    p50_ms=2.4,
    p80_ms=2.5,
    gb_per_s=14.0,
    dma_gb_per_s=55.0,
    share_of_dma=14 / 55,
    ok=True,
    machine=MACHINE,
)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables_measure.DMA_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(tables_measure, "PATTERN_WORDS", 1 << 10)


def run(case: str) -> list[FeedRow]:
    return list(feed.run(case, SETTING, report=lambda line: None))


def some_rows() -> list[Record]:
    plain = replace(BANDWIDTH, way=PLAIN, p50_ms=6.5, gb_per_s=10.3, share_of_dma=10.3 / 55)
    loader = replace(EPOCH, way=LOADER, n_batches=16, p50_ms=12.2, ratio=5.0)
    staged = replace(BANDWIDTH, way=GENERATED, p50_ms=2.6, gb_per_s=25.8, share_of_dma=25.8 / 55)
    return [plain, staged, BANDWIDTH, loader, EPOCH, replace(READ, way=NUMPY, p50_ms=24.0, memory=""), READ]


# ---- the cases


def test_bandwidth_of_every_way() -> None:
    rows = run("bandwidth")
    assert [(row.way, row.n_arrays) for row in rows] == [
        (way, n) for n in (1, 7) for way in (PLAIN, LOADER, GENERATED, FEEDER)
    ]
    for row in rows:
        assert isinstance(row, BandwidthRow)
        assert row.ok
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert row.gb_per_s == pytest.approx(row.batch_bytes / (1e6 * row.p50_ms))
        assert row.share_of_dma == pytest.approx(row.gb_per_s / row.dma_gb_per_s)


def test_epochs_of_every_way() -> None:
    rows = run("epoch")
    assert [(row.way, row.factor) for row in rows] == [
        (way, f) for f in (1, 2) for way in (PLAIN, LOADER, GENERATED, FEEDER)
    ]
    for row in rows:
        assert isinstance(row, EpochRow)
        assert row.ok
        assert row.ratio == pytest.approx(row.p50_ms / max(row.compute_ms, row.transfer_ms))


def test_rows_of_an_array_in_every_way() -> None:
    rows = run("rows")
    assert [(row.way, row.row_bytes) for row in rows] == [
        (way, n) for n in (512, 2048) for way in (NUMPY, TORCH, READER)
    ]
    assert all(row.ok for row in rows)
    assert rows[2].memory == "RowReader(512 × 128 float32, device='cpu', cpu)"


def test_sources_are_different_and_more_than_caches_hold() -> None:
    setting = feed_measure.FeedSetting(CPU, MACHINE, 1.0, 1 << 14, 3)
    sources = feed_measure.make_sources(Shape(2, 1024, 100), setting)
    assert len(sources) == 8
    arrays = {array.tobytes() for batch in sources for array in batch}
    assert len(arrays) == 16
    assert len(feed_measure.turns(sources, 100)) == 100


# ---- wrong results are found


@pytest.mark.parametrize("way", [FEEDER, GENERATED])
def test_a_feeder_that_repeats_a_batch_is_found(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(batches: Sequence[Batch], device: torch.device) -> Iterable[list[Tensor]]:
        return [[torch.from_numpy(a) for a in batches[0]] for _ in batches]

    monkeypatch.setitem(feed_measure.WAYS, way, stuck)
    for case in ("bandwidth", "epoch"):
        rows = run(case)
        assert [row.ok for row in rows] == [row.way != way for row in rows]
        assert "FAILED" in summary(next(row for row in rows if row.way == way))


def test_a_feeder_that_is_wrong_in_its_third_iteration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """From there on arrays are copied from where they are."""

    class Turned:
        def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
            self.batches, self.n = batches, 0

        def __iter__(self) -> Iterator[list[Tensor]]:
            self.n += 1
            for batch in self.batches if self.n < 3 else self.batches[::-1]:
                yield [torch.from_numpy(a) for a in batch]

    monkeypatch.setitem(feed_measure.WAYS, FEEDER, Turned)
    for case in ("bandwidth", "epoch"):
        rows = run(case)
        assert [row.ok for row in rows] == [row.way != FEEDER for row in rows]


def test_iterations_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feeder over a list pins in its second iteration, and that is not what later ones take."""
    iterated: list[str] = []
    for name in (PLAIN, FEEDER):

        class Noted(feed_measure.Plain):
            def __iter__(self, name: str = name) -> Iterator[list[Tensor]]:
                iterated.append(name)
                return super().__iter__()

        monkeypatch.setitem(feed_measure.WAYS, name, Noted)
    setting = feed_measure.FeedSetting(CPU, MACHINE, 1.0, 1 << 14, 3)
    rows = {row.way: row for row in feed_measure.epoch(SMALL.epoch, 1.0, setting)}
    assert (iterated.count(PLAIN), iterated.count(FEEDER)) == (1 + 3, 2 + 3)
    assert rows[FEEDER].n_samples == 3


def test_from_a_generator_nothing_is_known_of_the_batches() -> None:
    setting = feed_measure.FeedSetting(CPU, MACHINE, 1.0, 1 << 14, 3)
    sources = feed_measure.make_sources(Shape(2, 1024, 5), setting)
    feed = feed_measure.WAYS[GENERATED](sources, CPU)
    assert isinstance(feed, Feeder)
    assert not isinstance(feed.batches, list | tuple)
    assert len(list(feed)) == len(list(feed)) == len(sources)


def test_a_reader_of_other_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_read.RowReader, "__call__", lambda self, ids: torch.zeros(50, self.shape[1]))
    rows = run("rows")
    assert [row.ok for row in rows] == [row.way != READER for row in rows]


def test_the_command_fails_where_a_check_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feed, "run", lambda case, setting, report: [replace(BANDWIDTH, ok=False)])
    with pytest.raises(typer.Exit):
        feed.command(CPU, ["bandwidth"], quick=True, samples=None, json_path=None, png=None)
    assert "bandwidth: flatbed Feeder" in capsys.readouterr().err


# ---- stored, shown, drawn


def test_the_command_measures_stores_shows_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(feed, "QUICK", SMALL)
    feed.command(CPU, [], quick=True, samples=2, json_path=tmp_path / "f.json", png=tmp_path / "f.png")
    rows = read_rows(tmp_path / "f.json", *KINDS)
    assert list(dict.fromkeys(row.case for row in rows)) == list(CASES)
    assert {row.n_samples for row in rows} == {2}
    output = capsys.readouterr().out
    for row in rows:
        assert summary(row) in output
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_rows_survive_being_stored(tmp_path: Path) -> None:
    write_rows(some_rows(), tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json", *KINDS) == some_rows()


def test_tables_compare() -> None:
    text = to_markdown(some_rows())
    for line in (
        "| flatbed Feeder, from a generator | 64 MiB | 2.6 ms | 25.8 GB/s | 47% | 2.50× |",
        "| flatbed Feeder | 64 MiB | 1.3 ms | 51.6 GB/s | 94% | 5.00× |",
        "| flatbed Feeder | 2.44 ms | 1.22 ms | 2.48 ms | 1.016× |",
        "| flatbed RowReader, in place | 512 B | 2.4 ms | 14.0 GB/s | 25% | 10.00× |",
    ):
        assert line in text.splitlines()
    assert "epochs of 128 batches of 64 MiB" in text
    assert len(tables(some_rows())) == 3
    assert "51.6 GB/s FAILED" in to_markdown([replace(BANDWIDTH, ok=False)])
    assert to_markdown([BANDWIDTH, replace(BANDWIDTH, p50_ms=1.2)]).count("flatbed Feeder") == 1


def test_many_small_arrays_are_described() -> None:
    assert "500 × 16 KiB" in to_markdown([replace(BANDWIDTH, n_arrays=500, batch_bytes=500 << 14)])


def test_any_part_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for n, rows in enumerate([some_rows(), some_rows()[:3], some_rows()[3:5], some_rows()[5:]]):
        write_plot(rows, tmp_path / f"{n}.png")
        assert (tmp_path / f"{n}.png").stat().st_size > 5000


def test_names() -> None:
    assert file_name(replace(MACHINE, device="NVIDIA H200")) == "h200-feed"
    assert feed.make_setting(CPU).sizes is feed.QUICK
    assert READER_COPY.startswith("flatbed")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_every_case_is_right(case: str) -> None:
    device = torch.device("cuda")
    begin = time.monotonic()
    setting = feed.make_setting(device, quick=True, samples=2)
    rows = list(feed.run(case, setting, report=lambda line: None))
    assert all(row.ok for row in rows), [summary(row) for row in rows]
    assert time.monotonic() - begin < 60
    assert np.isfinite([row.p50_ms for row in rows]).all()
