"""Training, and checkpoints from which it continues with the same result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flatbed
from flatbed import FlatbedError, Prefetcher, load_checkpoint, save_checkpoint
from flatbed.word2vec.corpus import Corpus
from flatbed.word2vec.model import Gradients, MakeTables, cbow, make_tables, skip_gram, table_files
from flatbed.word2vec.sampling import BatchSampler, TrainingBatch, WordBags, make_bags
from flatbed.word2vec.settings import Settings, saved_run
from flatbed.word2vec.vectors import Vectors

LAST_RATE = 1e-4
"""The last learning rate as a fraction of the first."""
REPORTS, MOST_STEPS_PER_REPORT = 500, 50
STEPS_PER_DRAIN = 32
"""With several threads, steps after which none is left unfinished: training can stop and resume there."""
READ_WORDS = 8192
Step = tuple[TrainingBatch, list[Tensor]]
"""A batch, and the vectors of its inputs and outputs in an autograd graph; none if it has no pairs."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a training run after a step. `words` counts words of text, thinned out or not."""

    step: int
    n_steps: int
    epoch: int
    words: int
    n_words: int
    loss: float
    """Mean over the pairs since the last report, of a context and its negatives together.

    Without such pairs, the value of the last report; nan before the first pair.
    """
    lr: float
    words_per_second: float
    """Mean since this loop began."""


