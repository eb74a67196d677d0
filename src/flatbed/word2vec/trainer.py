"""Training: batches in, vectors out; interrupted and resumed with the same result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatbed import FlatbedError, load_checkpoint, save_checkpoint, tables
from flatbed.word2vec.checkpoint_dir import Saved, find
from flatbed.word2vec.corpus import Corpus
from flatbed.word2vec.model import block_loss
from flatbed.word2vec.ngrams import make_bags
from flatbed.word2vec.sampling import Batch, Batches
from flatbed.word2vec.settings import Settings
from flatbed.word2vec.tables import MakeTables, files_of, host_tables
from flatbed.word2vec.vectors import Vectors

LAST_RATE = 1e-4
"""What the learning rate falls to, of the one in the beginning."""
REPORTS, MOST_STEPS = 500, 50
"""About so many reports a training, but one in so many steps."""
LEAST_STEPS, LEAST_WORDS = 100, 128
"""Steps of an epoch: in a small text they are of fewer words than suit the optimizer, but of so many."""
READ_WORDS = 8192


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a training is after a step. `words` are words of the text, thinned out or not."""

    step: int
    n_steps: int
    epoch: int
    words: int
    n_words: int
    loss: float
    """Mean over the pairs of the steps since the last report: of a context and its negatives together. Where
    those steps had no pairs, the one before; nan before the first pair.
    """
    lr: float
    words_per_second: float
    """Of this run so far."""


