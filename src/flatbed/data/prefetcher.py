"""Batches on the device, and the rows that they look up, before the training loop asks for them."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flatbed.data.batches import BatchMover, Selector, pinned_batches
from flatbed.data.iterator import PrefetchIterator
from flatbed.data.loader_ranks import UNEVEN, LoaderRanks, common_channel
from flatbed.data.pipeline import Pipeline
from flatbed.errors import FlatbedError
from flatbed.tables.config import device_of
from flatbed.tables.embedding import TableModule
from flatbed.tables.prefetch import RowPrefetch
from flatbed.tables.table import Table

PREVIOUS_SECONDS = 60.0
"""How long a new iteration waits for a thread of an earlier one that is still inside the loader."""


class Prefetcher:
    """Iterates over a loader, and moves batches and the rows they look up to the device ahead of time.

    - `loader`: a `DataLoader`, a list, or any other iterable. Each iteration of the prefetcher is one of the
      loader. A loader may write to a batch again when it is asked for the next one.
    - `lookups`: maps each `Embedding`, `EmbeddingBag` or `Table` to a key of the batch, or to a function that
      is called once, where the batch is loaded, with the batch on the host. The result has the ids that will
      be looked up: a tensor, an array, a list of integers, or a list of tensors or arrays for several ones.
    - `depth`: number of batches ahead, beyond the one in use: loaded, on the way, or on the device. With 0,
      each batch is moved when it is asked for. Its ids are checked, and no rows are prefetched.
    - `device`: by default that of the tables; without tables the current GPU, or the CPU if there is none.
    - `pin`: copies the arrays of a list of batches into pinned memory once, at the first iteration. Later
      changes of the list have no effect. Without a GPU it changes nothing.
    - `uneven`: what happens when the loader of one rank ends before the others, if a table of
      `lookups` is sharded (`shard="row"`). All ranks take part in every lookup and
      step, so no rank can go on alone:

      - "stop", the default: all ranks end with the first, after the same number of batches. Batches that
        other loaders have beyond that are dropped. Each step has a full batch of every rank, as DDP expects.
      - "empty": an ended rank goes on with batches without rows (`x[:0]` of its last one) until all have
        ended. No batch is dropped, but the model and the loss must take empty batches: the mean of nothing is
        nan, and the mean of gradients over ranks counts the rank.
      - "error": all ranks raise a `FlatbedError` that names the rank.

    Small batches of a list, or of a `DataLoader` with workers, are loaded in the training thread. Threads
    load large batches (over 1 MiB, or with objects that move themselves), those of workers that were once
    more than 10 ms late, those of other loaders, and those of tables on disk and sharded tables.

    A batch is a tensor, a numpy array, or dicts, lists, tuples and dataclasses of them. Arrays of numbers
    become tensors, objects with a method `to(device)` are moved by it, and other values stay as they are. On
    a CPU, tensors share the memory of the arrays of a list, and are copies otherwise. Training gives bitwise
    the same result as without a prefetcher, if the loader draws its random numbers from a generator of its
    own.

    An iteration and its threads end with the last batch, with an error of the loader (raised when its turn
    comes), when the loop is left, or by `close()` of the iterator.

    If a table of `lookups` is sharded, all ranks begin the loop together, and take and leave it after the
    same batch. Their loader threads exchange ids ahead of time; rows are read and admitted by the ranks that
    hold them. An error of one loader, or a rank that leaves alone, ends the loops of all ranks.

    >>> import flatbed, torch
    >>> emb = flatbed.Embedding(1000, 8)
    >>> optimizer = flatbed.optim.Adam(emb, lr=0.01)
    >>> loader = [{"items": torch.randint(0, 1000, (16,))} for _ in range(10)]
    >>> for batch in flatbed.Prefetcher(loader, {emb: "items"}):
    ...     emb(batch["items"]).square().sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        loader: Iterable[Any],
        lookups: Mapping[TableModule | Table, Selector] | None = None,
        *,
        depth: int = 2,
        device: Any = None,
        pin: bool = False,
        uneven: str = "stop",
    ) -> None:
        if isinstance(loader, Tensor | np.ndarray | str | bytes | Mapping):
            raise TypeError(
                "loader must be a DataLoader or another iterable of batches; found one "
                f"{type(loader).__name__}: give [batch] if it is a batch"
            )
        if pin and not isinstance(loader, Sequence):
            raise TypeError(
                f"pin=True copies the batches of a list; found {type(loader).__name__}: give a list, or use "
                "pin_memory=True of the DataLoader"
            )
        if operator.index(depth) < 0:
            raise ValueError(f"depth is a number of batches, 0 or more; found {depth}")
        if uneven not in UNEVEN:
            raise ValueError(f'uneven is "stop", "empty" or "error"; found {uneven!r}')
        self.loader = loader
        self.depth = operator.index(depth)
        self.pin = pin
        self.uneven = uneven
        self._selectors = selectors_by_table(lookups)
        self._channel = common_channel([*self._selectors])
        self._device = device
        self._pinned: list[Any] | None = None
        self._is_exhausted = False
        """True once a loader that can be read once has ended."""
        self._previous: Pipeline | None = None
        _ = self.device  # raises for wrong devices

    @property
    def device(self) -> torch.device:
        """The device that batches are moved to."""
        return common_device([*self._selectors], self._device)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_previous": None, "_pinned": None}

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> PrefetchIterator:
        device = self.device
        is_pinned = self.pin and device.type == "cuda"
        is_reused = self.depth > 0 and not is_pinned and _may_reuse(self.loader)
        mover = BatchMover(device, is_reused=is_reused)
        if self._previous is not None and self._previous.is_closed:
            self._previous.join(PREVIOUS_SECONDS)  # persistent workers are not for two threads
        # The loader's iterator is made here and not in the thread: DataLoaders draw a seed and fork then.
        batches = self._begin(mover)
        lookups = []
        for table, selectors in self._selectors.items():
            keys = [selector for selector in selectors if not callable(selector)]
            lookups.append((selectors, RowPrefetch(table, self.depth, keys)))
        ranks = None
        if self._channel is not None:
            ranks = LoaderRanks(self._channel, [*self._selectors], uneven=self.uneven, depth=self.depth)
        self._previous = Pipeline(batches, lookups, mover, depth=self.depth, ranks=ranks)
        return PrefetchIterator(self._previous)

    def _begin(self, mover: BatchMover) -> Iterator[Any]:
        if self.pin and mover.on_gpu:
            if self._pinned is None:
                assert isinstance(self.loader, Sequence)
                self._pinned = pinned_batches(self.loader, mover)
            return iter(self._pinned)
        batches = iter(self.loader)
        if batches is not self.loader:
            return batches
        if self._is_exhausted:  # an epoch without batches would pass for training
            raise FlatbedError(
                f"an earlier loop has read the loader to its end, or to an error, and a "
                f"{type(batches).__name__} can be read once: give a list, a DataLoader or another object "
                "that can be iterated over again"
            )
        return self._read_once(batches)

    def _read_once(self, batches: Iterator[Any]) -> Iterator[Any]:
        is_generator = isinstance(batches, Generator)  # it also ends by an error
        self._is_exhausted = is_generator
        for batch in batches:  # a generator of the user is not closed with this one
            self._is_exhausted = False
            yield batch
            self._is_exhausted = is_generator
        self._is_exhausted = True


