"""What an open disk table must give back, also when it is forgotten or its process forks."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

from flatbed.errors import FlatbedError
from flatbed.tables.storage.disk.copy_pool import CopyPool
from flatbed.tables.storage.disk.file import MappedFile
from flatbed.tables.storage.disk.journal import Journal


class Held:
    """What a tier must give back: its lock, its file and its journal."""

    def __init__(self, descriptor: int, table: MappedFile, journal: Journal) -> None:
        self.table, self.journal = table, journal
        self.keep_journal = False
        self.n_elsewhere: Callable[[], int] = lambda: 0
        """How many rows have changed beside those in the journal."""
        self.readers, self.writers, self.sender = CopyPool(), CopyPool(), CopyPool(1)
        self.collectors, self.senders = self.readers.unhurried(), self.writers.unhurried()
        self._descriptor = descriptor
        self._process = os.getpid()
        self._told = False
        _ALL.add(self)

    def here(self) -> bool:
        """Whether this is the process that opened the table."""
        return self._process == os.getpid()

    def check(self) -> None:
        """Raise unless the tier can be used, here."""
        if not self.here():
            raise FlatbedError(
                f"{self.table.path} was opened by process {self._process}, and a forked process must not use "
                "it; look rows up in the process that opened the table"
            )
        if self._descriptor < 0:
            raise FlatbedError(f"{self.table.path} is closed; open it again")

    def drop_journal(self) -> None:
        """Remove a journal that another table has left; left lying, it would do no harm."""
        with suppress(FlatbedError):
            MappedFile.remove(self.journal.path)

    def close(self) -> None:
        """Give everything back, once, in the process that took it."""
        if self._descriptor < 0 or not self.here():
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            self.readers.close()
            self.writers.close()
            self.sender.close()
            self.journal.close(remove=not self.keep_journal)
            self.table.close()
        finally:
            os.close(descriptor)

    def leave(self) -> None:
        """Let go in a forked process: else it would keep the lock when the process that forked has ended."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.journal.close(remove=False)
            self.table.close()

    def forgotten(self) -> None:
        """Nobody has the table any more, and nobody has closed it."""
        try:
            self.tell("with the table, which nobody has any more")
        finally:
            self.close()

    def tell(self, when: str = "at exit") -> None:
        """Warn, once, of what is about to be lost."""
        if self._told or self._descriptor < 0 or not self.here() or self.keep_journal:
            return
        n_rows = self.journal.n_slots + self.n_elsewhere()
        message = (
            f"{n_rows} rows of {self.table.path} changed since its last checkpoint and are dropped {when}: "
            f"call table.checkpoint() or flatbed.save_checkpoint first, or table.close(discard=True)"
        )
        self._told = True
        if n_rows:
            with suppress(UserWarning):  # where warnings are errors, there is nobody left to hear of one
                warnings.warn(message, stacklevel=2)


_ALL: weakref.WeakSet[Held] = weakref.WeakSet()


@lru_cache(maxsize=1)
def tell_at_exit() -> None:
    """Exit handlers run last come, first served: this one before those that close forgotten tables."""
    atexit.register(_tell_all)


def _tell_all() -> None:
    for held in list(_ALL):
        held.tell()


def _leave_all() -> None:
    for held in list(_ALL):
        held.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)
