from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatbed
from flatbed import FlatbedError
from flatbed.word2vec import Corpus, Settings, Trainer
from flatbed.word2vec.sampling import BLOCK, BatchSampler, TrainingBatch, make_bags
from flatbed.word2vec.settings import remove_checkpoint, saved_run
from flatbed.word2vec.trainer import STEPS_PER_DRAIN

from .texts import KINDS, SURROUNDINGS, kinds_corpus, random_corpus

SMALL: dict[str, Any] = {
    "dim": 16,
    "window": 4,
    "epochs": 4,
    "subsample": 0,
    "device": "cpu",
    "batch_words": 512,
}


def purity(trainer: Trainer) -> float:
    """The fraction of the three nearest words of any kind that are of the same kind."""
    vectors = trainer.vectors()
    words = [word for some in KINDS.values() for word in some]
    kind = {word: name for name, some in KINDS.items() for word in some}
    right = 0
    for word in words:
        near = [other for other, _ in vectors.neighbors(word, n=100) if other in kind][:3]
        right += sum(kind[other] == kind[word] for other in near)
    return right / (3 * len(words))


LEARNING = {  # with batches that suit a vocabulary of 27 words
    "adamax": {},
    "sgd": {"batch_words": 64},
    "rmsprop": {},
    "Rprop": {"lr": 0.01},
}


@pytest.mark.parametrize("optimizer", LEARNING)
def test_neighbours_are_of_the_same_kind(optimizer: str) -> None:
    options = SMALL | {"batch_words": 256} | LEARNING[optimizer]
    trainer = Trainer(kinds_corpus(), Settings(**options, optimizer=optimizer))
    trainer.run()
    assert purity(trainer) > 0.95
    losses = [loss for _, loss in trainer.losses]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


