from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import flatbed
from flatbed.word2vec import Settings, Trainer, Vectors, commands, read_corpus
from flatbed.word2vec import plots as pictures
from flatbed.word2vec.commands import neighbors, word2vec

from .texts import kinds_corpus

app = typer.Typer()
app.command()(word2vec)
app.command()(neighbors)
PROGRAM = """
import typer
from flatbed.word2vec.commands import neighbors, word2vec
app = typer.Typer()
app.command()(word2vec)
app.command()(neighbors)
app()
"""
FEW = ["--dim", "8", "--epochs", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets torch's, which would stay so for the other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = kinds_corpus()
    begins = np.concatenate(([0], corpus.ends[:-1]))
    lines = [
        " ".join(corpus.words[i] for i in corpus.ids[a:b]) for a, b in zip(begins, corpus.ends, strict=True)
    ]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines))
    return path


def run(*arguments: object, code: int = 0) -> str:
    # Wide, since typer draws a frame around its errors and breaks the paths in them.
    done = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "500"})
    assert done.exit_code == code, done.output + repr(done.exception)
    return re.sub(r"[\s│]+", " ", done.output)


@pytest.mark.parametrize("binary", [False, True])
def test_from_text_to_neighbours(binary: bool, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.out"
    options = ["--dim", 16, "--epochs", 6, "--batch-words", 256, "--device", "cpu", "--subsample", 0]
    said = run("word2vec", text, *options, "--out", out, *(["--binary"] if binary else []))
    assert "12,000 words of text, 27 distinct" in said
    assert re.search(rf"wrote {out} wrote \S+\.loss\.png and \S+\.map\.png nearest neighbours", said)
    assert said.endswith(f"those of other words: flatbed neighbors {out} WORD... ")
    assert "tables on the host, computed on cpu" in said
    gensim = pytest.importorskip("gensim.models")
    theirs = gensim.KeyedVectors.load_word2vec_format(str(out), binary=binary)
    assert theirs.vectors.shape == (27, 16)
    animals = {"dog", "horse", "cow", "eats", "sleeps", "runs", "barn", "fur"}
    assert {word for word, _ in theirs.most_similar("cat", topn=4)} <= animals
    said = run("neighbors", out, "cat", "red", "-n", 2)
    assert len(re.findall(r"\d\.\d\d", said)) == 4
    for name in ("v.loss.png", "v.map.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v.loss.png", "v.map.png", "v.out"]


def test_the_library_without_files(tmp_path: Path) -> None:
    said = run("word2vec", *FEW, "--max-words", 20_000, "--out", tmp_path / "v.txt", "--no-pictures")
    assert "Python's standard library: 20,000 words of text" in said
    assert "words occur 40 times or more" in said
    assert "self" in Vectors.load(tmp_path / "v.txt")


def test_buckets_and_disk(text: Path, tmp_path: Path) -> None:
    """Tables on disk stay: a finished training is told from one that can go on."""
    options = [*FEW, "--no-pictures", "--buckets", "1_000", "--ngrams", "3-4", "--storage", "disk"]
    options += ["--path", tmp_path / "tables", "--optimizer", "Adagrad", "--out", tmp_path / "v.txt"]
    said = run("word2vec", text, *options)
    assert f"finished; delete {tmp_path}/tables and {tmp_path}/v.txt.checkpoint to start anew" in said
    assert (tmp_path / "tables" / "inputs.bed").stat().st_size > 1027 * 8 * 4
    said = run("word2vec", text, *options, code=1)
    assert "v.txt.checkpoint holds a finished training of" in said
    assert f"delete {tmp_path}/tables and {tmp_path}/v.txt.checkpoint to start anew" in said
    before = Vectors.load(tmp_path / "v.txt")
    said = run("word2vec", text, *options, "--resume")
    assert re.search(r"going on at step (\d+) of \1\b", said)
    np.testing.assert_array_equal(Vectors.load(tmp_path / "v.txt").matrix, before.matrix)


def test_without_matplotlib(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "have_matplotlib", lambda: False)
    said = run("word2vec", text, *FEW, "--out", tmp_path / "v.txt")
    assert "no pictures: matplotlib is not installed" in said
    assert "nearest neighbours" in said
    assert [p.name for p in tmp_path.iterdir()] == ["v.txt"]


def test_a_map_of_two_words() -> None:
    assert pictures.on_a_plane(np.array([[1.0], [2.0]])).shape == (2, 2)
    plane = pictures.on_a_plane(np.random.default_rng(0).standard_normal((9, 5)))
    np.testing.assert_allclose(plane.mean(0), 0, atol=1e-12)
    assert plane[:, 0].var() >= plane[:, 1].var()
    assert abs(plane[:, 0] @ plane[:, 1]) < 1e-9


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["none.txt"], "none.txt is not a file"),
        (["TEXT", "--out", "no/such/v.txt"], "the folder no/such does not exist"),
        (["TEXT", "--out", "."], "is a folder"),
        (["TEXT", "--dim", "0"], "dim must be 1 at least; found 0"),
        (["TEXT", "--optimizer", "adamaxx"], "no optimizer 'adamaxx'"),
        (["TEXT", "--storage", "cloud"], "storage must be one of"),
        (["TEXT", "--storage", "disk"], "needs a path"),
        (["TEXT", "--ngrams", "three"], "lengths are written as 3-6; found 'three'"),
        (["TEXT", "--ngrams", "6-3", "--buckets", "9"], "least and the greatest length"),
        (["TEXT", "--resume"], "there is no checkpoint"),
        (["TEXT", "--device", "tpu9x"], "tpu9x"),
        (["TEXT", "--threads", "0"], "--threads"),
        (["TEXT", "--out", "x.txt", "--checkpoint", "./x.txt"], "x.txt is where results go"),
    ],
)
def test_wrong_options(arguments: list[str], match: str, text: Path, tmp_path: Path) -> None:
    asked = [str(text) if one == "TEXT" else one for one in arguments]
    out = [] if "--out" in asked else ["--out", str(tmp_path / "v.txt")]
    said = run("word2vec", *asked, *out, code=2)
    assert match in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("v.txt", []),
        ("v.loss.png", []),
        ("v.map.png", []),
        (".v.txt.new", []),
        ("run", ["--checkpoint", "FOLDER/sub/../run"]),
        ("inputs.bed", ["--storage", "disk", "--path", "FOLDER"]),
    ],
)
def test_a_text_is_never_overwritten(name: str, options: list[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_text("to be or not to be " * 20)
    (tmp_path / "link.txt").symlink_to(tmp_path / name)
    given = [one.replace("FOLDER", str(tmp_path)) for one in options]
    for text in (tmp_path / name, tmp_path / "link.txt"):
        said = run("word2vec", text, *FEW, *given, "--out", tmp_path / "sub" / ".." / "v.txt", code=2)
        assert "would be overwritten" in said
        assert (tmp_path / name).read_text() == "to be or not to be " * 20
    assert len(list(tmp_path.iterdir())) == 3


def test_pictures_that_are_not_drawn_overwrite_nothing(text: Path, tmp_path: Path) -> None:
    (tmp_path / "v.map.png").write_text(text.read_text())
    run("word2vec", tmp_path / "v.map.png", *FEW, "--out", tmp_path / "v.txt", "--no-pictures")
    assert (tmp_path / "v.map.png").read_text() == text.read_text()


def save_half(text: Path, folder: Path, **options: Any) -> Trainer:
    """A checkpoint as Ctrl-C would leave it."""
    trainer = Trainer(read_corpus([text]), Settings(dim=8, epochs=2, device="cpu", **options))
    trainer.run(lambda p: trainer.stop() if p.step >= 7 else None)
    trainer.save(folder)
    return trainer


def test_the_checkpoint_of_another_training_is_kept(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.txt"
    half = save_half(text, tmp_path / "v.txt.checkpoint", seed=3)
    said = run("word2vec", text, *FEW, "--out", out, code=1)
    assert f"v.txt.checkpoint holds a training at step 7 of {half.n_steps} (dim 8," in said
    assert "--resume goes on with it; delete it, or give another --checkpoint, to begin anew" in said
    assert "words of text" not in said  # refused before anything is read
    again = Trainer(read_corpus([text]), half.settings)
    again.resume(tmp_path / "v.txt.checkpoint")
    run("word2vec", text, *FEW, "--out", out, "--checkpoint", tmp_path / "other", "--no-pictures")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v.txt", "v.txt.checkpoint"]


def test_a_folder_that_holds_something_else(text: Path, tmp_path: Path) -> None:
    flatbed.save_checkpoint(tmp_path / "run", torch.nn.Linear(1, 1))
    said = run("word2vec", text, *FEW, "--out", tmp_path / "v", "--checkpoint", tmp_path / "run", code=1)
    assert "run holds a checkpoint of something else: give another --checkpoint" in said
    (tmp_path / "file").write_text("mine")
    said = run("word2vec", text, *FEW, "--out", tmp_path / "v", "--checkpoint", tmp_path / "file", code=2)
    assert "file is a file" in said


def test_a_finished_training_removes_its_checkpoint(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "v.txt.checkpoint"
    save_half(text, folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "v0000099").mkdir()  # not made by a save
    options = [text, *FEW, "--out", tmp_path / "v.txt", "--no-pictures"]
    said = run("word2vec", *options, "--resume")
    assert f"removed {folder}: the training has finished" in said
    assert sorted(p.name for p in folder.iterdir()) == ["notes.txt", "v0000099"]
    assert "holds no checkpoint" in run("word2vec", *options, "--resume", code=1)
    said = run("word2vec", *options)
    assert "removed" not in said


@pytest.mark.parametrize("name", ["v.txt", ".v.txt.new", "v.loss.png", "v.map.png"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_results_go_to_regular_files(kind: str, name: str, text: Path, tmp_path: Path) -> None:
    """A pipe stands for devices, too: nothing may take their place."""
    (os.mkfifo if kind == "pipe" else os.mkdir)(tmp_path / name)
    before = (tmp_path / name).lstat()
    said = run("word2vec", text, *FEW, "--out", tmp_path / "v.txt", code=2)
    assert f"{name} is {'a folder' if kind == 'folder' else 'not a regular file'}: give another" in said
    assert (tmp_path / name).lstat() == before
    if name.endswith("png"):
        run("word2vec", text, *FEW, "--out", tmp_path / "v.txt", "--no-pictures")


def test_a_folder_that_cannot_be_written_to(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "v" * 252  # its draft's name is too long
    said = run("word2vec", text, *FEW, "--out", tmp_path / long, "--checkpoint", tmp_path / "c", code=2)
    assert "where the vectors would go: File name too long" in said

    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)
    said = run("word2vec", text, *FEW, "--out", tmp_path / "v.txt", code=2)
    assert ".v.txt.new cannot be made in" in said
    assert "where the vectors would go: Permission denied" in said
    assert "words of text" not in said


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_a_training_is_not_lost_if_its_vectors_cannot_be_written(
    storage: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Vectors, path: Path, *, binary: bool = False) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    options = [text, *FEW, "--no-pictures", "--storage", storage]
    options += ["--path", tmp_path / "tables"] if storage == "disk" else []
    out = tmp_path / "v.txt"
    with monkeypatch.context() as patch:
        patch.setattr(Vectors, "save", full)
        said = run("word2vec", *options, "--out", out, code=1)
    assert "the vectors were not written to" in said
    assert "No space left on device" in said
    assert f"the training is saved to {out}.checkpoint: --resume writes them" in said
    assert not out.exists()
    assert not (tmp_path / ".v.txt.new").exists()
    run("word2vec", *options, "--out", out, "--resume")
    run("word2vec", text, *FEW, "--no-pictures", "--out", tmp_path / "w.txt")
    np.testing.assert_array_equal(Vectors.load(out).matrix, Vectors.load(tmp_path / "w.txt").matrix)


def test_tables_that_were_never_saved(text: Path, tmp_path: Path) -> None:
    """As kill -9 leaves them: there is no going on, and it is said how to begin."""
    tables = tmp_path / "tables"
    options = [
        text,
        *FEW,
        "--no-pictures",
        "--out",
        tmp_path / "v.txt",
        "--storage",
        "disk",
        "--path",
        tables,
    ]
    program = (
        "import os, typer; from flatbed.word2vec import trainer; trainer.Trainer.vectors = \
trainer.Trainer.save = lambda *_: os._exit(9)\n"
        + PROGRAM
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(flatbed.__file__).parents[1])}
    command = [sys.executable, "-c", program, "word2vec", *map(str, options)]
    assert subprocess.run(command, capture_output=True, env=environment).returncode == 9
    assert (tables / "inputs.bed").exists()
    for more, code in (([], 1), (["--resume"], 2)):
        said = run("word2vec", *options, *more, code=code)
        assert re.search(r"ended before it saved a checkpoint, it cannot be resumed: delete", said), said
        for file in tables.iterdir():
            assert file.name in said.replace(" ", "")  # lines are broken anywhere
    for file in tables.iterdir():
        file.unlink()
    run("word2vec", *options)


def test_another_number_of_threads_is_noted(text: Path, tmp_path: Path) -> None:
    save_half(text, tmp_path / "run")
    threads = torch.get_num_threads()
    options = [text, *FEW, "--no-pictures", "--out", tmp_path / "v.txt", "--checkpoint", tmp_path / "run"]
    said = run("word2vec", *options, "--resume", "--threads", threads + 1)
    assert f"note: {threads} threads there and {threads + 1} here: sums may differ in their last bits" in said
    torch.set_num_threads(threads)
    save_half(text, tmp_path / "run")
    assert "note:" not in run("word2vec", *options, "--resume", "--threads", threads)


def test_words_are_printed_as_they_are(tmp_path: Path) -> None:
    words = [":key:", "x\\", "[bold]", "[/x]", "\\[a]"]
    Vectors(words, np.random.default_rng(0).standard_normal((5, 3))).save(tmp_path / "v.txt")
    said = run("neighbors", tmp_path / "v.txt", *words)
    for word in words:
        assert said.split().count(word) == 5


def test_lines_instead_of_a_bar(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = run("word2vec", text, *FEW, "--out", tmp_path / "v.txt", "--no-pictures")
    assert "training:" not in quiet
    monkeypatch.setattr(commands, "LINE_SECONDS", 0.0)
    said = run("word2vec", text, *FEW, "--out", tmp_path / "v.txt", "--no-pictures")
    line = r"training: [\d,]+ of 24,000 \(\d+%\), epoch 1, [\d,]+ words/s, loss \d\.\d{3}"
    assert len(re.findall(line, said)) > 3
    assert re.search(r"reading: ([\d,]+) of \1 \(100%\)", said)


def test_a_text_without_pairs_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a\nb\n" * 20)
    said = run("word2vec", tmp_path / "t.txt", *FEW, "--out", tmp_path / "v.txt")
    assert "nothing was learnt: no word had another one beside it" in said


def test_wrong_texts(text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "short.txt").write_text("to be or not to be")
    out = ["--out", tmp_path / "v.txt", *FEW]
    assert "Error: there are no words in" in run("word2vec", tmp_path / "empty.txt", *out, code=1)
    assert "no word occurs min_count=5 times" in run("word2vec", tmp_path / "short.txt", *out, code=1)
    assert not (tmp_path / "v.txt").exists()


def test_unknown_words_and_files(tmp_path: Path) -> None:
    Vectors(["append", "extend"], np.ones((2, 3))).save(tmp_path / "v.txt")
    said = run("neighbors", tmp_path / "v.txt", "apend", code=1)
    assert "Error: 'apend' is not among the 2 words; did you mean append?" in said
    assert "nearest neighbours" not in said
    said = run("neighbors", tmp_path / "v.txt", "extnd", "append", "xyz", code=1)
    assert re.search(r"append extend 1\.00 .*'extnd' is .* did you mean extend\? .*'xyz' is not among", said)
    assert "there is no file" in run("neighbors", tmp_path / "none", "a", code=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_resume(number: signal.Signals, text: Path, tmp_path: Path) -> None:
    """A real signal to a real process; what goes on later ends with the vectors of one left alone."""
    settings = Settings(dim=16, epochs=25, batch_words=256, device="cpu")
    whole = Trainer(read_corpus([text]), settings)
    whole.run()
    environment = {**os.environ, "PYTHONPATH": str(Path(flatbed.__file__).parents[1])}
    options = ["word2vec", str(text), "--dim", "16", "--epochs", "25", "--batch-words", "256"]
    options += ["--device", "cpu", "--no-pictures", "--checkpoint", str(tmp_path / "run")]
    options += ["--threads", str(torch.get_num_threads())]

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, *options, *more]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)

    cut = start("--out", str(tmp_path / "cut.txt"))
    assert cut.stdout is not None
    while "computed on cpu" not in cut.stdout.readline():
        pass
    time.sleep(0.2)
    cut.send_signal(number)
    said, _ = cut.communicate(timeout=120)
    assert cut.returncode == 130, said
    found = re.search(r"saved step ([\d,]+) of ([\d,]+) to \S+: go on with --resume", said)
    assert found, said
    step, n_steps = (int(number.replace(",", "")) for number in found.groups())
    assert 0 < step < n_steps
    assert not (tmp_path / "cut.txt").exists()
    again = start("--out", str(tmp_path / "cut.txt"), "--resume")
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    found_matrix = Vectors.load(tmp_path / "cut.txt").matrix
    np.testing.assert_array_equal(found_matrix, whole.vectors().matrix)
    assert not (tmp_path / "run").exists()


def test_commands_are_light() -> None:
    program = "import sys, flatbed; before = set(sys.modules); import flatbed.word2vec.commands as c; print(\
sorted(m for m in set(sys.modules) - before if m.startswith(('matplotlib', 'triton'))))"
    environment = {**os.environ, "PYTHONPATH": str(Path(flatbed.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "[]\n"
