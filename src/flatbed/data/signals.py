"""Signals while a `DataLoader` makes its workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import DataLoader

T = TypeVar("T")


def signals_later(function: Callable[[Any], T], argument: Any) -> T:
    """Call a function. Signals that come while a `DataLoader` makes its workers are handled at the end.

    Python drops the error of a handler in functions that run at a fork: the signal is lost, and the lock of
    `logging` stays taken, for which a loader thread would wait forever. Between two forks, an error may leave
    the lock of a worker's queue taken, or a worker that no one tells to end: the exit of Python then hangs.

    At other times, and in workers, signals are handled at once. SIGTERM ends a worker that has just begun.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(argument)  # handlers run in the main thread
    process, is_over, waiting = os.getpid(), False, set[int]()
    handlers: dict[int, Any] = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}

    def wait(number: int, frame: FrameType | None) -> None:
        is_worker = os.getpid() != process
        if is_worker and number == signal.SIGTERM:
            os._exit(0)  # as torch's handler does later: the exit of the parent waits for this process
        elif not is_worker and not is_over and _makes_workers(frame):
            waiting.add(number)
        else:
            set_back(number)
            before[number](number, frame)

    def set_back(number: int) -> None:
        if signal.getsignal(number) is wait:  # torch sets a handler of SIGCHLD, which calls the one before
            signal.signal(number, before[number])

    def raise_waiting() -> None:
        if waiting:
            try:
                signal.raise_signal(waiting.pop())
            finally:
                raise_waiting()

    try:
        for number in before:
            signal.signal(number, wait)
        return function(argument)  # no local variable: it would keep the workers if a handler raises
    finally:
        is_over = True  # first, since an error of a handler ends the loop below
        try:
            for number in before:
                set_back(number)
        finally:
            raise_waiting()


def _makes_workers(frame: FrameType | None) -> bool:
    """Return True if the iterator of a `DataLoader` is being made in a frame or its callers."""
    while frame is not None and frame.f_code is not DataLoader._get_iterator.__code__:
        frame = frame.f_back
    return frame is not None
