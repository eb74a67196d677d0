"""For each public function, the most likely mistake, and what it is told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatbed.cli import app
from tests.mistakes.data import DATA
from tests.mistakes.embeddings import EMBEDDINGS
from tests.mistakes.flat import FLAT
from tests.mistakes.mistake import Mistake
from tests.mistakes.optim import OPTIM
from tests.mistakes.saving import SAVING
from tests.mistakes.surface import NO_MISTAKE, commands, public
from tests.mistakes.tables import TABLES
from tests.mistakes.word2vec import WORD_VECTORS

MISTAKES: list[Mistake] = [*FLAT, *SAVING, *OPTIM, *EMBEDDINGS, *TABLES, *DATA, *WORD_VECTORS]


@pytest.mark.parametrize("one", MISTAKES, ids=str)
def test_mistake(one: Mistake, tmp_path: Path) -> None:
    with pytest.raises(one.error, match=one.message) as caught:
        one.attempt(tmp_path)
    assert "object at 0x" not in str(caught.value), "an address tells nobody what was found"


def test_every_public_function_has_a_mistake() -> None:
    thought_of = {one.of for one in MISTAKES}
    harmless = [pattern for patterns in NO_MISTAKE.values() for pattern in patterns]
    missing = [
        name
        for name in dict.fromkeys(public())
        if name not in thought_of and not any(fnmatchcase(name, pattern) for pattern in harmless)
    ]
    assert not missing, f"add a mistake to tests/mistakes, or a reason to NO_MISTAKE: {', '.join(missing)}"


def test_no_reason_is_left_over() -> None:
    names, thought_of = list(public()), {one.of for one in MISTAKES}
    for patterns in NO_MISTAKE.values():
        for pattern in patterns:
            found = [name for name in names if fnmatchcase(name, pattern)]
            assert found, f"there is no {pattern}"
            assert not thought_of.intersection(found), f"{pattern} has a mistake, after all"


def test_no_mistake_is_of_something_that_is_gone() -> None:
    properties = {"weight", "param_buffer", "gradient_buffer"}
    known = set(public())
    assert not [one.of for one in MISTAKES if one.of not in known and one.of.split(".")[-1] not in properties]


def test_names_are_distinct() -> None:
    names = [str(one) for one in MISTAKES]
    assert len(set(names)) == len(names)


# ---- commands

TYPED = {
    "word2vec": [
        ("--storage gpu", r"storage must be one of host, device, disk; found 'gpu'"),
        ("{folder}/missing.txt", r"files.*missing.txt' does not exist"),
        ("--out {folder}/missing/vectors.txt", r"--out: .*missing.* cannot be written"),
    ],
    "neighbors": [
        ("{folder}/missing.txt append", r"missing.txt' does not exist"),
        ("{folder}/notes.txt append", r"notes.txt does not begin with a line of two numbers, words and dim"),
    ],
    "check": [
        ("{folder}/missing", r"there is no file .*missing"),
        ("{folder}/notes.txt", r"notes.txt is missing, damaged or of another kind"),
        ("{folder}", r"holds no checkpoint"),
    ],
    "doctor": [
        ("cuda", r"unexpected extra argument(\(s\))? \(cuda\)"),
        ("--jsn", r"No such option: --jsn"),
        ("--rows 10 --optimizer adma", r"adam, adamw.*found 'adma'"),
    ],
}
"""What is typed after a command, and what is said of it."""


def typed() -> Iterator[tuple[str, str, str]]:
    for command, cases in TYPED.items():
        for words, message in cases:
            yield command, words, message
    for command in commands():
        yield command, "--no-such-option", r"No such option: --no-such-option"


@pytest.mark.parametrize(("command", "words", "message"), list(typed()))
def test_commands(command: str, words: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("rows")
    asked = f"{command} {words}".format(folder=tmp_path).split()
    result = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1"}).invoke(app, asked)
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    said = " ".join(result.output.replace("│", " ").split())
    assert re.search(message, said), said


def test_every_command_is_known() -> None:
    """And for each there is a mistake that only this one can tell."""
    assert set(TYPED) == set(commands())
    for command, cases in TYPED.items():
        assert [words for words, message in cases if "No such option" not in message], command
