"""`flatbed bench rows`: every tier and way is measured, checked, stored, shown and drawn."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

from flatbed.bench import reach, reach_measure, reach_ways, tables_measure
from flatbed.bench.reach import GB, MB, ROW_BYTES, Setting, Sizes, Sweep
from flatbed.bench.reach_measure import BLOCK_WORDS, ReachSetting, Shape, Turns, Way, contents, fill_
from flatbed.bench.reach_plot import reach_cases, write_plot
from flatbed.bench.reach_rows import (
    CUPY,
    FLATBED,
    PAGE_CACHE,
    TIERS,
    TORCH,
    TORCH_DEVICE,
    TORCH_FILE,
    TORCH_PINNED,
    ReachRow,
    Storage,
    file_name,
    rows_of,
    summary,
    swept,
)
from flatbed.bench.reach_table import tables, to_markdown
from flatbed.bench.rows import read_rows, write_rows
from flatbed.bench.tables_measure import Dma
from flatbed.cuda.host_memory import available_bytes
from tests.bench.samples import CPU, MACHINE, ROW

SMALL = Sizes(
    {
        tier: Sweep((64_000, 128_000), one_table=128_000, one_row=512, row_bytes=(64, 512, 1536))
        for tier in TIERS
    },
    n_ids=60,
    n_samples=3,
)
SETTING = Setting(CPU, MACHINE, Dma(10.0, 5.0), SMALL)
SAMPLE = ReachRow(
    benchmark="rows",
    tier="host",
    way=FLATBED,
    memory="managed",
    direction="read",
    clock="wall",
    table_bytes=8 * GB,
    row_bytes=512,
    n_ids=65_536,
    n_samples=7,
    p20_ms=0.8,
    p50_ms=1.0,
    p80_ms=1.6,
    gb_per_s=33.554432,
    dma_gb_per_s=55.0,
    share_of_dma=33.554432 / 55,
    ok=True,
    machine=MACHINE,
)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables_measure.DMA_BYTES, "cpu", 1 << 16)


def run(tier: Storage, setting: Setting = SETTING) -> tuple[list[ReachRow], list[str]]:
    lines: list[str] = []
    return list(reach.run(tier, setting, report=lines.append)), lines


def some_rows() -> list[ReachRow]:
    """As an H200 might give them."""
    rows = []
    for tier, ways in (("device", (FLATBED, TORCH_DEVICE)), ("host", (FLATBED, TORCH, TORCH_PINNED, CUPY))):
        for slower, way in enumerate(ways):
            for size, row in ((8 * GB, 64), (8 * GB, 512), (8 * GB, 4096), (1 * GB, 512), (32 * GB, 512)):
                one = replace(SAMPLE, tier=tier, way=way, table_bytes=size, row_bytes=row)
                one = replace(one, p50_ms=one.p50_ms * (1 + slower), gb_per_s=one.gb_per_s / (1 + slower))
                rows += [one, replace(one, direction="write", p50_ms=2 * one.p50_ms, dma_gb_per_s=50.0)]
    return rows


# ---- the tiers


@pytest.mark.parametrize(
    ("tier", "ways", "memory"),
    [
        ("device", (FLATBED, TORCH_DEVICE), "device"),
        ("host", (FLATBED, TORCH), "plain"),
        ("disk", (FLATBED, TORCH_FILE), PAGE_CACHE),
    ],
)
def test_every_way_of_a_tier(tier: Storage, ways: tuple[str, ...], memory: str) -> None:
    rows, _ = run(tier)
    shapes = [(128_000, 64), (128_000, 512), (128_000, 1536), (64_000, 512)]
    found = [(row.direction, row.table_bytes, row.row_bytes, row.way) for row in rows]
    assert sorted(found) == sorted(
        (d, t, r, way) for d in ("read", "write") for t, r in shapes for way in ways
    )
    for row in rows:
        assert row.ok, summary(row)
        assert row.memory == memory
        assert row.clock == "wall"
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert row.n_ids == min(60, row.table_bytes // row.row_bytes // 4)
        assert row.gb_per_s == pytest.approx(row.n_ids * row.row_bytes / (1e6 * row.p50_ms))
        assert row.spread[0] <= row.gb_per_s <= row.spread[1]
        assert row.dma_gb_per_s == (10 if row.direction == "read" else 5)
        assert row.share_of_dma == pytest.approx(row.gb_per_s / row.dma_gb_per_s)


def test_a_file_is_where_it_was_asked_for_and_gone_in_the_end(tmp_path: Path) -> None:
    running = reach.run("disk", replace(SETTING, folder=tmp_path), report=lambda line: None)
    next(running)
    (made,) = tmp_path.iterdir()
    assert {path.name for path in made.iterdir()} >= {"rows.table", "rows.bin"}
    running.close()
    assert not list(tmp_path.iterdir())


def test_torch_through_pinned_memory_moves_rows() -> None:
    shape = Shape(128_000, 512, 60)
    table = torch.empty(128_000, dtype=torch.uint8)
    fill_(table)
    way = reach_ways._by_pinned_torch(shape.of(table), shape, "plain", CPU)
    check_moves(way, shape)


def test_cupy_moves_rows() -> None:
    """CuPy's part is played by numpy, which exchanges tensors in the same way."""
    shape = Shape(128_000, 512, 60)
    memory = torch.empty(128_000, dtype=torch.uint8)
    fill_(memory)
    table = shape.of(memory)
    made = []

    def make() -> Any:
        made.append(table.numpy())
        return made[-1]

    numpy = SimpleNamespace(from_dlpack=lambda tensor: tensor.numpy())
    way = reach_ways._by_cupy(numpy, make, "registered", lambda ids: table[ids], CPU)
    check_moves(way, shape)
    assert len(made) == 1


