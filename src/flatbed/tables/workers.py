"""Calls in threads, for tables and their files.

`concurrent.futures` takes locks in Python code, where Control-C can leave them taken: later calls would hang.
Here, all locks are taken by functions of C.
"""

from __future__ import annotations

import sys
import weakref
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from itertools import islice, repeat
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
THREADS = 16  # more than cores: threads wait for the disk, which serves many requests at a time


class Call(Generic[T]):
    """A call that one thread makes, once, and any thread may wait for."""

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._to_do = [(function, args)]
        self._results: list[T] = []
        self.error: BaseException | None = None
        self._unfinished = allocate_lock()
        self._unfinished.acquire()

    def run(self) -> None:
        """Make the call, unless a thread has begun it. For threads that Control-C does not reach."""
        try:
            function, args = self._to_do.pop()
        except IndexError:
            return
        try:
            self._results.append(function(*args))
        except BaseException as error:
            self.error = error
        finally:
            self._unfinished.release()

    def wait(self) -> None:
        """Wait for the end of the call."""
        with self._unfinished:
            pass

    def result(self) -> T:
        """Wait for the end of the call. Return its result, or raise its error."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._results[0]

    def cancel(self) -> None:
        """Keep threads from beginning the call; if one has begun it, wait for the end."""
        try:
            self._to_do.pop()
        except IndexError:
            self.wait()


class Workers:
    """Up to `n_threads` threads, which begin calls in the order in which they were submitted.

    The threads end by `close`, or with this object. A process that exits does not wait for them.
    """

    def __init__(self, n_threads: int = THREADS) -> None:
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._threads: list[int] = []
        # In C, so that an interruption can neither start a thread twice nor forget it.
        self._starting = map(start_new_thread, repeat(_work, n_threads), repeat((self._calls,)))
        self._end = weakref.finalize(self, self._calls.put, None)
        self._end.atexit = False

    def submit(self, call: Call[Any]) -> None:
        """Let a thread make the call. It is made here if there is no thread: after `close`, or at exit."""
        self._calls.put(call)
        with suppress(RuntimeError):  # the process cannot start more threads
            self._threads.extend(islice(self._starting, 1))
        if not self._threads or not self._end.alive or sys.is_finalizing():
            call.run()

    def close(self) -> None:
        """End the threads after the calls so far. Does not wait."""
        self._end()


def _work(calls: SimpleQueue[Call[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # it refers to a table
    calls.put(None)  # for the next thread


def split(workers: Workers, function: Callable[[slice], object], n: int, *, n_parts: int) -> None:
    """Call a function with slices that cover n items, in at most `n_parts` threads, this one included."""
    n_parts = max(1, min(THREADS, n_parts))
    step = max(1, -(-n // n_parts))
    others = [Call(function, slice(start, start + step)) for start in range(step, n, step)]
    try:
        for other in others:
            workers.submit(other)
        function(slice(0, step))
        for other in others:
            other.result()
    finally:  # after an interruption, no thread may go on writing
        for other in others:
            other.cancel()
