"""A thread that iterates ahead of its consumer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from flatbed.cuda.streams import relax_capture

T = TypeVar("T")

JOIN_SECONDS = 5.0
"""How long `close` waits for a thread that is inside the loader. The thread ends when the loader returns."""


@dataclass(slots=True)
class EndOfStream:
    """The last result of a worker: there are no more items, or the worker failed."""

    error: BaseException | None = None


class OneShotItems(Iterator[Any]):
    """An iterator that can be read once, and remembers that it was read to its end."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self.is_exhausted = False

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self.is_exhausted = True
            raise


class BoundedSource:
    """The items of an iterator, each together with a permit. `depth` permits are there from the start.

    A permit is what the consumer passes to `permit` when it has taken an item, such as a CUDA event.
    """

    def __init__(self, items: Iterator[Any], depth: int) -> None:
        self._items: Iterator[Any] = items
        self._permits: SimpleQueue[Any] = SimpleQueue()
        for _ in range(depth):
            self._permits.put(None)

    def permit(self, permit: Any) -> None:
        """Allow one more item."""
        self._permits.put(permit)

    def stop(self) -> None:
        """End all later calls of `next`. Dropping the iterator ends the processes of a DataLoader."""
        self._items = iter(())
        self._permits.put(EndOfStream())

    def __next__(self) -> tuple[Any, Any]:
        permit = self._permits.get()
        if isinstance(permit, EndOfStream):
            raise StopIteration
        return permit, next(self._items)


class WorkerThread(Generic[T]):
    """Applies `prepare` to the items of a source in a daemon thread, and queues the results in order.

    The source may be another `WorkerThread`, which starts and stops with this one. `discard` is called for
    every result that the consumer does not take. The thread has no reference to its consumer, so that the
    garbage collector can end both.
    """

    def __init__(
        self,
        source: BoundedSource | WorkerThread[Any],
        prepare: Callable[[Any], T],
        *,
        discard: Callable[[T], None],
        name: str,
    ) -> None:
        self.is_stopped = False
        self._source = source
        self._prepare = prepare
        self._discard = discard
        self._results: SimpleQueue[T | EndOfStream] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(thread_state(),), name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, unless it was started before."""
        if isinstance(self._source, WorkerThread):
            self._source.start()
        if self._thread.ident is None and not self.is_stopped:
            self._thread.start()

    def take(self, *, wait: bool) -> T | EndOfStream | None:
        """Return the next result; None if there is none yet and `wait` is False."""
        with suppress(Empty):
            return self._results.get(block=wait)
        return None

    def __next__(self) -> T:
        result = self.take(wait=True)
        if not isinstance(result, EndOfStream):
            assert result is not None
            return result
        if result.error is None:
            raise StopIteration
        try:
            raise result.error
        finally:
            del result  # the traceback of the error refers to this frame

    def stop(self) -> None:
        """Make the thread end as soon as possible, and discard results that were not taken. Does not wait."""
        self.is_stopped = True
        self._source.stop()
        self._discard_results()
        self._results.put(EndOfStream())  # for a consumer that is waiting

    def join(self, seconds: float) -> None:
        """Wait for the thread and for its source, at most so long; never for the thread that calls this."""
        end = time.monotonic() + seconds
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            if (left := end - time.monotonic()) <= 0:
                break
            with suppress(RuntimeError):  # torch raises it here when a worker of a DataLoader dies
                self._thread.join(left)
        if isinstance(self._source, WorkerThread):
            self._source.join(max(0.0, end - time.monotonic()))

    def _run(self, apply_state: Callable[[], None]) -> None:
        end = EndOfStream()
        try:
            apply_state()
            while not self.is_stopped:
                try:
                    item = next(self._source)
                except StopIteration:
                    break
                self._results.put(self._prepared(item))
                del item  # the next one may take long
            if self.is_stopped:
                self._discard_results()
        except BaseException as error:  # raised by the consumer when its turn comes
            end.error = None if self.is_stopped else error
        self._source.stop()
        self._results.put(end)
        del end  # the traceback of the error refers to this frame

    def _prepared(self, item: Any) -> T:
        try:
            return self._prepare(item)
        except StopIteration as error:  # it would end the loop as if there were no more batches
            raise RuntimeError("StopIteration was raised while a batch was prepared") from error

    def _discard_results(self) -> None:
        while True:
            result = self.take(wait=False)
            if result is None:
                return
            if not isinstance(result, EndOfStream):
                self._discard(result)


def thread_state() -> Callable[[], None]:
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