def test_cupy_sees_memory_of_the_host() -> None:
    table = torch.zeros(5, 16)
    cuda = SimpleNamespace(
        UnownedMemory=lambda pointer, nbytes, owner, device: (pointer, nbytes, owner, device),
        MemoryPointer=lambda known, offset: (known, offset),
    )
    cupy = SimpleNamespace(
        cuda=cuda, float32="f4", ndarray=lambda shape, dtype, memptr: (shape, dtype, memptr)
    )
    shape, dtype, ((pointer, nbytes, owner, device), offset) = reach_ways._cupy_over(
        cupy, table, torch.device("cuda", 1)
    )
    assert (shape, dtype, offset, device, nbytes) == ((5, 16), "f4", 0, 1, 320)
    assert pointer == table.data_ptr()
    assert owner is table


def check_moves(way: Way, shape: Shape) -> None:
    setting = ReachSetting(CPU, MACHINE, Dma(1.0, 1.0), 3, lambda way, reason: pytest.fail(reason))
    for direction in ("read", "write"):
        ((found, readings),) = Turns(shape, setting).take([way], direction).items()
        assert found is way
        assert readings.ok
        assert len(readings.times) == 3


# ---- contents


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_contents_are_what_was_filled_in(row_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_measure, "CHUNK_WORDS", 1 << 10)
    monkeypatch.setattr(reach_measure, "BLOCK_WORDS", 3 << 10)  # several blocks in a small table
    n_words = row_bytes // 4
    memory = torch.empty(24 * 4096, dtype=torch.uint8)
    fill_(memory)
    n_rows = memory.numel() // row_bytes
    rows = memory.view(torch.int32)[: n_rows * n_words].view(n_rows, n_words)
    assert torch.equal(rows, contents(torch.arange(n_rows), n_words))
    assert len(torch.unique(rows, dim=0)) == n_rows
    part = torch.empty((n_rows - 3) * row_bytes, dtype=torch.uint8)
    fill_(part, 3 * n_words)  # as a file is filled, bit by bit
    assert torch.equal(part.view(torch.int32).view(-1, n_words), rows[3:])


