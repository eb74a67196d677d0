"""Stored rows of `flatbed bench floor` as tables, for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from flatbed.bench.floor import FloorRow
from flatbed.bench.rows import FUSED, LOOP, describe_machine

Rows = Sequence[FloorRow]
# What a column shows of a row among those of its case; None where there is nothing to show.
COLUMNS: dict[str, Callable[[FloorRow, Rows], str | None]] = {
    "GPU time": lambda row, case: _ms(row.gpu_p50_ms),
    "× the floor": lambda row, case: f"{row.ratio_to_floor:.2f}",
    "speed vs torch fused": lambda row, case: _times(row.ratio_to_fused),
    "wall time with zero_grad": lambda row, case: _ms(row.wall_p50_ms),
    "wall vs torch fused": lambda row, case: _wall_against(FUSED, row, case),
    "wall vs torch loop": lambda row, case: _wall_against(LOOP, row, case),
    "host time": lambda row, case: _ms(row.host_p50_ms),
    "memory of a step": lambda row, case: _size(row.step_memory_bytes),
    "memory kept": lambda row, case: _size(row.overhead_bytes),
    "error": lambda row, case: f"{row.max_rel_error:.0e}" if row.ok else f"FAILED {row.max_rel_error:.0e}",
}


def _wall_against(way: str, row: FloorRow, case: Rows) -> str | None:
    other = next((one for one in case if one.way == way), None)
    return None if other is None else _times(row.wall_p50_ms / other.wall_p50_ms)


def _times(ratio: float | None) -> str | None:
    return None if ratio is None else f"{1 / ratio:.2f}×"


def tables(rows: Sequence[FloorRow]) -> list[Table]:
    """One table per case and precision."""
    made = []
    for case in group_floor(rows):
        titles = (_describe(case[0]), describe_machine(case[0].machine))
        table = Table(title=titles[0], caption=titles[1], title_style="bold")
        table.add_column("way", no_wrap=True)
        for name in _columns(case):
            table.add_column(name, justify="right")
        for row in case:
            style = "red" if not row.ok else "bold" if row.way.startswith("flat") else ""
            table.add_row(*map(Text, [row.way, *_cells(row, case)]), style=style)
        made.append(table)
    return made


def to_markdown(rows: Sequence[FloorRow]) -> str:
    """A markdown table per case and precision, with the machine under it."""
    made = []
    for case in group_floor(rows):
        names = _columns(case)
        lines = [
            f"**{_describe(case[0])}**",
            "",
            f"| way | {' | '.join(names)} |",
            f"|---|{'---:|' * len(names)}",
            *(f"| {row.way} | {' | '.join(_cells(row, case))} |" for row in case),
            "",
            f"<sub>{describe_machine(case[0].machine)}</sub>",
        ]
        made.append("\n".join(lines))
    return "\n\n".join(made) + "\n"


def group_floor(rows: Sequence[FloorRow]) -> list[list[FloorRow]]:
    """Rows by case, in order of appearance; a later row replaces an earlier one of the same way."""
    cases: dict[tuple[str, ...], dict[str, FloorRow]] = {}
    for row in rows:
        key = (row.model, row.optimizer, row.precision, row.machine.device)
        cases.setdefault(key, {})[row.way] = row
    return [list(ways.values()) for ways in cases.values()]


def _columns(case: Sequence[FloorRow]) -> list[str]:
    return [name for name, show in COLUMNS.items() if any(show(row, case) is not None for row in case)]


def _cells(row: FloorRow, case: Sequence[FloorRow]) -> list[str]:
    return [COLUMNS[name](row, case) or "" for name in _columns(case)]


def _describe(row: FloorRow) -> str:
    return (
        f"{row.model}, {row.optimizer}, {row.precision}: {row.n_params:,} parameters, "
        f"{row.n_elements:,} elements; floor {row.floor_ms:.3g} ms "
        f"({row.bytes_per_element} B each at {row.copy_gb_per_s:,.0f} GB/s)"
    )


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g} ms"


def _size(value: int | None) -> str | None:
    return None if value is None else f"{value / 1e6:.3g} MB"
