"""Tables, pages and charts of stored rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.plot import write_plot
from benchmarks.rows import RESULTS, read_rows, write_rows
from tests.benchmarks.test_rows import row

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


def test_the_summary_compares_stored_rows() -> None:
    lines = report.summary().splitlines()
    assert len(lines) == 2 + 6
    ratios = [float(line.split("|")[-2].strip(" ×")) for line in lines[2:]]
    assert min(ratios) < 1 < max(ratios)  # one of them is slower, and is shown


def test_pages_are_filled_once(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- rows h200-tables.json step -->\nold\n<!-- end rows -->\nafter\n")
    assert report.fill([page], check=True) == [page]
    assert "old" in page.read_text()
    assert main(["fill", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- rows h200-tables.json step -->\n**tables step:")
    assert "tables fit" not in text
    assert text.endswith("<!-- end rows -->\nafter\n")
    assert main(["fill", "--check", str(page)]) == 0


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


@pytest.mark.parametrize("name", ["h200-step", "h200-roofline", "h200-cache", "h200-rows"])
def test_charts_of_bars_and_of_lines(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.png"
    write_plot(read_rows(RESULTS / f"{name}.json"), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_rows_without_times_are_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="can be drawn"):
        write_plot([row("flatbed", {"verdict": "worse"})], tmp_path / "chart.png")
