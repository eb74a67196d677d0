"""The comparison with gensim: its measures are right, and it finds a broken trainer."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import quality, whole_runs
from benchmarks.harness import Options
from benchmarks.quality import Judge, Text, Trained, split
from benchmarks.rows import RESULTS, read_rows

pytest.importorskip("gensim")
OPTIONS = Options(torch.device("cpu"), quick=True, report=lambda line: None)
TASK = quality.Task(dim=16, epochs=4)


@pytest.fixture(scope="module")
def text() -> Text:
    """A language that is learnt in a moment: steps along a ring of words, with frequent words in between."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(600):
        ring = (random.integers(100) + np.cumsum(random.integers(1, 3, 40))) % 100
        frequent, between = random.zipf(1.5, 40) % 50, random.random(40) < 0.4
        lines.append([f"f{f}" if b else f"w{w}" for b, f, w in zip(between, frequent, ring, strict=True)])
    return split(lines, min_count=TASK.min_count)


@pytest.fixture(scope="module")
def judge(text: Text) -> Judge:
    return Judge(text, TASK)


def random_vectors(text: Text, dim: int = 8) -> Trained:
    generator = torch.Generator().manual_seed(0)
    return Trained(*torch.randn((2, len(text.words), dim), generator=generator))


# ---- measures


def test_the_text_covers_the_judged_pairs() -> None:
    whole = split(quality.sentences(), min_count=5)
    assert sum(map(len, whole.training)) > 450_000
    assert len(whole.held_out) / len(whole.training) == pytest.approx(1 / 19, rel=0.01)
    judge = Judge(whole._replace(training=whole.training[:20], held_out=whole.held_out[:20]), TASK)
    for file in quality.JUDGED.values():
        assert abs(judge.similarity(random_vectors(whole), file)) < 0.2


def test_windows_have_random_size_and_end_with_the_sentence() -> None:
    text = split([["x"]] + [list("abcdefghij")] * 400, min_count=1)
    words, contexts = quality.pairs_of(text, text.training, window=4, subsample=0)
    position = np.array(["abcdefghij".index(word) for word in text.words])
    seen = np.bincount(np.abs(position[words] - position[contexts]), minlength=5) / 400
    # A word sees one at distance d with probability (4 - d + 1) / 4, and there are 2 (10 - d) such pairs.
    expected = [0, *(2 * (10 - d) * (4 - d + 1) / 4 for d in range(1, 5))]
    np.testing.assert_allclose(seen, expected, rtol=0.05)


def test_loss_is_that_of_a_plain_loop(text: Text, judge: Judge) -> None:
    trained = random_vectors(text)
    noise = text.counts**0.75 / (text.counts**0.75).sum()
    pairs = list(zip(*judge.pairs["held-out loss"], strict=True))
    total = 0.0
    for word, context in pairs:
        score = float(trained.inputs[word] @ trained.outputs[context])
        negatives = (trained.outputs @ trained.inputs[word]).double().numpy()
        total += math.log1p(math.exp(-score)) + TASK.negatives * float(noise @ np.logaddexp(0, negatives))
    assert judge.losses(trained)["held-out loss"] == pytest.approx(total / len(pairs), rel=1e-4)
    zeros = Trained(*torch.zeros(2, len(text.words), 8))
    assert judge.losses(zeros)["loss"] == pytest.approx((1 + TASK.negatives) * math.log(2), rel=1e-5)


def test_overlap_counts_shared_neighbors() -> None:
    one = torch.tensor([[1, 2], [3, 4]])
    assert quality.overlap(one, one.flip(1)) == 1.0
    assert quality.overlap(one, torch.tensor([[2, 9], [7, 8]])) == 0.25
    angles = torch.tensor([0.0, 0.1, 0.3, 3.0])
    near = quality.neighbors(torch.stack((angles.cos(), angles.sin()), 1))
    assert near[:, 0].tolist() == [1, 0, 1, 2]


def test_similarity_is_perfect_where_cosines_follow_the_judgements(text: Text, tmp_path: Path) -> None:
    angles = torch.linspace(0, 3, len(text.words))
    vectors = torch.stack((angles.cos(), angles.sin()), 1) * (1 + angles[:, None])
    lines = [f"{text.words[0]}\t{word}\t{-i}" for i, word in enumerate(text.words)]
    (tmp_path / "judged.tsv").write_text("\n".join(lines))
    judge = Judge(text, TASK)
    assert judge.similarity(Trained(vectors, vectors), str(tmp_path / "judged.tsv")) == pytest.approx(1.0)
    (tmp_path / "judged.tsv").write_text("unknown\twords\t1.0\n")
    assert math.isnan(judge.similarity(Trained(vectors, vectors), str(tmp_path / "judged.tsv")))


# ---- runs


def test_verdicts_are_those_of_the_stored_comparison() -> None:
    """It has two broken trainers, which are found worse."""
    stored = read_rows(RESULTS / "earlier" / "cpu-word2vec-quality.json")
    runs = [row for row in stored if row["case"] == "quality-runs"]
    found = {row["variant"]: row for row in whole_runs.compare(runs, OPTIONS)}
    assert [row["ok"] for row in found.values()] == [True, True, False, False]
    for row in stored:
        if row["case"] == "quality":
            judged = found[row["variant"]]["metrics"][row["setting"]["measure"]]
            assert judged == row["metrics"]["verdict"]
    assert list(whole_runs.compare(runs[:3], OPTIONS)) == [], "one turn proves nothing"


def test_runs_are_timed_and_judged(text: Text, tmp_path: Path) -> None:
    """flatbed is as good as gensim, and a quarter of the learning rate is found worse."""
    judge, path = Judge(text, TASK), tmp_path / "text.txt"
    judge.references.append(quality.neighbors(random_vectors(text).inputs))
    rows = list(whole_runs.run_turn(judge, path, "ring", 0, OPTIONS))
    assert [row["variant"] for row in rows] == list(whole_runs.VARIANTS)
    assert all(
        {"words_per_s", "gensim_ratio", "held-out loss", quality.OVERLAP} <= set(row["metrics"])
        for row in rows
    )
    gensim, _, sgd = (row["metrics"]["loss"] for row in rows)
    assert sgd == pytest.approx(gensim, abs=0.05)
    slow = whole_runs.run_flatbed(path, text, TASK, 0, optimizer="sgd", lr=TASK.lr / 4)
    assert judge.losses(slow)["loss"] > gensim + 0.1
