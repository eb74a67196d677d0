"""Rows: schema, storage and comparison; tables, pages and charts of stored rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pages, plot, report, rows
from benchmarks.__main__ import main
from benchmarks.harness import Options
from benchmarks.plot import write_plot
from benchmarks.rows import RESULTS, Row, percentiles, read_rows, speedup, write_rows

CPU = torch.device("cpu")


def row(variant: str, metrics: dict[str, Any], *, ok: bool | None = True, **setting: Any) -> Row:
    return Options(CPU).row("cache step", variant, setting, metrics, n_samples=3, ok=ok)


SPREAD = {"p20": 1.0, "p50": 2.0, "p80": 3.0}
ROWS = [
    row("torch sparse", {"back_to_back_ms": 4.0}, distribution="uniform", rows=1000),
    row(
        "flatbed",
        {"back_to_back_ms": SPREAD, "hit_rate": 0.25, "peak_memory_bytes": 3_000_000_000},
        distribution="uniform",
        rows=1000,
        cache_rows=10,
    ),
]


# ---- rows


def test_a_row_says_where_it_was_measured() -> None:
    made = row("flatbed", {"step_ms": 1.0, "hit_rate": None}, rows=10)
    assert set(made) == set(rows.FIELDS)
    assert made["metrics"] == {"step_ms": 1.0}
    assert made["machine"]["device"] == "cpu"
    assert made["versions"]["torch"] == torch.__version__


def test_rows_are_stored_and_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    made = [row("flatbed", {"step_ms": percentiles([1.0, 2.0])}, rows=10), row("torch sparse", {})]
    write_rows(made, path)
    assert read_rows(path) == made
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('[{"benchmark": "step"}]')
    with pytest.raises(ValueError, match="missing or unknown"):
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


# ---- tables


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("step_ms", 0.12345, "0.123 ms"),
        ("step_ms", 1234.5, "1,234 ms"),
        ("read_gb_per_s", 55.49, "55.5 GB/s"),
        ("words_per_s", 1234567.0, "1,234,567"),
        ("peak_memory_bytes", 31e9, "31 GB"),
        ("row_bytes", 1536, "1,536 B"),
        ("hit_rate", 0.7213, "72.1%"),
        ("copy_share", 0.7213, "72%"),
        ("roofline_ratio", 1.52, "1.52×"),
        ("max_rel_error", 2.1e-6, "2e-06"),
        ("max_rel_error", 0.0, "0"),
        ("rows", 20_000_000, "20,000,000"),
        ("verdict", "not worse", "not worse"),
    ],
)
def test_cells_follow_the_unit_in_the_name(name: str, value: Any, text: str) -> None:
    assert report.format_value(name, value) == text


def test_a_table_has_shared_settings_in_its_title_and_others_in_columns() -> None:
    (table,) = report.tables(ROWS)
    lines = table.splitlines()
    assert lines[0] == "**cache step: uniform, 1,000 rows**"
    assert lines[2] == "| variant | cache rows | back to back | × | hit rate | peak memory |"
    assert "| torch sparse |  | 4 ms | 1.00× |  |  |" in lines
    assert "| flatbed | 10 | 2 ms (1–3) | 2.00× | 25.0% | 3 GB |" in lines
    assert lines[-1].startswith("<sub>")


def test_tables_are_split_and_the_newest_row_counts() -> None:
    newer = row("torch sparse", {"back_to_back_ms": 8.0}, ok=False, distribution="uniform", rows=1000)
    other = row("torch sparse", {"back_to_back_ms": 5.0}, distribution="zipf 1.2", rows=1000)
    first, second = report.tables([*ROWS, newer, other])
    assert "| torch sparse FAILED |  | 8 ms |" in first
    assert second.startswith("**cache step: zipf 1.2, 1,000 rows**")


def test_seeds_are_merged() -> None:
    runs = [row("flatbed sgd", {"loss": float(seed), "role": "compared"}, seed=seed) for seed in range(11)]
    (merged,) = report.merge_seeds(runs)
    assert merged["metrics"] == {"loss": {"p20": 2.0, "p50": 5.0, "p80": 8.0}, "role": "compared"}


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_stored_results_are_rendered(file: Path) -> None:
    assert "\n| " in report.to_markdown(read_rows(file))


# ---- pages


def test_the_summary_compares_stored_rows() -> None:
    lines = [line for line in pages.TABLES["summary"].markdown().splitlines() if line.endswith("× |")]
    assert len(lines) == 6
    ratios = [float(line.split("|")[-2].strip(" ×")) for line in lines]
    assert min(ratios) < 1 < max(ratios)  # one of them is slower, and is shown


@pytest.mark.parametrize("name", pages.TABLES)
def test_a_table_of_a_page_is_short_and_complete(name: str) -> None:
    """No question takes more than ten lines, and no cell of a stored result is empty by mistake."""
    lines = [line for line in pages.TABLES[name].markdown().splitlines() if line.startswith("|")]
    assert 4 <= len(lines) <= 2 + 10
    cells = [cell.strip() for line in lines[2:] for cell in line.split("|")[2:-1]]
    assert sum(not cell for cell in cells) <= 2  # captured steps have no time of the optimizer alone


def test_every_table_is_on_a_page() -> None:
    shown = {match["name"] for page in pages.PAGES for match in pages.PLACE.finditer(page.read_text())}
    assert shown == set(pages.TABLES)


def test_pages_are_filled_once(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table cache -->\nold\n<!-- end table -->\nafter\n")
    assert pages.fill([page], check=True) == [page]
    assert "old" in page.read_text()
    assert main(["fill", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- table cache -->\n| by distribution | uniform | zipf 1.05 |")
    assert "<sub>h200-cache.json, commit " in text
    assert text.endswith("<!-- end table -->\nafter\n")
    assert main(["fill", "--check", str(page)]) == 0


@pytest.mark.parametrize("name", ["h200-rows", "h200-step", "h200-overlap", "h200-trace"])
def test_charts_of_stored_rows_are_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot(read_rows(RESULTS / f"{name}.json"), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_titles_of_charts_state_the_result() -> None:
    # Made-up rows: the titles of stored ones change with each benchmark run.
    speeds = [row("torch sparse", {"step_ms": 3.0}, rows=n) for n in (1, 2)]
    speeds += [row("flatbed", {"step_ms": ms}, rows=n) for n, ms in ((1, 3.0), (2, 1.5))]
    assert plot.title_of(speeds, "step_ms").endswith(
        ": flatbed has 1 to 2 × the speed of the fastest variant without flatbed"
    )
    bounded = [
        row(variant, {"step_ms": 1.0, "bound_ratio": ratio}, model=model)
        for variant, ratios in (("flatbed", (1.8, 2.0)), ("flatbed, prefetched", (0.91, 1.29)))
        for model, ratio in zip(("gemm", "conv"), ratios, strict=True)
    ]
    assert plot.title_of(bounded, "step_ms").endswith(
        ": steps take 0.91 to 1.3 × the larger of model and table alone (flatbed, prefetched)"
    )
    kernels = [row("torch fused", {"kernels": 21}), row("flatbed.optim", {"kernels": 4})]
    assert plot.title_of(kernels, plot.TIMELINE).endswith(
        ": 4 kernels with flatbed.optim, 21 kernels with torch fused"
    )


def test_rows_are_shown_and_failures_end_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    write_rows(ROWS, path)
    assert main(["show", str(path)]) == 0
    assert "**cache step: uniform, 1,000 rows**" in capsys.readouterr().out
    write_rows([{**ROWS[0], "ok": False}], path)
    assert main(["show", str(path)]) == 1
    assert "FAILED their checks: step: torch sparse" in capsys.readouterr().err


def test_rows_without_times_are_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="can be drawn"):
        write_plot([row("flatbed", {"verdict": "worse"})], tmp_path / "chart.png")
