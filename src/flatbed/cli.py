"""The `flatbed` command. What needs torch is imported by the commands that use it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flatbed._version import __version__

if TYPE_CHECKING:
    import torch

    from flatbed.bench.rows import Record
    from flatbed.doctor import Finding

app = typer.Typer(
    help="Training memory where it should be: measure it, and see what this machine offers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(
    help="Measure training against torch's own optimizers, and steps against memory.", no_args_is_help=True
)
app.add_typer(bench, name="bench")


class ModelName(str, Enum):
    """The models of flatbed.bench.models."""

    LINEAR100 = "linear100"
    RESNET_LIKE = "resnet-like"
    GPT_LIKE = "gpt-like"
    VIT_B16 = "vit-b16"
    MANY_SMALL = "many-small"


class OptimizerName(str, Enum):
    """The optimizers of flatbed.bench.ways."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"


class PrecisionName(str, Enum):
    """The precisions of flatbed.bench.floor."""

    FP32 = "fp32"
    BF16_MASTER = "bf16-master"


class TableCase(str, Enum):
    """The cases of flatbed.bench.tables."""

    MOVE = "move"
    SPEEDTORCH = "speedtorch"
    STEP = "step"
    FIT = "fit"


class TableOptimizer(str, Enum):
    """The optimizers of flatbed.bench.tables_ways."""

    ADAM = "adam"
    ADAGRAD = "adagrad"
    SGD = "sgd"


class CacheCase(str, Enum):
    """The cases of flatbed.bench.cache."""

    STEP = "step"
    SIZES = "sizes"
    ROWS = "rows"
    SWAP = "swap"
    DISK = "disk"


class DeviceName(str, Enum):
    """Where to train."""

    CPU = "cpu"
    CUDA = "cuda"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"flatbed {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Training memory where it should be: measure it, and see what this machine offers."""


