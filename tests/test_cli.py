import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatbed import __version__
from flatbed.bench import plot, ways
from flatbed.bench.models import CASES
from flatbed.bench.rows import read_rows, write_rows
from flatbed.cli import ModelName, OptimizerName, app
from tests.bench.samples import four_rows

run = CliRunner().invoke
QUICK = ["bench", "step", "--model", "many-small", "--device", "cpu", "--steps", "2"]


def test_version() -> None:
    result = run(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"flatbed {__version__}\n"


@pytest.mark.parametrize("words", [[], ["bench"], ["bench", "step"], ["bench", "show"], ["doctor"]])
def test_every_command_explains_itself(words: list[str]) -> None:
    result = run(app, [*words, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_the_choices_are_those_that_exist() -> None:
    assert [name.value for name in ModelName] == list(CASES)
    assert [name.value for name in OptimizerName] == list(ways.OPTIMIZERS)


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
    assert all(row.ok and row.n_params == 2000 and row.n_elements == 128000 for row in rows)
    assert paths["png"].read_bytes().startswith(b"\x89PNG")


def test_bench_step_writes_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.bench.samples import TINY

    monkeypatch.setitem(CASES, "linear100", lambda device: TINY)
    result = run(app, ["bench", "step", "--device", "cpu", "--trace", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.flat.json", "out.torch-fused.json", "out.torch-loop.json"]
    assert json.loads((tmp_path / "out.flat.json").read_text())["traceEvents"]


def test_a_failed_check_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatbed.bench import check
    from tests.bench.samples import TINY

    monkeypatch.setitem(CASES, "linear100", lambda device: TINY)
    monkeypatch.setattr(check, "TOLERANCE", -1.0)
    result = run(app, ["bench", "step", "--device", "cpu", "--steps", "1"])
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "FAILED: other weights than the reference's, in torch loop, torch foreach" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "vgg"], "vgg"),
        (["--optimizer", "lion"], "lion"),
        (["--steps", "0"], "--steps"),
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
        "print([m for m in sys.modules if m in ('matplotlib', 'triton') or m.startswith('flatbed.bench')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
