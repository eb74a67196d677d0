from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from flatbed.word2vec import Settings, Trainer, Vectors, commands, read_corpus
from flatbed.word2vec.commands import neighbors, word2vec
from tests import programs

from .texts import kinds_corpus

app = typer.Typer()
app.command()(word2vec)
app.command()(neighbors)
FEW = ["--dim", "8", "--epochs", "2", "--device", "cpu"]
QUIET = [*FEW, "--no-pictures", "--threads", "1"]  # the default is the number that an earlier run has set


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores torch's threads, which the command sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = kinds_corpus()
    sentences = np.split(np.array(corpus.words)[corpus.ids], corpus.ends[:-1])
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(" ".join(sentence) for sentence in sentences))
    return path


def run(*arguments: object, code: int | None = 0) -> str:
    """Run a command that ends with a code, with 1 or 2 where it is None."""
    # Wide, since typer breaks long lines of errors.
    done = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "500"})
    assert done.exit_code in ((1, 2) if code is None else (code,)), done.output + repr(done.exception)
    return re.sub(r"[\s│]+", " ", done.output)


def matrix(path: Path) -> np.ndarray:
    return Vectors.load(path).matrix


# ---- results


def test_from_text_to_neighbours(text: Path, tmp_path: Path) -> None:
    gensim = pytest.importorskip("gensim.models")
    out = tmp_path / "v.out"
    options = ["--dim", 16, "--epochs", 6, "--batch-words", 256, "--device", "cpu", "--subsample", 0]
    said = run("word2vec", text, *options, "--out", out, "--binary")
    assert "12,000 words of text, 27 distinct" in said
    assert "tables on the host, computed on cpu" in said
    assert f"wrote {out} wrote {tmp_path}/v.loss.png and {tmp_path}/v.map.png nearest neighbours" in said
    loaded = gensim.KeyedVectors.load_word2vec_format(str(out), binary=True)
    assert loaded.vectors.shape == (27, 16)
    animals = {"dog", "horse", "cow", "eats", "sleeps", "runs", "barn", "fur"}
    assert {word for word, _ in loaded.most_similar("cat", topn=4)} <= animals
    assert len(re.findall(r"\d\.\d\d", run("neighbors", out, "cat", "red", "-n", 2))) == 4
    for name in ("v.loss.png", "v.map.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v.loss.png", "v.map.png", "v.out"]


def test_the_standard_library_without_files(tmp_path: Path) -> None:
    said = run("word2vec", *QUIET, "--max-words", 20_000, "--out", tmp_path / "v.txt")
    assert "Python's standard library: 20,000 words of text" in said
    assert "words occur 40 times or more" in said
    assert "self" in Vectors.load(tmp_path / "v.txt")


def test_every_setting_is_an_option(text: Path, tmp_path: Path) -> None:
    """The command gives the same vectors as the settings in Python."""
    options: dict[str, Any] = {"dim": 8, "window": 3, "negatives": 4, "min_count": 2, "subsample": 0.1}
    options |= {"epochs": 1, "lr": 0.01, "optimizer": "Adagrad", "storage": "host", "seed": 3}
    options |= {"batch_words": 300, "device": "cpu", "buckets": 100, "cache_rows": 10, "threads": 2}
    typed = [part for k, v in options.items() for part in (f"--{k.replace('_', '-')}", v)]
    typed += ["--cbow", "--ngrams", "2-4", "--also", tmp_path / "also.txt"]
    (tmp_path / "also.txt").write_text("cats\ndogs cat")
    run("word2vec", text, *typed, "--no-pictures", "--out", tmp_path / "v.txt")
    trainer = Trainer(read_corpus(text), Settings(**options, cbow=True, ngrams=(2, 4)))
    trainer.run()
    wanted, found = trainer.vectors(["cats", "dogs"]), Vectors.load(tmp_path / "v.txt")
    assert found.words == wanted.words == [*trainer.corpus.words, "cats", "dogs"]
    np.testing.assert_array_equal(found.matrix, wanted.matrix)


