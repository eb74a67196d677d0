"""Rows of `flatbed bench cache`: stored, shown, drawn."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flatbed.bench import cache_plot
from flatbed.bench.cache_rows import CacheRow, SwapRow, file_name, rows_of, summary
from flatbed.bench.cache_table import tables, to_markdown
from flatbed.bench.cache_ways import CAPTURED_PREFETCHED, EAGER, PREFETCHED, SPARSE
from flatbed.bench.rows import read_rows, write_rows
from tests.bench.samples import FLOOR_ROW, MACHINE, four_rows
from tests.bench.table_samples import TRAIN_ROW

# As an H200 might give them.
CACHE_ROW = CacheRow(
    benchmark="cache",
    case="step",
    way=EAGER.name,
    distribution="zipf 1.05",
    optimizer="adam",
    storage="host",
    n_rows=20_000_000,
    dim=128,
    record_bytes=1536,
    n_ids=65_536,
    cache_rows=2_000_000,
    policy="lru",
    depth=0,
    captured=False,
    warm_up_steps=200,
    n_samples=100,
    p20_ms=0.8,
    p50_ms=0.9,
    p80_ms=1.0,
    block_steps=20,
    n_blocks=10,
    in_row_p20_ms=0.72,
    in_row_p50_ms=0.73,
    in_row_p80_ms=0.75,
    host_pace_p50=1.02,
    hits_per_step=18_000.0,
    misses_per_step=2_000.0,
    written_per_step=1_900.0,
    model_ms=None,
    peak_memory_bytes=3_400_000_000,
    max_abs_error=1e-9,
    ok=True,
    machine=MACHINE,
)
SWAP_ROW = SwapRow(
    benchmark="cache",
    case="swap",
    way="flatbed swap",
    memory="managed",
    table_bytes=30_720_000_000,
    record_bytes=1536,
    n_misses=59_000,
    n_samples=33,
    p20_ms=2.1,
    p50_ms=2.15,
    p80_ms=2.2,
    gb_per_s=84.3,
    dma_gb_per_s=94.0,
    share_of_dma=84.3 / 94,
    ok=True,
    machine=MACHINE,
)
UNCOUNTED = {"hits_per_step": None, "misses_per_step": None, "written_per_step": None}


def steps() -> list[CacheRow]:
    rows = []
    for law in ("uniform", "zipf 1.05"):
        row = replace(CACHE_ROW, distribution=law)
        rows += [
            replace(row, cache_rows=0, policy=None, in_row_p50_ms=4.4, **UNCOUNTED),
            row,
            replace(row, way=PREFETCHED.name, depth=2, in_row_p50_ms=0.6),
            replace(row, way=CAPTURED_PREFETCHED.name, depth=2, captured=True, in_row_p50_ms=0.4),
            replace(row, way=SPARSE.name, storage="device", cache_rows=0, policy=None, **UNCOUNTED),
        ]
    return rows


def sizes() -> list[CacheRow]:
    return [
        replace(
            CACHE_ROW,
            case="sizes",
            policy=policy,
            cache_rows=n,
            hits_per_step=20_000 - 2e9 / n,
            misses_per_step=2e9 / n,
        )
        for policy in ("lru", "lfu")
        for n in (131_072, 1_048_576, 4_194_304)
    ]


def table_sizes() -> list[CacheRow]:
    row = replace(CACHE_ROW, case="rows", dim=32, record_bytes=384, cache_rows=524_288)
    fixed = replace(row, distribution="half hits", hits_per_step=32_768.0, misses_per_step=32_768.0)
    return [
        *(replace(row, n_rows=n) for n in (2_000_000, 20_000_000, 60_000_000)),
        *(replace(fixed, cache_rows=n) for n in (131_072, 4_194_304)),
    ]


def disks() -> list[CacheRow]:
    row = replace(CACHE_ROW, case="disk", storage="disk", n_rows=4_000_000, model_ms=5.0, in_row_p50_ms=20.0)
    return [row, replace(row, way="flatbed, prefetched 4", depth=4, in_row_p50_ms=5.5)]


ALL = [*steps(), *sizes(), *table_sizes(), *disks(), SWAP_ROW]


def test_rows_survive_being_stored(tmp_path: Path) -> None:
    write_rows(ALL, tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json", CacheRow, SwapRow) == ALL
    assert rows_of([*four_rows(), FLOOR_ROW, TRAIN_ROW, *ALL]) == ALL


def test_rates_are_those_of_rows_that_were_counted_once() -> None:
    assert CACHE_ROW.hit_rate == pytest.approx(0.9)
    assert replace(CACHE_ROW, hits_per_step=0.0, misses_per_step=0.0).hit_rate is None
    assert replace(CACHE_ROW, captured=True, depth=2).hit_rate is None
    assert replace(CACHE_ROW, hits_per_step=None).hit_rate is None
    assert disks()[1].model_ratio == pytest.approx(1.1)
    assert CACHE_ROW.model_ratio is None


def test_a_row_is_one_line_for_those_who_watch() -> None:
    line = summary(CACHE_ROW)
    assert line.startswith("step flatbed, zipf 1.05, 20,000,000 × 128, lru 2,000,000: in a row 0.730 ms")
    assert "90.0% hits" in line
    assert "1.10 × the model's step" in summary(disks()[1])
    assert "84.30 GB/s, 90% of DMA" in summary(SWAP_ROW)
    for row in (CACHE_ROW, SWAP_ROW):
        assert "FAILED its check" in summary(replace(row, ok=False))


def test_tables_show_times_and_hits() -> None:
    text = to_markdown(ALL)
    for line in (
        "| flatbed | lru 2,000,000 | 0.73 ms | 0.72 to 0.75 ms | 0.9 ms | 1.02× | 90.0% | 2,000 | 3.4 GB |",
        "| flatbed | no cache | 4.4 ms | 0.72 to 0.75 ms | 0.9 ms | 1.02× |  |  | 3.4 GB |",
        "| lfu | 1,048,576 | 0.73 ms | 0.72 to 0.75 ms | 0.9 ms | 1.02× | 90.5% | 1,907 | 200 steps |",
        "| flatbed | 60,000,000 | 524,288 | 0.73 ms | 0.72 to 0.75 ms | 0.9 ms | 1.02× | 90.0% | 2,000 |",
        "| flatbed swap | managed | 30.7 GB | 1,536 B | 59,000 | 2.15 ms | 84.3 GB/s | 94.0 GB/s | 90% |",
    ):
        assert line in text.splitlines()
    assert "| 5 ms | 1.10× |" in text
    assert "**uniform: adam on 20,000,000 × 128 (30.7 GB with state), 65,536 ids a step**" in text
    assert "**zipf 1.05: adam on 2,000,000, 20,000,000, 60,000,000 × 32, 65,536 ids a step**" in text
    assert "**zipf 1.05: adam on 4,000,000 × 128 (6.14 GB with state) on disk, 65,536 ids a step**" in text
    assert "FAILED" not in text
    assert len(tables(ALL)) == 2 + 1 + 2 + 1 + 1


def test_what_was_not_measured_has_no_column() -> None:
    alone = replace(CACHE_ROW, peak_memory_bytes=None, hits_per_step=None, misses_per_step=None)
    assert "| way | cache | per step, in a row | p20 to p80 | one by one |" in to_markdown([alone])


def test_failed_checks_are_shown() -> None:
    console = Console(width=170)
    with console.capture() as captured:
        for table in tables([replace(CACHE_ROW, ok=False), replace(SWAP_ROW, ok=False)]):
            console.print(table)
    assert "3.4 GB FAILED" in captured.get()
    assert "84.3 GB/s FAILED" in captured.get()


def test_the_newest_row_of_a_kind_counts() -> None:
    text = to_markdown([CACHE_ROW, SWAP_ROW, replace(CACHE_ROW, in_row_p50_ms=0.5), SWAP_ROW])
    assert text.count("lru 2,000,000") == 1
    assert "0.5 ms" in text
    assert text.count("flatbed swap") == 1


def test_files_are_named_after_the_device() -> None:
    assert file_name(replace(MACHINE, device="NVIDIA H200"), "sizes") == "h200-cache-sizes"
    assert file_name(replace(MACHINE, device="cpu"), "step") == "cpu-cache-step"


def test_curves_and_bars_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    cases = {"step": steps(), "sizes": sizes(), "rows": table_sizes(), "disk": disks(), "swap": [SWAP_ROW]}
    for name, rows in {**cases, "part": table_sizes()[:1], "all": ALL}.items():
        cache_plot.write_plot(rows, tmp_path / f"{name}.png")
        assert image.imread(tmp_path / f"{name}.png").std() > 0.04
    titles = [[panel.title for panel in panels] for _, _, panels in cache_plot.cache_cases(ALL)]
    assert titles[0] == ["uniform: per step, in a row", "zipf 1.05: per step, in a row"]
    assert titles[1] == ["hits", "a step, in a row"]
    assert len(titles) == 5


def test_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_plot, "have_matplotlib", lambda: False)
    with pytest.raises(ModuleNotFoundError, match="matplotlib is not installed"):
        cache_plot.write_plot(ALL, tmp_path / "rows.png")