def test_rows_far_apart_differ() -> None:
    """Offsets that are cut to 32 bits lead to rows 4 GiB before: they must not look like the right ones."""
    for row_bytes in ROW_BYTES:
        n_words = row_bytes // 4
        assert BLOCK_WORDS % n_words == 0
        far = torch.tensor([7 * GB // row_bytes, 31 * GB // row_bytes])
        for before in ((1 << 32) // row_bytes, (1 << 31) // row_bytes, BLOCK_WORDS // n_words):
            same = contents(far, n_words) == contents(far - before, n_words)
            assert not same.all(dim=1).any()
        assert bool(torch.isfinite(contents(far, n_words).view(torch.float32)).all())


# ---- wrong results are found


@pytest.mark.parametrize("tier", TIERS)
def test_rows_that_are_not_the_right_ones_are_found(tier: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(way: Way) -> Way:
        if not way.ours:
            return way
        n_rows = 64_000 // 1536
        return replace(
            way,
            read=lambda ids: way.read((ids + 1) % n_rows),
            write=lambda ids, rows: way.write(ids[:-1], rows[:-1]),
        )

    spoil(monkeypatch, shifted)
    rows, _ = run(tier)
    assert [row.ok for row in rows] == [row.way != FLATBED for row in rows]
    assert "FAILED" in summary(rows[0])


def test_rows_left_on_another_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda way: replace(way, read=lambda ids: way.read(ids).to("meta")))
    rows, _ = run("host")
    assert [row.ok for row in rows] == [row.direction == "write" for row in rows]


def test_a_peer_that_fails_is_left_out_and_ours_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ids: Tensor) -> Tensor:
        raise OSError("no such luck")

    spoil(monkeypatch, lambda way: way if way.ours else replace(way, read=broken))
    rows, lines = run("host")
    assert {row.way for row in rows if row.direction == "read"} == {FLATBED}
    assert {row.way for row in rows if row.direction == "write"} == {FLATBED, TORCH}
    assert lines.count(f"host: {TORCH} is left out: OSError: no such luck") == 1
    spoil(monkeypatch, lambda way: replace(way, read=broken))
    with pytest.raises(OSError, match="no such luck"):
        run("host")


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ways do something else."""
    real = reach.measured

    def measured(ways: list[Way], *args: Any, **options: Any) -> Any:
        return real([change(way) for way in ways], *args, **options)

    monkeypatch.setattr(reach, "measured", measured)


def test_the_command_fails_where_a_check_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reach, "run", lambda tier, setting, report: [replace(SAMPLE, ok=False)])
    with pytest.raises(typer.Exit):
        command("host")
    assert "host: flatbed" in capsys.readouterr().err


# ---- sizes


def test_shapes_are_two_sweeps_that_cross() -> None:
    sweep = reach.FULL.sweeps["host"]
    shapes = sweep.shapes(40 * GB, 65_536)
    assert [(s.table_bytes // GB, s.row_bytes) for s in shapes] == [
        *((8, row) for row in ROW_BYTES),
        (1, 512),
        (32, 512),
    ]
    assert {s.n_ids for s in shapes} == {65_536}
    assert {s.table_bytes for s in sweep.shapes(8 * GB, 1)} == {GB, 8 * GB}
    assert {s.table_bytes for s in sweep.shapes(7 * GB, 1)} == {GB}
    assert sweep.shapes(GB - 1, 1) == []


def test_what_has_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "room", lambda tier, setting: 100_000)
    rows, lines = run("host")
    assert {row.table_bytes for row in rows} == {64_000}
    assert "host: a table of 0.128 MB is left out: there is room for 0.1 MB" in lines
    monkeypatch.setattr(reach, "room", lambda tier, setting: 1)
    assert run("host")[0] == []


def test_room_leaves_some(tmp_path: Path) -> None:
    for tier in TIERS:
        assert 0 < reach.room(tier, replace(SETTING, folder=tmp_path)) < 0.9 * available_bytes()


def test_no_more_host_memory_than_is_asked_for() -> None:
    for sizes in (reach.FULL, reach.SMALL, reach.QUICK):
        assert max(size for sweep in sizes.sweeps.values() for size in sweep.table_bytes) <= 32 * GB
    assert max(size for sweep in reach.SMALL.sweeps.values() for size in sweep.table_bytes) <= 512 * MB
    assert reach.make_setting(CPU).sizes is reach.SMALL
    assert reach.make_setting(CPU, quick=True).sizes is reach.QUICK


def test_rows_of_odd_sizes_are_refused() -> None:
    for row_bytes in (510, 700):
        sweep = replace(SMALL.sweeps["host"], row_bytes=(row_bytes,))
        with pytest.raises(ValueError, match=f"found {row_bytes} bytes"):
            run("host", replace(SETTING, sizes=replace(SMALL, sweeps={"host": sweep})))


def test_tiers() -> None:
    gpu = torch.device("cuda")
    assert reach.find_tiers(gpu, []) == ["device", "host", "disk"]
    assert reach.find_tiers(gpu, ["disk", "device"]) == ["device", "disk"]
    assert reach.find_tiers(CPU, []) == ["host", "disk"]
    with pytest.raises(ValueError, match="one of device, host, disk; found cloud"):
        reach.find_tiers(CPU, ["cloud"])
    with pytest.raises(typer.BadParameter, match="ask for the tier host"):
        command("device")


# ---- stored, shown, drawn


def command(*tiers: str, **options: Any) -> None:
    given = {"quick": True, "samples": 2, "folder": None, "json_path": None, "png": None} | options
    reach.command(CPU, tiers, **given)


def test_the_command_measures_stores_shows_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(reach, "QUICK", SMALL)
    command(folder=tmp_path, json_path=tmp_path / "r.json", png=tmp_path / "r.png")
    rows = read_rows(tmp_path / "r.json", ReachRow)
    assert list(dict.fromkeys(row.tier for row in rows)) == ["host", "disk"]
    assert {row.n_samples for row in rows} == {2}
    output = capsys.readouterr().out
    for row in rows:
        assert summary(row) in output
    assert "tables in a file in the page cache" in output
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_rows_survive_being_stored(tmp_path: Path) -> None:
    write_rows(some_rows(), tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json", ReachRow) == some_rows()
    assert rows_of([ROW, SAMPLE]) == [SAMPLE]


def test_tables_compare() -> None:
    text = to_markdown(some_rows())
    lines = text.splitlines()
    line = "| flatbed | 8 GB | 512 B | 65,536 | 33.6 (21–41.9) | 33.6 (21–41.9) | 61%, 61% | 2.00×, 2.00× |"
    assert line in lines
    assert "| flatbed | 8 GB | 512 B | 65,536 | 33.6 (21–41.9) | 33.6 (21–41.9) | 2.00×, 2.00× |" in lines
    assert any(line.startswith("| CuPy | 32 GB | 512 B | 65,536 | 8.39 ") for line in lines)
    assert "a plain copy of pinned memory: 55.0 GB/s to the device, 50.0 GB/s back" in text
    assert len(tables(some_rows())) == 2
    assert "33.6 (21–41.9) FAILED" in to_markdown([replace(SAMPLE, ok=False)])
    assert to_markdown([SAMPLE, replace(SAMPLE, p50_ms=1.2)]).count("| flatbed ") == 1


def test_both_sweeps_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert swept(some_rows()) == (8 * GB, 512)
    cases = reach_cases([ROW, *some_rows()])
    assert len(cases) == 2
    for _, _, (by_row, by_table) in cases:
        assert {row.table_bytes for row in by_row.rows} == {8 * GB}
        assert {row.row_bytes for row in by_table.rows} == {512}
        assert {row.table_bytes for row in by_table.rows} == {GB, 8 * GB, 32 * GB}
    for n, rows in enumerate([some_rows(), [SAMPLE], [replace(SAMPLE, ok=False)]]):
        write_plot(rows, tmp_path / f"{n}.png")
        assert (tmp_path / f"{n}.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="no rows"):
        write_plot([ROW], tmp_path / "none.png")


def test_names() -> None:
    assert file_name(replace(MACHINE, device="NVIDIA H200")) == "h200-rows"
    assert "65,536 × 512 B" in summary(SAMPLE)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", TIERS)
def test_on_a_gpu_every_tier_is_right(tier: Storage) -> None:
    begin = time.monotonic()
    setting = reach.make_setting(torch.device("cuda"), quick=True, samples=2)
    rows, _ = run(tier, setting)
    assert all(row.ok for row in rows), [summary(row) for row in rows]
    assert {row.clock for row in rows} == {"gpu" if tier == "device" else "wall"}
    ways = {"device": TORCH_DEVICE, "host": TORCH_PINNED, "disk": TORCH_FILE}
    assert {row.way for row in rows} >= {FLATBED, ways[tier]}
    assert time.monotonic() - begin < 30
