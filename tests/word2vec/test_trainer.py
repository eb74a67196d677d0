from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatbed
from flatbed import FlatbedError
from flatbed.word2vec import Corpus, Progress, Settings, Trainer
from flatbed.word2vec import sampling as pairs
from flatbed.word2vec.sampling import BLOCK
from flatbed.word2vec.settings import find_optimizer

from .texts import KINDS, kinds_corpus, random_corpus

SMALL: dict[str, Any] = {
    "dim": 16,
    "window": 4,
    "epochs": 4,
    "subsample": 0,
    "device": "cpu",
    "batch_words": 512,
}


def purity(trainer: Trainer) -> float:
    """How many of the three nearest among words of all kinds are of the same kind."""
    vectors = trainer.vectors()
    words = [word for some in KINDS.values() for word in some]
    kind = {word: name for name, some in KINDS.items() for word in some}
    right = 0
    for word in words:
        near = [other for other, _ in vectors.neighbors(word, n=100) if other in kind][:3]
        right += sum(kind[other] == kind[word] for other in near)
    return right / (3 * len(words))


LEARNING = {  # in batches that suit a vocabulary of 27 words
    "adamax": {},
    "sgd": {"batch_words": 64},
    "adagrad": {},
    "Adam": {"lr": 0.02},
    "rmsprop": {},
    "Rprop": {"lr": 0.01},
}


@pytest.mark.parametrize("optimizer", LEARNING)
def test_neighbours_come_out_right(optimizer: str) -> None:
    options = SMALL | {"batch_words": 256} | LEARNING[optimizer]
    trainer = Trainer(kinds_corpus(), Settings(**options, optimizer=optimizer))
    trainer.run()
    assert purity(trainer) > 0.95
    losses = [loss for _, loss in trainer.losses]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


