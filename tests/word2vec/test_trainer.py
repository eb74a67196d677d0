from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatbed
from flatbed import FlatbedError
from flatbed.word2vec import Corpus, Settings, Trainer
from flatbed.word2vec.model import SCORE_BOUND
from flatbed.word2vec.sampling import make_bags
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


LEARNING: list[dict[str, Any]] = [  # with batches that suit a vocabulary of 27 words
    {},
    {"optimizer": "sgd", "batch_words": 64},
    {"optimizer": "rmsprop"},
    {"optimizer": "Rprop", "lr": 0.01},
    {"cbow": True},
    {"threads": 2},
    {"threads": 3, "cbow": True},
]


@pytest.mark.parametrize("options", LEARNING, ids=str)
def test_neighbours_are_of_the_same_kind(options: dict[str, Any]) -> None:
    trainer = Trainer(kinds_corpus(), Settings(**SMALL | {"batch_words": 256} | options))
    trainer.run()
    assert purity(trainer) > 0.95
    losses = [loss for _, loss in trainer.losses]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert trainer.step == trainer.n_steps
    assert trainer.words == trainer.n_words


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


def test_sgd_takes_one_step_at_a_time() -> None:
    """With rows of some steps before, it diverges."""
    options = SMALL | {"optimizer": "sgd", "batch_words": 64}
    trainers = [Trainer(kinds_corpus(300), Settings(**options, threads=n)) for n in (1, 4)]
    for trainer in trainers:
        trainer.run()
    np.testing.assert_array_equal(*(trainer.vectors().matrix for trainer in trainers))


def test_the_error_of_a_step_is_raised_and_not_those_of_later_steps() -> None:
    trainer = Trainer(kinds_corpus(300), Settings(**SMALL | {"batch_words": 64}, threads=2))
    n_steps = iter(range(trainer.n_steps))

    def fail(*_: Any) -> None:
        if next(n_steps) == 5:
            raise RuntimeError("of step 5")

    trainer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="of step 5"):
        trainer.run()


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
    settings = Settings(**options, path=tmp_path / "one" if is_disk else None)
    whole = Trainer(corpus, settings, steps_per_report=3)
    whole.run()
    settings = Settings(**options, path=tmp_path / "tables" if is_disk else None)
    trainer = Trainer(corpus, settings, steps_per_report=3)
    for _ in trainer:
        break  # and continue below
    for cut in sorted(np.random.default_rng(0).integers(4, whole.n_steps, 2).tolist()):
        stop = lambda *_, cut=cut, t=trainer: t.stop() if t.step + 1 >= cut else None  # noqa: E731
        trainer.optimizer.register_step_post_hook(stop)  # also between two reports
        trainer.run()
        assert trainer.step == (-(-cut // STEPS_PER_DRAIN) * STEPS_PER_DRAIN if settings.threads > 1 else cut)
        trainer.save(tmp_path / "run")
        trainer.close()
        trainer = Trainer(corpus, settings, steps_per_report=3)
        trainer.resume(tmp_path / "run")
    trainer.run()
    np.testing.assert_array_equal(trainer.vectors().matrix, whole.vectors().matrix)
    assert trainer.losses == whole.losses
    trainer.close()
    whole.close()


def test_resume_refuses_other_settings_and_texts(tmp_path: Path) -> None:
    """Without `batch_words`, a small text has more steps than the default of its optimizer gives."""
    corpus, options = random_corpus(50, 20_000), {**SMALL, "batch_words": None}
    trainer = Trainer(corpus, Settings(**options, cache_rows=8))
    next(iter(trainer))
    trainer.save(tmp_path / "run")
    for changes, match in (
        ({"dim": 8}, "another training: dim=16 there and 8 here"),
        ({"seed": 5}, "seed=0 there and 5 here"),
        ({"optimizer": "adam", "batch_words": 8192}, "lr=0.06 there and 0.02 here, optimizer=adamax"),
        ({"batch_words": 8192}, r"another training: steps=\d+ there and \d+ here"),
    ):
        other = Trainer(corpus, Settings(**options | changes))
        with pytest.raises(FlatbedError, match=match):
            other.resume(tmp_path / "run")
        assert other.step == 0
    with pytest.raises(FlatbedError, match=r"text=.* the same files in the same order"):
        Trainer(random_corpus(50, 20_000, seed=1), Settings(**options)).resume(tmp_path / "run")
    again = Trainer(corpus, Settings(**options))  # the size of a cache may change
    again.resume(tmp_path / "run")
    assert again.step == trainer.step


def test_lengths_of_ngrams_need_buckets() -> None:
    """Otherwise there are no n-grams."""
    with pytest.raises(ValueError, match=r"\(2, 4\).*buckets"):
        Settings(ngrams=(2, 4))


def test_every_optimizer_that_is_listed_trains() -> None:
    with pytest.raises(ValueError, match="optimizer must be one of") as caught:
        Settings(optimizer="")
    listed = str(caught.value).removeprefix("optimizer must be one of ").split(";")[0].split(", ")
    assert {name.lower() for name in flatbed.optim.__all__} - {"from_torch"} < set(listed)
    for name in listed:
        next(iter(Trainer(kinds_corpus(50), Settings(**SMALL, optimizer=name))))


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


@pytest.mark.parametrize("dim", [16, 100])
@pytest.mark.parametrize("n_repeats", [100, 500])
def test_sgd_learns_a_line_of_two_words(dim: int, n_repeats: int) -> None:
    """One pair hundreds of times: the sum of its gradients must not push scores beyond the bound for good."""
    text = [["left", "right"] * n_repeats, *([["a", "cat", "and", "a", "dog"]] * 200)]
    options = SMALL | {"dim": dim, "batch_words": None, "epochs": 5}
    trainer = Trainer(Corpus.from_sentences(text), Settings(**options, optimizer="sgd"))
    trainer.run()
    rows = [trainer.corpus.words.index(word) for word in ("left", "right")]
    inputs, outputs = (trainer.model[name].read_rows(rows) for name in ("inputs", "outputs"))
    assert (inputs @ outputs.T).abs().max() < SCORE_BOUND
    assert trainer.losses[-1][1] < 6 * np.log(2)  # that of zeros


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
