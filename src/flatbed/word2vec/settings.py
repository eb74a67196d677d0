"""Settings of a training run, the optimizers they name, and the description of a run in its checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from flatbed import FlatbedError, optim
from flatbed.word2vec.corpus import LONGEST_SENTENCE

STORAGES = ("host", "device", "disk")
UNSUITED = {getattr(torch.optim, name, None) for name in ("Optimizer", "LBFGS", "Muon", "Adafactor")}
"""Classes of torch.optim that tables cannot have: their updates are not elementwise."""
CURRENT, MANIFEST, MARK, LOCK = "CURRENT.json", "checkpoint.json", ".flatbed", ".lock"
"""Files of `flatbed.save_checkpoint`."""


@dataclass(frozen=True, slots=True)
class OptimizerDefaults:
    """Values that suit word vectors by measurement, where they differ from the optimizer's defaults."""

    lr: float | None = None
    batch_words: int = 4096
    least_steps: int = 100
    """An epoch of a small text has this many steps, with fewer words than `batch_words`."""
    shared_negatives: int = 32
    """Negatives that the words of a block share; their weights make them count as `negatives`."""
    can_lag: bool = False
    """True if steps may use rows of some steps before, as they do with several threads."""
    row_norm: float = math.inf
    """Norm that bounds the gradient of each row in a step."""
    options: dict[str, Any] = field(default_factory=dict)


OPTIMIZER_DEFAULTS = {
    # A row's momentum is as old as the last step with the row: for a rare word, thousands of steps.
    "adamax": OptimizerDefaults(0.06, 8192, 60, can_lag=True, options={"betas": (0.0, 0.99)}),
    "adamax, cbow": OptimizerDefaults(0.045, can_lag=True, options={"betas": (0.0, 0.99)}),
    # As in word2vec. In larger batches, or with older rows, frequent words diverge. word2vec takes a step for
    # each pair, with ever smaller gradients. Their sum over a line of two words is bounded instead.
    "sgd": OptimizerDefaults(0.025, 1024, shared_negatives=64, row_norm=40.0),
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
    cbow: Annotated[bool, "CBOW: predict a word from the mean of its contexts."] = False
    window: Annotated[int, "Most words of context on each side; each word draws 1 to this many."] = 5
    negatives: Annotated[int, "Random words per pair."] = 5
    min_count: Annotated[int, "Words that occur less often are left out."] = 5
    subsample: Annotated[float, "Words more frequent than this are thinned out; 0 keeps all."] = 1e-3
    epochs: Annotated[int, "Passes over the text."] = 5
    lr: Annotated[float | None, "First learning rate; it falls linearly. Depends on the optimizer."] = None
    optimizer: Annotated[str, "Any elementwise optimizer of flatbed.optim or torch.optim."] = "adamax"
    storage: Annotated[str, "Where the tables are: host, device or disk."] = "host"
    path: Annotated[str | Path | None, "Folder of the tables' files, for storage disk."] = None
    seed: Annotated[int, "Seed of first weights and all sampling."] = 0
    batch_words: Annotated[int | None, "Words of text in a step. Depends on the optimizer and the text."] = (
        None
    )
    device: Annotated[str | None, "cpu or cuda; cuda if there is a GPU."] = None
    buckets: Annotated[int, "Table rows for hashed character n-grams, 10_000_000 for example."] = 0
    ngrams: Annotated[tuple[int, int], "Least and greatest length of n-grams."] = (3, 6)
    cache_rows: Annotated[int | None, "Rows of each table cached on a GPU."] = None
    threads: Annotated[int, "Threads on a CPU. The result's bits depend on it."] = 1

    def __post_init__(self) -> None:
        ones = ("dim", "window", "negatives", "min_count", "epochs", "batch_words", "threads")
        zeros = ("seed", "buckets", "subsample", "lr", "cache_rows")
        for name, bound in (dict.fromkeys(ones, 1) | dict.fromkeys(zeros, 0)).items():
            value = getattr(self, name)
            if value is not None and not bound <= value < 2**63:
                raise ValueError(f"{name} must be at least {bound}, and less than 2**63; found {value}")
        if self.window > LONGEST_SENTENCE:
            raise ValueError(
                f"window must be at most {LONGEST_SENTENCE}, since longer sentences are split; "
                f"found {self.window}"
            )
        if self.storage not in STORAGES:
            raise ValueError(f"storage must be one of {', '.join(STORAGES)}; found {self.storage!r}")
        if (self.path is not None) != (self.storage == "disk"):
            raise ValueError(
                f"storage disk and a path (--path) go together; found storage={self.storage!r}, "
                f"path={self.path!r}"
            )
        if not 1 <= self.ngrams[0] <= self.ngrams[1]:
            raise ValueError(f"ngrams must be the least and the greatest length; found {self.ngrams}")
        if not self.buckets and self.ngrams != (3, 6):
            raise ValueError(
                f"ngrams={self.ngrams} needs rows for n-grams: give buckets, 1_000_000 for example"
            )
        find_optimizer(self.optimizer)

    @property
    def learning_rate(self) -> float | None:
        """The first learning rate; None for the optimizer's own default."""
        return self.defaults.lr if self.lr is None else self.lr

    @property
    def torch_device(self) -> torch.device:
        """The device that computes."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def n_parallel_steps(self) -> int:
        """Steps that are computed at the same time: `threads` on a CPU with tables in memory, otherwise 1."""
        is_parallel = self.torch_device.type == "cpu" and self.storage != "disk" and self.defaults.can_lag
        return self.threads if is_parallel else 1

    @property
    def defaults(self) -> OptimizerDefaults:
        """Values that suit the optimizer."""
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
            "batch_words": self.batch_words or self.defaults.batch_words,
        }


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return `make(model, **options)` for the optimizer with this name; upper and lower case are equal."""
    found: dict[str, Callable[..., torch.optim.Optimizer]] = {}
    for each in vars(torch.optim).values():
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each not in UNSUITED:
            found[each.__name__.lower()] = partial(optim.from_torch, each)
    found |= {each.lower(): getattr(optim, each) for each in optim.__all__ if each != "from_torch"}
    if name.lower() not in found:
        raise ValueError(f"optimizer must be one of {', '.join(sorted(found))}; found {name!r}")
    return found[name.lower()]


def saved_run(folder: str | Path) -> dict[str, Any] | None:
    """Read what `Trainer.save` tells of a run, without loading it; None for a folder without a checkpoint."""
    folder = Path(folder)
    if not (folder / CURRENT).exists():
        return None
    try:
        version = json.loads((folder / CURRENT).read_text())["version"]
        extra: dict[str, Any] = json.loads((folder / version / MANIFEST).read_text())["extra"]
        return {name: extra[name] for name in ("settings", "text", "step", "steps")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlatbedError(
            f"{folder} holds no intact checkpoint of word vectors ({error!r}): give another folder"
        ) from error


def remove_checkpoint(folder: str | Path) -> None:
    """Remove a checkpoint, and its folder unless the user has other files there."""
    folder = Path(folder)
    (folder / CURRENT).unlink()
    for mark in folder.glob(f"*/{MARK}"):
        shutil.rmtree(mark.parent)
    (folder / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # not empty
        folder.rmdir()
