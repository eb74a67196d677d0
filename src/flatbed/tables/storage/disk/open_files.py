"""The files of a disk table, opened and closed together: its lock, file, journal and threads.

Opening recovers the last completed checkpoint.
"""

from __future__ import annotations

import os
import secrets
import stat
import weakref
from contextlib import ExitStack, closing, suppress
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import numpy as np

from flatbed.cuda.streams import OrderedLock
from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.progress import note
from flatbed.tables.files import check_folder, file_errors, new_draft
from flatbed.tables.record import Record
from flatbed.tables.storage.base import Fill
from flatbed.tables.storage.disk.checked_records import (
    file_size,
    has_sums,
    map_records,
    write_rows,
    write_sums,
)
from flatbed.tables.storage.disk.format import (
    STATE_AT,
    Identity,
    State,
    encode_identity,
    encode_state,
    read_header,
)
from flatbed.tables.storage.disk.journal import Journal, Sealed, apply, has_changes, read_sealed
from flatbed.tables.storage.disk.mapped_file import MappedFile, lock_table, open_for_lock
from flatbed.tables.workers import Workers

# ---- recovery


SAVE_BEFORE = (
    "To keep such rows, save before the end: by flatbed.save_checkpoint if that saves this table, otherwise "
    "by table.close() or table.checkpoint()"
)


def journal_of(path: Path) -> Path:
    """Return the path of a table's journal."""
    return path.with_name(path.name + ".journal")


def recover(table: MappedFile, *, forget: bool = False) -> tuple[Identity, State]:
    """Complete a sealed checkpoint or drop an unfinished one, and map the records.

    Everything is checked before anything is written. A note tells of changed rows that are dropped. With
    `forget`, all rows lose their checksums.
    """
    path = table.path
    identity, state = read_header(table)
    journal, is_lost = journal_of(path), False
    if os.path.lexists(journal):
        with closing(MappedFile(journal)) as file:
            sealed = read_sealed(file)
            is_lost = sealed is None and has_changes(file, identity.table)
            if sealed is not None and _is_wanted(path, identity, state, sealed):
                _map_table(table, identity, sealed.state, forget=forget)
                table.fill_holes()
                apply(table, sealed)
                state = sealed.state
    if state is None:
        raise DamagedFileError(
            f"the header of {path} is damaged: its checksum or a value is wrong; restore the file from a copy"
        )
    if state.applying:
        raise FlatbedError(
            f"{path} was being changed when its process ended, and its journal {journal} is missing or "
            "damaged; put the journal back next to it, or restore the table from a copy"
        )
    _map_table(table, identity, state, forget=forget)
    if os.path.lexists(journal):
        MappedFile.remove(journal)
        MappedFile.sync_folder(journal.parent)
    if is_lost:
        note(
            f"rows of {path} changed after its last checkpoint and are dropped, since the process that "
            f"changed them ended without closing the table. {SAVE_BEFORE}"
        )
    return identity, state


def is_prepared(path: Path, token: str) -> bool:
    """Return whether the journal of a table has the checkpoint with this token."""
    with suppress(FlatbedError), closing(MappedFile(journal_of(path), read_only=True)) as file:
        sealed = read_sealed(file)
        return sealed is not None and sealed.state.meta.get("token") == token
    return False


def _is_wanted(path: Path, identity: Identity, state: State | None, sealed: Sealed) -> bool:
    """Return True to apply a sealed journal, False to drop it.

    Raises for a journal of another table or of another time, and if it is not known if it was decided.
    """
    journal = journal_of(path)
    if sealed.table == identity.replaces:
        return False
    if (sealed.table, sealed.records.itemsize) != (identity.table, identity.record.nbytes):
        raise FlatbedError(f"{journal} belongs to another table than {path}; move one of them away")
    new, decision = sealed.state, sealed.decision
    if state is None:
        return True  # the state is torn, which only happens while a sealed journal is applied
    if (state.generation, state.word) == (new.generation, new.word):
        return True
    if state.applying or (state.generation + 1, state.word) != (new.generation, sealed.base):
        raise FlatbedError(
            f"{path} is at checkpoint {state.generation} ({state.word}), but {journal} holds checkpoint "
            f"{new.generation} ({new.word}) after {sealed.base}: they were copied at different times; "
            "restore both from one copy, or remove the journal"
        )
    if decision is None:
        return True
    is_decided = decision.outcome(path)
    if is_decided is None:
        place = decision.beside(path)
        raise FlatbedError(
            f"{journal} holds a checkpoint that was being made, and {place}, which says whether it was "
            f"completed, is missing or of another time: put the folder of that time to {place.parent}, or "
            f"delete {journal} to go back to the checkpoint before"
        )
    return is_decided


