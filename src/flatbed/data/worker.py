"""Iteration in a thread of its own, some items ahead of whoever takes them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from flatbed.errors import FlatbedError

T = TypeVar("T")

JOIN_SECONDS = 5.0
"""How long an end waits for a thread that is deep in a loader; it stops by itself as soon as it returns."""


@dataclass(slots=True)
class Last:
    """No more items: they ended, or the thread failed."""

    error: BaseException | None = None


class Background(Generic[T]):
    """What `prepare` makes of the items of an iterator, in a daemon thread, at most `depth` of them ahead.

    The items may be those of another background, which then begins and ends with this one: so two threads
    work on different items at the same time, and each item goes through both.

    The thread knows this object and nothing of whoever uses it, so that they can be collected while it runs.
    Both queues are of the kind that may be put to anywhere, even by the garbage collector.
    """

    def __init__(
        self,
        items: Iterator[Any] | Background[Any],
        prepare: Callable[[Any], T],
        *,
        depth: int,
        name: str,
        drop: Callable[[T], None],
    ) -> None:
        self.stopped = False
        self.before = items if isinstance(items, Background) else None
        """The background that items come from, if they do."""
        self._items: Iterator[Any] | None = _Taken(items) if isinstance(items, Background) else items
        self._prepare = prepare
        self._drop = drop
        self._room: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[T | Last] = SimpleQueue()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(_surroundings(),), name=name, daemon=True)
        for _ in range(depth):
            self._room.put(True)

    def start(self) -> None:
        """Begin, unless that is done."""
        if self.before is not None:
            self.before.start()
        if self._items is not None and self._thread.ident is None:
            self._thread.start()

    def take(self, *, wait: bool) -> T | Last | None:
        """The next item, in order; None if there is none yet and nobody waits. After `Last`, no more."""
        if self._ready.empty() and wait and os.getpid() != self._process:
            raise FlatbedError(
                "this iteration began in another process, and its thread is there: iterate anew here"
            )
        try:
            taken = self._ready.get(block=wait)
        except Empty:
            return None
        self._room.put(True)
        return taken

    def stop(self) -> None:
        """Have the thread end as soon as it can, and drop what was not taken. Waits for nothing."""
        if os.getpid() != self._process:
            return  # a copy by fork: the thread and what it made belong to the parent
        self.stopped = True
        self._room.put(False)
        if self.before is not None:
            self.before.stop()
        self._drain()
        self._ready.put(Last())  # for whoever waits for an item
        if self._thread.ident is None:
            self._items = None

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread, by default a while, and for that of the background before; but not in either:
        each may wait for the other.
        """
        end = time.monotonic() + (JOIN_SECONDS if seconds is None else seconds)
        threads = self._threads()
        if threading.current_thread() in threads or os.getpid() != self._process:
            return
        for thread in threads:
            while thread.is_alive() and (left := end - time.monotonic()) > 0:
                # When a worker of a DataLoader dies, torch raises this in the main thread, wherever that is.
                with suppress(RuntimeError):
                    thread.join(left)

    def _threads(self) -> list[threading.Thread]:
        return [self._thread, *(self.before._threads() if self.before is not None else [])]

    def close(self) -> None:
        """Stop, and wait for it a while. Call it as often as you like."""
        self.stop()
        self.join()

    def _run(self, surroundings: Callable[[], None]) -> None:
        items, self._items = self._items, None
        last = Last()
        try:
            surroundings()
            while items is not None and self._room.get() and not self._was_stopped():
                try:
                    item = next(items)
                except StopIteration:
                    break
                self._ready.put(self._prepared(item))
                del item  # while the next one is waited for
                if self._was_stopped():  # it may have been put behind the back of who emptied the queue
                    self._drain()
        except BaseException as error:  # whatever it is, it belongs to whoever waits for the item
            last.error = None if self.stopped else error
            end_workers(items)
        del items  # the loader's iterator, and its workers with it, before anyone hears of the end
        self._ready.put(last)
        del last  # the error's traceback has this frame

    def _prepared(self, item: Any) -> T:
        try:
            return self._prepare(item)
        except StopIteration as error:  # which would end the loop in silence
            raise RuntimeError("a batch raised StopIteration while it was prepared") from error

    def _was_stopped(self) -> bool:
        return self.stopped  # by another thread, at any moment

    def _drain(self) -> None:
        while True:
            try:
                item = self._ready.get_nowait()
            except Empty:
                return
            if not isinstance(item, Last):
                self._drop(item)


