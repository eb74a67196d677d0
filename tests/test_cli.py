from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatbed import __version__, doctor
from flatbed.cli import app
from flatbed.doctor import Finding
from flatbed_command import HELP, main

run = CliRunner().invoke


@pytest.mark.parametrize("words", ["", "check", "doctor", "word2vec", "neighbors"])
def test_every_command_explains_itself(words: str) -> None:
    result = run(app, [*words.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_doctor_shows_every_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def examine(table_bytes: int | None) -> dict[str, Finding]:
        asked.append(table_bytes)
        return {"disk": Finding(False, "[none] left", "Free some."), "bus": Finding(None, "needs a GPU")}

    monkeypatch.setattr(doctor, "examine", examine)
    result = run(app, ["doctor", "--table-gb", "2.5"])
    assert result.exit_code == 0
    for text in ("disk", "[none] left", "Free some.", "needs a GPU"):
        assert text in result.stdout
    records = json.loads(run(app, ["doctor", "--json"]).stdout)
    assert records[1] == {"name": "bus", "ok": None, "value": "needs a GPU", "meaning": ""}
    assert asked == [2_500_000_000, None]


def test_doctor_models_a_table_on_many_gpus() -> None:
    result = run(app, ["doctor", "--rows", "6.5e9", "--ranks", "512", "--ids", "1024"])
    assert result.exit_code == 0
    assert "6,500,000,000 rows" in result.stdout
    assert "Not measured" in result.stdout
    assert "this machine" not in result.stdout
    assert "this machine" in run(app, ["doctor", "--rows", "1000"]).stdout


@pytest.mark.parametrize("option", ["--table-gb", "--rows", "--dim", "--ranks", "--ids", "--hit-rate"])
def test_wrong_numbers_are_usage_errors(option: str) -> None:
    others = [] if option in ("--table-gb", "--rows") else ["--rows", "1e6"]
    for number in ("inf", "-inf", "nan", "1e400", "1e308", "-1", "9" * 400, "", "many"):
        result = run(app, ["doctor", *others, option, number], env={"COLUMNS": "500"})
        assert (result.exit_code, f"Invalid value for '{option}'" in result.output) == (2, True), number


def test_a_path_that_the_system_refuses() -> None:
    result = run(app, ["check", "a" * 300])
    assert (result.exit_code, "File name too long" in result.output) == (1, True)


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys, flatbed_command as command; "
        "sys.argv = ['flatbed', *sys.argv[1:]]; command.main(); "
        "assert not {'torch', 'flatbed', 'typer'} & set(sys.modules)"
    )
    for words in ([], ["--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == (f"flatbed {__version__}" if "--version" in words else HELP)
    names = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert re.findall(r"^  (\w+) +[A-Z]", HELP, re.M) == names


def test_other_words_reach_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flatbed", "doctor", "--table-gb", "0"])
    with pytest.raises(SystemExit, match="2"):
        main()
    monkeypatch.setattr(sys, "argv", ["flatbed", "--version"])
    runpy.run_path(str(Path(doctor.__file__).with_name("__main__.py")), run_name="__main__")
    assert capsys.readouterr().out == f"flatbed {__version__}\n"
