"""A table of text, for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from flatbed.bench.rows import Machine, describe_machine

OURS = "flatbed"  # what lines of our own begin with


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table as text, whatever it becomes."""

    title: str
    machine: Machine
    columns: list[str]
    lines: list[list[str]]
    n_names: int = 1
    """So many columns say what a line is about."""

    def drawn(self) -> Table:
        """For the terminal."""
        table = Table(title=self.title, caption=describe_machine(self.machine), title_style="bold")
        for place, column in enumerate(self.columns):
            table.add_column(column, justify="left" if place < self.n_names else "right")
        for line in self.lines:
            failed = any("FAILED" in cell for cell in line)
            style = "red" if failed else "bold" if line[0].startswith(OURS) else ""
            table.add_row(*map(Text, line), style=style)
        return table


def marked_down(sheets: Sequence[Sheet]) -> str:
    """As markdown, each with the machine under it."""
    made = []
    for sheet in sheets:
        lines = [
            f"**{sheet.title}**",
            "",
            f"| {' | '.join(sheet.columns)} |",
            f"|{'---|' * sheet.n_names}{'---:|' * (len(sheet.columns) - sheet.n_names)}",
            *(f"| {' | '.join(line)} |" for line in sheet.lines),
            "",
            f"<sub>{describe_machine(sheet.machine)}</sub>",
        ]
        made.append("\n".join(lines))
    return "\n\n".join(made) + "\n"