def _map_table(table: MappedFile, identity: Identity, state: State, *, forget: bool) -> None:
    n_rows, nbytes = state.n_rows, identity.record.nbytes
    expected = file_size(n_rows, nbytes)
    if forget and table.size >= expected:
        write_sums(table, nbytes, np.zeros(n_rows, np.uint32))
    if table.size > expected and has_sums(table, n_rows, nbytes):
        table.truncate(expected)  # drop space of rows that a `resize` was about to add
    map_records(table, n_rows, nbytes)


# ---- open files


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


# ---- opening and creating

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
        files = OpenFiles(held, table, _journal(table, identity, state))
        undo.pop_all()
    return files, identity, state


def forget_sums(path: Path) -> None:
    """Forget the checksums of a table's file: its rows are taken as they are until they change."""
    open_files(path, forget=True)[0].close()


def _journal(table: MappedFile, identity: Identity, state: State) -> Journal:
    path, nbytes = journal_of(table.path), identity.record.nbytes
    return Journal(path, identity.table, n_rows=state.n_rows, nbytes=nbytes, mode=table.mode)


class Draft:
    """A complete file of a new table with a temporary name. `publish` renames it, `discard` removes it."""

    def __init__(
        self, path: Path, record: Record, state: State, *, fill: Fill, replaces: str | None = None
    ) -> None:
        """Write the file. `replaces`: name of the table whose open file it will replace."""
        self._is_replacing = replaces is not None
        if not self._is_replacing:
            if path.exists():
                raise _exists(path)
            _remove_stale_journal(path)
        check_folder(path)
        self.path, self.state = path, state
        self.identity = Identity(secrets.token_hex(16), record, replaces)
        first, second = encode_identity(self.identity), encode_state(state)
        mode = stat.S_IMODE(path.stat().st_mode) if self._is_replacing else None
        with ExitStack() as undo:
            with file_errors(path):
                draft, descriptor = new_draft(path)
            self._held = undo.enter_context(FileIO(descriptor, "r+"))
            undo.callback(MappedFile.remove, draft)
            self._table = table = MappedFile(draft, mode=mode)
            undo.callback(table.close)
            table.write(0, first)
            table.reserve(file_size(state.n_rows, record.nbytes))
            table.write(STATE_AT, second)
            sums = write_rows(table, record, range(state.n_rows), fill=fill)
            write_sums(table, record.nbytes, sums)
            map_records(table, state.n_rows, record.nbytes)
            self._undo = undo.pop_all()

    def discard(self) -> None:
        """Remove the file, unless it was published."""
        self._undo.close()

    def publish(self) -> Opened:
        """Give the file its name."""
        table = self._table
        with self._undo as undo:
            if not self._is_replacing and self.path.exists():
                raise _exists(self.path)
            MappedFile.rename(table.path, self.path)
            undo.pop_all()
            undo.callback(table.close)
            undo.callback(self._held.close)
            table.path = self.path
            MappedFile.sync_folder(self.path.parent)
            undo.pop_all()
        files = OpenFiles(self._held, table, _journal(table, self.identity, self.state))
        return files, self.identity, self.state


def _exists(path: Path) -> FlatbedError:
    return FlatbedError(
        f"{path} exists already, and did not when this table was built: another table or program has "
        f"made it. Give every table a path of its own"
    )


def _remove_stale_journal(path: Path) -> None:
    """Remove the journal of a table whose file was deleted or moved.

    Raises if it has a checkpoint, or if another kind of file has its name.
    """
    journal = journal_of(path)
    if not os.path.lexists(journal):
        return
    with closing(MappedFile(journal)) as file:
        if read_sealed(file) is not None:
            raise FlatbedError(
                f"{journal} holds a checkpoint of a table that is not here: put its file back, or delete "
                f"{journal} to make a new table at {path}"
            )
    MappedFile.remove(journal)
    MappedFile.sync_folder(journal.parent)
