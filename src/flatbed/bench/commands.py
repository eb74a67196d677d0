"""The commands of `flatbed bench`. What they run is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatbed.bench.options import (
    CacheCase,
    DeviceOption,
    FeedCase,
    JsonPath,
    ModelName,
    OptimizerName,
    PlotsOption,
    PngPath,
    PrecisionName,
    RowsTier,
    TableCase,
    TableOptimizer,
    TracePath,
    find_device,
    in_existing_folder,
)
from flatbed.bench.terminal import console, fail_on, out_of_memory, present, progress_bar, say

if TYPE_CHECKING:
    from flatbed.bench.rows import Record

bench = typer.Typer(
    help="Measure training against torch's own optimizers, and steps against memory.", no_args_is_help=True
)


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
    where = find_device(device)
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
    title = f"{case.name}, {optimizer.value} on {where.type}"
    with progress_bar(title, n_stages) as progress, out_of_memory():
        rows = bench_step.run(setting, progress=progress)
        traces = write_traces(setting, trace, progress=progress) if trace else []
    present(rows, json_path=json_path, png=png)
    for path in traces:
        typer.echo(f"wrote {path}")
    fail_on([row.way for row in rows if not row.ok and row.part == "step"])


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
    where = find_device(device)
    from flatbed.bench import floor as bench_floor
    from flatbed.bench.models import find_case

    case = find_case(model.value, where)
    setting = bench_floor.Setting(case, bench_floor.PRECISIONS[precision.value], where, steps)
    title = f"{case.name}, {precision.value} on {where.type}"
    with progress_bar(title, setting.n_stages) as progress, out_of_memory():
        rows = bench_floor.run(setting, progress=progress)
    present(rows, json_path=json_path, png=png)
    fail_on([row.way for row in rows if not row.ok])


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
            callback=in_existing_folder,
        ),
    ] = None,
    plots: PlotsOption = None,
) -> None:
    """Move and train rows of tables on the host, in flatbed's ways and in others'."""
    where = find_device(device)
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
        for row in bench_tables.run(name, setting, report=say):
            found.setdefault(name, []).append(row)
            say(summary(row))
            wrong += [f"{name}: {row.way}"] if failed(row) else []
            if out is not None and out.is_dir():
                write_rows(found[name], out / f"{file_name(machine, name)}.json")
            elif out is not None:
                write_rows([one for some in found.values() for one in some], out)
        present(found[name], json_path=None, png=plots and plots / f"{file_name(machine, name)}.png")
    fail_on(list(dict.fromkeys(wrong)))


@bench.command()
def rows(
    tiers: Annotated[
        list[RowsTier] | None,
        typer.Argument(help="Where tables are; all that the device offers unless given.", metavar="TIERS"),
    ] = None,
    device: DeviceOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny tables: to see that it runs.")] = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Readings per way.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the files of the tier disk are made.", exists=True, file_okay=False),
    ] = None,
    json_path: JsonPath = None,
    png: PngPath = None,
) -> None:
    """Read and write random rows of tables by row size, table size and tier, in flatbed's way and others'."""
    where = find_device(device)
    from flatbed.bench import reach

    reach.command(
        where,
        [tier.value for tier in tiers or ()],
        quick=quick,
        samples=samples,
        folder=folder,
        json_path=json_path,
        png=png,
    )


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
    plots: PlotsOption = None,
) -> None:
    """Train tables through a cache of hot rows: time, hits, and what prefetching and CUDA graphs do."""
    where = find_device(device)
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
            say(f"{name}: {way} is left out: {reason}")
            wrong.extend([f"{name}: {way}"] if way.startswith(FLATBED) else [])

        rows: list[Record] = []
        stages = bench_cache.n_stages(name, setting)
        with progress_bar(f"{name} on {where.type}", stages) as stage:
            for row in bench_cache.run(name, setting, stage=stage, left_out=left_out):
                rows.append(row)
                say(summary(row))
                wrong.extend([] if row.ok else [f"{name}: {row.way}"])
                if out is not None:
                    write_rows(rows, out / f"{file_name(machine, name)}.json")
        for table in cache_tables(rows):
            console().print(table)
        if plots is not None and rows:
            write_plot(rows, plots / f"{file_name(machine, name)}.png")
            typer.echo(f"wrote {plots / f'{file_name(machine, name)}.png'}")
    fail_on(list(dict.fromkeys(wrong)))


@bench.command()
def feed(
    cases: Annotated[
        list[FeedCase] | None,
        typer.Argument(help="What to measure; all unless given.", metavar="CASES"),
    ] = None,
    device: DeviceOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, as without a GPU.")] = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Readings per way.")] = None,
    json_path: JsonPath = None,
    png: PngPath = None,
) -> None:
    """Bring numpy batches, and rows of numpy arrays, to the device, in flatbed's ways and in others'."""
    where = find_device(device)
    from flatbed.bench import feed as bench_feed

    bench_feed.command(
        where,
        [case.value for case in cases or ()],
        quick=quick,
        samples=samples,
        json_path=json_path,
        png=png,
    )


@bench.command()
def train(
    cases: Annotated[
        list[str] | None, typer.Argument(help="words, n-grams; all unless given.", metavar="CASES")
    ] = None,
    device: DeviceOption = None,
    way: Annotated[
        list[str] | None, typer.Option(help="A way to measure, by name; repeatable. All unless given.")
    ] = None,
    buckets: Annotated[int | None, typer.Option(min=1, help="Rows of n-grams.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Store the rows as they are found in this folder, a file per case, such as "
            "h200-train-n-grams.json.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    plots: PlotsOption = None,
) -> None:
    """Train word vectors with tables on the host, on the device, and with torch's sparse gradients."""
    where = find_device(device)
    from flatbed.bench import train as bench_train
    from flatbed.bench.rows import this_machine, write_rows
    from flatbed.bench.train_rows import WordsRow, file_name, summary

    machine = this_machine(where.type)
    try:
        chosen = bench_train.find_cases(where, cases or (), buckets=buckets)
        ways = bench_train.find_ways(way or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    wrong: list[str] = []
    for case in chosen:
        found: list[WordsRow] = []
        with progress_bar(f"{case.name} on {where.type}", 1 + len(ways)) as stage, out_of_memory():
            for row in bench_train.run(case, where, machine, ways=ways, stage=stage):
                found.append(row)
                say(summary(row))
                wrong += [] if row.ok else [f"{case.name}: {row.way}"]
                if out is not None:
                    write_rows(found, out / f"{file_name(machine, case.name)}.json")
        present(found, json_path=None, png=plots and plots / f"{file_name(machine, case.name)}.png")
    fail_on(wrong)


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
    present(rows, json_path=None, png=png, with_tables=not markdown)
