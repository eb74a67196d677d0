"""Stored rows as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flatbed.bench.rows import FUSED, LOOP, Line, Row, describe_case, describe_machine, group, speedup


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table per case."""
    return [_table(lines) for lines in group(rows)]


def _table(lines: Sequence[Line]) -> Table:
    first = lines[0].optimizer
    table = Table(title=describe_case(first), caption=describe_machine(first.machine), title_style="bold")
    table.add_column("way")
    for part in (f"clip + {first.optimizer}\n+ zero_grad", "whole step"):
        table.add_column(part, justify="right")
        table.add_column("vs torch\nfused", justify="right")
        table.add_column("vs torch\nloop", justify="right")
    table.add_column("error", justify="right")
    if first.peak_memory_bytes is not None:
        table.add_column("peak\nmemory", justify="right")
    rows = [row for line in lines for row in (line.optimizer, line.step)]
    for line in lines:
        table.add_row(*_cells(line, rows), style="bold" if line.optimizer.way.startswith("flat") else "")
    return table


def _cells(line: Line, rows: Sequence[Row]) -> list[Text]:
    cells = [Text(line.optimizer.way)]
    for row in (line.optimizer, line.step):
        cells.append(Text(f"{row.p50_ms:.3g} ms"))
        cells += [_times(speedup(row, rows, over=over)) for over in (FUSED, LOOP)]
    row = line.optimizer
    error = f"{row.max_rel_error:.0e}" if row.max_rel_error else "0"
    cells.append(Text(error) if row.ok else Text(f"FAILED {error}", "red"))
    if row.peak_memory_bytes is not None:
        cells.append(Text(f"{row.peak_memory_bytes / 1e9:.3g} GB"))
    return cells


def _times(faster: float | None) -> Text:
    if faster is None:
        return Text("")
    return Text(f"{faster:.2f}×", "green" if faster > 1.05 else "red" if faster < 0.95 else "")
