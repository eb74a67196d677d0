"""What an open disk table must give back, also when it is forgotten or its process forks."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

from flatbed.errors import FlatbedError
from flatbed.rows.disk.file import MappedFile
from flatbed.rows.disk.journal import Journal
from flatbed.rows.disk.rows import Hands


class Held:
    """What a tier must give back: its lock, its file and its journal."""

    def __init__(self, descriptor: int, table: MappedFile, journal: Journal) -> None:
        self.table, self.journal = table, journal
        self.keep_journal = False
        self.readers, self.writers = Hands(), Hands()
        self._descriptor = descriptor
        self._process = os.getpid()
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


_ALL: weakref.WeakSet[Held] = weakref.WeakSet()


def _leave_all() -> None:
    for held in list(_ALL):
        held.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)
