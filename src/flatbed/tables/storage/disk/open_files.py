"""Resources of one open disk table: its lock, file, journal and threads."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache

from flatbed.errors import FlatbedError
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
        self._has_warned = False
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
            self.warn_unsaved("with the table, which was garbage collected")
        finally:
            self.close()

    def warn_unsaved(self, when: str = "at exit") -> None:
        """Warn, once, of changed rows that are about to be lost."""
        if self._has_warned or self._lock_descriptor < 0 or not self.is_own_process() or self.keep_journal:
            return
        n_rows = self.journal.n_slots + self.count_cached()
        self._has_warned = True
        if n_rows:
            with suppress(UserWarning):  # raised as an error, it could not be caught here
                warnings.warn(
                    f"{n_rows} rows of {self.table.path} changed since its last checkpoint and are dropped "
                    f"{when}: call table.close(), table.checkpoint() or flatbed.save_checkpoint first, or "
                    f"table.close(discard=True)",
                    stacklevel=2,
                )


_ALL: weakref.WeakSet[OpenFiles] = weakref.WeakSet()


@lru_cache(maxsize=1)
def warn_at_exit() -> None:
    """Register the exit warning after weakref's handler, so that it runs before tables are finalized."""
    atexit.register(_warn_all)


def _warn_all() -> None:
    for files in list(_ALL):
        files.warn_unsaved()


def _close_all_after_fork() -> None:
    for files in list(_ALL):
        files.close_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_after_fork)
