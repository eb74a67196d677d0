"""Settings of a training run, and the optimizers they name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch

from flatbed import optim

STORAGES = ("host", "device", "disk")


@dataclass(frozen=True, slots=True)
class OptimizerDefaults:
    """Values that suit word vectors by measurement, where they differ from the optimizer's defaults."""

    lr: float | None = None
    batch_words: int = 4096
    least_steps: int = 100
    """An epoch of a small text has this many steps, with fewer words than `batch_words`."""
    shared_negatives: int = 32
    """Negatives that the words of a block share."""
    can_lag: bool = False
    """True if steps may use rows of some steps before, as they do with several threads."""
    options: dict[str, Any] = field(default_factory=dict)


OPTIMIZER_DEFAULTS = {
    # A row's momentum is as old as the last step with the row: for a rare word, thousands of steps.
    "adamax": OptimizerDefaults(0.06, 8192, 60, can_lag=True, options={"betas": (0.0, 0.99)}),
    "adamax, cbow": OptimizerDefaults(0.045, can_lag=True, options={"betas": (0.0, 0.99)}),
    # As in word2vec. In larger batches, or with older rows, frequent words diverge.
    "sgd": OptimizerDefaults(0.025, 1024, shared_negatives=64),
    "adagrad": OptimizerDefaults(0.1, can_lag=True),
    "adam": OptimizerDefaults(0.02, can_lag=True),
    "adamw": OptimizerDefaults(0.02, can_lag=True),
    "sparseadam": OptimizerDefaults(0.02, can_lag=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a training run. Each is also an option of `flatbed word2vec`, with the same description.

    Runs with the same settings on a CPU with the same number of threads are bitwise equal, whether or not
    they were interrupted and resumed.

    >>> from flatbed.word2vec import Settings
    >>> Settings(optimizer="adamax", dim=100).learning_rate
    0.06
    """

    dim: Annotated[int, "Size of a vector."] = 128
    cbow: Annotated[bool, "Predict a word from the mean of its contexts, not contexts from the word."] = False
    window: Annotated[int, "Most words of context on each side; each word draws 1 to this many."] = 5
    negatives: Annotated[int, "Random words per pair."] = 5
    min_count: Annotated[int, "Words that occur less often are left out."] = 5
    subsample: Annotated[float, "Words more frequent than this are thinned out; 0 keeps all."] = 1e-3
    epochs: Annotated[int, "Passes over the text."] = 5
    lr: Annotated[float | None, "First learning rate; it falls linearly. Depends on the optimizer."] = None
    optimizer: Annotated[str, "Any optimizer of flatbed.optim or torch.optim."] = "adamax"
    storage: Annotated[str, "Where the tables are: host, device or disk."] = "host"
    path: Annotated[str | Path | None, "Folder of the tables' files, for storage disk."] = None
    seed: Annotated[int, "Seed of first weights and all sampling."] = 0
    batch_words: Annotated[
        int | None, "Words of text in a step. Depends on the optimizer; less for small texts."
    ] = None
    device: Annotated[str | None, "cpu or cuda; cuda if there is a GPU."] = None
    buckets: Annotated[int, "Table rows for hashed character n-grams, 10_000_000 for example."] = 0
    ngrams: Annotated[tuple[int, int], "Least and greatest length of n-grams."] = (3, 6)
    cache_rows: Annotated[int | None, "Rows of each table cached on a GPU."] = None
    threads: Annotated[int, "Threads on a CPU. The result's bits depend on it."] = 1

    def __post_init__(self) -> None:
        for name in ("dim", "window", "negatives", "min_count", "epochs", "batch_words", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; found {value}")
        for name in ("seed", "buckets", "subsample"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0; found {getattr(self, name)}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be greater than 0; found {self.lr}")
        if self.storage not in STORAGES:
            raise ValueError(f"storage must be one of {', '.join(STORAGES)}; found {self.storage!r}")
        if (self.path is not None) != (self.storage == "disk"):
            raise ValueError(
                f"storage disk and a path (--path) go together; found storage={self.storage!r}, "
                f"path={self.path!r}"
            )
        least, greatest = self.ngrams
        if not 1 <= least <= greatest:
            raise ValueError(f"ngrams must be the least and the greatest length; found {self.ngrams}")
        find_optimizer(self.optimizer)

    @property
    def learning_rate(self) -> float | None:
        """The first learning rate; None for the optimizer's own default."""
        return self.lr or self._defaults.lr

    @property
    def words_per_step(self) -> int:
        """`batch_words`, or the number that suits the optimizer."""
        return self.batch_words or self._defaults.batch_words

    @property
    def least_steps(self) -> int:
        """Steps in an epoch of a small text, which has fewer words per step."""
        return self._defaults.least_steps

    @property
    def n_parallel_steps(self) -> int:
        """Steps that are computed at the same time: `threads` on a CPU with tables in memory, otherwise 1."""
        is_parallel = self.torch_device.type == "cpu" and self.storage != "disk" and self._defaults.can_lag
        return self.threads if is_parallel else 1

    @property
    def shared_negatives(self) -> int:
        """Negatives that the words of a block share; their weights make them count as `negatives`."""
        return self._defaults.shared_negatives

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Keyword arguments of the optimizer."""
        lr = {} if self.learning_rate is None else {"lr": self.learning_rate}
        return lr | self._defaults.options

    @property
    def torch_device(self) -> torch.device:
        """The device that computes."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def _defaults(self) -> OptimizerDefaults:
        name = self.optimizer.lower()
        found = OPTIMIZER_DEFAULTS.get(name, OptimizerDefaults())
        return OPTIMIZER_DEFAULTS.get(f"{name}, cbow", found) if self.cbow else found

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of the result, for JSON: not device, threads, cache and paths."""
        hidden = ("device", "path", "cache_rows", "threads")
        result = {name: value for name, value in asdict(self).items() if name not in hidden}
        return result | {
            "ngrams": list(self.ngrams),
            "optimizer": self.optimizer.lower(),
            "lr": self.learning_rate,
            "batch_words": self.words_per_step,
        }


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return `make(model, **options)` for the optimizer with this name; upper and lower case are equal."""
    ours, torchs = _optimizers(optim), _optimizers(torch.optim)
    if name.lower() in ours:
        return ours[name.lower()]
    if name.lower() not in torchs:
        known = ", ".join(sorted({*ours, *torchs}))
        raise ValueError(f"there is no optimizer {name!r}; known are {known}")
    return partial(optim.from_torch, torchs[name.lower()])


def _optimizers(module: ModuleType) -> dict[str, type[torch.optim.Optimizer]]:
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    found = {each.__name__.lower(): each for each in classes if issubclass(each, torch.optim.Optimizer)}
    return {name: each for name, each in found.items() if name != "optimizer"}
