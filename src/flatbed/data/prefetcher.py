"""Batches on the device, and the rows that they look up, before the training loop asks for them."""

from __future__ import annotations

import atexit
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatbed.data.lookups import Selector, TableLookups, common_device, selectors_by_table
from flatbed.data.pipeline import InlineIteration, ThreadedIteration
from flatbed.data.staging import CopyStream, StagingRing, ring_for
from flatbed.data.transfer import BatchMover, pinned_batches
from flatbed.data.worker import BoundedSource, OneShotItems, WorkerThread
from flatbed.errors import FlatbedError
from flatbed.tables.embedding import TableModule
from flatbed.tables.prefetch import RowPrefetch
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from typing_extensions import Self

PREVIOUS_SECONDS = 60.0
"""How long a new iteration waits for a thread of an earlier one that is still inside the loader."""


class Prefetcher:
    """Iterates over a loader in a thread, and moves batches and the rows they look up to the device.

    - `loader`: a `DataLoader`, a list, or any other iterable. Each iteration of the prefetcher is one of the
      loader. For a CPU, or in pinned memory, the loader must not write to batches that it has returned.
    - `lookups`: maps each `Embedding`, `EmbeddingBag` or `Table` to a key of the batch, or to a function that
      is called once, in the loader's thread, with the batch on the host. The result has the ids that will be
      looked up: a tensor, an array, a list of integers, or a list of tensors or arrays for several lookups.
    - `depth`: number of batches ahead, beyond the one in use: loaded, on the way, or on the device. With 0
      there is no thread: each batch is moved when it is asked for, and no rows are prefetched.
    - `device`: by default that of the tables; without tables the current GPU, or the CPU if there is none.
    - `pin`: copies the arrays of a list of batches into pinned memory once, at the first iteration. Later
      changes of the list have no effect. Without a GPU it changes nothing.

    A batch is a tensor, a numpy array, or dicts, lists, tuples and dataclasses of them. Arrays of numbers
    become tensors, objects with a method `to(device)` are moved by it, and other values stay as they are. On
    a CPU, tensors share the memory of the arrays. Training gives bitwise the same result as without a
    prefetcher, if the loader draws its random numbers from a generator of its own.

    An iteration and its threads end with the last batch, with an error of the loader (raised when its turn
    comes), when the loop is left, or by `close()` of the iterator.

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
        self.loader = loader
        self.depth = operator.index(depth)
        self.pin = pin
        self._selectors = selectors_by_table(lookups)
        self._device = device
        self._ring: StagingRing | None = None  # kept for all iterations, since pinning takes a while
        self._pinned: list[Any] | None = None
        self._one_shot: OneShotItems | None = None
        self._previous: WorkerThread[Any] | None = None
        _ = self.device  # raises for wrong devices

    @property
    def device(self) -> torch.device:
        """The device that batches are moved to."""
        return common_device([*self._selectors], self._device)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> PrefetchIterator:
        device = self.device
        copies: CopyStream | None = None
        if device.type == "cuda":
            copies = CopyStream(device, current=self.depth == 0)
            self._ring = ring_for(device) if self._ring is None else self._ring
        mover = BatchMover(device, copies, self._ring)
        if self._previous is not None and self._previous.is_stopped:
            self._previous.join(PREVIOUS_SECONDS)  # persistent workers are not for two threads
        # The loader's iterator is made here and not in the thread: DataLoaders draw a seed and fork then.
        batches = self._begin(mover)
        if self.depth == 0:
            return PrefetchIterator(InlineIteration(batches, mover))
        lookups = [
            TableLookups(table, s, RowPrefetch(table, self.depth)) for table, s in self._selectors.items()
        ]
        iteration = ThreadedIteration(BoundedSource(batches, self.depth), lookups, mover)
        self._previous = iteration.worker
        return PrefetchIterator(iteration)

    def _begin(self, mover: BatchMover) -> Iterator[Any]:
        if self.pin and mover.copies is not None:
            if self._pinned is None:
                assert isinstance(self.loader, Sequence)
                self._pinned = pinned_batches(self.loader, mover)
            return iter(self._pinned)
        batches: Iterator[Any] = iter(self.loader)
        if batches is not self.loader:
            return batches
        if self._one_shot is None:
            self._one_shot = OneShotItems(batches)
        if self._one_shot.is_exhausted:  # an epoch without batches would pass for training
            raise FlatbedError(
                f"an earlier loop has read the loader to its end, and a {type(batches).__name__} can be read "
                "once: give a list, a DataLoader or another object that can be iterated over again"
            )
        return self._one_shot


class PrefetchIterator(Iterator[Any]):
    """One iteration of a `Prefetcher`. Everything that it started ends when it is closed or collected."""

    def __init__(self, iteration: ThreadedIteration | InlineIteration) -> None:
        self._iteration = iteration
        self._close = weakref.finalize(self, iteration.close)
        _open.add(self)
        _close_at_exit()

    def __next__(self) -> Any:
        return self._iteration.next()

    def close(self) -> None:
        """End early: the threads, the loader's iterator, and all prefetched rows."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


_open: weakref.WeakSet[PrefetchIterator] = weakref.WeakSet()


@lru_cache(maxsize=1)
def _close_at_exit() -> None:
    """Register the end of all iterations after weakref's handler: their threads end before tables do.

    Without this, the order would be that of creation, and tables on disk are created at their first lookup.
    """
    atexit.register(_close_all)


def _close_all() -> None:
    for iterator in [*_open]:
        iterator.close()
