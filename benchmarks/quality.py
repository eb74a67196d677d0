"""Quality of flatbed's word vectors beside gensim's: same text, same settings, several seeds, one judge.

Every trainer is compared with gensim in five measures. The 95% interval of the difference of means must stay
above −margin, and the margin was fixed before the first comparison. Text and word pairs come with gensim;
nothing is downloaded.
"""

from __future__ import annotations

import bz2
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Options
from benchmarks.rows import Row
from flatbed.word2vec import Corpus, Settings, Trainer, Vectors

GENSIM = "gensim"
WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
PLAIN = ("lee_background.cor", "lee.cor", "pang_lee_polarity.cor")
JUDGED = {"WordSim-353": "wordsim353.tsv", "SimLex-999": "simlex999.txt"}
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
HELD_OUT = 20  # one sentence of so many is kept from the trainers
N_ASKED, N_NEIGHBORS = 1000, 10
MARGIN = 0.02
OVERLAP = "overlap@10"
MEASURES = {"loss": False, "held-out loss": False, OVERLAP: True, **dict.fromkeys(JUDGED, True)}
"""Names, and whether higher is better."""
FIRST_SEED, FIRST_REFERENCE = 300, 1000
"""Nothing was tuned with these seeds."""

Ids = npt.NDArray[np.int64]
Sentences = list[list[str]]


# ---- text


class Text(NamedTuple):
    """Sentences to train on, sentences for the judge, and the frequent words, most frequent first."""

    training: Sentences
    held_out: Sentences
    words: list[str]
    counts: Ids


def path_of(name: str) -> Path:
    """Return the path of a file that comes with gensim."""
    from gensim.test.utils import datapath

    return Path(datapath(name))


@lru_cache(maxsize=1)
def sentences() -> Sentences:
    """Read the whole text, shuffled once: gensim's result depends on the order of a text."""
    from gensim.corpora.wikicorpus import extract_pages, filter_wiki

    lines: list[str] = []
    with bz2.open(path_of(WIKIPEDIA)) as file:
        for _, article, _ in extract_pages(file, ("0",)):
            if not article.lstrip().upper().startswith("#REDIRECT"):
                lines += filter_wiki(article).splitlines()
    for name in PLAIN:
        lines += path_of(name).read_text(encoding="utf-8", errors="replace").splitlines()
    split = (WORD.findall(line.lower().removeprefix("__label__")) for line in lines)
    found = [words for words in split if len(words) >= 5]  # shorter lines are headings
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def split(lines: Sequence[list[str]], *, min_count: int) -> Text:
    """Hold out every twentieth sentence, and count the words of the others."""
    training = [words for i, words in enumerate(lines) if i % HELD_OUT]
    counted = Counter(word for words in training for word in words)
    kept = {word: count for word, count in counted.most_common() if count >= min_count}
    return Text(training, list(lines[::HELD_OUT]), [*kept], np.array([*kept.values()], dtype=np.int64))


# ---- judge


class Trained(NamedTuple):
    """A row per word of `Text.words` in both tables, and the time of training."""

    inputs: Tensor
    outputs: Tensor
    seconds: float = 1.0
    cpu_seconds: float = 1.0


class Task(NamedTuple):
    """Settings that all trainers share."""

    dim: int = 64
    window: int = 5
    negatives: int = 5
    epochs: int = 10
    subsample: float = 1e-3
    min_count: int = 5
    lr: float = 0.025


def pairs_of(text: Text, parts: Sentences, *, window: int, subsample: float) -> tuple[Ids, Ids]:
    """Draw (word, context) pairs as skip-gram sees them; the same pairs for every training."""
    random = np.random.default_rng(0)
    number = {word: i for i, word in enumerate(text.words)}
    known = [[number[word] for word in words if word in number] for words in parts]
    ids = np.fromiter((i for words in known for i in words), dtype=np.int64)
    sentence = np.repeat(np.arange(len(known)), [len(words) for words in known])
    if subsample:
        threshold = subsample * text.counts.sum()
        kept = (np.sqrt(text.counts / threshold) + 1) * threshold / text.counts
        chosen = random.random(len(ids)) < kept[ids]
        ids, sentence = ids[chosen], sentence[chosen]
    reach = random.integers(1, window + 1, len(ids))
    words, contexts = [], []
    for distance in range(1, min(window, len(ids) - 1) + 1):
        left, right = np.arange(len(ids) - distance), np.arange(distance, len(ids))
        together = sentence[left] == sentence[right]
        for word, context in ((left, right), (right, left)):
            seen = together & (reach[word] >= distance)
            words.append(ids[word[seen]])
            contexts.append(ids[context[seen]])
    return np.concatenate(words), np.concatenate(contexts)


