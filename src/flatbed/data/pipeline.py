"""The loader threads of one iteration of a `Prefetcher`, and its batches until they are finished.

Small batches of a list, or of the worker processes of a DataLoader, are loaded ahead in the training thread.
Threads are used for large batches, after a worker was late, for loaders that run code of the user in this
process, for tables on disk, and for sharded tables.

`cuda.streams` has the streams and the order between them. If a table is sharded, the loader threads of all
ranks agree on each batch (`LoaderRanks`), and exchange its ids before its copies are issued.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import torch

from flatbed.cuda.streams import relax_capture, stream_for
from flatbed.data.batches import BatchMover, HostBatch, MovedBatch, Selector, select_ids, without_rows
from flatbed.data.loader_ranks import NO_BATCH, LoaderRanks
from flatbed.tables.prefetch import PrefetchRequest, RowPrefetch

THREAD_NAME = "flatbed-prefetch"
JOIN_SECONDS = 5.0
"""How long `close` waits for a thread that is inside the loader. The thread ends when the loader returns."""


INLINE_BYTES = 1 << 20
"""The largest batch that the training thread copies itself, if no code of the user makes it in this process.

Threads load the batches after the first larger one.

The loader thread would take the interpreter lock from the training thread in every call to torch. On an H200
with a slow host, that cost 0.2 to 0.7 ms of each step; the copy takes less than 0.2 ms.
"""
SECONDS_TO_FORK = 30.0  # the longest wait of a loader thread that forks for the training thread
INLINE_SECONDS = 0.01
"""The longest wait for a worker process in the training thread, except in the first `next`.

After a longer one, threads load the batches, so that the training thread can use those that are ready.
"""


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch between the loader and the end of its step."""

    requests: deque[tuple[RowPrefetch, PrefetchRequest]] = field(default_factory=deque)
    """For each table, the rows that it prefetches for this batch."""
    moved: MovedBatch | None = None
    ready: Any = None
    """The event after copies, admissions and moves of records; None on a CPU, or with a depth of 0."""

    def finish(self, *, is_left: bool = False) -> None:
        """End all requests. Two threads may do so. After Ctrl-C, call it again: it skips finished requests.

        `is_left`: the loop ends while this batch is in use, or waits to be used.
        """
        for prefetch, request in [*self.requests]:
            prefetch.finish(request, is_left=is_left)
            with suppress(ValueError):
                self.requests.remove((prefetch, request))

    __del__ = finish  # of a batch that an interruption took out of a queue


@dataclass(slots=True)
class End:
    """The last item of a queue: there are no more batches, or the loader failed."""

    error: BaseException | None = None


