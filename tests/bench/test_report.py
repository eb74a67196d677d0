from pathlib import Path

import pytest

from flatbed.bench import floor_table, report, rows
from flatbed.bench.rows import write_rows
from tests.bench.samples import FLOOR_ROW, four_rows


def test_rows_of_all_benchmarks_can_lie_in_one_file(tmp_path: Path) -> None:
    records = [*four_rows(), FLOOR_ROW]
    write_rows(records, tmp_path / "rows.json")
    assert report.read(tmp_path / "rows.json") == records
    assert report.step_rows(records) == four_rows()
    assert report.floor_rows(records) == [FLOOR_ROW]


def test_each_benchmark_is_shown_in_its_own_way() -> None:
    records = [FLOOR_ROW, *four_rows()]
    assert len(report.tables(records)) == 2
    steps, floors = rows.to_markdown(four_rows()), floor_table.to_markdown([FLOOR_ROW])
    assert report.to_markdown(records) == f"{steps}\n{floors}"
    assert report.to_markdown(four_rows()) == steps
    assert report.to_markdown([FLOOR_ROW]) == floors
    assert report.tables([]) == []


def test_other_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"benchmark": "floor"}]')
    with pytest.raises(ValueError, match="missing or unknown fields"):
        report.read(path)