class _Taken(Iterator[Any]):
    """The items of a background, in order, for the thread of another one."""

    def __init__(self, source: Background[Any]) -> None:
        self._source = source

    def __next__(self) -> Any:
        taken = self._source.take(wait=True)
        if isinstance(taken, Last):
            if taken.error is None:
                raise StopIteration
            try:
                raise taken.error
            finally:
                del taken  # the error's traceback has this frame
        if self._source.stopped:  # nobody wants it any more
            self._source._drop(taken)
            raise StopIteration
        return taken


class Foreground(Generic[T]):
    """The same without a thread, for iterators that cost nothing: whoever takes an item prepares those ahead.

    Nothing is prepared beyond what is taken unless there is room for it, which `has_room` says at once.
    """

    def __init__(
        self,
        items: Iterator[Any],
        prepare: Callable[[Any], T],
        *,
        depth: int,
        has_room: Callable[[], bool],
    ) -> None:
        self.stopped = False
        self._items: Iterator[Any] | None = items
        self._prepare = prepare
        self._depth = depth
        self._has_room = has_room
        self._ready: deque[T | Last] = deque()

    def start(self) -> None:
        """There is nothing to begin."""

    def take(self, *, wait: bool) -> T | Last | None:
        """The next item, in order. After `Last`, no more."""
        while self._items is not None and len(self._ready) < self._depth:
            if self._ready and not self._has_room():
                break
            self._advance(self._items)
        return self._ready.popleft() if self._ready else Last()

    def _advance(self, items: Iterator[Any]) -> None:
        try:
            item = next(items)
        except Exception as error:  # for whoever takes the item that it is instead of
            self._items = None
            self._ready.append(Last(None if isinstance(error, StopIteration) else error))
            return
        try:
            self._ready.append(self._prepare(item))
        except Exception as error:
            self._items = None
            self._ready.append(Last(None if self.stopped else error))

    def stop(self) -> None:
        """Let the iterator go, and what was not taken."""
        self.stopped = True
        self._items = None
        self._ready.clear()

    def join(self, seconds: float | None = None) -> None:
        """There is no thread to wait for."""

    def close(self) -> None:
        """The same as `stop`."""
        self.stop()


def join_stopped(earlier: Iterable[Background[Any] | Foreground[Any]], seconds: float) -> None:
    """Wait, so long for all of them, until none that was stopped is in its source any more: that may be one
    which cannot be in two threads at a time.
    """
    end = time.monotonic() + seconds
    for one in earlier:
        if one.stopped:
            one.join(max(0.0, end - time.monotonic()))


def end_workers(items: Any) -> None:
    """Those of a `DataLoader`'s iterator after an error, whose traceback would keep both alive."""
    shut_down = getattr(items, "_shutdown_workers", None)
    if callable(shut_down) and not getattr(items, "_persistent_workers", False):
        with suppress(Exception):  # the error that there is must arrive
            shut_down()


def _surroundings() -> Callable[[], None]:
    """What torch keeps per thread and a loader may depend on, as it is here, to be set up elsewhere."""
    grad, device = torch.is_grad_enabled(), torch.get_default_device()
    n_threads = torch.get_num_threads()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call,unused-ignore]

    def set_up() -> None:
        torch.set_grad_enabled(grad)
        if (
            n_threads != torch.get_num_threads()
        ):  # a thread of a DataLoader that pins leaves 1 to all new ones
            torch.set_num_threads(n_threads)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        if device != torch.get_default_device():
            torch.set_default_device(device)

    return set_up