class Pipeline:
    """The loader threads of one iteration, and all batches that are not finished.

    If there are threads, one loads batches. A second one reads rows from disk, if there are tables on disk.
    Queues connect the threads: permits to load a batch, loaded batches, and batches whose rows were read. The
    pipeline has no reference to the iterator of the training loop, so that the garbage collector can end it.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        lookups: list[tuple[list[Selector], RowPrefetch]],
        mover: BatchMover,
        *,
        depth: int,
        ranks: LoaderRanks | None = None,
    ) -> None:
        self.batches: Iterator[Any] = batches
        self.lookups, self.mover, self.depth, self.ranks = lookups, mover, depth, ranks
        self.batches_ahead: deque[PendingBatch] = deque()
        """Batches that the training thread has taken, and not handed out."""
        self.in_use: PendingBatch | None = None
        self.is_closed = self.is_in_next = False
        """True while the training thread works on its batches. It finishes them if another thread closes."""
        self.is_waiting = False
        """True while the training thread waits for a batch of the loader threads."""
        reads_disk = any(prefetch.reads_disk for _, prefetch in lookups)
        self.needs_threads = depth > 0 and (reads_disk or mover.is_reused or ranks is not None)
        self._stages = [self.load, self._read] if reads_disk else [self.load]
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in (None, *self._stages)]
        self.permits, self.results = self._queues[0], self._queues[-1]
        self.n_permits = 0
        """Batches that the loader threads have still to deliver."""
        self.threads: list[threading.Thread] = []
        """Empty before `start`."""
        self._copies: torch.cuda.Stream | None = None
        """The stream of the loader threads, if there are any."""
        self._process = os.getpid()

    # ---- in the loader threads; `load` also in the training thread

    def _run(
        self,
        stage: Callable[[Any], PendingBatch | End],
        inbox: SimpleQueue[Any],
        outbox: SimpleQueue[Any],
        apply_settings: Callable[[], None],
    ) -> None:
        result: PendingBatch | End
        if stage == self.load:
            _in_thread.pipeline = self
        try:
            apply_settings()
            while True:
                item = inbox.get()
                result = item if isinstance(item, End) else stage(item)
                if isinstance(result, End):
                    break
                outbox.put(result)
                del item, result  # the next one may take long
        except BaseException as error:  # the training thread raises it after the batches before
            result = End(None if self.is_closed else error)
        if self.ranks is not None and stage == self.load:
            self.ranks.leave()
        if self.is_closed:
            self._discard_results()
        outbox.put(result)
        del result  # the traceback of the error refers to this frame

    def load(self, earlier_steps: Any) -> PendingBatch | End:
        """Load a batch, check its ids, and allocate its memory.

        A loader thread also issues the copies, after the event of earlier steps.
        """
        pending, ranks = PendingBatch(), self.ranks
        try:
            begin = time.monotonic()
            batch = next(self.batches, NO_BATCH)
            is_late = self.in_use is not None and time.monotonic() - begin > INLINE_SECONDS
            if has_ended := batch is NO_BATCH:
                if ranks is None or self.is_closed:
                    return End()
                batch = ranks.empty_batch
            host = HostBatch(batch)
            if batch is not NO_BATCH:
                host = self.mover.to_host(batch)
                at_once = not self.depth or ranks is not None  # raise here, so that all ranks raise
                for selectors, prefetch in self.lookups:
                    ids = select_ids(prefetch.table, selectors, host.batch)
                    request = prefetch.check(ids, at_once=at_once)
                    if self.depth:
                        pending.requests.append((prefetch, request))
            if ranks is not None and not self._agree(ranks, pending, host.batch, has_ended=has_ended):
                return End()
            if earlier_steps is not None:
                earlier_steps.synchronize()  # the device holds no more than depth + 1 batches
            extra = [tensor for _, request in pending.requests for tensor in request.tensors]
            pending.moved = moved = self.mover.move(host, extra, self._copies)
            # Objects that move themselves may have been pinned, at any size.
            if self.depth and (is_late or moved.has_objects or moved.nbytes > INLINE_BYTES):
                self.needs_threads = True
            if ranks is not None:
                ranks.n_loaded += 1
        except BaseException as error:
            pending.finish()
            if ranks is not None:
                ranks.leave(error)
            if isinstance(error, StopIteration):  # it would end the loop as if there were no more batches
                raise RuntimeError("StopIteration was raised while a batch was prepared") from error
            raise
        return pending

    def _agree(self, ranks: LoaderRanks, pending: PendingBatch, batch: Any, *, has_ended: bool) -> bool:
        """Agree with other ranks whether there is a batch, and exchange its ids."""
        if ranks.uneven == "empty" and not has_ended:
            ranks.empty_batch = without_rows(batch)
        if not ranks.agree(has_ended=has_ended):
            pending.finish()
            return False
        for prefetch, request in pending.requests:
            prefetch.exchange(request, ranks.channel)
        return True

    def _read(self, pending: PendingBatch) -> PendingBatch:
        moved = pending.moved
        assert moved is not None
        try:
            for prefetch, request in pending.requests:
                prefetch.read(request, moved.tensors, moved.arrived)
        except BaseException:
            pending.finish()
            raise
        return pending

    def wait_to_fork(self) -> None:
        """Wait until the training thread waits for the batch that is being loaded, but not for ever.

        The training thread may wait for a lock that other code takes before a fork.
        """
        end = time.monotonic() + SECONDS_TO_FORK
        while not (self.is_closed or (self.is_waiting and self.n_permits == self.permits.qsize())):
            if time.monotonic() > end:
                return
            time.sleep(0.001)

    # ---- in any thread

    def start(self) -> None:
        """Start the threads. Not within a stream, which changes the current GPU."""
        device, settings, first = self.mover.device, thread_settings(), None
        is_first = self.in_use is None and not self.batches_ahead
        if is_first and "torch.distributed.tensor" in sys.modules:
            self.batches = begun(self.batches)
            first = torch.cuda.current_stream(device).record_event() if self.mover.on_gpu else None

        def apply() -> None:
            settings()
            if first is not None:  # the batch may have tensors that were computed on the GPU
                torch.cuda.current_stream(device).wait_event(first)

        self._copies = stream_for(device, "batches") if self.mover.on_gpu else None
        for one in zip(self._stages, self._queues, self._queues[1:], strict=False):
            thread = threading.Thread(target=self._run, args=(*one, apply), name=THREAD_NAME, daemon=True)
            self.threads.append(thread)
            thread.start()
        self.permit(None)

    def permit(self, earlier_steps: Any) -> None:
        """Let the threads load until `depth` batches are ahead. Copies wait for the event given."""
        for _ in range(self.depth - self.n_permits - len(self.batches_ahead)):
            self.n_permits += 1
            self.permits.put(earlier_steps)

    def close(self) -> None:
        """Tell the threads to end, and finish all batches. Any thread may call this, any number of times."""
        if os.getpid() != self._process:
            return  # after a fork, threads and lookups belong to the parent
        self.is_closed = True
        if self.ranks is not None:
            self.ranks.end()
        self.batches = iter(())  # ends the processes of a DataLoader
        self._discard_results()
        if not self.is_in_next:
            self.finish_batches()
        self.join(JOIN_SECONDS)  # last, since it may be interrupted

    def finish_batches(self) -> None:
        """Finish the batches that the training thread has taken. Two threads may do so."""
        if self.in_use is not None:
            self._leave(self.in_use)
        with suppress(IndexError):
            while True:
                self._leave(self.batches_ahead.popleft())

    def _leave(self, pending: PendingBatch) -> None:
        """Finish a batch whose copies, moves or step may go on."""
        pending.finish(is_left=True)
        if pending.moved is not None and self.mover.on_gpu and self.depth:  # it was not handed out
            pending.moved.record_stream(stream_for(self.mover.device, "decisions"), targets_only=True)

    def join(self, seconds: float) -> None:
        """Wait for the threads, at most so long; never for the thread that calls this."""
        end = time.monotonic() + seconds
        for thread in self.threads:
            while thread.is_alive() and thread is not threading.current_thread():
                if (left := end - time.monotonic()) <= 0:
                    return
                with suppress(RuntimeError):  # torch raises it here when a worker of a DataLoader dies
                    thread.join(left)

    def _discard_results(self) -> None:
        """Finish batches that the training thread has not taken, and wake all threads that wait."""
        for queue in self._queues:
            with suppress(Empty):
                while True:
                    result = queue.get(block=False)
                    if isinstance(result, PendingBatch):
                        result.finish()
            queue.put(End())


_in_thread = threading.local()
"""In a thread that loads batches, `pipeline` is its pipeline."""


def _wait_to_fork() -> None:
    """Let a loader thread fork while no other thread works: a generator may make workers as it goes.

    A lock that another thread holds stays taken in the forked process. Each worker of a `DataLoader` takes
    that of torch's generator of random numbers, and would hang.
    """
    pipeline: Pipeline | None = getattr(_in_thread, "pipeline", None)
    if pipeline is not None:
        pipeline.wait_to_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_to_fork)


def begun(batches: Iterator[Any]) -> Iterator[Any]:
    """Take the first batch in this thread.

    Returns an iterator over all batches. If the first one failed, the iterator raises that error.

    Loaders that are generators fork their workers then. A fork in another thread destroys in the worker what
    torch keeps for DTensors in the training thread, and the worker crashes or hangs.
    """
    try:
        first = next(batches)
    except StopIteration:
        return iter(())
    except BaseException as error:  # also Control-C: the loader thread tells other ranks
        found = error

        def fail() -> NoReturn:
            raise found

        return iter(fail, None)
    return chain([first], batches)


def thread_settings() -> Callable[[], None]:
    """Return a function that gives another thread the settings of torch that this thread has now."""
    is_grad_enabled, device = torch.is_grad_enabled(), torch.get_default_device()
    n_threads = torch.get_num_threads()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call,unused-ignore]

    def apply() -> None:
        torch.set_grad_enabled(is_grad_enabled)
        if n_threads != torch.get_num_threads():  # a DataLoader that pins sets 1 for all new threads
            torch.set_num_threads(n_threads)
        if device != torch.get_default_device():
            torch.set_default_device(device)
        if gpu is not None:
            torch.cuda.set_device(gpu)
            relax_capture()  # this thread allocates while the training thread may capture a graph

    return apply
