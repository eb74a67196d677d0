"""Batches on the device, and the rows that they look up, before the training loop asks for them.

Streams on a GPU: "batches" has the copies of batches, "rows" the admission of rows to caches. Both run beside
the training stream. "rows" waits for the ids of the batch and for the steps that were issued before; the
training stream waits for both when a batch is handed out.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.streams import stream_for
from flatbed.data.batches import record_stream
from flatbed.data.lookups import Lookup, Selector, common_device, selectors_by_table
from flatbed.data.staging import CopyStream, StagingRing, ring_for
from flatbed.data.transfer import BatchMover, MovedBatch, pinned_batches
from flatbed.data.worker import JOIN_SECONDS, BoundedSource, EndOfStream, OneShotItems, WorkerThread
from flatbed.errors import FlatbedError
from flatbed.tables.embedding import TableModule
from flatbed.tables.prefetch import RowPrefetch
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from typing_extensions import Self

THREAD_NAME = "flatbed-prefetch"
PREVIOUS_SECONDS = 60.0
"""How long a new iteration waits for a thread of an earlier one that is still inside the loader."""


class Prefetcher:
    """Iterates over a loader in a thread, and moves batches and the rows they look up to the device.

    - `loader`: a `DataLoader`, a list, or any other iterable. Each iteration of the prefetcher is one of the
      loader. The loader must not write to pinned memory of batches that it has returned.
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
    >>> for batch in Prefetcher(loader, {emb: "items"}):
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
        batches = self._begin(device)
        if self.depth == 0:
            return PrefetchIterator(InlineIteration(batches, mover))
        lookups = [Lookup(table, s, RowPrefetch(table, self.depth)) for table, s in self._selectors.items()]
        iteration = ThreadedIteration(BoundedSource(batches, self.depth), lookups, mover)
        self._previous = iteration.worker
        return PrefetchIterator(iteration)

    def _begin(self, device: torch.device) -> Iterator[Any]:
        if self.pin and device.type == "cuda":
            if self._pinned is None:
                assert isinstance(self.loader, Sequence)
                self._pinned = pinned_batches(self.loader)
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
        self._close = weakref.finalize(self, iteration.close)  # also at exit of the interpreter

    def __next__(self) -> Any:
        return self._iteration.next()

    def close(self) -> None:
        """End early: the threads, the loader's iterator, and all prefetched rows."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# ---- without threads


class InlineIteration:
    """Moves each batch when it is asked for, in the current stream."""

    def __init__(self, batches: Iterator[Any], mover: BatchMover) -> None:
        self._batches: Iterator[Any] = batches
        self._mover = mover

    def next(self) -> Any:
        """Return the next batch."""
        try:
            host = self._mover.to_host(next(self._batches))
            return self._mover.hand_out(self._mover.move(host))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop the loader's iterator."""
        self._batches = iter(())


# ---- with threads


