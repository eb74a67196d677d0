"""Stored rows of `flatbed bench feed` as bars. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatbed.bench.feed_rows import BandwidthRow, EpochRow, FeedRow, ReadRow, describe, newest, rows_of, size
from flatbed.bench.plot import MISSING, have_matplotlib
from flatbed.bench.rows import Machine, Record, describe_machine
from flatbed.bench.tables_plot import WayBars, draw


def feed_cases(records: Sequence[Record]) -> list[tuple[str, Machine, list[WayBars]]]:
    """What is drawn of some rows: a title, the machine, and panels side by side."""
    made: list[tuple[str, Machine, list[WayBars]]] = []
    for rows in newest(records, BandwidthRow):
        kinds = {describe(row): [o for o in rows if describe(o) == describe(row)] for row in rows}
        title = f"numpy batches to the device; a plain copy of pinned memory: {rows[0].dma_gb_per_s:.1f} GB/s"
        made.append((title, rows[0].machine, [_speeds(kind, some) for kind, some in kinds.items()]))
    for epochs in newest(records, EpochRow):
        panels = []
        for factor in dict.fromkeys(row.factor for row in epochs):
            bars = [(_short(row), row.ratio, row.ok) for row in epochs if row.factor == factor]
            panels.append(WayBars(f"compute {factor:g} × transfer", "×", bars))
        title = f"epochs of batches of {size(epochs[0].batch_bytes)}: time over the larger of both"
        made.append((title, epochs[0].machine, panels))
    for reads in newest(records, ReadRow):
        sizes = dict.fromkeys(row.row_bytes for row in reads)
        panels = [_speeds(f"rows of {size(n)}", [o for o in reads if o.row_bytes == n]) for n in sizes]
        made.append((f"{reads[0].n_ids:,} random rows of an array", reads[0].machine, panels))
    return made


def _speeds(title: str, rows: Sequence[BandwidthRow] | Sequence[ReadRow]) -> WayBars:
    return WayBars(title, "GB/s", [(_short(row), row.gb_per_s, row.ok) for row in rows])


def _short(row: FeedRow) -> str:
    return row.way.replace(", .to(non_blocking=True)", "").replace("torch.from_numpy", "from_numpy")


def write_plot(records: Sequence[Record], path: Path) -> None:
    """Draw a line of panels per case."""
    if not have_matplotlib():
        raise ModuleNotFoundError(MISSING, name="matplotlib")
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    cases = feed_cases(rows_of(records))
    figure = Figure(figsize=(18, 0.4 + 2.4 * len(cases)))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    subfigures = figure.subfigures(len(cases), 1, squeeze=False)
    for (subfigure,), (title, machine, panels) in zip(subfigures, cases, strict=True):
        subfigure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold")
        subfigure.supxlabel(describe_machine(machine), x=0.99, ha="right", fontsize=8, color="#888888")
        axes = subfigure.subplots(1, len(panels), squeeze=False)
        for place, (axis, panel) in enumerate(zip(axes[0], panels, strict=True)):
            draw(axis, panel)
            if place and [bar[0] for bar in panel.bars] == [bar[0] for bar in panels[0].bars]:
                axis.set_yticklabels([])  # those of the first panel
    figure.savefig(str(path), dpi=140, facecolor="white")