class Trainer:
    """Skip-gram, or CBOW, with negative sampling over a corpus.

    Iterating trains, and yields `Progress` every few steps. A loop can be left and entered again: training
    continues. `run()` is such a loop, and `stop()` ends it after the current step. `save` and `resume`
    continue training in another process.

    With several threads, each computes a step of its own. They use the tables in the order of the steps: the
    rows of a step are looked up after the update of the step `threads` before, so results are repeatable.
    Training then stops after groups of 32 steps.

    - `make_tables`: makes the model and the optimizer, for comparisons; by default flatbed tables.
    - `prefetch`: load rows of coming batches ahead of time; by default on a GPU, and for tables on disk.
    - `steps_per_report`: by default the number that gives about 500 reports, at most 50.

    >>> from flatbed.word2vec import Corpus, Settings, Trainer
    >>> corpus = Corpus.from_sentences([["a", "cat", "and", "a", "dog"]] * 50)
    >>> trainer = Trainer(corpus, Settings(dim=8, epochs=2, device="cpu"))
    >>> for progress in trainer:
    ...     pass
    >>> progress.words
    500
    """

    losses: list[tuple[int, float]]
    """(words trained, mean loss since the report before) of every report with pairs."""

    def __init__(
        self,
        corpus: Corpus,
        settings: Settings | None = None,
        *,
        make_tables: MakeTables = make_tables,
        prefetch: bool | None = None,
        steps_per_report: int | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        self.corpus = corpus.frequent(settings.min_count)
        words = self.corpus.words
        if len(words) < 2:
            raise ValueError(
                f"{len(words)} words occur min_count={settings.min_count} times or more in a text of "
                f"{len(corpus):,} words, and training needs 2: give more text, or a lower min_count "
                "(--min-count)"
            )
        self._text = self.corpus.fingerprint()
        self._sampler = BatchSampler(self.corpus, settings)
        self.n_words = len(self.corpus) * settings.epochs
        self.n_steps = self._sampler.steps_per_epoch * settings.epochs
        self.step = 0
        self.words = 0
        self.losses = []
        self._steps_per_report = steps_per_report or min(
            max(self.n_steps // REPORTS, 1), MOST_STEPS_PER_REPORT
        )
        self._loss = torch.zeros((), dtype=torch.float64, device=settings.torch_device)
        self._n_pairs = 0
        self._is_stopped = False
        self._earlier_files = [file for file in table_files(settings) if file.exists()]
        for file in table_files(settings):
            file.parent.mkdir(parents=True, exist_ok=True)
        self.model, self.optimizer = make_tables(settings, len(words))
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        if prefetch is None:
            # On a CPU, rows in memory need no loading, and a thread costs as much as it saves.
            prefetch = settings.torch_device.type != "cpu" or settings.storage == "disk"
        self._prefetch = prefetch and len(flatbed.tables(self.model)) > 0
        self._n_threads = 1 if self._prefetch else settings.n_parallel_steps

    # ---- training

    @property
    def done(self) -> bool:
        """True after the last step."""
        return self.step == self.n_steps

    def __iter__(self) -> Iterator[Progress]:
        if self._earlier_files:
            raise FlatbedError(
                f"{self._earlier_files[0]} holds an earlier training: resume it from its checkpoint, give "
                f"another path (--path), or delete {' and '.join(map(str, self._earlier_files))} to start "
                "again (the only way if it was killed before it saved a checkpoint)"
            )
        self._is_stopped = False
        begin, words_before, n_reported = time.perf_counter(), self.words, self.step // self._steps_per_report
        pool = ThreadPoolExecutor(self._n_threads) if self._n_threads > 1 else None
        made_ahead: dict[int, TrainingBatch] = {}
        with pool or nullcontext(), closing(self._batches()) as batches:
            while not self.done and not self._is_stopped:
                if pool is None:
                    self._finish_step(*self._compute_step(self._begin_step(next(batches))))
                else:
                    self._train_group(pool, made_ahead)
                if self.step // self._steps_per_report > n_reported or self.done:
                    n_reported = self.step // self._steps_per_report
                    seconds = max(time.perf_counter() - begin, 1e-9)
                    yield self._report((self.words - words_before) / seconds)

    def run(self, progress: Callable[[Progress], None] | None = None) -> None:
        """Train to the end, or until `stop()`."""
        for report in self:
            if progress is not None:
                progress(report)

    def stop(self) -> None:
        """End the loop after the current step; for signal handlers and other threads, too."""
        self._is_stopped = True

    def _batches(self) -> Generator[TrainingBatch, None, None]:
        """Yield the remaining batches on the computing device."""
        sampled = map(self._sampler.make, range(self.step, self.n_steps))
        device = self.settings.torch_device
        if device.type == "cpu" and not self._prefetch:
            yield from sampled
            return
        lookups: dict[Any, Any] = {}
        if self._prefetch:
            lookups[self.model["inputs"]] = lambda batch: batch.inputs
            lookups[self.model["outputs"]] = lambda batch: batch.outputs
        with closing(iter(Prefetcher(sampled, lookups, device=device))) as prefetched:
            yield from prefetched

    def _train_group(self, pool: ThreadPoolExecutor, made_ahead: dict[int, TrainingBatch]) -> None:
        """Train up to the next multiple of `STEPS_PER_DRAIN` steps, `threads` steps at a time.

        A thread that computes step k updates its rows when step k - 1 has done so, and then looks up those of
        step k + threads. Batches need no table: `made_ahead` passes them to the next group.
        """
        n, make = self._n_threads, self._sampler.make
        end = min((self.step // STEPS_PER_DRAIN + 1) * STEPS_PER_DRAIN, self.n_steps)
        begun: dict[int, Step] = {}

        def train(number: int, previous: Future[None] | None) -> None:
            computed = self._compute_step(begun.pop(number))
            if number + n < self.n_steps:
                made_ahead[number + n] = make(number + n)
            if previous is not None:
                previous.result()
            self._finish_step(*computed)
            if number + n < end:
                begun[number + n] = self._begin_step(made_ahead.pop(number + n))

        for number in range(self.step, min(self.step + n, end)):
            batch = made_ahead.pop(number) if number in made_ahead else make(number)
            begun[number] = self._begin_step(batch)
        futures: list[Future[None]] = []
        for number in range(self.step, end):
            futures.append(pool.submit(train, number, futures[-1] if futures else None))
        for future in futures:  # an error of one step makes later ones fail, too
            future.result()

    def _begin_step(self, batch: TrainingBatch) -> Step:
        """Look up the rows of a batch."""
        if not batch.n_pairs:
            return batch, []
        ids = (batch.inputs,) if batch.offsets is None else (batch.inputs, batch.offsets)
        return batch, [self.model["inputs"](*ids), self.model["outputs"](batch.outputs)]

    def _compute_step(self, step: Step) -> tuple[Step, Gradients | None]:
        batch, rows = step
        if not rows:
            return step, None
        compute = cbow if self.settings.cbow else skip_gram
        return step, compute(rows[0].detach(), rows[1].detach(), batch, self.settings.negatives)

    def _finish_step(self, step: Step, found: Gradients | None) -> None:
        """Update the rows. The loss is a sum over pairs, so the batch size does not change a pair's pull."""
        batch, rows = step
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._rate_factor()
        if found is not None:
            grads, row_norm = [found.inputs, found.outputs], self.settings.defaults.row_norm
            if row_norm < math.inf:
                grads = [grad.renorm_(2, 0, row_norm) for grad in grads]
            torch.autograd.backward(rows, grads)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._loss += found.loss
        self._n_pairs += batch.n_pairs
        self.step += 1
        self.words += batch.n_words

    def _rate_factor(self) -> float:
        return max(1 - self.step / self.n_steps, LAST_RATE)

    def _report(self, words_per_second: float) -> Progress:
        loss = self.losses[-1][1] if self.losses else math.nan
        if self._n_pairs:
            loss = float(self._loss) / self._n_pairs
            if not math.isfinite(loss):
                raise FlatbedError(
                    f"the loss is {loss} after step {self.step:,}: try a lower lr than {self._rates[0]:g} "
                    f"or fewer batch_words than {self._sampler.batch_words:,}"
                )
            self.losses.append((self.words, loss))
        self._loss.zero_()
        self._n_pairs = 0
        if self.done and not self.losses:
            raise FlatbedError(
                "nothing was trained: no word had a neighbour in its sentence (a line of the file). Give "
                f"more text, longer sentences, or subsample=0 (--subsample 0); "
                f"found {self.settings.subsample:g}"
            )
        return Progress(
            step=self.step,
            n_steps=self.n_steps,
            epoch=min(self.step // self._sampler.steps_per_epoch + 1, self.settings.epochs),
            words=self.words,
            n_words=self.n_words,
            loss=loss,
            lr=self._rates[0] * self._rate_factor(),
            words_per_second=words_per_second,
        )

    # ---- results

    def vectors(self, words: Sequence[str] = ()) -> Vectors:
        """Return the current vectors of all words.

        With n-grams, `words` that are not in the text follow: their vectors are the means of their n-grams.
        """
        known, matrix = self.corpus.words, self._read(self._sampler.bags, len(self.corpus.words))
        in_text = set(known) if words else set()
        others = [word for word in dict.fromkeys(words) if word not in in_text]
        if not others:
            return Vectors(list(known), matrix, self.corpus.counts)
        if self._sampler.bags is None:
            raise FlatbedError(f"{others[0]!r} is not in the text: train n-grams (buckets=) for its vector")
        bags = make_bags(others, self.settings.buckets, self.settings.ngrams, n_known=len(known))
        found = np.concatenate((matrix, self._read(bags, len(others))))
        counts = np.concatenate((self.corpus.counts, np.zeros(len(others), np.int64)))
        return Vectors([*known, *others], found, counts)

    @torch.no_grad()
    def _read(self, bags: WordBags | None, n_words: int) -> np.ndarray:
        """Read the vectors of words by number."""
        inputs, device, parts = self.model["inputs"], self.settings.torch_device, []
        for begin in range(0, n_words, READ_WORDS):
            words = np.arange(begin, min(begin + READ_WORDS, n_words))
            rows = (words,) if bags is None else bags.lookup(words)
            parts.append(inputs(*(torch.from_numpy(ids).to(device) for ids in rows)).float().cpu())
        matrix: np.ndarray = torch.cat(parts).numpy()
        return matrix

    def close(self) -> None:
        """Free the tables' memory and close their files; changes since the last `save` are dropped."""
        for table in flatbed.tables(self.model):
            table.close(discard=True)

    # ---- checkpoints

    def save(self, folder: str | Path) -> None:
        """Save a checkpoint for `resume`."""
        extra = {
            "settings": self.settings.to_dict(),
            "text": self._text,
            "step": self.step,
            "steps": self.n_steps,
            "words": self.words,
            "losses": list(chain.from_iterable(self.losses)),
            "loss": float(self._loss),
            "pairs": self._n_pairs,
        }
        save_checkpoint(folder, self.model, self.optimizer, extra=extra)

    def resume(self, folder: str | Path) -> None:
        """Continue from a checkpoint of a training run with the same text and settings."""
        saved = saved_run(folder)
        if saved is None:
            raise FlatbedError(f"{folder} holds no checkpoint: check the path")
        found = {**saved["settings"], "steps": saved["steps"], "text": saved["text"]}
        expected = {**self.settings.to_dict(), "steps": self.n_steps, "text": self._text}
        differences = [
            f"{name}={found.get(name)} there and {value} here"
            for name, value in expected.items()
            if found.get(name) != value
        ]
        if differences:
            raise FlatbedError(
                f"{folder} is from another training: {', '.join(differences)}. Give the same settings, and "
                "the same files in the same order"
            )
        extra = load_checkpoint(folder, self.model, self.optimizer)
        self.step, self.words, self._n_pairs = extra["step"], extra["words"], extra["pairs"]
        flat = extra["losses"]
        self.losses = list(zip(map(int, flat[::2]), flat[1::2], strict=True))
        self._loss.fill_(extra["loss"])
        self._earlier_files = []