def has_workers(loader: Iterable[Any]) -> bool:
    """Return True for a DataLoader whose other processes make batches, in memory of their own."""
    begin = getattr(type(loader), "__iter__", None)  # that of a subclass may make batches here
    return isinstance(loader, DataLoader) and begin is DataLoader.__iter__ and loader.num_workers > 0


def _may_reuse(loader: Iterable[Any]) -> bool:
    """Return True if code of the user makes batches in this process: it may write to them again."""
    begin = getattr(type(loader), "__iter__", None)
    return not has_workers(loader) and begin not in (list.__iter__, tuple.__iter__)


def selectors_by_table(lookups: Any) -> dict[Table, list[Selector]]:
    """Check the argument `lookups` of a `Prefetcher`. Two modules may share a table."""
    if lookups is None:
        return {}
    if not isinstance(lookups, Mapping):
        raise TypeError(
            "lookups must map each module to a key of the batch or to a function of it, {emb: 'items'} for "
            f"example; found {type(lookups).__name__}"
        )
    selectors: dict[Table, list[Selector]] = {}
    for module, selector in lookups.items():
        table = module.table if isinstance(module, TableModule) else module
        if not isinstance(table, Table):
            raise TypeError(
                "a key of lookups must be a flatbed.Embedding, a flatbed.EmbeddingBag or a flatbed.Table; "
                f"found {torch.typename(module)}: give each flatbed embedding of a model, and leave out "
                "torch's, whose rows are not prefetched"
            )
        if not callable(selector) and not isinstance(selector, (str, int)):
            raise TypeError(
                f"lookups[{table!r}] must be a key of the batch or a function of it; found "
                f"{type(selector).__name__}"
            )
        selectors.setdefault(table, []).append(selector)
    return selectors


def common_device(tables: Sequence[Table], wanted: Any) -> torch.device:
    """Return the device of the batches: `wanted`, that of the tables, or the current GPU if there is one."""
    if wanted is not None:
        device = device_of(wanted)
    elif tables:
        device = tables[0]._store.device
    else:
        device = device_of("cuda" if torch.cuda.is_available() else "cpu")
    for table in tables:
        if table._store.device != device:
            raise ValueError(
                f"{table!r} computes on {table._store.device}, and batches are to be moved to {device}: "
                "move the module with .to(), or use a Prefetcher for each device"
            )
    return device
