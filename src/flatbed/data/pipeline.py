"""One iteration of a `Prefetcher`: what the loader threads and the training thread do with each batch.

Streams on a GPU: the loader thread issues copies of batches in "batches". The training thread issues
admissions of rows in "rows", which waits for the copies of the ids. The training stream waits for both when a
batch is handed out. The loader thread waits for events of earlier steps before it copies more batches.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.streams import stream_for
from flatbed.data.batches import record_stream
from flatbed.data.lookups import TableLookups
from flatbed.data.transfer import BatchMover, MovedBatch
from flatbed.data.worker import JOIN_SECONDS, BoundedSource, EndOfStream, WorkerThread
from flatbed.tables.prefetch import RowPrefetch

THREAD_NAME = "flatbed-prefetch"


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

    def __init__(self, source: BoundedSource, lookups: list[TableLookups], mover: BatchMover) -> None:
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
                ids = lookup.ids(host.batch)
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
            if self.in_use is not None:
                self.in_use.finish()
            steps = self._record_steps()
            self._take()
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

    def _take(self) -> None:
        """Take and admit all batches that are ready; wait for the first one only."""
        while self.end is None:
            taken = self.worker.take(wait=not self.pending)
            if taken is None:
                return
            if isinstance(taken, EndOfStream):
                self.end = taken
            else:
                self.pending.append(taken)
                self._admit(taken)

    def _admit(self, pending: PendingBatch) -> None:
        if not pending.lookups:
            return
        if self._rows is not None:
            assert pending.moved is not None
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
        if self.in_use is not None:
            self.in_use.finish()
        while self.pending:
            self.pending.popleft().finish()
        self.worker.join(JOIN_SECONDS)  # last, since it may be interrupted
