from dataclasses import replace

from rich.console import Console

from flatbed.bench.floor import FloorRow
from flatbed.bench.floor_table import tables, to_markdown
from tests.bench.samples import FLOOR_ROW

FUSED_ROW = replace(
    FLOOR_ROW, way="torch fused", gpu_p50_ms=15.0, wall_p50_ms=25.0, ratio_to_floor=1.5, ratio_to_fused=1.0
)


def render(rows: list[FloorRow]) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        for table in tables(rows):
            console.print(table)
    return captured.get()


def test_a_table_compares_with_the_floor_and_with_torch() -> None:
    text = render([FUSED_ROW, FLOOR_ROW])
    ours = next(line for line in text.splitlines() if "flatbed.optim" in line)
    cells = [cell.strip() for cell in ours.split("│")][1:-1]
    assert cells == [
        "flatbed.optim",
        "12 ms",
        "1.20",
        "1.25×",
        "12.5 ms",
        "2.00×",
        "0.1 ms",
        "0 MB",
        "1.5 MB",
        "2e-06",
    ]
    assert "floor 10 ms (32 B each at 4,000 GB/s)" in " ".join(text.split())


def test_markdown_has_the_same() -> None:
    lines = to_markdown([FUSED_ROW, FLOOR_ROW]).splitlines()
    assert lines[0].startswith("**gpt-like, adam, fp32: 580 parameters, 1,250,000,000 elements; floor 10 ms")
    assert (
        "| flatbed.optim | 12 ms | 1.20 | 1.25× | 12.5 ms | 2.00× | 0.1 ms | 0 MB | 1.5 MB | 2e-06 |" in lines
    )
    assert lines[-1].startswith("<sub>Some GPU")


def test_what_a_cpu_cannot_tell_has_no_column() -> None:
    unknown = {"gpu_p50_ms": None, "host_p50_ms": None, "step_memory_bytes": None, "overhead_bytes": None}
    row = replace(FLOOR_ROW, ratio_to_fused=None, **unknown)
    assert "| way | × the floor | wall time with zero_grad | error |" in to_markdown([row])


def test_cases_and_precisions_have_tables_of_their_own_and_the_newest_row_counts() -> None:
    rows = [FLOOR_ROW, replace(FLOOR_ROW, precision="bf16-master"), replace(FLOOR_ROW, wall_p50_ms=77.0)]
    assert len(tables(rows)) == 2
    text = to_markdown(rows)
    assert text.count("flatbed.optim |") == 2
    assert "77 ms" in text


def test_a_failed_check_is_shown() -> None:
    assert "FAILED 2e-06" in render([replace(FLOOR_ROW, ok=False)])
