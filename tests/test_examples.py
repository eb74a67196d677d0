"""The examples run, and their models learn."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.programs import ROOT
from tests.scripts.ranks import run_on_ranks

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs an example in this process, and returns what it prints."""
    n_threads = torch.get_num_threads()

    def run(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(n_threads)


def test_the_demo_ends_with_the_same_numbers(run: Run) -> None:
    out = run("demo.py", "--depth", "10", "--steps", "30")
    assert out.endswith("largest difference between any two weights: 0.0\n")
    ours, theirs = re.findall(r"loss (\S+) → ([\d.e-]+), clip", out)
    assert ours == theirs
    assert float(ours[1]) < float(ours[0]) / 2


def test_tables_resume_with_the_same_losses(run: Run) -> None:
    lines = run("tables.py", "--users", "500", "--items", "200", "--steps", "40").splitlines()
    first, second = lines
    before, after = (float(word) for word in first.split()[1:4:2])
    assert after < before
    assert second.endswith("as without a crash: True")


def test_speedtorch_word2vec_learns(run: Run) -> None:
    words = run("speedtorch_word2vec.py", "--steps", "100").splitlines()[0].split()
    assert float(words[-1]) < float(words[-3])


def test_glove_learns(run: Run) -> None:
    lines = run("glove.py", "--steps", "150", "start").splitlines()
    assert float(lines[1].split()[3]) < float(lines[1].split()[1])
    assert lines[2].startswith("start: ")


def test_ratings_approach_the_noise(run: Run) -> None:
    sizes = ["--users", "200", "--items", "100", "--ratings", "20000", "--batch", "500"]
    last = run("ratings.py", *sizes).splitlines()[-1]
    plain, found, noise = (float(n) for n in re.findall(r"\d\.\d{3}", last))
    assert noise < found < 0.4 < plain  # seen: 1.008, 0.328, 0.300


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo processes on a CPU")
def test_two_towers_recommend_items_after_a_restart_on_another_number_of_ranks(
    run: Run, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    first = run_on_ranks("two_tower.py", "--folder", folder, "--steps", "40")
    second = run("two_tower.py", "--folder", folder, "--steps", "60")
    assert first.startswith("2 ranks, steps 0 to 40")
    assert first.count("gloo threads left: 0\n") == 2
    assert second.startswith("1 ranks, steps 40 to 60")
    (_, saved, popular, _), (loaded, trained, _, chance) = (
        [float(number) for number in re.findall(r"\d\.\d{3}", out)] for out in (first, second)
    )
    assert loaded == saved
    assert trained > max(saved, 2 * popular, 20 * chance)  # seen: 0.348, 0.394; 0.140; 0.005
