"""Creating and opening the files of a disk table."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TypeAlias

from flatbed.errors import FlatbedError
from flatbed.tables.record import Record
from flatbed.tables.storage.base import Fill
from flatbed.tables.storage.disk.copy_pool import write_rows
from flatbed.tables.storage.disk.file import MappedFile, lock
from flatbed.tables.storage.disk.format import (
    RECORDS_AT,
    STATE_AT,
    Identity,
    State,
    encode_identity,
    encode_state,
)
from flatbed.tables.storage.disk.journal import Journal, read_sealed
from flatbed.tables.storage.disk.open_files import OpenFiles
from flatbed.tables.storage.disk.recovery import journal_of, recover

Opened: TypeAlias = tuple[OpenFiles, Identity, State]


def open_files(path: Path) -> Opened:
    """Lock a table's file and recover its last completed checkpoint."""
    if not path.exists():
        raise FlatbedError(f"there is no table at {path}; check the path, or create one")
    with ExitStack() as undo:
        descriptor = lock(path)
        undo.callback(os.close, descriptor)
        table = MappedFile(path)
        undo.callback(table.close)
        identity, state = recover(table)
        journal = Journal(journal_of(path), identity.table, nbytes=identity.record.nbytes)
        undo.pop_all()
    return OpenFiles(descriptor, table, journal), identity, state


def create_files(
    path: Path, record: Record, state: State, *, fill: Fill, replaces: str | None = None
) -> Opened:
    """Make a table's file, whose name appears when it is complete.

    `replaces` names the table whose open file it replaces.
    """
    if replaces is not None:
        identity = Identity(secrets.token_hex(16), record, replaces)
        return _build(path, identity, state, fill=fill, replace=True), identity, state
    if path.exists():
        raise _exists(path)
    identity = Identity(secrets.token_hex(16), record, _predecessor(path))
    files = _build(path, identity, state, fill=fill, replace=False)
    with suppress(FlatbedError):  # the predecessor's journal, ignored if it stays
        MappedFile.remove(files.journal.path)
    return files, identity, state


def _exists(path: Path) -> FlatbedError:
    return FlatbedError(f"{path} exists already: open it, choose another path, or delete it first")


def _predecessor(path: Path) -> str | None:
    """Name of the table that was at this path and has left a sealed journal."""
    journal = journal_of(path)
    if not journal.exists():
        return None
    with closing(MappedFile(journal)) as file:
        sealed = read_sealed(file)
    return None if sealed is None else sealed.table


def _build(path: Path, identity: Identity, state: State, *, fill: Fill, replace: bool) -> OpenFiles:
    """Write a whole table under a temporary name, then rename it."""
    first, second = encode_identity(identity), encode_state(state)
    draft = path.with_name(path.name + ".new")
    nbytes = identity.record.nbytes
    with ExitStack() as undo:
        descriptor = lock(draft, create=True)
        undo.callback(os.close, descriptor)
        undo.callback(MappedFile.remove, draft)
        table = MappedFile(draft)
        undo.callback(table.close)
        table.truncate(0)  # a killed process may have left a draft
        table.reserve(RECORDS_AT + state.n_rows * nbytes)
        table.write(0, first)
        table.write(STATE_AT, second)
        write_rows(table, identity.record, range(state.n_rows), fill=fill)
        table.sync()
        table.map(RECORDS_AT, nbytes, count=state.n_rows, random=True)
        if path.exists() and not replace:
            raise _exists(path)
        MappedFile.rename(draft, path)
        undo.pop_all()
        undo.callback(table.close)
        undo.callback(os.close, descriptor)
        table.path = path
        MappedFile.sync_folder(path.parent)
        undo.pop_all()
    return OpenFiles(descriptor, table, Journal(journal_of(path), identity.table, nbytes=nbytes))
