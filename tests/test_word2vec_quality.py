"""The comparison with gensim: its judge is right, and it notices a broken trainer."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flatbed.bench.rows import this_machine, write_rows

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("gensim")

from quality import judge, rows, text, trainers  # noqa: E402
from quality.intervals import Difference, welch  # noqa: E402

TASK = trainers.Task(dim=16, epochs=4, min_count=5)


@pytest.fixture(scope="module")
def small() -> text.Text:
    """A part of the text that trains in a moment."""
    return text.read_text(min_count=TASK.min_count, max_sentences=800)


@pytest.fixture(scope="module")
def judge_of_small(small: text.Text) -> judge.Judge:
    return judge.Judge(small, window=TASK.window, subsample=TASK.subsample, negatives=TASK.negatives)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def row(trainer: str, role: str, seed: int, measures: dict[str, float]) -> rows.RunRow:
    return rows.RunRow(
        benchmark=rows.BENCHMARK,
        machine=this_machine("cpu"),
        trainer=trainer,
        role=role,
        seed=seed,
        dim=TASK.dim,
        window=TASK.window,
        negatives=TASK.negatives,
        epochs=TASK.epochs,
        subsample=TASK.subsample,
        min_count=TASK.min_count,
        lr=TASK.lr,
        n_words=1,
        vocabulary=1,
        gensim="4",
        seconds=1.0,
        cpu_seconds=1.0,
        words_per_second=1.0 + seed,
        measures=measures,
    )


def made_rows(trainer: str, role: str, better_by: float) -> list[rows.RunRow]:
    """Runs that are better than those of 0 by so much in every measure, with some spread."""
    signs = {m.name: 1 if m.higher_is_better else -1 for m in judge.MEASURES}
    return [
        row(
            trainer, role, seed, {name: 0.5 + sign * better_by + 0.001 * seed for name, sign in signs.items()}
        )
        for seed in range(4)
    ]


# What the judge says


def test_the_text_covers_the_judged_pairs() -> None:
    whole = text.read_text(min_count=5)
    assert whole.n_words > 450_000
    assert len(text.judged_pairs("WordSim-353", whole.words)) > 230
    assert len(text.judged_pairs("SimLex-999", whole.words)) > 500
    assert len(whole.held_out) / len(whole.training) == pytest.approx(1 / 19, rel=0.01)


def test_pairs_are_the_words_in_reach() -> None:
    made = text.divide([["x"], ["a", "b", "c"], ["b", "a"]], min_count=1)
    words, contexts = judge.pairs_of(made, made.training, window=1, subsample=0)
    found = sorted((made.words[w], made.words[c]) for w, c in zip(words, contexts, strict=True))
    assert found == [("a", "b"), ("a", "b"), ("b", "a"), ("b", "a"), ("b", "c"), ("c", "b")]


def test_windows_have_random_size_and_end_with_the_sentence() -> None:
    made = text.divide([["x"]] + [list("abcdefghij")] * 400, min_count=1)
    words, contexts = judge.pairs_of(made, made.training, window=4, subsample=0)
    place = np.array(["abcdefghij".index(word) for word in made.words])
    distance = np.abs(place[words] - place[contexts])
    # A word sees one at distance d with probability (window - d + 1) / window, and there are 2 (10 - d) such.
    seen = np.bincount(distance, minlength=5) / 400
    expected = [0, *(2 * (10 - d) * (4 - d + 1) / 4 for d in range(1, 5))]
    np.testing.assert_allclose(seen, expected, rtol=0.05)


def test_loss_is_that_of_a_plain_loop(small: text.Text, judge_of_small: judge.Judge) -> None:
    random = torch.Generator().manual_seed(0)
    shape = (len(small.words), 8)
    trained = judge.Trained(
        torch.randn(shape, generator=random), torch.randn(shape, generator=random), 1.0, 1.0
    )
    found = judge_of_small.losses(trained)["held-out loss"]
    noise = small.counts**0.75 / (small.counts**0.75).sum()
    total = 0.0
    pairs = list(zip(*judge_of_small.pairs["held-out loss"], strict=True))
    for word, context in pairs:
        score = float(trained.inputs[word] @ trained.outputs[context])
        negatives = (trained.outputs @ trained.inputs[word]).double().numpy()
        total += math.log1p(math.exp(-score)) + TASK.negatives * float(noise @ np.logaddexp(0, negatives))
    assert found == pytest.approx(total / len(pairs), rel=1e-4)
    zeros = judge.Trained(torch.zeros(shape), torch.zeros(shape), 1.0, 1.0)
    assert judge_of_small.losses(zeros)["loss"] == pytest.approx(judge_of_small.untrained_loss(), rel=1e-5)


def test_overlap_counts_shared_neighbours() -> None:
    one = torch.tensor([[1, 2], [3, 4]])
    assert judge.overlap(one, one.flip(1)) == 1.0
    assert judge.overlap(one, torch.tensor([[2, 9], [7, 8]])) == 0.25
    angles = torch.tensor([0.0, 0.1, 0.3, 3.0])
    near = judge.neighbours(torch.stack((angles.cos(), angles.sin()), 1))
    assert near[:, 0].tolist() == [1, 0, 1, 2]


def test_likeness_is_that_of_people(small: text.Text, judge_of_small: judge.Judge) -> None:
    """Vectors made so that cosines follow the judgements are judged perfect."""
    pairs = [(small.words[2 * i], small.words[2 * i + 1], float(i)) for i in range(20)]
    judge_of_pairs = judge.Judge(small, window=2, subsample=0, negatives=1)
    judge_of_pairs.judged["SimLex-999"] = pairs
    vectors = torch.zeros(len(small.words), 2)
    for i in range(20):
        angle = math.pi * (1 - i / 20)
        vectors[2 * i] = torch.tensor([1.0, 0.0])
        vectors[2 * i + 1] = torch.tensor([math.cos(angle), math.sin(angle)]) * (1 + i)
    trained = judge.Trained(vectors, vectors, 1.0, 1.0)
    assert judge_of_pairs.likeness(trained, "SimLex-999") == pytest.approx(1.0)
    judge_of_pairs.judged["SimLex-999"] = pairs[:5]
    assert math.isnan(judge_of_pairs.likeness(trained, "SimLex-999"))


# What follows from it


def test_interval_is_welchs() -> None:
    from scipy.stats import ttest_ind

    ours, theirs = [1.0, 1.2, 1.1, 1.4], [0.9, 1.0, 1.3, 0.7, 0.8]
    expected = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    found = welch(ours, theirs, higher_is_better=True)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    turned = welch(ours, theirs, higher_is_better=False)
    assert (turned.low, turned.high) == pytest.approx((-expected.high, -expected.low))
    with pytest.raises(ValueError, match="two runs of each; found 1 and 5"):
        welch([1.0], theirs, higher_is_better=True)


def test_verdicts() -> None:
    assert Difference(0.0, -0.01, 0.01).verdict(0.02) == "not worse"
    assert Difference(-0.1, -0.13, -0.07).verdict(0.02) == "worse"
    assert Difference(-0.01, -0.03, 0.01).verdict(0.02) == "undecided"
    assert Difference(float("nan"), float("nan"), float("nan")).verdict(0.02) == "undecided"


def test_failures_are_bad_vectors_and_mistakes_that_nobody_noticed(tmp_path: Path) -> None:
    runs = [
        *made_rows("gensim", "compared", 0.0),
        *made_rows("as good", "compared", 0.001),
        *made_rows("bad", "compared", -0.1),
        *made_rows("bad default", "default", -0.1),
        *made_rows("broken but fine", "broken", 0.0),
        *made_rows("broken", "broken", -0.1),
    ]
    found = rows.compare(runs)
    wrong = rows.failures(found)
    names = [measure.name for measure in judge.MEASURES]
    assert wrong == [
        *(f"bad: worse in {name}" for name in names),
        *(f"bad default: worse in {name}" for name in names if name != rows.OVERLAP),
        "broken but fine: nobody noticed",
    ]

    stored = tmp_path / "rows.json"
    write_rows([*runs, *found], stored)
    assert rows.read(stored) == [*runs, *found]
    assert "| bad | loss |" in rows.to_markdown(stored)


def test_references_are_not_compared() -> None:
    runs = [*made_rows("gensim", "compared", 0.0), *made_rows("ours", "compared", 0.0)]
    references = [
        replace(run, role="reference", measures={}) for run in made_rows("gensim", "compared", -1.0)
    ]
    assert rows.compare([*references, *runs]) == rows.compare(runs)


# The trainers themselves


def walks() -> text.Text:
    """A language that is learnt in a moment: steps along a ring of words, with frequent words in between."""
    random = np.random.default_rng(0)
    sentences = []
    for _ in range(600):
        places = (random.integers(100) + np.cumsum(random.integers(1, 3, 40))) % 100
        frequent = random.zipf(1.5, 40) % 50
        between = random.random(40) < 0.4
        sentences.append(
            [f"f{f}" if b else f"w{w}" for b, f, w in zip(between, frequent, places, strict=True)]
        )
    return text.divide(sentences, min_count=TASK.min_count)


def test_a_broken_trainer_is_noticed() -> None:
    """On a small text, where flatbed's is as good as gensim's."""
    small = walks()
    judge_of_small = judge.Judge(
        small, window=TASK.window, subsample=TASK.subsample, negatives=TASK.negatives
    )
    contenders = [one for one in (*trainers.COMPARED, *trainers.BROKEN) if one.role != "default"]
    runs = []
    for seed in range(3):
        for one in contenders:
            losses = judge_of_small.losses(one.train(small, TASK, seed))
            runs.append(
                row(one.name, one.role, seed, {m.name: losses.get(m.name, 0.0) for m in judge.MEASURES})
            )
    verdicts = {r.trainer: r for r in rows.compare(runs) if r.measure == "loss"}
    assert verdicts["flatbed sgd"].verdict == "not worse", verdicts["flatbed sgd"]
    for one in trainers.BROKEN:
        assert verdicts[one.name].verdict == "worse", verdicts[one.name]


def test_mistakes_are_gone_afterwards() -> None:
    from flatbed.word2vec.sampling import Batches
    from flatbed.word2vec.vocabulary import Unigrams

    before = Unigrams.draw, Batches.make
    for mistake in (trainers.uniform_negatives, trainers.shifted_window):
        with mistake():
            assert (Unigrams.draw, Batches.make) != before
        assert (Unigrams.draw, Batches.make) == before
