from dataclasses import replace

from rich.console import Console

from flatbed.bench.rows import Row
from flatbed.bench.table import tables
from tests.bench.samples import four_rows


def render(rows: list[Row]) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        for table in tables(rows):
            console.print(table)
    return capture.get()


def test_a_table_compares_each_way_with_torch_fused() -> None:
    flat = next(line for line in render(four_rows()).splitlines() if "flat bound" in line)
    cells = [cell.strip() for cell in flat.split("│")]
    assert cells[1:4] == ["flat bound", "0.5 ms", "4.00×"]
    assert cells[5:7] == ["5 ms", "4.00×"]


def test_a_failed_check_is_shown() -> None:
    text = render([replace(row, ok=False, max_rel_error=0.2) for row in four_rows()])
    assert "FAILED 2e-01" in text
