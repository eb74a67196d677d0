"""Likely mistakes with optimizers, parameters, checkpoints and commands, and what their errors say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatbed.cli import app
from tests.mistakes.flat import FLAT
from tests.mistakes.mistake import Mistake
from tests.mistakes.optim import OPTIM
from tests.mistakes.saving import SAVING

MISTAKES: list[Mistake] = [*FLAT, *SAVING, *OPTIM]


@pytest.mark.parametrize("one", MISTAKES, ids=str)
def test_mistake(one: Mistake, tmp_path: Path) -> None:
    with pytest.raises(one.error, match=one.message) as caught:
        one.attempt(tmp_path)
    assert "object at 0x" not in str(caught.value), "an address tells nobody what was found"


# ---- commands

TYPED = [
    ("word2vec --storage gpu", r"storage must be one of host, device, disk; found 'gpu'"),
    ("word2vec --optimizer adm", r"optimizer must be one of .*adam, .*; found 'adm'"),
    ("word2vec {folder}/missing.txt", r"files.*missing.txt' does not exist"),
    ("word2vec --out {folder}/missing/vectors.txt", r"--out: .*missing.* cannot be written"),
    ("neighbors {folder}/missing.txt append", r"missing.txt' does not exist"),
    ("neighbors {folder}/notes.txt append", r"notes.txt does not begin with a line of two numbers"),
    ("check {folder}/missing", r"missing is missing, or no file"),
    ("check {folder}/notes.txt", r"notes.txt is damaged or of another kind"),
    ("check {folder}", r"holds no checkpoint"),
    ("doctor cuda", r"unexpected extra argument(\(s\))? \(cuda\)"),
    ("doctor --jsn", r"No such option: --jsn"),
    ("doctor --ranks 8", r"--ranks describes a table: give --rows, too"),
    ("doctor --rows 10 --ranks 11", r"each of the 11 ranks"),
    ("doctor --rows 10 --optimizer adma", r"adam, adamw.*found 'adma'"),
]
"""What is typed after `flatbed`, and what is said of it."""


@pytest.mark.parametrize(("words", "message"), TYPED)
def test_commands(words: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("rows")
    asked = words.format(folder=tmp_path).split()
    result = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1"}).invoke(app, asked)
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    said = " ".join(result.output.replace("│", " ").split())
    assert re.search(message, said), said