class Trainer:
    """Skip-gram with negative sampling over a corpus.

    Iterating trains, and yields `Progress` every few steps; a loop that is left can be entered again and goes
    on where it was. `run()` is such a loop, and `stop()` ends it after the step that is under way. `save` and
    `resume` carry a training over to another process.

    `make_tables` makes other tables than those of the settings, to be compared with them;
    `steps_per_report` is by default what gives about 500 reports, 50 at most.

    >>> corpus = Corpus.from_sentences([["a", "cat", "and", "a", "dog"]] * 50)
    >>> trainer = Trainer(corpus, Settings(dim=8, epochs=2, device="cpu"))
    >>> for progress in trainer:
    ...     pass
    >>> progress.words
    500
    """

    losses: list[tuple[int, float]]
    """(words trained, mean loss since the one before) at every report with pairs."""

    def __init__(
        self,
        corpus: Corpus,
        settings: Settings | None = None,
        *,
        make_tables: MakeTables = host_tables,
        steps_per_report: int | None = None,
    ) -> None:
        self.settings = settings = Settings() if settings is None else settings
        _check_types(corpus, settings, steps_per_report)
        self.corpus = corpus.frequent(settings.min_count)
        if not self.corpus.words:
            raise ValueError(
                f"no word occurs min_count={settings.min_count} times in a text of {len(corpus):,} words: "
                "give more text, or a lower min_count"
            )
        if len(self.corpus) < 2 or len(self.corpus.words) < 2:
            raise ValueError(
                f"only one word occurs min_count={settings.min_count} times or more in a text of "
                f"{len(corpus):,} words, which is nothing to learn from: give more text, or a lower min_count"
            )
        self._fingerprint = self.corpus.fingerprint()
        n_words = len(self.corpus.words)
        self._bags = (
            make_bags(self.corpus.words, settings.buckets, settings.ngrams) if settings.buckets else None
        )
        self.batch_words = settings.batch_words or min(
            settings.words_per_step, max(LEAST_WORDS, len(self.corpus) // LEAST_STEPS)
        )
        self._batches = Batches(
            self.corpus,
            window=settings.window,
            subsample=settings.subsample,
            batch_words=self.batch_words,
            seed=settings.seed,
            bags=self._bags,
        )
        self.n_steps = self._batches.per_epoch * settings.epochs
        self._every = steps_per_report or min(max(self.n_steps // REPORTS, 1), MOST_STEPS)
        self.step = 0
        self.words = 0
        self.losses = []
        self._loss = torch.zeros((), dtype=torch.float64, device=settings.where)
        self._n_pairs = 0
        self._stopped = False
        self._unknown = [file for file in files_of(settings) if file.exists()]
        for file in files_of(settings):
            file.parent.mkdir(parents=True, exist_ok=True)
        self.tables = make_tables(settings, n_words)
        self._rates = [float(group["lr"]) for group in self.tables.optimizer.param_groups]

    # ---- training

    @property
    def n_words(self) -> int:
        """Words of text in the whole training."""
        return len(self.corpus) * self.settings.epochs

    def __iter__(self) -> Iterator[Progress]:
        if self._unknown:
            raise FlatbedError(
                f"{self._unknown[0]} holds an earlier training: resume that one, give another path, or "
                f"delete {' and '.join(map(str, self._unknown))} to begin anew (the only way if "
                "that training was ended before it saved a checkpoint)"
            )
        self._stopped = False
        every = self._every
        began, before = time.perf_counter(), self.words
        made = self._batches.range(self.step, self.n_steps)
        batches = self.tables.batches(made, self.settings.where)
        try:
            for batch in batches:
                self._train(batch)
                if self.step % every == 0 or self.step == self.n_steps:
                    yield self._report((self.words - before) / max(time.perf_counter() - began, 1e-9))
                if self._stopped:
                    return
        finally:
            batches.close()  # and its thread, and what that has fetched

    def run(self, progress: Callable[[Progress], None] | None = None) -> None:
        """Train to the end, or until `stop()`."""
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be a function of a Progress; found {progress!r}")
        for report in self:
            if progress is not None:
                progress(report)

    def stop(self) -> None:
        """Have the loop end after the step that is under way. For signal handlers and other threads, too."""
        self._stopped = True

    @property
    def done(self) -> bool:
        """Whether all steps are trained."""
        return self.step == self.n_steps

    def _train(self, batch: Batch) -> None:
        """One step. The loss is a sum over pairs, so that a pair pulls as hard in any batch."""
        tables, left = self.tables, max(1 - self.step / self.n_steps, LAST_RATE)
        for group, rate in zip(tables.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * left
        if batch.n_pairs:
            where = (batch.inputs,) if batch.offsets is None else (batch.inputs, batch.offsets)
            inputs, outputs = tables.model["inputs"](*where), tables.model["outputs"](batch.outputs)
            loss = block_loss(inputs, outputs, batch, self.settings.negatives)  # type: ignore[arg-type]
            loss.backward()  # type: ignore[no-untyped-call]
            tables.optimizer.step()
            tables.optimizer.zero_grad()
            self._loss += loss.detach()
        self._n_pairs += batch.n_pairs
        self.step += 1
        self.words += batch.n_words

    def _report(self, words_per_second: float) -> Progress:
        before = self.losses[-1][1] if self.losses else math.nan
        loss = float(self._loss) / self._n_pairs if self._n_pairs else before
        if self._n_pairs and not math.isfinite(loss):
            raise FlatbedError(
                f"the loss is {loss} after step {self.step:,}: a lower lr (here {self._rates[0]:g}) or fewer "
                f"batch_words ({self.batch_words:,}) keep {self.settings.optimizer} from that"
            )
        if self._n_pairs:
            self.losses.append((self.words, loss))
        self._loss.zero_()
        self._n_pairs = 0
        epoch = min(self.step // self._batches.per_epoch + 1, self.settings.epochs)
        rate = self._rates[0] * max(1 - self.step / self.n_steps, LAST_RATE)
        return Progress(
            self.step, self.n_steps, epoch, self.words, self.n_words, loss, rate, words_per_second
        )

    # ---- results

    @torch.no_grad()
    def vectors(self) -> Vectors:
        """The words' vectors as they are now."""
        inputs, device, parts = self.tables.model["inputs"], self.settings.where, []
        n_words = len(self.corpus.words)
        for begin in range(0, n_words, READ_WORDS):
            words = np.arange(begin, min(begin + READ_WORDS, n_words))
            asked = (words,) if self._bags is None else self._bags.of(words)
            parts.append(inputs(*(torch.from_numpy(ids).to(device) for ids in asked)).float().cpu())
        return Vectors(list(self.corpus.words), torch.cat(parts).numpy(), self.corpus.counts)

    def close(self) -> None:
        """Give the tables' memory and files back. Of files, what was not saved is dropped."""
        for table in tables(self.tables.model):
            table.close(discard=True)

    # ---- checkpoints

    def save(self, folder: str | Path) -> None:
        """Make a checkpoint: `resume` goes on from it with the same result."""
        threads = torch.get_num_threads() if self.settings.where.type == "cpu" else None
        about = Saved(self.settings.to_dict(), self._fingerprint, self.step, self.n_steps, threads)
        position: dict[str, Any] = {
            **about.extra(),
            "words": self.words,
            "losses": list(chain.from_iterable(self.losses)),
            "loss": float(self._loss),
            "pairs": self._n_pairs,
        }
        save_checkpoint(folder, self.tables.model, self.tables.optimizer, extra=position)

    def resume(self, folder: str | Path) -> None:
        """Go on from a checkpoint of a training with the same text and settings."""
        saved = find(folder)
        if saved is None:
            raise FlatbedError(f"{folder} holds no checkpoint of a training of word vectors: check the path")
        self._check_same(saved.settings, saved.text, folder)
        position = load_checkpoint(folder, self.tables.model, self.tables.optimizer)
        self.step, self.words, self._n_pairs = position["step"], position["words"], position["pairs"]
        flat = position["losses"]
        self.losses = list(zip(map(int, flat[::2]), flat[1::2], strict=True))
        self._loss.fill_(position["loss"])
        self._unknown = []

    def _check_same(self, theirs: dict[str, Any], text: str, folder: str | Path) -> None:
        ours = self.settings.to_dict()
        differing = [name for name in ours if theirs.get(name) != ours[name]]
        if differing:
            found = ", ".join(f"{name}={theirs.get(name)} there and {ours[name]} here" for name in differing)
            raise FlatbedError(f"{folder} is of a training with other settings: {found}")
        if text != self._fingerprint:
            raise FlatbedError(
                f"{folder} is of a training on another text: give the same files in the same order"
            )


def _check_types(corpus: Any, settings: Any, steps_per_report: Any) -> None:
    if not isinstance(corpus, Corpus):
        raise TypeError(
            f"corpus must be a Corpus; found {type(corpus).__name__}: Corpus.from_sentences makes one of "
            "lists of words, and read_corpus of files"
        )
    if not isinstance(settings, Settings):
        raise TypeError(f"settings must be Settings(...); found {type(settings).__name__}")
    if steps_per_report is not None and (not isinstance(steps_per_report, int) or steps_per_report < 1):
        raise ValueError(f"steps_per_report must be an integer, 1 at least; found {steps_per_report!r}")
