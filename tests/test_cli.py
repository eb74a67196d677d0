import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from flatbed.bench import floor, plot, ways
from flatbed.bench.floor import FloorRow
from flatbed.bench.models import CASES
from flatbed.bench.options import ModelName, OptimizerName, PrecisionName
from flatbed.bench.rows import read_rows, write_rows
from typer.testing import CliRunner

from flatbed import __version__
from flatbed.cli import app
from tests.bench.samples import FLOOR_ROW, TINY, four_rows

run = CliRunner().invoke
QUICK = ["bench", "step", "--model", "linear100", "--device", "cpu", "--steps", "2"]


def test_version() -> None:
    result = run(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"flatbed {__version__}\n"


@pytest.mark.parametrize("words", ["", "bench", "bench step", "bench floor", "bench show", "doctor"])
def test_every_command_explains_itself(words: str) -> None:
    result = run(app, [*words.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_the_choices_are_those_that_exist() -> None:
    assert [name.value for name in ModelName] == list(CASES)
    assert [name.value for name in OptimizerName] == list(ways.OPTIMIZERS)
    assert [name.value for name in PrecisionName] == list(floor.PRECISIONS)


def test_bench_step_measures_stores_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "png")}
    options = ["--json", str(paths["json"]), "--png", str(paths["png"])]
    result = run(app, [*QUICK, *options])
    assert result.exit_code == 0, result.output
    for way in ways.WAYS:
        assert way.name in result.stdout
    rows = read_rows(paths["json"])
    assert len(rows) == 2 * len(ways.WAYS)
    assert all(row.ok and row.n_params == 200 and row.n_elements == 1_651_200 for row in rows)
    assert paths["png"].read_bytes().startswith(b"\x89PNG")


def test_bench_step_writes_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "linear100", lambda device: TINY)
    result = run(app, ["bench", "step", "--device", "cpu", "--trace", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.flat.json", "out.optim.json", "out.torch-fused.json", "out.torch-loop.json"]
    assert json.loads((tmp_path / "out.flat.json").read_text())["traceEvents"]


def test_bench_step_measures_the_ways_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "linear100", lambda device: TINY)
    path = tmp_path / "rows.json"
    words = ["bench", "step", "--device", "cpu", "--way", "flatbed.optim", "--way", "flat bound"]
    result = run(app, [*words, "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = [row.way for row in read_rows(path) if row.part == "step"]
    assert found == ["torch loop", "flat bound", "flatbed.optim"]


@pytest.mark.parametrize("precision", list(PrecisionName))
def test_bench_floor_measures_and_stores(
    precision: PrecisionName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(floor.COPY_BYTES, "cpu", 1 << 20)
    path = tmp_path / "rows.json"
    words = ["bench", "floor", "--model", "vit-b16", "--device", "cpu", "--steps", "2"]
    result = run(app, [*words, "--precision", precision.value, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "flatbed.optim" in result.stdout
    assert "GPU time" not in result.stdout
    rows = read_rows(path, FloorRow)
    assert rows[-1].n_samples == 2
    assert all(row.ok and row.precision == precision.value for row in rows)


def test_a_failed_floor_check_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "run", lambda setting, progress: [replace(FLOOR_ROW, ok=False)])
    result = run(app, ["bench", "floor", "--device", "cpu"])
    assert result.exit_code == 1
    assert "FAILED: not what the reference gives, in flatbed.optim" in result.stderr


def test_a_failed_check_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatbed.bench import check

    monkeypatch.setitem(CASES, "linear100", lambda device: TINY)
    monkeypatch.setattr(check, "TOLERANCE", -1.0)
    result = run(app, ["bench", "step", "--device", "cpu", "--steps", "1"])
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "FAILED: not what the reference gives, in torch loop, torch foreach" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "vgg"], "vgg"),
        (["--optimizer", "lion"], "lion"),
        (["--steps", "0"], "--steps"),
        (["--way", "flat"], "no way named 'flat' on"),
        (["--json", "/no/such/folder/rows.json"], "does not exist"),
        (["--trace", "/no/such/folder/trace.json"], "does not exist"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: list[str], message: str) -> None:
    result = run(app, ["bench", "step", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run(app, ["bench", "step", "--device", "cuda"])
    assert result.exit_code == 2
    assert "torch sees no CUDA GPU" in result.stderr


def test_png_is_refused_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    result = run(app, [*QUICK, "--png", str(tmp_path / "out.png")])
    assert result.exit_code == 2
    assert "matplotlib is not installed" in result.stderr


def test_show_prints_stored_rows_as_table_or_markdown(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write_rows(four_rows(), path)
    table = run(app, ["bench", "show", str(path)])
    assert table.exit_code == 0
    assert "flat bound" in table.stdout
    markdown = run(app, ["bench", "show", str(path), "--markdown"])
    assert markdown.exit_code == 0
    assert "| flat bound | 0.5 ms | 4.00× | 5 ms | 4.00× |" in markdown.stdout
    assert "━" not in markdown.stdout


def test_show_prints_and_draws_rows_of_several_benchmarks(tmp_path: Path) -> None:
    steps, floors = tmp_path / "steps.json", tmp_path / "floors.json"
    write_rows(four_rows(), steps)
    write_rows([FLOOR_ROW], floors)
    table = run(app, ["bench", "show", str(steps), str(floors)])
    assert table.exit_code == 0
    assert "flat bound" in table.stdout
    assert "flatbed.optim" in table.stdout
    assert "× the floor" in run(app, ["bench", "show", str(floors), "--markdown"]).stdout
    pytest.importorskip("matplotlib")
    chart = run(app, ["bench", "show", str(steps), str(floors), "--png", str(tmp_path / "out.png")])
    assert chart.exit_code == 0
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.parametrize(("text", "message"), [("{}", "not a list of rows"), ("[]", "there are no rows")])
def test_show_refuses_what_is_not_rows(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    result = run(app, ["bench", "show", str(path)])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_the_command_line_alone_loads_no_benchmark_and_no_plotting() -> None:
    code = (
        "import sys, flatbed.cli; "
        "print(*[m for m in sys.modules if m in ('matplotlib', 'triton') or m.startswith('flatbed.bench.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    words = {f"flatbed.bench.{name}" for name in ("commands", "options", "terminal")}  # how they are asked
    assert set(done.stdout.split()) == words


def test_the_package_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flatbed", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"flatbed {__version__}\n"
