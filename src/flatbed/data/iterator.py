"""The training thread's part of one iteration of a `Prefetcher`: it takes batches, and hands them out."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from flatbed.cuda.streams import InStream, stream_for
from flatbed.data.batches import map_leaves
from flatbed.data.pipeline import End, PendingBatch, Pipeline
from flatbed.distributed.ranks import reason_of

if TYPE_CHECKING:
    from typing_extensions import Self


class PrefetchIterator(Iterator[Any]):
    """One iteration of a `Prefetcher`. Everything that it started ends when it is closed or collected."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._end: End | None = None
        mover = pipeline.mover
        self._decisions = self._moves = None
        if mover.on_gpu and pipeline.depth:
            self._decisions, self._moves = (stream_for(mover.device, name) for name in ("decisions", "moves"))
        self._in_decisions: Any = nullcontext() if self._decisions is None else InStream(self._decisions)
        self._streams: dict[int, torch.cuda.Stream] = {}  # those of the loop so far, by id: mostly one
        self._close = weakref.finalize(self, pipeline.close)
        _open.add(self)
        _close_at_exit()

    # Events that are recorded again at every `next` (with loader threads, the first one is new each
    # time): making one takes as long as recording it.

    @cached_property
    def _earlier_steps(self) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call,unused-ignore]

    @cached_property
    def _decisions_done(self) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call,unused-ignore]

    def __next__(self) -> Any:
        pipeline, stream, earlier_steps = self._pipeline, None, None
        # Set before reading `is_closed`. `close` sets `is_closed` before reading this: one sees the other.
        pipeline.is_in_next = True
        try:
            if pipeline.is_closed:
                raise StopIteration
            finished: list[Any] = []  # keeps the memory of admissions until "decisions" waits for their step
            if pipeline.in_use is not None:
                finished += pipeline.in_use.requests
                pipeline.in_use.finish()
            if pipeline.ranks is not None:
                pipeline.ranks.begin()
            taken = self._take_batches()
            if self._decisions is not None:
                stream = torch.cuda.current_stream(self._decisions.device_index)
                earlier_steps = self._wait_for_steps(self._decisions, stream)
            finished.clear()
            if taken:
                with self._in_decisions:
                    for pending in taken:
                        self._admit(pending)
            if pipeline.is_closed or not pipeline.batches_ahead:  # another thread may close, or the loader
                self._raise_end()
            if pipeline.ranks is not None:
                pipeline.ranks.take_batch()
            pipeline.in_use = pipeline.batches_ahead.popleft()
            batch = self._hand_out(pipeline.in_use, stream)
            if pipeline.threads:
                pipeline.permit(earlier_steps)
            return batch
        except StopIteration:
            raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            pipeline.is_in_next = False
            if pipeline.is_closed:
                pipeline.finish_batches()

    def _wait_for_steps(self, decisions: torch.cuda.Stream, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Make "decisions" wait for all steps so far; return the event after those in the current stream.

        Memory of batches was allocated in the current stream before.
        """
        earlier_steps = self._earlier_steps
        if self._pipeline.threads:  # loader threads wait for it later
            earlier_steps = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call,unused-ignore]
        earlier_steps.record(stream)
        decisions.wait_event(earlier_steps)
        self._streams.setdefault(stream.stream_id, stream)
        for other in self._streams.values() if len(self._streams) > 1 else ():
            decisions.wait_stream(other)
        return earlier_steps

    def _hand_out(self, pending: PendingBatch, stream: torch.cuda.Stream | None) -> Any:
        """Return a batch for the loop, whose stream waits for it. Lookups find its prefetched rows now."""
        moved = pending.moved
        assert moved is not None
        if stream is not None:
            stream.wait_event(pending.ready)
            if moved.arrived is not None or len(self._streams) > 1:  # memory of another stream
                moved.record_stream(stream)
        for prefetch, request in pending.requests:
            prefetch.begin(request, stream)
        batch = moved.batch
        if moved.has_objects:
            batch = map_leaves(self._pipeline.mover.move_object, batch)
        pending.moved = None  # the loop alone holds the batch, which may be large
        return batch

    def _raise_end(self) -> NoReturn:
        """Raise the error of the loader, or end the loop."""
        end, self._end = self._end, None
        if end is not None and end.error is not None:
            try:
                raise end.error
            finally:
                del end  # the traceback of the error refers to this frame
        if self._pipeline.ranks is not None:
            self._pipeline.ranks.is_exhausted = True
        self._pipeline.close()
        raise StopIteration

    def _take_batches(self) -> list[PendingBatch]:
        """Load batches here; or take those that threads have loaded, and wait for one if there is none."""
        pipeline, taken = self._pipeline, list[PendingBatch]()
        while self._end is None:
            if pipeline.needs_threads and not pipeline.threads:
                pipeline.start()
            found: PendingBatch | End
            if pipeline.threads:
                if not pipeline.n_permits or (pipeline.batches_ahead and pipeline.results.empty()):
                    break
                pipeline.n_permits -= 1
                pipeline.is_waiting = True
                found = pipeline.results.get()
                pipeline.is_waiting = False
            elif len(pipeline.batches_ahead) <= pipeline.depth:
                try:
                    found = pipeline.load(None)
                except Exception as error:  # raised after the batches before it
                    found = End(error)
            else:
                break
            if isinstance(found, End):
                self._end = found
            else:
                pipeline.batches_ahead.append(found)
                taken.append(found)
        return taken

    def _admit(self, pending: PendingBatch) -> None:
        """Admit the rows of a batch in the current stream, "decisions", after the copies of the ids.

        Batches that were loaded in this thread are copied in that stream, too. Records move in "moves".
        """
        decisions, moves, moved = self._decisions, self._moves, pending.moved
        assert moved is not None
        moved.issue_copies()
        pending.ready = moved.arrived
        if decisions is not None and pending.requests and moved.arrived is not None:
            decisions.wait_event(moved.arrived)
        try:
            for prefetch, request in pending.requests:
                for tensor in request.tensors if decisions is not None else ():
                    if moved.arrived is not None or tensor.is_cuda:  # not allocated by `load` in this thread
                        moved.tensors[id(tensor)].record_stream(decisions)  # type: ignore[arg-type,unused-ignore]
                prefetch.admit(request, moved.tensors)
        finally:
            if decisions is not None and moves is not None and pending.requests:
                # "moves" waits for copies, too, and `ready` is right for caches that only use "decisions".
                self._decisions_done.record(decisions)
                moves.wait_event(self._decisions_done)
            for prefetch, request in pending.requests:
                prefetch.issue_moves(request)
            if moves is not None and pending.requests:
                pending.ready = moves.record_event()
            elif decisions is not None and pending.ready is None:
                pending.ready = decisions.record_event()

    def _fail(self, error: BaseException) -> None:
        """Close, and let the loader thread tell other ranks the reason."""
        if self._decisions is not None and self._moves is not None:
            # The memory of the last admissions may be free. "decisions" waits for them before it reuses it.
            for stream in (self._moves, *self._streams.values()):
                self._decisions.wait_stream(stream)
        if self._pipeline.ranks is not None:
            self._pipeline.ranks.reason = reason_of(error)
        self._pipeline.close()

    def close(self) -> None:
        """End early: the threads, the loader's iterator, and all prefetched rows."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is None or isinstance(error, GeneratorExit):  # a generator around the loop is closed
            self.close()
        else:
            self._fail(error)


_open: weakref.WeakSet[PrefetchIterator] = weakref.WeakSet()


@lru_cache(maxsize=1)
def _close_at_exit() -> None:
    """Register the end of all iterations after weakref's handler: their threads end before tables do.

    Without this, the order would be that of creation, and tables on disk are created at their first lookup.
    """

    @atexit.register
    def close_all() -> None:
        for iterator in [*_open]:
            iterator.close()