def test_without_matplotlib(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = run("word2vec", text, *FEW, "--out", tmp_path / "v.txt")
    assert "no pictures: matplotlib is not installed" in said
    assert "nearest neighbours" in said
    assert [p.name for p in tmp_path.iterdir()] == ["v.txt"]


def test_lines_instead_of_a_bar(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "LINE_SECONDS", 0.0)
    said = run("word2vec", text, *QUIET, "--out", tmp_path / "v.txt")
    line = r"training: [\d,]+ of 24,000 \(\d+%\), epoch 1, [\d,]+ words/s, loss \d\.\d{3}"
    assert len(re.findall(line, said)) > 3
    assert re.search(r"reading: ([\d,]+) of \1 \(100%\)", said)


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["TEXT", "--out", "."], "is a directory"),
        (["TEXT", "--ngrams", "three"], "lengths such as 3-6; found 'three'"),
        (["TEXT", "--ngrams", "3-6"], "--ngrams needs --buckets"),
        (["TEXT", "--resume"], "holds no checkpoint"),
        (["TEXT", "--device", "tpu9x"], "torch cannot use 'tpu9x'"),
        (["TEXT", "--checkpoint", "TEXT"], "is a file"),
        (["TEXT", "--encoding", "latin1000"], "unknown encoding"),
        (["TEXT", "--also", "TEXT"], "--also needs n-grams: give --buckets"),
        (["TEXT", "--window", "1001"], "window must be at most 1000, since longer sentences are split"),
        (["TEXT", "--cache-rows", "-1"], "cache_rows must be at least 0"),
        (["TEXT", "--lr", "1e308"], r"lr must be at least 0, and less than 2**63; found 1e+308"),
        (["TEXT", "--buckets", "9" * 20], "buckets must be at least 0, and less than 2**63"),
        (["TEXT", "--subsample", "nan"], "subsample must be at least 0"),
    ],
)
def test_wrong_options(arguments: list[str], match: str, text: Path, tmp_path: Path) -> None:
    given = [str(text) if each == "TEXT" else each for each in arguments]
    out = [] if "--out" in given else ["--out", tmp_path / "v.txt"]
    assert match in run("word2vec", *given, *out, code=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["v.txt", "v.loss.png", "v.map.png", ".v.txt.new"])
def test_a_text_is_never_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_text("to be or not to be")
    (tmp_path / "link.txt").symlink_to(tmp_path / name)
    for text in (tmp_path / name, tmp_path / "link.txt"):
        said = run("word2vec", text, *FEW, "--out", tmp_path / "sub" / ".." / "v.txt", code=1)
        assert "would be overwritten" in said
        assert text.read_text() == "to be or not to be"