class Judge:
    """Measures vectors, whatever trained them."""

    def __init__(self, text: Text, task: Task) -> None:
        self.text, self.task = text, task
        parts = {"loss": text.training, "held-out loss": text.held_out}
        shape: dict[str, Any] = {"window": task.window, "subsample": task.subsample}
        self.pairs = {name: pairs_of(text, part, **shape) for name, part in parts.items()}
        noise = torch.from_numpy(text.counts).double() ** 0.75
        self.noise = (noise / noise.sum()).float()
        self.references: list[Tensor] = []

    def judge(self, trained: Trained) -> dict[str, float]:
        """Compute all measures."""
        own = neighbors(trained.inputs)
        shared = [overlap(own, other) for other in self.references]
        similar = {name: self.similarity(trained, file) for name, file in JUDGED.items()}
        return {**self.losses(trained), OVERLAP: fmean(shared) if shared else float("nan"), **similar}

    def losses(self, trained: Trained) -> dict[str, float]:
        """Compute the loss of negative sampling, with the expected value over negatives."""
        products = (part @ trained.outputs.T for part in torch.split(trained.inputs, 512))
        negative = torch.cat([F.softplus(part) @ self.noise for part in products])
        found = {}
        for name, pairs in self.pairs.items():
            words, contexts = map(torch.from_numpy, pairs)
            total = self.task.negatives * float(negative[words].double().sum())
            parts = (torch.split(words, 100_000), torch.split(contexts, 100_000))
            for word, context in zip(*parts, strict=True):
                score = (trained.inputs[word] * trained.outputs[context]).sum(1)
                total += float(F.softplus(-score).double().sum())
            found[name] = total / max(len(words), 1)
        return found

    def similarity(self, trained: Trained, file: str) -> float:
        """Compute Spearman's correlation of cosines with people's judgements; nan if no pair is known."""
        from gensim.models import KeyedVectors

        vectors = KeyedVectors(trained.inputs.shape[1])
        vectors.add_vectors(self.text.words, trained.inputs.numpy())
        try:
            return float(vectors.evaluate_word_pairs(path_of(file))[1][0])
        except ValueError:
            return float("nan")


def neighbors(inputs: Tensor) -> Tensor:
    """Return the words with the greatest cosine to each of the most frequent ones."""
    vectors = F.normalize(inputs, dim=1)
    n_asked = min(N_ASKED, len(vectors))
    cosines = vectors[:n_asked] @ vectors.T
    cosines[:, :n_asked].fill_diagonal_(-2.0)
    return cosines.topk(min(N_NEIGHBORS, len(vectors) - 1), dim=1).indices


def overlap(one: Tensor, other: Tensor) -> float:
    """Return the share of equal neighbors."""
    return float((one[:, :, None] == other[:, None, :]).any(2).float().mean())


# ---- trainers

Train = Callable[[Text, Task, int, Sentences], Trained]


def gensim_model(task: Task, seed: int, workers: int) -> Any:
    """Make gensim's skip-gram with the settings of a task."""
    from gensim.models import Word2Vec

    shape = {"vector_size": task.dim, "window": task.window, "min_count": task.min_count, "alpha": task.lr}
    noise = {"negative": task.negatives, "sample": task.subsample, "min_alpha": 0.0001}
    return Word2Vec(sg=1, workers=workers, seed=seed, **shape, **noise)


def of_gensim(model: Any, text: Text, took: tuple[float, float]) -> Trained:
    """Return gensim's vectors in the order of the text's words."""
    rows = [model.wv.key_to_index[word] for word in text.words]
    return Trained(torch.from_numpy(model.wv.vectors[rows]), torch.from_numpy(model.syn1neg[rows]), *took)


def of_flatbed(trainer: Trainer, vectors: Vectors, text: Text, took: tuple[float, float]) -> Trained:
    """Return flatbed's vectors in the order of the text's words."""
    number = {word: i for i, word in enumerate(vectors.words)}
    rows = [number[word] for word in text.words]
    outputs: Any = trainer.model["outputs"]
    return Trained(torch.from_numpy(vectors.matrix[rows]), outputs.read_rows(rows), *took)


def train_gensim(text: Text, task: Task, seed: int, lines: Sentences) -> Trained:
    """Train with gensim's compiled loop."""
    model = gensim_model(task, seed, workers=1)
    model.build_vocab(lines)
    took = timed(lambda: model.train(lines, total_examples=model.corpus_count, epochs=task.epochs))
    return of_gensim(model, text, took)


