"""Recovery: opening a table's file at its last completed checkpoint."""

from __future__ import annotations

import os
import warnings
from contextlib import closing, suppress
from pathlib import Path

from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.tables.storage.disk.checked_records import file_size, map_records
from flatbed.tables.storage.disk.format import Identity, State, read_header
from flatbed.tables.storage.disk.journal import Sealed, apply, read_sealed
from flatbed.tables.storage.disk.mapped_file import MappedFile

KEPT = ".kept-"  # and a number, after the name of a journal


def journal_of(path: Path) -> Path:
    """Return the path of a table's journal."""
    return path.with_name(path.name + ".journal")


def recover(table: MappedFile, token: str | None = None) -> tuple[Identity, State]:
    """Complete a sealed checkpoint or drop an unfinished one, and map the records.

    Everything is checked before anything is written. A sealed journal whose decision is another job's is
    renamed instead of dropped. A checkpoint with this `token` is known to be decided, also one of a journal
    that was renamed before.
    """
    path = table.path
    identity, state = read_header(table)
    journal, is_foreign = journal_of(path), False
    if state is not None and token is not None and not os.path.lexists(journal):
        kept = kept_journal(path, identity.table, base=state.word, token=token)
        if kept is not None:
            MappedFile.rename(kept[0], journal)
    if os.path.lexists(journal):
        with closing(MappedFile(journal)) as file:
            sealed = read_sealed(file)
            is_wanted = False if sealed is None else _wanted(path, identity, state, sealed, token)
            is_foreign = is_wanted is None
            if sealed is not None and is_wanted:
                _check_rows(journal, identity, sealed=sealed, file=file)
                _map_table(table, identity, sealed.state)
                table.fill_holes()
                assert file.rows is not None
                apply(table, file.rows, rows=sealed.rows, sums=sealed.sums, state=sealed.state)
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
    _map_table(table, identity, state)
    if is_foreign:
        _keep_aside(journal)
    elif os.path.lexists(journal):
        MappedFile.remove(journal)
        MappedFile.sync_folder(journal.parent)
    return identity, state


def kept_journal(path: Path, table: str, *, base: str, token: str) -> tuple[Path, Sealed] | None:
    """Find a sealed journal that was renamed, follows the checkpoint `base` and was prepared with `token`."""
    prefix = journal_of(path).name + KEPT
    for kept in sorted(other for other in path.parent.iterdir() if other.name.startswith(prefix)):
        with suppress(FlatbedError), closing(MappedFile(kept, read_only=True)) as file:
            sealed = read_sealed(file)
            decision = None if sealed is None else sealed.decision
            if sealed and decision and (sealed.table, sealed.base, decision.token) == (table, base, token):
                return kept, sealed
    return None


def _keep_aside(journal: Path) -> None:
    """Rename a sealed journal of which no file here says whether it counts."""
    number = 1
    while os.path.lexists(kept := journal.with_name(f"{journal.name}{KEPT}{number}")):
        number += 1
    MappedFile.rename(journal, kept)
    MappedFile.sync_folder(journal.parent)
    warnings.warn(
        f"{journal} holds a checkpoint that flatbed.save_checkpoint prepared, and its folder has another "
        f"one by now. The table is at the checkpoint before, and the journal is kept as {kept}: "
        f"flatbed.load_checkpoint takes it with the folder of that time; otherwise delete it",
        stacklevel=2,
    )


def _wanted(
    path: Path, identity: Identity, state: State | None, sealed: Sealed, token: str | None
) -> bool | None:
    """True if a sealed journal is to be applied, None if another job's decision speaks against it.

    A journal of another table, or of another time, is an error.
    """
    if sealed.table != identity.table:
        if sealed.table == identity.replaces:
            return False
        raise FlatbedError(f"{journal_of(path)} belongs to another table than {path}; move one of them away")
    new = sealed.state
    if state is None:
        return True  # torn, which happens only while a sealed journal is applied
    if (state.generation, state.word) == (new.generation, new.word):
        return True
    is_next = (state.generation + 1, state.word) == (new.generation, sealed.base)
    if is_next and not state.applying:
        decision = sealed.decision
        return decision is None or decision.token == token or decision.outcome(path)
    raise FlatbedError(
        f"{path} is at checkpoint {state.generation} ({state.word or 'unnamed'}), but {journal_of(path)} "
        f"holds checkpoint {new.generation} ({new.word or 'unnamed'}) after {sealed.base or 'an unnamed one'}"
        ": they were copied at different times; restore both from one copy, or remove the journal"
    )


def _check_rows(journal: Path, identity: Identity, *, sealed: Sealed, file: MappedFile) -> None:
    rows, n_rows = sealed.rows, sealed.state.n_rows
    if file.rows is None or file.rows.dtype.itemsize != identity.record.nbytes:
        raise DamagedFileError(
            f"{journal} holds records of another size than its table; restore both from a copy"
        )
    if len(rows) and (rows.min() < -1 or rows.max() >= n_rows):
        raise DamagedFileError(f"{journal} holds rows beyond the table's {n_rows}; restore both from a copy")


def _map_table(table: MappedFile, identity: Identity, state: State) -> None:
    nbytes = identity.record.nbytes
    longest = file_size(state.n_rows, nbytes)
    if table.size > longest:
        table.truncate(longest)  # space of rows that an interrupted resize has added
    map_records(table, state.n_rows, nbytes)