@pytest.mark.parametrize("wrong", ["contexts", "inputs"])
def test_a_broken_trainer_does_not_pass_for_a_right_one(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with contexts from anywhere, or with another word's row."""
    made = pairs.Batches._blocks

    def broken(self: Any, words: np.ndarray, *rest: Any) -> pairs.Batch:
        if wrong == "contexts":
            return made(self, np.random.default_rng(0).permutation(words), *rest)
        batch = made(self, words, *rest)
        return replace(batch, words=np.roll(batch.words, BLOCK))

    monkeypatch.setattr(pairs.Batches, "_blocks", broken)
    trainer = Trainer(kinds_corpus(), Settings(**SMALL | {"batch_words": 256}))
    trainer.run()
    assert purity(trainer) < 0.8


def test_vectors_with_ngrams() -> None:
    """Words that share letters begin alike: spelling alone tells kinds apart."""
    trainer = Trainer(kinds_corpus(), Settings(**SMALL, buckets=500, ngrams=(2, 3)))
    trainer.run()
    assert purity(trainer) > 0.95
    assert trainer.tables.model["inputs"].num_embeddings == 27 + 500
    bags, table = trainer._bags, trainer.tables.model["inputs"]
    assert bags is not None
    rows, _ = bags.of(np.array([3]))
    wanted = table.read_rows(rows).mean(0)
    np.testing.assert_allclose(trainer.vectors().matrix[3], wanted.numpy(), rtol=1e-5)


def test_ngram_rows_learn() -> None:
    trainer = Trainer(kinds_corpus(200), Settings(**SMALL | {"epochs": 1}, buckets=50))
    before = trainer.tables.model["inputs"].read_rows(np.arange(77)).clone()
    trainer.run()
    changed = (trainer.tables.model["inputs"].read_rows(np.arange(77)) != before).any(1)
    assert changed[:27].all()
    assert changed[27:].sum() > 30


def test_progress_and_learning_rate() -> None:
    trainer = Trainer(kinds_corpus(300), Settings(**SMALL, lr=0.5))
    seen = list(trainer)
    assert [p.step for p in seen] == list(range(1, trainer.n_steps + 1))
    assert seen[-1].words == seen[-1].n_words == trainer.n_words == 4 * 2400
    for p in seen:
        assert p.lr == pytest.approx(0.5 * max(1 - p.step / p.n_steps, 1e-4))
        assert p.epoch == min((p.step - 1) // 5 + 1, 4) or p.step % 5 == 0
    assert trainer.done
    assert trainer.losses == [(p.words, p.loss) for p in seen]
    assert list(trainer) == []


def test_the_rate_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has all of it, and it falls with a straight line."""
    trainer = Trainer(kinds_corpus(300), Settings(**SMALL, lr=0.002, optimizer="sgd"))
    rates: list[float] = []
    step = trainer.tables.optimizer.step
    monkeypatch.setattr(
        trainer.tables.optimizer,
        "step",
        lambda: (rates.append(trainer.tables.optimizer.param_groups[0]["lr"]), step()),
    )
    trainer.run()
    np.testing.assert_allclose(rates, 0.002 * (1 - np.arange(trainer.n_steps) / trainer.n_steps))


def test_the_first_loss_is_that_of_zeros() -> None:
    """Outputs begin as zeros: every term is log 2."""
    first: Progress = next(iter(Trainer(random_corpus(500, 4000), Settings(**SMALL, min_count=1))))
    assert 5.0 * np.log(2) < first.loss < 6 * np.log(2)


def trained(corpus: Corpus, settings: Settings) -> np.ndarray:
    trainer = Trainer(corpus, settings)
    trainer.run()
    return trainer.vectors().matrix


def test_seeds() -> None:
    corpus = kinds_corpus(200)
    a, b = (trained(corpus, Settings(**SMALL, seed=3)) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, trained(corpus, Settings(**SMALL, seed=4)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "sgd", "lr": 0.001},
        {"optimizer": "adam", "storage": "device"},
        {"buckets": 60},
        {"optimizer": "ASGD"},
        {"storage": "disk"},
    ],
    ids=str,
)
def test_an_interrupted_training_is_the_same_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    corpus = random_corpus(200, 6000)
    where = {"path": tmp_path / "tables"} if options.get("storage") == "disk" else {}
    whole = Trainer(corpus, Settings(**SMALL, **options, **({"path": tmp_path / "one"} if where else {})))
    whole.run()
    settings = Settings(**SMALL, **options, **where)
    trainer = Trainer(corpus, settings)
    n_cuts = 0
    for cut in sorted(np.random.default_rng(0).integers(1, whole.n_steps, 2).tolist()):
        trainer.run(lambda p, cut=cut, t=trainer: t.stop() if p.step >= cut else None)
        assert trainer.step == cut
        trainer.save(tmp_path / "run")
        trainer.close()
        trainer = Trainer(corpus, settings)
        trainer.resume(tmp_path / "run")
        n_cuts += 1
    trainer.run()
    np.testing.assert_array_equal(trainer.vectors().matrix, whole.vectors().matrix)
    assert trainer.losses == whole.losses
    assert n_cuts == 2
    trainer.close()
    whole.close()


def test_a_loop_that_is_left_goes_on() -> None:
    corpus = random_corpus(100, 3000)
    whole = trained(corpus, Settings(**SMALL))
    trainer = Trainer(corpus, Settings(**SMALL))
    for limit in (3, 7, 10**9):
        for progress in trainer:
            if progress.step >= limit:
                break
    np.testing.assert_array_equal(trainer.vectors().matrix, whole)


def test_stopped_from_another_thread() -> None:
    trainer = Trainer(random_corpus(500, 20_000), Settings(**SMALL | {"epochs": 10_000}))
    thread = threading.Timer(0.1, trainer.stop)
    thread.start()
    begun = time.monotonic()
    trainer.run()
    thread.join()
    assert 0 < trainer.step < trainer.n_steps
    assert time.monotonic() - begun < 20


def test_resume_refuses_what_is_not_the_same(tmp_path: Path) -> None:
    corpus = random_corpus(50, 2000)
    trainer = Trainer(corpus, Settings(**SMALL))
    next(iter(trainer))
    trainer.save(tmp_path / "run")
    for options, match in (
        ({"dim": 8}, "other settings: dim=16 there and 8 here"),
        ({"seed": 5}, "seed=0 there and 5 here"),
        ({"optimizer": "sgd", "batch_words": 512}, "lr=0.045 there and 0.025 here, optimizer=adamax"),
    ):
        other = Trainer(corpus, Settings(**SMALL | options))
        with pytest.raises(FlatbedError, match=match):
            other.resume(tmp_path / "run")
        assert other.step == 0
    with pytest.raises(FlatbedError, match="another text"):
        Trainer(random_corpus(50, 2000, seed=1), Settings(**SMALL)).resume(tmp_path / "run")
    with pytest.raises(FlatbedError, match="holds no checkpoint"):
        trainer.resume(tmp_path / "none")


def test_files_of_an_earlier_training_are_not_overwritten(tmp_path: Path) -> None:
    corpus = random_corpus(50, 2000)
    settings = Settings(**SMALL, storage="disk", path=tmp_path)
    trainer = Trainer(corpus, settings)
    trainer.run()
    trainer.save(tmp_path / "run")
    trainer.close()
    again = Trainer(corpus, settings)
    with pytest.raises(
        FlatbedError,
        match=r"inputs\.bed holds an earlier training: resume that one, .* or delete \S+inputs\.bed and "
        r"\S+outputs\.bed to begin anew \(the only way if that training was ended before",
    ):
        again.run()
    again.resume(tmp_path / "run")
    again.run()
    assert again.done
    again.close()


def test_the_size_of_a_cache_may_change_on_the_way(tmp_path: Path) -> None:
    corpus = random_corpus(50, 2000)
    trainer = Trainer(corpus, Settings(**SMALL, cache_rows=8))
    next(iter(trainer))
    trainer.save(tmp_path)
    again = Trainer(corpus, Settings(**SMALL))
    again.resume(tmp_path)
    assert again.step == trainer.step


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dim": 0}, "dim must be 1 at least; found 0"),
        ({"window": -1}, "window must be 1 at least"),
        ({"negatives": 0}, "negatives must be 1 at least"),
        ({"epochs": 0}, "epochs must be 1 at least"),
        ({"seed": -1}, "seed must be 0 at least"),
        ({"dim": 1.5}, "dim must be an integer; found 1.5"),
        ({"batch_words": 0}, "batch_words must be 1 at least"),
        ({"subsample": -1.0}, "subsample is a frequency"),
        ({"lr": 0.0}, "lr must be greater than 0"),
        ({"lr": float("nan")}, "lr must be greater than 0"),
        ({"storage": "cloud"}, "storage must be one of host, device, disk; found 'cloud'"),
        ({"storage": "disk"}, "needs a path"),
        ({"path": "x"}, 'path is for storage="disk"'),
        ({"ngrams": (4, 3)}, "least and the greatest length"),
        ({"optimizer": None}, "optimizer must be a name such as 'adamax'; found None"),
        ({"storage": None}, "storage must be a name such as 'host'; found None"),
        ({"ngrams": 3}, r"ngrams are the least and the greatest length, \(3, 6\) say; found 3"),
        ({"ngrams": ("3", "6")}, "ngrams are the least and the greatest length"),
        ({"subsample": "1"}, "subsample must be a number; found '1'"),
        ({"subsample": None}, "subsample must be a number; found None"),
        ({"lr": "1"}, "lr must be a number; found '1'"),
        ({"path": 5, "storage": "disk"}, "path must be that of a folder; found 5"),
        ({"device": "tpu9x"}, "device must be .*; found 'tpu9x'"),
        ({"optimizer": "adamaxx"}, "no optimizer 'adamaxx'; known are adadelta, .*adamax, .*asgd"),
    ],
)
def test_wrong_settings(options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        Settings(**options)


@pytest.mark.parametrize("name", ["LBFGS", "adafactor"])
def test_optimizers_that_are_not_for_tables(name: str) -> None:
    with pytest.raises(ValueError, match=f"the optimizer '{name}' is not for tables: "):
        Trainer(kinds_corpus(50), Settings(**SMALL, optimizer=name))


def test_every_optimizer_has_its_name() -> None:
    for name in flatbed.optim.__all__:
        if name != "from_torch":
            assert find_optimizer(name.lower()) is getattr(flatbed.optim, name)


def test_texts_without_words() -> None:
    with pytest.raises(ValueError, match="no word occurs min_count=5 times in a text of 3 words"):
        Trainer(Corpus.from_sentences([["a", "b", "c"]]))
    with pytest.raises(ValueError, match="min_count=5 times in a text of 0 words"):
        Trainer(Corpus.from_sentences([]))
    with pytest.raises(ValueError, match="only one word"):
        Trainer(Corpus.from_sentences([["a"] * 9]))


def test_a_loss_that_runs_away_is_told() -> None:
    trainer = Trainer(kinds_corpus(300), Settings(**SMALL, optimizer="sgd", lr=10.0))
    with pytest.raises(FlatbedError, match=r"the loss is (nan|inf) after step .* a lower lr \(here 10\)"):
        trainer.run()


def test_a_text_of_sentences_of_one_word() -> None:
    """No pairs at all: nothing to learn, and nothing breaks."""
    trainer = Trainer(Corpus.from_sentences([["a"], ["b"]] * 20), Settings(**SMALL))
    for progress in trainer:
        assert np.isnan(progress.loss)
    assert trainer.losses == []
    assert np.isfinite(trainer.vectors().matrix).all()


def test_steps_without_pairs_have_no_loss(tmp_path: Path) -> None:
    """The mean of the last pairs is carried on, through a checkpoint, too."""
    sentences = [["a", "b"] * 100, *([["c"]] * 20)]
    settings = Settings(**SMALL | {"batch_words": 20}, seed=1)
    trainer = Trainer(Corpus.from_sentences(sentences), settings, steps_per_report=1)
    reports = list(trainer)
    n_pairs = [batch.n_pairs for batch in trainer._batches.range(0, trainer.n_steps)]
    assert sum(n > 0 for n in n_pairs) == settings.epochs
    assert n_pairs[-1] == 0
    assert len(trainer.losses) == settings.epochs
    assert min(loss for _, loss in trainer.losses) > 0.5
    assert reports[-1].loss == trainer.losses[-1][1]
    trainer.save(tmp_path / "run")
    again = Trainer(trainer.corpus, settings)
    again.resume(tmp_path / "run")
    assert again.losses == trainer.losses


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"buckets": 300}, {"storage": "device"}, {"cache_rows": 0}], ids=str)
def test_training_on_a_gpu(options: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(**SMALL | {"device": "cuda", "batch_words": 256}, **options)
    trainer = Trainer(kinds_corpus(), settings)
    trainer.run(lambda p: trainer.stop() if p.step == 20 else None)
    trainer.save(tmp_path / "run")
    again = Trainer(kinds_corpus(), settings)
    again.resume(tmp_path / "run")
    again.run()
    assert purity(again) > 0.95
    assert torch.isfinite(torch.from_numpy(again.vectors().matrix)).all()