def test_the_file_of_further_words_is_never_overwritten(text: Path, tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("cats dogs")
    options = [text, *QUIET, "--buckets", 10, "--also", tmp_path / "v.txt", "--out", tmp_path / "v.txt"]
    assert "would be overwritten" in run("word2vec", *options, code=1)
    assert (tmp_path / "v.txt").read_text() == "cats dogs"


def test_a_pipe_is_not_replaced(text: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "v.txt")
    assert "not a regular file" in run("word2vec", text, *QUIET, "--out", tmp_path / "v.txt", code=1)
    assert (tmp_path / "v.txt").is_fifo()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("\n \n", "0 words occur min_count=5 times"),
        ("to be or not to be", "0 words occur min_count=5 times"),
        ("a\nb\n" * 20, "nothing was trained"),
        ("one two three four five\n" * 5, "nothing was trained"),
    ],
)
def test_texts_with_nothing_to_learn(content: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(content)
    assert match in run("word2vec", tmp_path / "t.txt", *FEW, "--out", tmp_path / "v.txt", code=1)
    assert not (tmp_path / "v.txt").exists()


def test_characters_of_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("café caf thé\n" * 200, encoding="latin-1")
    options = [tmp_path / "t.txt", *QUIET, "--out", tmp_path / "v.txt"]
    message = run("word2vec", *options)
    assert "Warning: 2 different words have U+FFFD" in message
    assert "--encoding latin-1" in message
    assert "Warning" not in run("word2vec", *options, "--encoding", "latin-1")
    assert set(Vectors.load(tmp_path / "v.txt").words) == {"café", "caf", "thé"}
    (tmp_path / "u.txt").write_text("plain words\n" * 200)
    options = [tmp_path / "u.txt", "--also", tmp_path / "t.txt", "--buckets", 10, *options[1:]]
    assert "Warning: 2 different words have U+FFFD" in run("word2vec", *options)


def test_unknown_words_and_files(tmp_path: Path) -> None:
    Vectors(["append", "extend"], np.ones((2, 3))).save(tmp_path / "v.txt")
    said = run("neighbors", tmp_path / "v.txt", "extnd", "append", "xyz", code=1)
    assert re.search(r"append extend 1\.00 .*'extnd' is .* did you mean extend\? .*'xyz' is not among", said)
    assert "nearest neighbours" not in run("neighbors", tmp_path / "v.txt", "apend", code=1)


# ---- checkpoints


def test_the_checkpoint_of_another_training_is_kept(text: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "v.txt", tmp_path / "v.txt.checkpoint"
    half = Trainer(read_corpus(text), Settings(dim=8, epochs=2, device="cpu", seed=3))
    half.run(lambda p: half.stop() if p.step >= 7 else None)
    half.save(folder)
    said = run("word2vec", text, *FEW, "--out", out, code=1)
    assert f"holds a training at step 7 of {half.n_steps} (dim 8," in said
    assert "continue it with --resume, delete" in said
    assert "words of text" not in said  # before the text is read
    assert "removed" not in run("word2vec", text, *QUIET, "--out", out, "--checkpoint", tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v.txt", "v.txt.checkpoint"]
    Trainer(read_corpus(text), half.settings).resume(folder)


def test_tables_on_disk(text: Path, tmp_path: Path) -> None:
    """Tables on disk stay, with their checkpoint: --resume writes the vectors again."""
    out, tables = tmp_path / "v.txt", tmp_path / "tables"
    options = [text, *QUIET, "--buckets", "1_000", "--storage", "disk", "--path", tables, "--out", out]
    assert f"finished; delete {tables} and {out}.checkpoint to start again" in run("word2vec", *options)
    assert (tables / "inputs.bed").stat().st_size > 1027 * 8 * 4
    assert f"delete {out}.checkpoint and {tables} to start again" in run("word2vec", *options, code=1)
    before = matrix(out)
    assert re.search(r"continuing at step (\d+) of \1\b", run("word2vec", *options, "--resume"))
    np.testing.assert_array_equal(matrix(out), before)


def test_tables_of_a_run_that_was_killed(text: Path, tmp_path: Path) -> None:
    """Without a checkpoint they cannot be resumed; the message says what to delete."""
    tables = tmp_path / "tables"
    killed = Trainer(read_corpus(text), Settings(dim=8, device="cpu", storage="disk", path=tables))
    next(iter(killed))
    killed.close()
    options = [text, *QUIET, "--out", tmp_path / "v.txt", "--storage", "disk", "--path", tables]
    said = run("word2vec", *options, code=1)
    assert f"delete {tables}/inputs.bed and {tables}/outputs.bed to start again" in said
    for file in tables.iterdir():
        file.unlink()
    run("word2vec", *options)


def test_a_run_that_was_killed_continues(text: Path, tmp_path: Path) -> None:
    """From the last of its regular checkpoints, to the vectors of a run that was not killed."""
    options = [text, *QUIET]
    on_disk = [*options, "--out", tmp_path / "v.txt", "--storage", "disk", "--path", tmp_path / "tables"]
    killed = """
import os
from flatbed.cli import app
from flatbed.word2vec import Trainer
finish = Trainer._finish_step
def finish_step(self, *step):
    finish(self, *step)
    if self.step == 50:
        os.kill(os.getpid(), 9)
Trainer._finish_step = finish_step
app()
"""
    done = programs.run(killed, "word2vec", *on_disk, "--checkpoint-every", "1e-9", ok=False)
    assert done.returncode == -9, done.stderr
    assert "holds a training at step 49" in run("word2vec", *on_disk, code=1)
    assert "continuing at step 49" in run("word2vec", *on_disk, "--resume")
    run("word2vec", *options, "--out", tmp_path / "w.txt")
    np.testing.assert_array_equal(matrix(tmp_path / "v.txt"), matrix(tmp_path / "w.txt"))


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_training_is_saved_if_the_vectors_cannot_be_written(
    storage: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Vectors, path: Path, *, binary: bool = False) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    options = [text, *QUIET, "--storage", storage]
    options += ["--path", tmp_path / "tables"] if storage == "disk" else []
    out = tmp_path / "v.txt"
    with monkeypatch.context() as patch:
        patch.setattr(Vectors, "save", full)
        said = run("word2vec", *options, "--out", out, code=1)
    assert "No space left on device" in said
    assert f"the training is saved to {out}.checkpoint" in said
    assert not out.exists()
    assert not (tmp_path / ".v.txt.new").exists()
    run("word2vec", *options, "--out", out, "--resume")
    run("word2vec", text, *QUIET, "--out", tmp_path / "w.txt")
    np.testing.assert_array_equal(matrix(out), matrix(tmp_path / "w.txt"))


def test_vectors_are_on_the_disk_before_the_checkpoint_is_removed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    run("word2vec", text, *QUIET, "--out", tmp_path / "v.txt")
    assert f"{tmp_path}/.v.txt.new" in synced


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_and_resume(
    number: signal.Signals, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run ends with the vectors of an uninterrupted one."""
    finish, handlers = Trainer._finish_step, [signal.getsignal(number)]

    def interrupted(trainer: Trainer, *step: Any) -> None:
        finish(trainer, *step)
        if trainer.step == 9:
            os.kill(os.getpid(), number)

    options = [text, *QUIET, "--threads", "2", "--checkpoint", tmp_path / "run"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_finish_step", interrupted)
        said = run("word2vec", *options, "--out", tmp_path / "v.txt", code=130)
    assert re.search(r"saved step ([\d,]+) of ([\d,]+) to \S+: continue with --resume", said)
    assert [signal.getsignal(number)] == handlers
    assert not (tmp_path / "v.txt").exists()
    said = run("word2vec", *options, "--resume", "--out", tmp_path / "v.txt")
    assert f"removed {tmp_path / 'run'}: the training has finished" in said
    assert not (tmp_path / "run").exists()
    run("word2vec", *options, "--out", tmp_path / "w.txt")
    np.testing.assert_array_equal(matrix(tmp_path / "v.txt"), matrix(tmp_path / "w.txt"))


def test_a_signal_before_the_first_step(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its usual effect, since there is nothing to save yet."""
    bar = commands._progress_bar

    @contextmanager
    def interrupted(title: str) -> Iterator[Any]:
        with bar(title) as update:
            if title == "training":
                os.kill(os.getpid(), signal.SIGTERM)
            yield update

    monkeypatch.setattr(commands, "_progress_bar", interrupted)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run("word2vec", text, *QUIET, "--out", tmp_path / "v.txt", code=143)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []
