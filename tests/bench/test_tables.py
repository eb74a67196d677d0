from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import flatbed
from flatbed.bench import (
    plot,
    report,
    tables,
    tables_cupy,
    tables_measure,
    tables_move,
    tables_speedtorch,
    tables_step,
    tables_ways,
)
from flatbed.bench.options import TableCase, TableOptimizer
from flatbed.bench.rows import Record, write_rows
from flatbed.bench.tables_rows import (
    CASES,
    DEVICE,
    HOST,
    KERNEL,
    ROWS,
    SPARSE,
    SPEEDTORCH,
    TORCH,
    MoveRow,
    TrainRow,
    failed,
    file_name,
    summary,
)
from flatbed.bench.tables_table import tables as rich_tables
from flatbed.bench.tables_table import to_markdown
from flatbed.cli import app
from flatbed.kernels import rows as ops
from flatbed.kernels.rows import RecordLocation
from flatbed.tables.storage.memory import MemoryStorage
from tests.bench.samples import CPU, FLOOR_ROW, MACHINE, four_rows
from tests.bench.table_samples import MOVE_ROW, TRAIN_ROW, moves, peers, steps

invoke = CliRunner().invoke
SMALL = [
    "--device",
    "cpu",
    "--gigabytes",
    "0.001",
    "--ids",
    "50",
    "--rows",
    "300",
    "--dim",
    "8",
    "--repeats",
    "3",
]
SETTING = tables.Setting(CPU, MACHINE, gigabytes=0.001, n_rows=300, dim=8, n_ids=50, repeats=3)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables_measure.DMA_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(tables_measure, "PATTERN_WORDS", 1 << 10)


def run(case: str, setting: tables.Setting = SETTING) -> list[MoveRow | TrainRow]:
    return list(tables.run(case, setting, report=lambda line: None))


def bench(*words: str) -> tuple[int, str]:
    result = invoke(app, ["bench", "tables", *SMALL, *words])
    return result.exit_code, result.output


# ---- the cases


def test_records_of_every_size_are_moved_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_move, "TABLE_BYTES", (100_000, 500_000, 10**7))
    rows = run("move")
    seen = [(row.table_bytes, row.record_bytes, row.direction) for row in rows]
    shapes = [(10**6, size) for size in tables_move.RECORD_BYTES] + [(100_000, 1536), (500_000, 1536)]
    assert seen == [(*shape, direction) for shape in shapes for direction in ("to", "back")]
    for row in rows:
        assert (row.case, row.way, row.memory, row.clock) == ("move", KERNEL, "plain", "wall")
        assert (row.n_ids, row.n_samples, row.ok) == (50, 3, True)
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert row.gb_per_s == pytest.approx(50 * row.record_bytes / (1e6 * row.p50_ms))
        assert row.share_of_dma == pytest.approx(row.gb_per_s / row.dma_gb_per_s)


def test_speedtorchs_benchmark_is_taken_in_flatbeds_ways_and_in_torchs() -> None:
    rows = run("speedtorch")
    ways = [(KERNEL, "plain"), (ROWS, "plain"), (TORCH, "pageable")]
    assert [(row.way, row.memory, row.direction) for row in rows] == [
        (*way, direction) for way in ways for direction in ("to", "back")
    ]
    assert all(row.ok and row.record_bytes == 512 and row.clock == "wall" for row in rows)


@pytest.mark.parametrize("optimizer", tables_ways.RECIPES)
def test_steps_are_taken_in_every_way_and_give_the_reference(optimizer: str) -> None:
    rows = run("step", replace(SETTING, optimizer=optimizer))
    assert [row.way for row in rows] == [HOST, SPARSE, DEVICE]
    for row in rows:
        assert (row.case, row.optimizer, row.n_rows, row.dim, row.n_ids) == ("step", optimizer, 300, 8, 50)
        assert (row.ok, row.n_wrong_rows, row.n_samples) == (True, 0, 3)
        assert 60 < row.n_checked_rows < 110
        assert row.peak_memory_bytes is row.growth_bytes is row.memory_limit_bytes is None
        assert row.together_ms > 0


def test_fit_is_for_gpus() -> None:
    assert tables.find_cases(CPU, []) == ["move", "speedtorch", "step"]
    assert tables.find_cases(torch.device("cuda"), []) == list(CASES)
    assert tables.find_cases(torch.device("cuda"), ["fit", "move"]) == ["move", "fit"]
    with pytest.raises(ValueError, match="no case named 'fit' on cpu; there are move, speedtorch, step"):
        tables.find_cases(CPU, ["fit"])


def test_fit_fills_its_size_with_weights_and_state() -> None:
    setting = tables._fit_setting(replace(SETTING, dim=128, gigabytes=0.0015, n_ids=None))
    assert (setting.n_rows, setting.steps, setting.n_ids) == (976, tables.FIT_STEPS, 65_536)


def test_the_defaults_are_those_of_the_stated_targets() -> None:
    setting = tables.Setting(torch.device("cuda"), MACHINE)
    assert tables._bytes_and_ids("move", setting) == (30 * 10**9, 65_536)
    assert tables._bytes_and_ids("speedtorch", setting) == (10**10, 131_072)
    assert tables._bytes_and_ids("fit", setting) == (40 * 10**9, 65_536)
    step = tables._step_setting(setting)
    assert (step.n_rows, step.dim, step.n_ids, step.optimizer) == (20_000_000, 128, 65_536, "adam")
    for case in CASES:
        tables.check(case, setting)


# ---- what they have in common


@pytest.mark.parametrize(("n_rows", "n_ids"), [(7, 7), (100, 60), (5000, 50), (10**10, 300)])
def test_ids_are_distinct_and_in_no_order(n_rows: int, n_ids: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = tables_measure.distinct_ids(n_rows, n_ids, generator)
    other = tables_measure.distinct_ids(n_rows, n_ids, generator)
    assert len(ids) == len(torch.unique(ids)) == n_ids
    assert ids.min() >= 0
    assert ids.max() < n_rows
    assert not torch.equal(ids, other)
    assert not torch.equal(ids, ids.sort().values)


def test_memory_is_numbered_so_that_it_can_be_read_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_measure, "PATTERN_LIMIT", 1 << 12)
    memory = torch.zeros(4 * 5000, dtype=torch.uint8)
    tables_measure.number_(memory)
    assert torch.equal(memory.view(torch.int32), torch.arange(5000, dtype=torch.int32) % (1 << 12))
    last = torch.tensor([(1 << 30) - 1], dtype=torch.int32)
    assert last.view(torch.float32).isfinite()


def test_batches_that_are_checked_come_again_with_other_gradients() -> None:
    batches = tables_step.make_batches(tables._step_setting(SETTING))
    first, second, _ = batches.checked
    assert torch.equal(first[:25].sort().values, second[:25].sort().values)
    assert not torch.equal(first[:25], second[:25])
    assert len(batches.single) == len(batches.together) == 3
    assert batches.target.abs().min() >= 1


# ---- SpeedTorch's way, with numpy in the place of CuPy


class NumpyTable:
    """Writes as CuPy does: of equal ids, one wins."""

    def __init__(self, n_rows: int, dim: int) -> None:
        self.array = np.zeros((n_rows, dim), np.float32)
        self.memory = torch.from_numpy(self.array).view(-1).view(torch.uint8)

    def read(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(self.array[ids])

    def write(self, ids: np.ndarray, rows: Tensor) -> None:
        self.array[ids] = rows.numpy()


@pytest.fixture
def numpy_for_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_cupy, "PinnedTable", NumpyTable)
    monkeypatch.setattr(tables_cupy, "free_pool", lambda: None)
    monkeypatch.setattr(tables_cupy, "to_cupy", lambda ids: ids.numpy())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ways = {SPEEDTORCH: tables_ways.SwitchedTable}
    monkeypatch.setattr(tables_step, "trainees", lambda device, left_out: ways)


@pytest.mark.usefixtures("numpy_for_cupy")
@pytest.mark.parametrize("optimizer", tables_ways.RECIPES)
def test_speedtorchs_way_is_right_without_repeated_ids_and_loses_updates_with_them(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = replace(SETTING, n_rows=60, optimizer=optimizer)
    (wrong,) = run("step", setting)
    assert wrong.way == SPEEDTORCH
    assert 5 < wrong.n_wrong_rows < wrong.n_checked_rows
    assert not wrong.ok
    assert not failed(wrong)

    def permuted(n_rows: int, shape: tuple[int], generator: torch.Generator) -> Tensor:
        return torch.randperm(n_rows, generator=generator)[: shape[0]]

    def target(n_ids: int, dim: int, generator: torch.Generator) -> Tensor:
        return 1 + torch.rand((n_ids, dim), generator=generator)

    monkeypatch.setattr(torch, "randint", permuted)
    monkeypatch.setattr(tables_step, "make_target", target)
    monkeypatch.setattr(tables_step, "CHECKED_STEPS", 1)
    (right,) = run("step", setting)
    assert right.ok


@pytest.mark.usefixtures("numpy_for_cupy")
def test_cupys_ways_move_rows_of_pinned_memory() -> None:
    with tables_speedtorch._cupy(100, CPU) as peer:
        assert [mover.memory for mover in peer.movers] == ["pinned", "pinned"]
        for mover in peer.movers:
            ids = torch.tensor([3, 99, 0])
            rows = torch.randn(3, tables_speedtorch.DIM)
            assert torch.equal(mover.to(mover.prepare(ids)), peer.table[ids])
            mover.back(mover.prepare(ids), rows)
            assert torch.equal(peer.table[ids], rows)
    assert peer.movers[0].prepare(ids).dtype == np.int32


def test_a_peer_that_fails_is_named_and_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(tables_ways, "SparseTable", fail)
    said: list[str] = []
    rows = list(tables.run("step", SETTING, report=said.append))
    assert [row.way for row in rows] == [HOST, DEVICE]
    assert said == ["step: torch sparse is left out: RuntimeError: no kernel image"]


# ---- wrong results are found


def test_a_gather_of_other_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(place: RecordLocation, rows: Tensor, nbytes: int) -> Tensor:
        assert place.memory is not None
        return place.memory[:, :nbytes][(rows + 1) % len(place.memory)]

    monkeypatch.setattr(tables_move.ops, "gather", shifted)
    rows = run("move")
    assert all(row.ok == (row.direction == "back") for row in rows)
    assert "FAILED" in summary(rows[0])
    code, output = bench("--case", "move")
    assert code == 1
    assert "FAILED: not what the reference gives, in move: flatbed kernel" in output


def test_a_scatter_that_loses_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ops.scatter_

    def half(place: RecordLocation, rows: Tensor, records: Tensor) -> None:
        whole(place, rows[::2], records[::2])

    monkeypatch.setattr(ops, "scatter_", half)
    found = {(row.way, row.direction): row.ok for row in run("speedtorch")}
    assert not found[KERNEL, "back"]
    assert found[KERNEL, "to"]
    assert found[TORCH, "back"]


def test_steps_that_are_too_long_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tables_ways.RECIPES["adam"]

    def hasty(module: flatbed.Embedding, lr: float) -> torch.optim.Optimizer:
        return flatbed.optim.Adam(module, lr=1.02 * lr)

    monkeypatch.setitem(tables_ways.RECIPES, "adam", replace(recipe, flatbed_class=hasty))
    found = {row.way: row for row in run("step")}
    assert found[SPARSE].ok
    assert found[HOST].n_wrong_rows == found[HOST].n_checked_rows
    assert failed(found[HOST])
    assert bench("--case", "step")[0] == 1


def test_lost_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = tables_ways.FlatbedTable.step

    def forgetful(self: tables_ways.FlatbedTable, ids: Tensor, target: Tensor) -> None:
        step(self, ids, target)
        store = self._emb.table.store
        store.flush(drop=True)
        assert isinstance(store.ensure_layout(), MemoryStorage)
        assert store.ensure_layout().memory is not None
        for name in self._emb.table.state_names:
            store.record.view(store.ensure_layout().memory, name).zero_()

    monkeypatch.setattr(tables_ways.FlatbedTable, "step", forgetful)
    assert [row.ok for row in run("step")] == [False, True, False]


# ---- stored, shown, drawn


def test_the_command_measures_stores_and_draws_every_case(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, output = bench("--out", str(tmp_path), "--plots", str(tmp_path))
    assert code == 0, output
    names = [f"cpu-tables-{case}" for case in ("move", "speedtorch", "step")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"{name}.{kind}" for name in names for kind in ("json", "png")]
    )
    stored: list[Record] = []
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        stored += report.read(tmp_path / f"{name}.json")
    assert len(stored) == 12 + 6 + 3
    for row in stored:
        assert summary(row) in output
    for text in ("of a copy", "vs torch", "wrong rows"):
        assert text in output


def test_one_file_may_hold_all_and_grows_with_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "all.json"
    code, output = bench("--case", "step", "--case", "speedtorch", "--optimizer", "sgd", "--out", str(path))
    assert code == 0, output
    rows = report.read(path)
    assert [row.case for row in rows] == ["speedtorch"] * 6 + ["step"] * 3
    assert rows[-1].optimizer == "sgd"

    def cut_off(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tables_speedtorch, "_torch", cut_off)
    assert bench("--case", "speedtorch", "--out", str(path))[0] != 0
    assert [row.way for row in report.read(path)] == [KERNEL] * 2 + [ROWS] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "fit"], "no case named 'fit' on cpu"),
        (["--case", "move", "--ids", "400"], "400 distinct ids asked of tables of 325 rows"),
        (["--case", "speedtorch", "--ids", "2000"], "asked of tables of 1,953 rows"),
        (["--out", "/no/such/folder/rows.json"], "does not exist"),
        (["--plots", "/no/such/folder"], "does not exist"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: Sequence[str], message: str) -> None:
    code, output = bench(*options)
    assert code == 2
    assert message in " ".join(output.replace("│", " ").split())


