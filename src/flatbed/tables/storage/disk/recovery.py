"""Recovery of a table's file: completes or drops what a process has left in the journal."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.progress import note
from flatbed.tables.storage.disk.checked_records import file_size, has_sums, map_records, write_sums
from flatbed.tables.storage.disk.format import Identity, State, read_header
from flatbed.tables.storage.disk.journal import Sealed, apply, has_changes, read_sealed
from flatbed.tables.storage.disk.mapped_file import MappedFile

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
            if sealed is None:
                is_lost = has_changes(file, identity.table)
            elif not _is_wanted(path, identity, state, sealed):
                is_lost = sealed.table == identity.table and bool((sealed.rows >= 0).any())
            else:
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

    Raises for a journal of another table or of another time, and if it is unknown whether its save was
    completed.
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
