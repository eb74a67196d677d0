"""Draft: the file of a new table, complete before it gets its name."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import ExitStack, closing
from io import FileIO
from pathlib import Path

from flatbed.errors import FlatbedError
from flatbed.tables.files import check_folder, file_errors, new_draft
from flatbed.tables.record import Record
from flatbed.tables.storage.base import Fill
from flatbed.tables.storage.disk.checked_records import file_size, map_records, write_rows, write_sums
from flatbed.tables.storage.disk.format import (
    STATE_AT,
    Identity,
    State,
    encode_identity,
    encode_state,
)
from flatbed.tables.storage.disk.journal import read_sealed
from flatbed.tables.storage.disk.mapped_file import MappedFile
from flatbed.tables.storage.disk.open_files import Opened, OpenFiles, new_journal
from flatbed.tables.storage.disk.recovery import journal_of


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
        files = OpenFiles(self._held, table, new_journal(table, self.identity, self.state))
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