def test_plots_are_refused_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    code, output = bench("--plots", str(tmp_path))
    assert code == 2
    assert "matplotlib is not installed" in output


def test_the_choices_are_those_that_exist() -> None:
    assert [case.value for case in TableCase] == list(CASES)
    assert [optimizer.value for optimizer in TableOptimizer] == list(tables_ways.RECIPES)


def test_rows_survive_being_stored_beside_those_of_other_benchmarks(tmp_path: Path) -> None:
    rows = [*four_rows(), *moves(), FLOOR_ROW, *peers(), *steps()]
    write_rows(rows, tmp_path / "rows.json")
    assert report.read(tmp_path / "rows.json") == rows
    assert len(report.tables(rows)) == 2 + 3
    assert report.to_markdown(rows).endswith(to_markdown([*moves(), *peers(), *steps()]))


def test_files_are_named_after_the_device() -> None:
    assert file_name(replace(MACHINE, device="NVIDIA H200"), "move") == "h200-tables-move"
    assert file_name(replace(MACHINE, device="cpu"), "step") == "cpu-tables-step"
    assert file_name(replace(MACHINE, device="NVIDIA A100-SXM4-80GB"), "fit") == "a100-sxm4-80gb-tables-fit"


def test_tables_show_speeds_and_how_they_compare() -> None:
    text = to_markdown([*moves(), *peers(), *steps()])
    for line in (
        "| managed | 30 GB | 1,536 B | 50.0 GB/s | 91% | 50.0 GB/s | 91% |",
        "| flatbed kernel | managed | 1.5 ms | 45.0 | 10.00× | 4.00× | 1.5 ms | 45.0 | 20.00× | 4.00× |",
        "| flatbed host | 4.4 ms | 4.3 to 4.5 ms | 4.2 ms | 5.00× | 0.50× | 0.4 GB | 0 of 130,000 |",
    ):
        assert line in text.splitlines()
    assert "**adam on 20,000,000 × 128 (30.7 GB with state), 65,536 ids a step**" in text
    assert "a plain copy: 55.0 GB/s to the device, 55.0 GB/s back" in text
    assert "SpeedTorch's way | 22 ms" in text
    assert "FAILED" not in text


def test_what_was_not_measured_has_no_column() -> None:
    unknown = replace(TRAIN_ROW, peak_memory_bytes=None)
    assert "| way | step | p20 to p80 | per step, in a row | wrong rows |" in to_markdown([unknown])
    limited = replace(TRAIN_ROW, case="fit", memory_limit_bytes=4 * 10**9)
    assert "| GPU memory | of it allowed |" in to_markdown([limited])
    alone = to_markdown([MOVE_ROW])
    assert "| managed | 30 GB | 1,536 B | 50.0 GB/s | 91% |  |  |" in alone


def test_failed_checks_are_shown() -> None:
    console = Console(width=160)
    with console.capture() as captured:
        for table in rich_tables([replace(MOVE_ROW, ok=False), replace(TRAIN_ROW, ok=False, n_wrong_rows=3)]):
            console.print(table)
    assert "50.0 GB/s FAILED" in captured.get()
    assert "FAILED 3 of 130,000" in captured.get()


def test_the_newest_row_of_a_kind_counts() -> None:
    text = to_markdown(
        [TRAIN_ROW, *moves(), replace(TRAIN_ROW, p50_ms=3.3), replace(MOVE_ROW, gb_per_s=51.5)]
    )
    assert text.count("flatbed host") == 1
    assert "3.3 ms" in text
    assert "51.5 GB/s" in text


def test_curves_and_bars_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    limited = replace(TRAIN_ROW, case="fit", peak_memory_bytes=None)
    for name, rows in {
        "move": moves(),
        "part": moves()[:1],
        "speedtorch": peers(),
        "step": steps(),
        "fit": [limited],
        "all": [*four_rows(), FLOOR_ROW, *moves(), *peers(), *steps()],
    }.items():
        plot.write_plot(rows, tmp_path / f"{name}.png")
        assert image.imread(tmp_path / f"{name}.png").std() > 0.04


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_every_case_is_right(case: str) -> None:
    device = torch.device("cuda")
    setting = tables.Setting(device, MACHINE, gigabytes=0.05, n_rows=100_000, dim=128, n_ids=2000, repeats=3)
    rows = run(case, setting)
    assert rows
    for row in rows:
        assert not failed(row), summary(row)
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
    if case == "fit":
        (row,) = rows
        assert row.peak_memory_bytes < row.memory_limit_bytes == 4 * 10**9