def _in_existing_folder(path: Path | None) -> Path | None:
    """Refuse at once what would otherwise fail after minutes of measuring."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist")
    return path


def _drawable(path: Path | None) -> Path | None:
    if path is not None:
        from flatbed.bench.plot import MISSING, have_matplotlib

        if not have_matplotlib():
            raise typer.BadParameter(MISSING)
        if path.suffix.lower() not in (".png", ".svg", ".pdf", ".jpg"):
            raise typer.BadParameter(f"a chart is a .png, .svg, .pdf or .jpg file; found {path.name!r}")
    return _in_existing_folder(path)


JsonPath = Annotated[
    Path | None,
    typer.Option("--json", help="Store the rows here.", dir_okay=False, callback=_in_existing_folder),
]
PngPath = Annotated[
    Path | None,
    typer.Option("--png", help="Draw a bar chart here.", dir_okay=False, callback=_drawable),
]
TracePath = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write Chrome traces: X.json gives X.torch-loop.json, X.torch-fused.json, X.flat.json and "
        "X.optim.json.",
        dir_okay=False,
        callback=_in_existing_folder,
    ),
]
DeviceOption = Annotated[
    DeviceName | None, typer.Option("--device", help="Where; cuda if there is a GPU, unless given.")
]


@bench.command()
def step(
    model: Annotated[ModelName, typer.Option(help="What to train.")] = ModelName.LINEAR100,
    optimizer: Annotated[OptimizerName, typer.Option(help="Which update rule.")] = OptimizerName.ADAMW,
    device: DeviceOption = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Timed steps per way; the default suits the model.")
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="A way to measure, by name; repeatable. All unless given; torch loop always."),
    ] = None,
    json_path: JsonPath = None,
    png: PngPath = None,
    trace: TracePath = None,
) -> None:
    """Time clip + optimizer + zero_grad, and the whole training step, in torch's ways and in flatbed's."""
    where = _find_device(device)
    from flatbed.bench import step as bench_step
    from flatbed.bench.models import find_case
    from flatbed.bench.trace import TRACED, write_traces
    from flatbed.bench.ways import find_ways

    try:
        ways = find_ways(where, way or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--way") from error
    case = find_case(model.value, where)
    setting = bench_step.Setting(case, optimizer.value, where, steps or case.steps, ways)
    n_stages = setting.n_stages + (sum(way.name in TRACED for way in ways) if trace else 0)
    with _progress(f"{case.name}, {optimizer.value} on {where.type}", n_stages) as progress, _out_of_memory():
        rows = bench_step.run(setting, progress=progress)
        traces = write_traces(setting, trace, progress=progress) if trace else []
    _report(rows, json_path=json_path, png=png)
    for path in traces:
        typer.echo(f"wrote {path}")
    _fail_on([row.way for row in rows if not row.ok and row.part == "step"])


@bench.command()
def floor(
    model: Annotated[ModelName, typer.Option(help="Whose parameters to step.")] = ModelName.GPT_LIKE,
    precision: Annotated[
        PrecisionName, typer.Option(help="All fp32, or bf16 with fp32 master weights and state.")
    ] = PrecisionName.FP32,
    device: DeviceOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per way and clock.")] = 20,
    json_path: JsonPath = None,
    png: PngPath = None,
) -> None:
    """Compare a step of Adam that clips with the least time its memory traffic can take."""
    where = _find_device(device)
    from flatbed.bench import floor as bench_floor
    from flatbed.bench.models import find_case

    case = find_case(model.value, where)
    setting = bench_floor.Setting(case, bench_floor.PRECISIONS[precision.value], where, steps)
    title = f"{case.name}, {precision.value} on {where.type}"
    with _progress(title, setting.n_stages) as progress, _out_of_memory():
        rows = bench_floor.run(setting, progress=progress)
    _report(rows, json_path=json_path, png=png)
    _fail_on([row.way for row in rows if not row.ok])


def _drawable_folder(path: Path | None) -> Path | None:
    if path is not None:
        from flatbed.bench.plot import MISSING, have_matplotlib

        if not have_matplotlib():
            raise typer.BadParameter(MISSING)
    return path


@bench.command()
def tables(
    case: Annotated[
        list[TableCase] | None,
        typer.Option(help="What to measure; repeatable. All that the device offers unless given."),
    ] = None,
    device: DeviceOption = None,
    gigabytes: Annotated[
        float | None, typer.Option(min=1e-6, help="Size of the table in move, speedtorch and fit.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the table in step.")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Numbers in a row, in step and fit.")] = 128,
    ids: Annotated[int | None, typer.Option(min=2, help="Ids in a batch.")] = None,
    optimizer: Annotated[
        TableOptimizer, typer.Option(help="Which update rule, in step and fit.")
    ] = TableOptimizer.ADAM,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls or steps.")] = 30,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Store the rows as they are found: all in this file, or in a folder that exists a file per "
            "case, such as h200-tables-move.json.",
            callback=_in_existing_folder,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Draw a chart per case into this folder.",
            exists=True,
            file_okay=False,
            callback=_drawable_folder,
        ),
    ] = None,
) -> None:
    """Move and train rows of tables on the host, in flatbed's ways and in others'."""
    where = _find_device(device)
    from flatbed.bench import tables as bench_tables
    from flatbed.bench.rows import this_machine, write_rows
    from flatbed.bench.tables_rows import failed, file_name, summary

    machine = this_machine(where.type)
    sizes = (gigabytes, rows, dim, ids)
    setting = bench_tables.Setting(where, machine, *sizes, optimizer=optimizer.value, repeats=repeats)
    try:
        cases = bench_tables.find_cases(where, [one.value for one in case or ()])
        for name in cases:
            bench_tables.check(name, setting)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    found: dict[str, list[Record]] = {}
    wrong = []
    for name in cases:
        for row in bench_tables.run(name, setting, report=_say):
            found.setdefault(name, []).append(row)
            _say(summary(row))
            wrong += [f"{name}: {row.way}"] if failed(row) else []
            if out is not None and out.is_dir():
                write_rows(found[name], out / f"{file_name(machine, name)}.json")
            elif out is not None:
                write_rows([one for some in found.values() for one in some], out)
        _report(found[name], json_path=None, png=plots and plots / f"{file_name(machine, name)}.png")
    _fail_on(list(dict.fromkeys(wrong)))


@bench.command()
def cache(
    cases: Annotated[
        list[CacheCase] | None,
        typer.Argument(help="What to measure; all unless given.", metavar="CASES"),
    ] = None,
    device: DeviceOption = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Tiny tables and few steps, as without a GPU: to see that it runs."),
    ] = False,
    scale: Annotated[
        float, typer.Option(min=1e-3, max=100, help="All numbers of rows and ids, times this.")
    ] = 1.0,
    warm_up: Annotated[
        int | None, typer.Option(min=1, help="Steps before those that are timed, 200 unless given.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Timed steps, one by one, 100 unless given; twice as many in a row."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the file of the case disk is made.", exists=True, file_okay=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Store the rows as they are found in this folder, a file per case, such as "
            "h200-cache-step.json.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Draw a chart per case into this folder.",
            exists=True,
            file_okay=False,
            callback=_drawable_folder,
        ),
    ] = None,
) -> None:
    """Train tables through a cache of hot rows: time, hits, and what prefetching and CUDA graphs do."""
    where = _find_device(device)
    from flatbed.bench import cache as bench_cache
    from flatbed.bench.cache_plot import write_plot
    from flatbed.bench.cache_rows import FLATBED, file_name, summary
    from flatbed.bench.cache_table import tables as cache_tables
    from flatbed.bench.rows import this_machine, write_rows

    machine = this_machine(where.type)
    setting = bench_cache.make_setting(
        where, machine, quick=quick, scale=scale, warm_up=warm_up, steps=steps, folder=folder
    )
    wrong: list[str] = []
    for name in bench_cache.find_cases([one.value for one in cases or ()]):

        def left_out(way: str, reason: str, name: str = name) -> None:
            _say(f"{name}: {way} is left out: {reason}")
            wrong.extend([f"{name}: {way}"] if way.startswith(FLATBED) else [])

        rows: list[Record] = []
        stages = bench_cache.n_stages(name, setting)
        with _progress(f"{name} on {where.type}", stages) as stage:
            for row in bench_cache.run(name, setting, stage=stage, left_out=left_out):
                rows.append(row)
                _say(summary(row))
                wrong.extend([] if row.ok else [f"{name}: {row.way}"])
                if out is not None:
                    write_rows(rows, out / f"{file_name(machine, name)}.json")
        for table in cache_tables(rows):
            _console().print(table)
        if plots is not None and rows:
            write_plot(rows, plots / f"{file_name(machine, name)}.png")
            typer.echo(f"wrote {plots / f'{file_name(machine, name)}.png'}")
    _fail_on(list(dict.fromkeys(wrong)))


def _say(line: str) -> None:
    """At once, even into a pipe: measuring takes minutes, and may be cut off."""
    typer.echo(line)
    sys.stdout.flush()


@bench.command()
def show(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files that --json wrote.", exists=True, dir_okay=False, metavar="ROWS"),
    ],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print markdown tables.")] = False,
    png: PngPath = None,
) -> None:
    """Show stored rows as tables, as markdown or as a chart."""
    from flatbed.bench import report

    try:
        rows = [row for path in files for row in report.read(path)]
        if not report.tables(rows):
            raise ValueError("there are no rows in it")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="ROWS") from error
    if markdown:
        typer.echo(report.to_markdown(rows), nl=False)
    _report(rows, json_path=None, png=png, with_tables=not markdown)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at python, torch, GPU, memory and copy speeds, and say what anything missing means."""
    from flatbed.doctor import examine, torch_is_usable

    findings = examine()
    if as_json:
        typer.echo(json.dumps([finding.to_dict() for finding in findings], indent=1, ensure_ascii=False))
    else:
        _console().print(_findings_table(findings))
    if not torch_is_usable():
        raise typer.Exit(1)