@pytest.mark.parametrize("wrong", ["contexts", "inputs"])
def test_a_broken_trainer_fails_the_test_above(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With contexts from anywhere, or with the row of another word."""
    right = BatchSampler._blocks

    def broken(self: Any, words: np.ndarray, *rest: Any) -> TrainingBatch:
        if wrong == "contexts":
            return right(self, np.random.default_rng(0).permutation(words), *rest)
        batch = right(self, words, *rest)
        return replace(batch, centers=batch.centers.flatten().roll(BLOCK).view_as(batch.centers))

    monkeypatch.setattr(BatchSampler, "_blocks", broken)
    trainer = Trainer(kinds_corpus(), Settings(**SMALL | {"batch_words": 256}))
    trainer.run()
    assert purity(trainer) < 0.8


def test_vectors_with_ngrams() -> None:
    trainer = Trainer(kinds_corpus(), Settings(**SMALL, buckets=500, ngrams=(2, 3)))
    table = trainer.model["inputs"]
    before = table.read_rows(np.arange(27 + 500)).clone()
    trainer.run()
    assert purity(trainer) > 0.95
    changed = (table.read_rows(np.arange(27 + 500)) != before).any(1)
    assert changed[:27].all()
    assert changed[27:].sum() > 100
    rows, _ = make_bags(trainer.corpus.words, 500, (2, 3)).lookup(np.array([3]))
    wanted = table.read_rows(rows).mean(0)
    np.testing.assert_allclose(trainer.vectors().matrix[3], wanted.numpy(), rtol=1e-5)
    vectors = trainer.vectors(["horses", "cat", "horses"])  # a word that is not in the text
    assert vectors.words == [*trainer.corpus.words, "horses"]
    near = {word for word, _ in vectors.neighbors("horses", 4)}
    assert near <= {*KINDS["animal"], *SURROUNDINGS["animal"]}
    with pytest.raises(FlatbedError, match=r"'horses' is not in the text: train n-grams \(buckets=\)"):
        Trainer(kinds_corpus(), Settings(**SMALL)).vectors(["horses"])


@pytest.mark.parametrize("options", [{"cbow": True}, {"threads": 2}, {"threads": 3, "cbow": True}], ids=str)
def test_cbow_and_threads_learn_the_same_kinds(options: dict[str, Any]) -> None:
    settings = Settings(**SMALL | {"batch_words": 256}, **options)
    found = []
    for _ in range(2):
        trainer = Trainer(kinds_corpus(), settings)
        trainer.run()
        found.append(trainer.vectors().matrix)
    assert purity(trainer) > 0.95
    np.testing.assert_array_equal(*found)
    assert trainer.step == trainer.n_steps
    assert trainer.words == trainer.n_words


def test_sgd_takes_one_step_at_a_time() -> None:
    """With rows of some steps before, it diverges."""
    corpus, options = kinds_corpus(300), SMALL | {"optimizer": "sgd", "batch_words": 64}
    one, four = (trained(corpus, Settings(**options, threads=n)) for n in (1, 4))
    np.testing.assert_array_equal(one, four)


def test_progress_and_learning_rate() -> None:
    """The rate of the optimizer falls linearly from the first step."""
    trainer = Trainer(kinds_corpus(300), Settings(**SMALL, lr=0.5))
    seen, rates = [], []
    for progress in trainer:
        seen.append(progress)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert [p.step for p in seen] == list(range(1, trainer.n_steps + 1))
    np.testing.assert_allclose(rates, 0.5 * (1 - np.arange(trainer.n_steps) / trainer.n_steps))
    np.testing.assert_allclose([p.lr for p in seen[:-1]], rates[1:])
    assert [p.epoch for p in seen[::5]] == [1, 2, 3, 4]
    assert seen[-1].words == seen[-1].n_words == trainer.n_words == 4 * 2400
    assert trainer.done
    assert trainer.losses == [(p.words, p.loss) for p in seen]
    assert list(trainer) == []


def test_the_first_loss_is_that_of_zeros() -> None:
    """Outputs are zero at first: every term is log 2."""
    first = next(iter(Trainer(random_corpus(500, 4000), Settings(**SMALL, min_count=1))))
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
        {"cbow": True},
        {"threads": 2, "batch_words": 64},
    ],
    ids=str,
)
def test_an_interrupted_training_has_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    corpus = random_corpus(200, 6000)
    options = SMALL | options
    is_disk = options.get("storage") == "disk"
    whole = Trainer(corpus, Settings(**options, path=tmp_path / "one" if is_disk else None))
    whole.run()
    settings = Settings(**options, path=tmp_path / "tables" if is_disk else None)
    trainer = Trainer(corpus, settings)
    for cut in sorted(np.random.default_rng(0).integers(1, whole.n_steps, 2).tolist()):
        trainer.run(lambda p, cut=cut, t=trainer: t.stop() if p.step >= cut else None)
        assert trainer.step == (-(-cut // STEPS_PER_DRAIN) * STEPS_PER_DRAIN if settings.threads > 1 else cut)
        trainer.save(tmp_path / "run")
        trainer.close()
        trainer = Trainer(corpus, settings)
        trainer.resume(tmp_path / "run")
    trainer.run()
    np.testing.assert_array_equal(trainer.vectors().matrix, whole.vectors().matrix)
    assert trainer.losses == whole.losses
    trainer.close()
    whole.close()


def test_resume_refuses_other_steps(tmp_path: Path) -> None:
    """A small text has fewer words per step than the setting that the optimizer suggests."""
    corpus, options = random_corpus(50, 20_000), {**SMALL, "batch_words": None}
    trainer = Trainer(corpus, Settings(**options))
    next(iter(trainer))
    trainer.save(tmp_path / "run")
    asked = Settings(**options | {"batch_words": trainer.settings.defaults.batch_words})
    with pytest.raises(FlatbedError, match=r"another training: steps=\d+ there and \d+ here"):
        Trainer(corpus, asked).resume(tmp_path / "run")


def test_a_loop_that_was_left_continues() -> None:
    corpus = random_corpus(100, 3000)
    whole = trained(corpus, Settings(**SMALL))
    trainer = Trainer(corpus, Settings(**SMALL))
    for limit in (3, 7, 10**9):
        for progress in trainer:
            if progress.step >= limit:
                break
    np.testing.assert_array_equal(trainer.vectors().matrix, whole)


def test_resume_refuses_other_settings_and_texts(tmp_path: Path) -> None:
    corpus = random_corpus(50, 2000)
    trainer = Trainer(corpus, Settings(**SMALL))
    next(iter(trainer))
    trainer.save(tmp_path / "run")
    for options, match in (
        ({"dim": 8}, "another training: dim=16 there and 8 here"),
        ({"seed": 5}, "seed=0 there and 5 here"),
        ({"optimizer": "sgd", "batch_words": 512}, "lr=0.06 there and 0.025 here, optimizer=adamax"),
    ):
        other = Trainer(corpus, Settings(**SMALL | options))
        with pytest.raises(FlatbedError, match=match):
            other.resume(tmp_path / "run")
        assert other.step == 0
    with pytest.raises(FlatbedError, match=r"text=.* the same files in the same order"):
        Trainer(random_corpus(50, 2000, seed=1), Settings(**SMALL)).resume(tmp_path / "run")
    with pytest.raises(FlatbedError, match="holds no checkpoint"):
        trainer.resume(tmp_path / "none")


def test_the_size_of_a_cache_may_change(tmp_path: Path) -> None:
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
        ({"dim": 0}, "dim must be at least 1; found 0"),
        ({"batch_words": 0}, "batch_words must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"subsample": float("nan")}, "subsample must be at least 0; found nan"),
        ({"lr": float("nan")}, "lr must be at least 0; found nan"),
        ({"storage": "cloud"}, "storage must be one of host, device, disk; found 'cloud'"),
        ({"storage": "disk"}, "disk and a path"),
        ({"path": "x"}, "disk and a path"),
        ({"ngrams": (4, 3)}, "least and the greatest length"),
        ({"optimizer": "adamaxx"}, "no optimizer 'adamaxx'; known are adadelta, .*adamax, .*asgd"),
    ],
)
def test_wrong_settings(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Settings(**options)


@pytest.mark.parametrize("name", ["LBFGS", "adafactor"])
def test_optimizers_without_support_for_tables(name: str) -> None:
    with pytest.raises(ValueError, match=f"the optimizer '{name}' does not support tables: "):
        Trainer(kinds_corpus(50), Settings(**SMALL, optimizer=name))


def test_all_optimizers_are_found() -> None:
    for name in flatbed.optim.__all__:
        if name != "from_torch":
            assert Settings(optimizer=name.lower()).to_dict()["optimizer"] == name.lower()


def test_a_loss_that_diverges_is_an_error() -> None:
    trainer = Trainer(kinds_corpus(300), Settings(**SMALL, optimizer="sgd", lr=10.0))
    trainer.model["inputs"].write_rows([0], np.full((1, 16), np.nan))
    with pytest.raises(FlatbedError, match=r"the loss is nan after step .* lower lr than 10"):
        trainer.run()


@pytest.mark.parametrize("optimizer", ["sgd", "adamax"])
def test_a_line_of_junk_does_not_diverge(optimizer: str) -> None:
    """One token thousands of times: every pair of a step pulls at the same two rows."""
    junk = [["=" * 8] * 20_000, *([["a", "cat", "and", "a", "dog"]] * 200)]
    options = SMALL | {"batch_words": None, "epochs": 2}
    trainer = Trainer(Corpus.from_sentences(junk), Settings(**options, optimizer=optimizer))
    trainer.run()
    assert np.isfinite(trainer.vectors().matrix).all()
    assert trainer.losses[-1][1] < 10


def test_steps_without_pairs_have_no_loss(tmp_path: Path) -> None:
    """Reports repeat the last mean, also after a checkpoint."""
    sentences = [["a", "b"] * 100, *([["c"]] * 20)]
    settings = Settings(**SMALL | {"batch_words": 20}, seed=1)
    trainer = Trainer(Corpus.from_sentences(sentences), settings, steps_per_report=1)
    reports = list(trainer)
    assert len(trainer.losses) == settings.epochs < len(reports)
    assert trainer.losses[-1][0] < trainer.words
    assert min(loss for _, loss in trainer.losses) > 0.5
    assert reports[-1].loss == trainer.losses[-1][1]
    trainer.save(tmp_path / "run")
    again = Trainer(trainer.corpus, settings)
    again.resume(tmp_path / "run")
    assert again.losses == trainer.losses


# ---- checkpoints


def saved(folder: Path) -> Trainer:
    trainer = Trainer(kinds_corpus(200), Settings(dim=8, epochs=2, device="cpu"))
    trainer.run(lambda p: trainer.stop() if p.step >= 3 else None)
    trainer.save(folder)
    return trainer


def test_the_description_of_a_checkpoint(tmp_path: Path) -> None:
    assert saved_run(tmp_path / "none") is None
    trainer = saved(tmp_path)
    found = saved_run(tmp_path)
    assert found is not None
    assert (found["step"], found["steps"]) == (3, trainer.n_steps)
    assert found["settings"]["dim"] == 8


@pytest.mark.parametrize("name", ["CURRENT.json", "v*/checkpoint.json"])
def test_a_checkpoint_that_is_damaged_or_of_another_model(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    file = next(tmp_path.glob(name))
    for content in ("", "{", "[]", '{"settings": {}}', '{"extra": {"step": 3}}'):
        file.write_text(content)
        with pytest.raises(FlatbedError, match=r"no intact checkpoint of word vectors .*: give another"):
            saved_run(tmp_path)


def test_removing_a_checkpoint_keeps_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saved(folder)
    remove_checkpoint(folder)
    assert not folder.exists()
    saved(folder)
    (folder / "v0000042").mkdir()
    (folder / "notes").touch()
    remove_checkpoint(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["notes", "v0000042"]


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