@dataclass(slots=True)
class PendingLookup:
    """The rows that one table prefetches for one batch."""

    prefetch: RowPrefetch
    request: Any
    ids: list[Tensor]


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch between the loader and the end of its step."""

    lookups: deque[PendingLookup] = field(default_factory=deque)
    moved: MovedBatch | None = None

    def finish(self) -> None:
        """End all lookups, each once, also if two threads do so."""
        while True:
            try:
                lookup = self.lookups.popleft()
            except IndexError:
                return
            lookup.prefetch.finish(lookup.request)


class ThreadedIteration:
    """Runs the loader in a thread. A second thread reads rows from disk, if there are tables on disk.

    Has no reference to the iterator of the training loop, so that the garbage collector can end it.
    """

    def __init__(self, source: BoundedSource, lookups: list[Lookup], mover: BatchMover) -> None:
        self.source = source
        self.lookups = lookups
        self.mover = mover
        self.is_closed = False
        self.pending: deque[PendingBatch] = deque()
        """Batches that were taken from the worker, the next one first."""
        self.in_use: PendingBatch | None = None
        self.end: EndOfStream | None = None
        self.worker: WorkerThread[PendingBatch] = WorkerThread(
            source, self._load, discard=PendingBatch.finish, name=THREAD_NAME
        )
        if any(lookup.prefetch.reads_disk for lookup in lookups):
            self.worker = WorkerThread(
                self.worker, self._read, discard=PendingBatch.finish, name=f"{THREAD_NAME}-disk"
            )
        self._rows = stream_for(mover.device, "rows") if mover.device.type == "cuda" else None
        self._process = os.getpid()

    # In the loader threads.

    def _load(self, item: tuple[Any, Any]) -> PendingBatch:
        """Stage the lookups of a batch, and issue its copies."""
        steps, batch = item
        host = self.mover.to_host(batch)
        pending = PendingBatch()
        try:
            for lookup in self.lookups:
                ids = lookup.ids(host)
                request = lookup.prefetch.stage([one.cpu() for one in ids])
                pending.lookups.append(PendingLookup(lookup.prefetch, request, ids))
            if steps is not None:
                steps.synchronize()  # the device holds no more than depth + 1 batches
            pending.moved = self.mover.move(host, [ids for each in pending.lookups for ids in each.ids])
            for each in pending.lookups:
                each.ids = [pending.moved.tensors[id(ids)] for ids in each.ids]
        except BaseException:
            pending.finish()
            raise
        return pending

    def _read(self, pending: PendingBatch) -> PendingBatch:
        try:
            for each in pending.lookups:
                each.prefetch.read(each.request)
        except BaseException:
            pending.finish()
            raise
        return pending

    # In the training thread.

    def next(self) -> Any:
        """Return the next batch, after rows of all batches that are ready were admitted."""
        if self.is_closed:
            raise StopIteration
        try:
            self.worker.start()
            used, self.in_use = self.in_use, None
            if used is not None:
                used.finish()
            steps = self._record_steps()
            self._take(steps)
            if self.pending:
                return self._hand_out(steps)
        except BaseException:
            self.close()
            raise
        end = self.end
        self.close()
        if end is None or end.error is None:
            raise StopIteration
        try:
            raise end.error
        finally:
            del end  # the traceback of the error refers to this frame

    def _record_steps(self) -> torch.cuda.Event | None:
        """Return an event after the steps that were issued; None on a CPU."""
        if self._rows is None:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call,unused-ignore]
        event.record(torch.cuda.current_stream(self.mover.device))
        return event

    def _take(self, steps: torch.cuda.Event | None) -> None:
        """Take and admit all batches that are ready; wait for the first one only."""
        while self.end is None:
            taken = self.worker.take(wait=not self.pending)
            if taken is None:
                return
            if isinstance(taken, EndOfStream):
                self.end = taken
            else:
                self.pending.append(taken)
                self._admit(taken, steps)

    def _admit(self, pending: PendingBatch, steps: torch.cuda.Event | None) -> None:
        assert pending.moved is not None
        if self._rows is not None and pending.lookups:
            assert steps is not None
            self._rows.wait_event(steps)
            self._rows.wait_event(pending.moved.arrived)
            for ids in (ids for each in pending.lookups for ids in each.ids):
                record_stream(ids, self._rows)
        with nullcontext() if self._rows is None else torch.cuda.stream(self._rows):
            for each in pending.lookups:
                each.prefetch.admit(each.request, each.ids)
                each.ids = []  # the loop alone holds the batch

    def _hand_out(self, steps: torch.cuda.Event | None) -> Any:
        pending = self.in_use = self.pending.popleft()
        assert pending.moved is not None
        for each in pending.lookups:
            each.prefetch.begin(each.request)
        batch = self.mover.hand_out(pending.moved)
        pending.moved = None
        self.source.permit(steps)
        return batch

    def close(self) -> None:
        """Stop the threads and finish all lookups. Any thread may call this, any number of times."""
        if os.getpid() != self._process:
            return  # after a fork, threads and lookups belong to the parent
        self.is_closed = True
        self.worker.stop()
        self.end = None
        used, self.in_use = self.in_use, None
        if used is not None:
            used.finish()
        while self.pending:
            self.pending.popleft().finish()
        self.worker.join(JOIN_SECONDS)  # last, since it may be interrupted