def _find_device(device: DeviceName | None) -> torch.device:
    import torch

    available = torch.cuda.is_available()
    if device is DeviceName.CUDA and not available:
        raise typer.BadParameter("torch sees no CUDA GPU; `flatbed doctor` says more", param_hint="--device")
    return torch.device(device.value if device else "cuda" if available else "cpu")


def _report(
    rows: Sequence[Record], *, json_path: Path | None, png: Path | None, with_tables: bool = True
) -> None:
    from flatbed.bench import report
    from flatbed.bench.plot import write_plot
    from flatbed.bench.rows import write_rows

    if with_tables:
        for table in report.tables(rows):
            _console().print(table)
    if json_path:
        write_rows(rows, json_path)
        typer.echo(f"wrote {json_path}")
    if png:
        write_plot(rows, png)
        typer.echo(f"wrote {png}")


def _fail_on(ways: Sequence[str]) -> None:
    if ways:
        typer.echo(f"FAILED: other weights than the reference's, in {', '.join(ways)}", err=True)
        raise typer.Exit(1)


def _findings_table(findings: Sequence[Finding]) -> Table:
    marks = {True: Text("✓", "green"), False: Text("✗", "red"), None: Text("–", "dim")}
    table = Table(title="flatbed doctor", title_style="bold", show_lines=False)
    for column in ("", "what", "found", "meaning"):
        table.add_column(column)
    for finding in findings:
        style = "dim" if finding.ok is None else ""
        cells = (Text(finding.name), Text(finding.value), Text(finding.meaning))
        table.add_row(marks[finding.ok], *cells, style=style)
    return table


def _console() -> Console:
    """The terminal; where there is none, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; the block calls what it is given at the beginning of each stage."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stage = TextColumn("[dim]{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, stage, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=-1)

        def begin(description: str) -> None:
            bar.update(task, advance=1, description=description)

        yield begin


@contextmanager
def _out_of_memory() -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        typer.echo(f"Not enough GPU memory for this model; try another --model. {error}", err=True)
        raise typer.Exit(1) from error