def train_flatbed(text: Text, task: Task, seed: int, lines: Sentences, **settings: Any) -> Trained:
    """Train with flatbed on the CPU; `settings` override those of the task."""
    chosen: dict[str, Any] = {**task._asdict(), "device": "cpu", "seed": seed, **settings}
    trainer = Trainer(Corpus.from_sentences(lines), Settings(**chosen))
    took = timed(trainer.run)
    return of_flatbed(trainer, trainer.vectors(), text, took)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return wall time, and processor time of all threads."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


COMPARED: dict[str, tuple[str, Train]] = {
    GENSIM: ("compared", train_gensim),
    "flatbed sgd": ("compared", lambda *task: train_flatbed(*task, optimizer="sgd")),
    "flatbed default": ("default", lambda *task: train_flatbed(*task, lr=None)),
}
"""Trainers with what is asked of them: "compared" ones are as good as gensim in every measure, "default" ones
in all but the overlap, since another optimizer finds other neighbors."""


# ---- runs


def train_and_judge(judge: Judge, options: Options, name: str, role: str, train: Train, seed: int) -> Row:
    """Train and judge once. The order of sentences differs between seeds."""
    text, task = judge.text, judge.task
    order = np.random.default_rng(seed).permutation(len(text.training))
    trained = train(text, task, seed, [text.training[i] for i in order])
    is_reference = role == "reference"
    if is_reference:
        judge.references.append(neighbors(trained.inputs))
    n_words = sum(map(len, text.training))
    speed = n_words * task.epochs / trained.seconds
    measured = {} if is_reference else judge.judge(trained)
    setting = {key: getattr(task, key) for key in ("dim", "window", "negatives", "epochs")}
    setting |= {"vocabulary": len(text.words), "text_words": n_words, "seed": seed}
    metrics = {**measured, "words_per_s": speed, "cpu_seconds": trained.cpu_seconds, "role": role}
    case = "word2vec reference" if is_reference else "word2vec quality-runs"
    return options.row(case, name, setting, metrics, n_samples=1, ok=True)


def compare(runs: Sequence[Row], options: Options) -> list[Row]:
    """Compare each trainer with gensim in each measure."""
    from scipy.stats import sem

    found = []
    for name in dict.fromkeys(run["variant"] for run in runs if run["variant"] != GENSIM):
        first = next(run for run in runs if run["variant"] == name)
        setting = {key: value for key, value in first["setting"].items() if key != "seed"}
        for measure, higher_is_better in MEASURES.items():
            own, gensims = (
                [run["metrics"][measure] for run in runs if run["variant"] == variant]
                for variant in (name, GENSIM)
            )
            mean, low, high = difference(own, gensims, higher_is_better=higher_is_better)
            metrics: dict[str, Any] = {"gensim_mean": fmean(gensims), "gensim_stderr": float(sem(gensims))}
            metrics |= {"mean": fmean(own), "stderr": float(sem(own)), "better_by": mean, "low": low}
            role, judged = first["metrics"]["role"], verdict(low, high, MARGIN)
            metrics |= {"high": high, "margin": MARGIN, "verdict": judged}
            more = {**setting, "role": role, "measure": measure}
            ok = judged == "not worse" or (role == "default" and measure == OVERLAP)
            found.append(options.row("word2vec quality", name, more, metrics, n_samples=len(own), ok=ok))
    return found


def verdict(low: float, high: float, margin: float) -> str:
    """Judge an interval of differences; more is better."""
    return "not worse" if low > -margin else "worse" if high < -margin else "undecided"


def difference(
    ours: Sequence[float], theirs: Sequence[float], *, higher_is_better: bool
) -> tuple[float, float, float]:
    """Return the difference of means and its 95% interval (Welch's t), turned so that more is better."""
    from scipy.stats import ttest_ind

    sign = 1.0 if higher_is_better else -1.0
    found = ttest_ind(sign * np.array(ours), sign * np.array(theirs), equal_var=False)
    interval = found.confidence_interval(0.95)
    return sign * (fmean(ours) - fmean(theirs)), float(interval.low), float(interval.high)


def run(options: Options) -> Iterator[Row]:
    """Train all in turns: `--steps` seeds each, by default 10; half as many references."""
    torch.set_num_threads(1)
    seeds = options.steps or 10
    task = Task(epochs=3 if options.quick else 10)
    text = split(sentences()[: 2000 if options.quick else None], min_count=task.min_count)
    judge = Judge(text, task)
    for number in range(max(2, seeds // 2)):
        yield train_and_judge(judge, options, GENSIM, "reference", train_gensim, FIRST_REFERENCE + number)
    runs = []
    for number in range(seeds):
        for name, (role, train) in COMPARED.items():
            options.report(f"{name}, seed {FIRST_SEED + number}")
            runs.append(train_and_judge(judge, options, name, role, train, FIRST_SEED + number))
            yield runs[-1]
    yield from compare(runs, options)
