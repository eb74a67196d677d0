import json
import shutil
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest

from flatbed.bench import rows as rows_module
from flatbed.bench.rows import (
    FUSED,
    LOOP,
    Machine,
    Row,
    git_commit,
    group,
    read_rows,
    speedup,
    this_machine,
    to_markdown,
    write_rows,
)
from tests.bench.samples import ROW, four_rows


def test_rows_survive_being_stored(tmp_path: Path) -> None:
    rows = four_rows()
    write_rows(rows, tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json") == rows
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"]


def test_a_stored_row_is_one_flat_object_with_every_field() -> None:
    record = json.loads(json.dumps(ROW.to_dict()))
    names = {field.name for cls in (Row, Machine) for field in fields(cls)} - {"machine"}
    assert set(record) == names
    assert record["device"] == "Some GPU"
    assert record["p50_ms"] == 2.0


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    write_rows([ROW], path)

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(rows_module.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_rows(four_rows(), path)
    assert read_rows(path) == [ROW]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "rows.json is not JSON"),
        ("{}", "not a list of rows"),
        ("[1]", "not a list of rows"),
        ('[{"way": "loop"}]', "missing or unknown fields"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_this_machine_names_itself() -> None:
    machine = this_machine("cpu")
    assert machine.device == "cpu"
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.threads >= 1
    assert machine.timestamp.endswith("+00:00")


def test_markdown_has_both_parts_of_a_way_in_one_line() -> None:
    lines = to_markdown(four_rows()).splitlines()
    assert lines[0] == "**many-small, adamw: 2,000 parameters, 128,000 elements**"
    assert "| torch fused | 2 ms | 1.00× | 20 ms | 1.00× |" in lines
    assert "| flat bound | 0.5 ms | 4.00× | 5 ms | 4.00× |" in lines
    assert "Some GPU, Some CPU, 4 threads; torch 2.13.0, flatbed 0.1.0, commit 0123456789-dirty" in lines[-1]


def test_markdown_says_where_a_check_failed() -> None:
    rows = [replace(row, ok=row.way == FUSED) for row in four_rows()]
    assert "| flat bound (FAILED) |" in to_markdown(rows)


def test_rows_are_grouped_by_case_and_the_newest_counts() -> None:
    other = [replace(row, model="linear100") for row in four_rows()]
    newer = replace(ROW, p50_ms=7.0)
    cases = group([*four_rows(), *other, newer])
    assert [[line.optimizer.way for line in lines] for lines in cases] == [[FUSED, "flat bound"]] * 2
    assert cases[0][0].optimizer.p50_ms == 7.0
    assert cases[1][0].optimizer.p50_ms == 2.0
    assert group([ROW]) == []


def test_speedup_compares_the_same_part() -> None:
    rows = four_rows()
    assert speedup(rows[3], rows, over=FUSED) == 4.0
    assert speedup(rows[3], rows, over=LOOP) is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_checkout_and_of_no_other(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = (tmp_path / "src" / "flatbed").resolve()
    package.mkdir(parents=True)
    source = package / "a.py"
    source.write_text("")
    installed = (tmp_path / "venv" / "flatbed").resolve()
    installed.mkdir(parents=True)

    assert git_commit.__wrapped__(package) is None
    git("init")
    assert git_commit.__wrapped__(package) is None
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit.__wrapped__(package) == commit
    assert git_commit.__wrapped__(installed) is None
    source.write_text("changed")
    assert git_commit.__wrapped__(package) == f"{commit}-dirty"
