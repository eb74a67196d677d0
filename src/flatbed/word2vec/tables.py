"""The two tables of a training, and the optimizer that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flatbed import Embedding, EmbeddingBag, FlatbedError, Prefetcher
from flatbed.word2vec.sampling import Batch
from flatbed.word2vec.settings import Settings, find_optimizer


@dataclass(frozen=True, slots=True)
class Tables:
    """What is trained. `model` has the modules `inputs` and `outputs`.

    `inputs` is called with words, or with n-grams with (rows, offsets).
    """

    model: nn.ModuleDict
    optimizer: torch.optim.Optimizer
    prefetch: bool = True
    """Whether rows of coming batches are fetched ahead of time."""

    def batches(self, made: Iterator[Batch], device: torch.device) -> Generator[Any, None, None]:
        """Batches as tensors on the device; for a GPU, or with `prefetch`, made ahead of time in a thread."""
        if device.type == "cpu" and not self.prefetch:
            yield from map(as_tensors, made)
            return
        ids: dict[Any, Any] = {}
        if self.prefetch:
            ids = {self.model["inputs"]: _inputs, self.model["outputs"]: _outputs}
        with iter(Prefetcher(made, ids, device=device)) as prefetched:
            yield from prefetched


def as_tensors(batch: Batch) -> Any:
    """The same batch, its arrays seen as tensors."""
    arrays = {each.name: getattr(batch, each.name) for each in fields(batch)}
    seen = {name: torch.from_numpy(one) for name, one in arrays.items() if isinstance(one, np.ndarray)}
    return replace(batch, **seen)  # type: ignore[arg-type]


MakeTables = Callable[[Settings, int], Tables]
"""From the settings and the number of words; rows of `inputs` beyond that are n-grams."""


def files_of(settings: Settings) -> list[Path]:
    """Of tables on disk."""
    if settings.path is None:
        return []
    return [Path(settings.path) / f"{name}.bed" for name in ("inputs", "outputs")]


def host_tables(settings: Settings, n_words: int) -> Tables:
    """Tables of flatbed's, wherever their rows live."""
    dim, device = settings.dim, settings.where
    options: dict[str, Any] = {"storage": settings.storage, "device": device, "seed": settings.seed}
    if settings.storage != "device":
        options["cache_rows"] = settings.cache_rows
    paths: list[Any] = [*files_of(settings)] or [None, None]
    small: Any = ("uniform", -1 / dim, 1 / dim)  # as gensim begins
    inputs: Embedding | EmbeddingBag
    if settings.buckets:
        n_rows = n_words + settings.buckets
        inputs = EmbeddingBag(
            n_rows, dim, mode="mean", include_last_offset=True, init=small, path=paths[0], **options
        )
    else:
        inputs = Embedding(n_words, dim, init=small, path=paths[0], **options)
    outputs = Embedding(n_words, dim, init="zeros", path=paths[1], **options)
    model = nn.ModuleDict({"inputs": inputs, "outputs": outputs})
    chosen = {} if settings.learning_rate is None else {"lr": settings.learning_rate}
    chosen |= {} if settings.recipe is None else settings.recipe.options
    make = find_optimizer(settings.optimizer)
    # On a CPU, rows in memory need no fetching, and a thread that makes batches costs as much as it saves.
    prefetch = device.type != "cpu" or settings.storage == "disk"
    try:
        return Tables(model, make(model, **chosen), prefetch)
    except (FlatbedError, TypeError) as error:
        raise ValueError(f"the optimizer {settings.optimizer!r} is not for tables: {error}") from error


def _inputs(batch: Batch) -> Any:
    return batch.inputs


def _outputs(batch: Batch) -> Any:
    return batch.outputs
