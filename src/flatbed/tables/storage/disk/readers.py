"""Counts of threads that read a file."""

from __future__ import annotations

import threading


class Readers:
    """Threads that read a table's file without the storage's lock.

    A reader enters while it holds the lock. The thread that holds the lock and is about to change or close
    the file waits for all others to leave. Readers are counted by thread, so that a thread which was
    interrupted while leaving does not wait for itself.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._threads.discard(threading.get_ident())
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until no other thread reads."""
        me = {threading.get_ident()}
        with self._changed:
            self._changed.wait_for(lambda: self._threads <= me)
