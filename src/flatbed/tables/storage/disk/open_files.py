"""The files of a disk table, opened and closed together: its lock, file, journal and threads.

Opening recovers the last completed checkpoint.
"""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from flatbed.cuda.streams import OrderedLock
from flatbed.errors import FlatbedError
from flatbed.progress import note
from flatbed.tables.storage.disk.format import Identity, State
from flatbed.tables.storage.disk.journal import Journal
from flatbed.tables.storage.disk.mapped_file import MappedFile, lock_table, open_for_lock
from flatbed.tables.storage.disk.recovery import SAVE_BEFORE, journal_of, recover
from flatbed.tables.workers import Workers


class OpenFiles:
    """The files of an open table. They are closed once, by `close`, at garbage collection or after a fork."""

    def __init__(self, held: FileIO, table: MappedFile, journal: Journal) -> None:
        self.table, self.journal = table, journal
        self.lock = OrderedLock("file")
        self.n_cached = 0
        """Upper bound of changed rows that only a cache has."""
        self.workers = Workers()
        self.writer = Workers(1)
        self._held: FileIO | None = held
        _ALL.add(self)

    @property
    def is_open(self) -> bool:
        """True until `close`, which a forked process calls as it begins."""
        return self._held is not None

    def check(self) -> None:
        """Raise if the table is closed."""
        if not self.is_open:
            raise FlatbedError(f"{self.table.path} is closed; open it again")

    def close(self, *, is_forked: bool = False) -> None:
        """Close everything; a second call does nothing. A forked process only closes its descriptors."""
        if self._held is None:
            return
        held, self._held = self._held, None
        try:  # at once: an interruption in between would keep the lock
            if not is_forked:
                self.workers.close()
                self.writer.close()
            self.journal.close(remove=not is_forked)
            self.table.close()
        finally:
            held.close()

    def close_forgotten(self) -> None:
        """Close a table at exit, or after it was garbage collected without `close`: changed rows are lost."""
        journal, about = self.journal, "up to " if self.n_cached else ""
        n_rows = min(journal.n_entries + self.n_cached, journal.n_rows)
        try:
            if self.is_open and n_rows and not journal.is_sealed:
                note(
                    f"{about}{n_rows} rows of {self.table.path} changed since its last checkpoint and are "
                    f"dropped. {SAVE_BEFORE}. table.close(discard=True) drops them in silence"
                )
        finally:
            self.close()


_ALL: weakref.WeakSet[OpenFiles] = weakref.WeakSet()


def _close_all_after_fork() -> None:
    """Close inherited descriptors: a forked process would keep the locks of its parent's tables with them."""
    for files in list(_ALL):
        files.lock = OrderedLock("file")  # a thread that is not in this process may hold the old one
        files.close(is_forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_after_fork)


# ---- opening

Opened: TypeAlias = tuple[OpenFiles, Identity, State]


def open_files(path: Path, *, forget: bool = False) -> Opened:
    """Lock a table's file and recover its last completed checkpoint."""
    if not path.exists():
        raise FlatbedError(f"there is no table at {path}; check the path, or create one")
    with ExitStack() as undo:
        held = undo.enter_context(open_for_lock(path))
        lock_table(held, path)  # not before: Control-C in `enter_context` would leave the lock taken
        table = MappedFile(path)
        undo.callback(table.close)
        identity, state = recover(table, forget=forget)
        files = OpenFiles(held, table, new_journal(table, identity, state))
        undo.pop_all()
    return files, identity, state


def forget_sums(path: Path) -> None:
    """Forget the checksums of a table's file: its rows are taken as they are until they change."""
    open_files(path, forget=True)[0].close()


def new_journal(table: MappedFile, identity: Identity, state: State) -> Journal:
    """Make the journal of an open table. Its file appears with the first change."""
    path, nbytes = journal_of(table.path), identity.record.nbytes
    return Journal(path, identity.table, n_rows=state.n_rows, nbytes=nbytes, mode=table.mode)
