"""Resources of one open disk table: its lock, file, journal and threads."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache

from flatbed.errors import FlatbedError
from flatbed.progress import note
from flatbed.tables.storage.disk.copy_pool import copy_threads
from flatbed.tables.storage.disk.file import MappedFile
from flatbed.tables.storage.disk.journal import Journal


class OpenFiles:
    """Closes everything once, in the process that opened it, also at garbage collection and after a fork."""

    def __init__(self, descriptor: int, table: MappedFile, journal: Journal) -> None:
        self.table, self.journal = table, journal
        self.keep_journal = False
        self.count_cached: Callable[[], int] = lambda: 0
        """Counts changed rows in a cache that the journal does not have yet."""
        self.pool = copy_threads()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="flatbed-disk-writer")
        self._lock_descriptor = descriptor
        self._process = os.getpid()
        self._has_told = False
        _ALL.add(self)

    def is_own_process(self) -> bool:
        """True if this is the process that opened the table."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raise if the table is closed, or if this is a forked process."""
        if not self.is_own_process():
            raise FlatbedError(
                f"{self.table.path} was opened by process {self._process}, and a forked process must not use "
                "it; look rows up in the process that opened the table"
            )
        if self._lock_descriptor < 0:
            raise FlatbedError(f"{self.table.path} is closed; open it again")

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        if self._lock_descriptor < 0 or not self.is_own_process():
            return
        descriptor, self._lock_descriptor = self._lock_descriptor, -1
        try:
            self.pool.shutdown(wait=False)
            self.writer.shutdown(wait=False)
            self.journal.close(remove=not self.keep_journal)
            self.table.close()
        finally:
            os.close(descriptor)

    def close_after_fork(self) -> None:
        """Close descriptors in a forked process: otherwise it would keep the lock of the parent's table."""
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1
            self.journal.close(remove=False)
            self.table.close()

    def close_forgotten(self) -> None:
        """Close a table that was garbage collected without `close`."""
        try:
            with suppress(UserWarning):  # raised as an error, it could not be caught here
                self.tell_unsaved("with the table, which was garbage collected", tell=warnings.warn)
        finally:
            self.close()

    def tell_unsaved(self, when: str, tell: Callable[[str], None] = note) -> None:
        """Tell, once, that changed rows are about to be lost."""
        if self._has_told or self._lock_descriptor < 0 or not self.is_own_process() or self.keep_journal:
            return
        self._has_told = True
        n_rows = self.journal.n_slots + self.count_cached()
        if n_rows:
            tell(
                f"{n_rows} rows of {self.table.path} changed since its last checkpoint and are dropped "
                f"{when}: call table.close(), table.checkpoint() or flatbed.save_checkpoint first, or "
                f"table.close(discard=True)"
            )


_ALL: weakref.WeakSet[OpenFiles] = weakref.WeakSet()
SECONDS_TO_TELL = 5.0  # at SIGTERM; a writer that takes longer is not waited for


@lru_cache(maxsize=1)
def tell_at_exit() -> None:
    """Tell of unsaved rows at exit, before weakref's handler finalizes tables, and at SIGTERM.

    A handler of the user's stays. One that is set later replaces this one.
    """
    atexit.register(_tell_all, "at exit")
    if threading.current_thread() is threading.main_thread() and _is_default():
        signal.signal(signal.SIGTERM, _terminate)


def _is_default() -> bool:
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _terminate(number: int, _: object) -> None:
    """Tell of unsaved rows, and end the process as SIGTERM does by default."""
    # In a thread: this one may hold a lock that the writer of a table waits for.
    thread = threading.Thread(target=_tell_all, args=("at SIGTERM",), daemon=True)
    thread.start()
    thread.join(SECONDS_TO_TELL)
    if signal.getsignal(number) is _terminate:  # otherwise another handler, which called this one, decides
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _tell_all(when: str) -> None:
    for files in list(_ALL):
        files.tell_unsaved(when)


def _close_all_after_fork() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for files in list(_ALL):
        files.close_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_after_fork)
