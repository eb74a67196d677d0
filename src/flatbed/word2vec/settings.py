"""What a training is asked for, checked at the door."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatbed import optim

STORAGES = ("host", "device", "disk")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What suits word vectors by measurement, where it is not the optimizer's own default."""

    lr: float
    batch_words: int
    options: dict[str, Any] = field(default_factory=dict)


RECIPES = {
    # A row's momentum would be from its last visit, which for a rare word is thousands of steps ago.
    "adamax": Recipe(0.045, 4096, {"betas": (0.0, 0.99)}),
    "sgd": Recipe(0.025, 1024),  # word2vec's own; in larger batches the sums for frequent words run away
    "adagrad": Recipe(0.1, 4096),
    "adam": Recipe(0.02, 4096),
    "adamw": Recipe(0.02, 4096),
    "sparseadam": Recipe(0.02, 4096),
}
BATCH_WORDS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How word vectors are trained.

    - `dim`: numbers in a vector. `window`: contexts reach 1 to `window` words to each side, at random.
    - `negatives`: random words per pair, drawn as count**0.75.
    - `min_count`: rarer words are left out. `subsample`: frequent words are thinned out above this frequency
      (0: none is).
    - `epochs`: passes over the text. `batch_words`: words of text in a step; by default what suits the
      optimizer, or a hundredth of a small text.
    - `optimizer`: a name of `flatbed.optim` or `torch.optim`, "adamax" say. `lr`: its learning rate at the
      beginning, from where it falls linearly; by default what suits it.
    - `storage`: where rows live, "host", "device" or "disk". `path`: the folder of their files, for "disk".
    - `seed`: of the first weights and of all sampling. Runs with the same settings on a CPU with the same
      number of threads are equal bit for bit, however they were interrupted and resumed.
    - `device`: that computes; by default a GPU if there is one.
    - `buckets`, `ngrams`: with buckets, a word's vector is the mean of its own row and those of its hashed
      character n-grams of these lengths.
    - `cache_rows`: of each table, on a GPU; see `flatbed.Embedding`.

    >>> Settings(optimizer="adamax", dim=100).learning_rate
    0.045
    """

    dim: int = 128
    window: int = 5
    negatives: int = 5
    min_count: int = 5
    subsample: float = 1e-3
    epochs: int = 5
    lr: float | None = None
    optimizer: str = "adamax"
    storage: str = "host"
    path: str | Path | None = None
    seed: int = 0
    batch_words: int | None = None
    device: str | None = None
    buckets: int = 0
    ngrams: tuple[int, int] = (3, 6)
    cache_rows: int | None = None

    def __post_init__(self) -> None:
        least = {"dim": 1, "window": 1, "negatives": 1, "min_count": 1, "epochs": 1, "seed": 0, "buckets": 0}
        for name, bound in (*least.items(), ("batch_words", 1), ("cache_rows", 0)):
            value = getattr(self, name)
            if value is None and name in ("batch_words", "cache_rows"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer; found {value!r}")
            if value < bound:
                raise ValueError(f"{name} must be {bound} at least; found {value}")
        self._check_types()
        if not (math.isfinite(self.subsample) and self.subsample >= 0):
            raise ValueError(
                f"subsample is a frequency such as 1e-3, or 0 for none; found {self.subsample!r}"
            )
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be greater than 0; found {self.lr!r}")
        if self.storage not in STORAGES:
            raise ValueError(f"storage must be one of {', '.join(STORAGES)}; found {self.storage!r}")
        if (self.path is not None) != (self.storage == "disk"):
            raise ValueError(
                'storage="disk" needs a path, the folder of its files'
                if self.path is None
                else f'path is for storage="disk"; found storage={self.storage!r}'
            )
        if len(self.ngrams) != 2 or not 1 <= self.ngrams[0] <= self.ngrams[1]:
            raise ValueError(
                f"ngrams are the least and the greatest length, (3, 6) say; found {self.ngrams!r}"
            )
        find_optimizer(self.optimizer)

    def _check_types(self) -> None:
        for name in ("subsample", "lr"):
            value = getattr(self, name)
            wrong = isinstance(value, bool) or not isinstance(value, int | float)
            if wrong and not (name == "lr" and value is None):
                raise TypeError(f"{name} must be a number; found {value!r}")
        for name in ("optimizer", "storage"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(
                    f"{name} must be a name such as "
                    f"{'adamax' if name == 'optimizer' else 'host'!r}; found {getattr(self, name)!r}"
                )
        if not isinstance(self.path, str | Path | None):
            raise TypeError(f"path must be that of a folder; found {self.path!r}")
        lengths: Any = self.ngrams
        if not isinstance(lengths, tuple | list) or not all(isinstance(one, int) for one in lengths):
            raise TypeError(f"ngrams are the least and the greatest length, (3, 6) say; found {lengths!r}")
        try:
            torch.device(self.device or "cpu")
        except (RuntimeError, TypeError) as error:
            raise ValueError(f'device must be "cpu" or "cuda", say; found {self.device!r}') from error

    @property
    def recipe(self) -> Recipe | None:
        """What was measured for the optimizer, if anything was."""
        return RECIPES.get(self.optimizer.lower())

    @property
    def learning_rate(self) -> float | None:
        """The one that training begins with; None for the optimizer's own default."""
        return self.lr if self.lr is not None or self.recipe is None else self.recipe.lr

    @property
    def words_per_step(self) -> int:
        """`batch_words`, or what suits the optimizer."""
        if self.batch_words is not None:
            return self.batch_words
        return BATCH_WORDS if self.recipe is None else self.recipe.batch_words

    @property
    def where(self) -> torch.device:
        """The device that computes."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def to_dict(self) -> dict[str, Any]:
        """What the result depends on, for JSON. Not the device, its cache and paths: they may change."""
        free = ("device", "path", "cache_rows")
        made = {name: value for name, value in asdict(self).items() if name not in free}
        return made | {
            "ngrams": list(self.ngrams),
            "optimizer": self.optimizer.lower(),
            "lr": self.learning_rate,
            "batch_words": self.words_per_step,
        }


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """What makes the optimizer of this name over tables: `make(model, **options)`."""
    ours = {one.lower(): getattr(optim, one) for one in optim.__all__ if one != "from_torch"}
    if name.lower() in ours:
        made: Callable[..., Any] = ours[name.lower()]
        return made
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    theirs = {kind.__name__.lower(): kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
    theirs.pop("optimizer")
    if name.lower() not in theirs:
        known = ", ".join(sorted({*ours, *theirs}))
        raise ValueError(f"there is no optimizer {name!r}; known are {known}")
    kind = theirs[name.lower()]
    return lambda model, **options: optim.from_torch(kind, model, **options)
