"""Rows of a disk table that changed since its last checkpoint, in a file next to it.

    [seal: one page] [entries: a record each] [rows of the entries: int64 each] [state and decision: JSON]

Without a seal, recovery drops the file. The first page then has the name of the table if rows have changed
since the last checkpoint, and is zero otherwise. With a durable seal, the file *is* the next checkpoint, and
copying it to the table can be repeated.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatbed.cuda.host_memory import available_bytes
from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.progress import progress
from flatbed.tables.files import NoSpace, read_small
from flatbed.tables.storage.disk.checked_records import (
    MEMORY_PART,
    SUMMED_PART,
    row_sums,
)
from flatbed.tables.storage.disk.format import (
    JOURNAL,
    PAGE,
    RECORDS_AT,
    STATE_AT,
    OtherVersion,
    State,
    decode,
    dump,
    encode,
    encode_state,
    load,
    state_of,
)
from flatbed.tables.storage.disk.mapped_file import MappedFile, Records, Sums, anonymous
from flatbed.tables.workers import Workers, split

ENTRIES_AT = PAGE
SEALED_ROOM = 2 * RECORDS_AT  # bytes of JSON: a state, and the path of a decision
DECISION_LIMIT = 1 << 20
LARGE = 16 << 20  # at least this many bytes of entries are mapped in large pages, which save time then
CHUNK = 32 << 20  # bytes of records that are copied to the table at a time
CACHED = 512 << 10  # bytes that stay in a core's cache while they are copied
MOST_ENTRIES = 2**31 - 2  # the entry map counts them in int32


@dataclass(frozen=True, slots=True)
class Decision:
    """A JSON file that says by its token whether a checkpoint of several files was completed."""

    path: str
    token: str
    relative: str
    """The path from the table's folder, which a copy of table and decision keeps."""
    before: str | None
    """Token in the file when the checkpoint was prepared."""

    @staticmethod
    def of(path: str | Path, token: str, *, table: Path) -> Decision:
        """Describe a decision that is to be made."""
        path = os.path.abspath(path)
        before = token_in(Path(path)) if os.path.isdir(os.path.dirname(path)) else None
        return Decision(path, token, os.path.relpath(path, table.parent), before)

    def beside(self, table: Path) -> Path:
        """Return where the file is as seen from a table, which may be a copy."""
        return Path(os.path.normpath(table.parent / self.relative))

    def outcome(self, table: Path) -> bool | None:
        """Return True if the checkpoint was completed, False if it was not, and None if this is not known.

        - True: a decision file holds the token.
        - False: the file next to the table still holds the token before. Before the first save into a folder,
          there is no token: then the folder must have the version that the killed save was writing.
        - None: the file next to the table is missing or belongs to another job. Or the table is a copy, and
          the file of the original does not hold the token.

        Raises if a file cannot be read.
        """
        beside = self.beside(table)
        places = [place for place in (beside, Path(self.path)) if place.parent.is_dir()]
        if not places:
            raise FlatbedError(
                f"a checkpoint was being made, and the folder of {self.path}, which says whether it was "
                f"completed, is missing: put it back (or mount it), or to {self.relative} as seen from the "
                f"table's folder. If it is lost, close the table, and delete its journal to go back to the "
                f"checkpoint before"
            )
        for place in places:
            found = token_in(place)
            if found == self.token:
                return True
            if place == beside and found == self.before:
                versions = (one.name for one in place.parent.iterdir() if one.is_dir())
                if found is not None or any(name.endswith(self.token[:8]) for name in versions):
                    return False
        return None


def token_in(path: Path) -> str | None:
    """Read the token of a decision; None if there is no such file."""
    try:
        found = load(read_small(path, DECISION_LIMIT))["token"]
        if not isinstance(found, str):
            raise DamagedFileError("its token is no string")
    except FileNotFoundError:
        return None
    except (OSError, KeyError, DamagedFileError) as error:
        raise DamagedFileError(
            f"a checkpoint was being made, and {path}, which says whether it was completed, cannot be read "
            f"({error}); restore that file, or delete the table's journal to go back to the checkpoint before"
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class Sealed:
    """Contents of a sealed journal."""

    table: str
    state: State
    base: str
    """Word of the checkpoint before: the rows have changed since."""
    decision: Decision | None
    rows: NDArray[np.int64]
    """The row of each entry; -1 for an entry without a row."""
    records: Records
    sums: Sums


class Journal:
    """Changed rows and their records."""

    def __init__(self, path: Path, table: str, *, n_rows: int, nbytes: int, mode: Callable[[], int]) -> None:
        self.path, self.table, self.n_rows, self.nbytes = path, table, n_rows, nbytes
        self._mode = mode  # returns the present mode of the table's file
        self.n_entries = 0
        self.is_sealed = False  # True from just before the seal is written until `unseal` has completed
        self._n_lost = 0  # entries that no row refers to, after an interruption
        self._capacity = -1
        self.file: MappedFile | None = None
        self._is_named = False  # the file's name is durable
        self._is_marked = False  # the first page says that rows have changed, or are about to
        self._entry_of_row: NDArray[np.int32] | None = None  # counted from 1: 0 is "not changed"
        self._row_of_entry: NDArray[np.int64] = np.empty(0, np.int64)
        self._sums: Sums = np.empty(0, np.uint32)  # checksums of the entries' records; 0: not known

    @property
    def records(self) -> Records:
        """Records of all entries."""
        if self.file is None or self.file.rows is None:
            return np.empty(0, f"V{self.nbytes}")
        return self.file.rows

    def entries(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the entries of rows, -1 for a row without one."""
        if self._entry_of_row is None or not self.n_entries:
            return np.full(len(ids), -1, np.int32)
        entries: NDArray[np.int32] = self._entry_of_row[ids] - np.int32(1)
        return entries

    def count_missing(self, ids: NDArray[np.int64]) -> int:
        """Count rows without an entry."""
        return int((self.entries(ids) < 0).sum())

    def has_room(self, n_others: int) -> bool:
        """Return whether any `n_others` more rows can change without a `make_room`. Needs no lock."""
        needed = min(self.n_entries + n_others, self.n_rows + self._n_lost)
        return self._is_marked and needed <= self._capacity

    def put(
        self, ids: NDArray[np.int64], records: Records, workers: Workers, sums: Sums | None = None
    ) -> None:
        """Replace the records of unique rows; after an error for lack of space, nothing has changed.

        `sums`: the checksums of the records, if they are known.
        """
        if self._entry_of_row is None:
            self._entry_of_row = anonymous(self.n_rows)
        entries = self._entry_of_row[ids].astype(np.int64) - 1
        fresh = np.flatnonzero(entries < 0)
        after = self.n_entries + len(fresh)
        self._grow(after)
        self._mark(is_changed=True)
        entries[fresh] = np.arange(self.n_entries, after)
        # An interruption between these lines leaves entries that no row refers to; `seal` skips them.
        self._n_lost += len(fresh)
        self._row_of_entry[self.n_entries : after] = ids[fresh]
        self.n_entries = after
        self._copy(entries, records, workers, sums)
        self._entry_of_row[ids[fresh]] = entries[fresh] + 1
        self._n_lost -= len(fresh)

    def _copy(
        self, entries: NDArray[np.int64], records: Records, workers: Workers, sums: Sums | None
    ) -> None:
        """Write records, and compute their checksums, if needed, while they are in a core's cache."""
        file = self.file
        assert file is not None
        self._sums[entries] = 0  # not known until the copy has ended: it may be interrupted

        def copy(part: slice) -> None:
            file.scatter(entries[part], records[part])
            self._sums[entries[part]] = row_sums(records[part]) if sums is None else sums[part]

        part_bytes = SUMMED_PART if sums is None else MEMORY_PART
        split(workers, copy, len(entries), n_parts=records.nbytes // part_bytes)

    def make_room(self, ids: NDArray[np.int64], *, also: int) -> None:
        """Reserve space for the records of these rows, and of at most `also` other rows without an entry."""
        needed = self.n_entries + self.count_missing(ids) + also
        self._grow(min(needed, self.n_rows + self._n_lost))
        self._mark(is_changed=needed > 0)

    def _mark(self, *, is_changed: bool) -> None:
        """Write a first page without a seal. It says if rows have changed, or are about to."""
        if self.is_sealed or is_changed != self._is_marked:
            assert self.file is not None
            name = bytes(len(JOURNAL)) + self.table.encode() if is_changed else b""
            self.file.write(0, name.ljust(PAGE, b"\0"))  # all of it: no part of an old seal may stay
            self._is_marked = is_changed

    def _grow(self, needed: int) -> None:
        """Reserve space for `needed` entries and their seal; for twice as many as now if there is room."""
        if needed <= self._capacity:
            return
        if needed > MOST_ENTRIES:
            raise FlatbedError(f"{needed} rows changed since the last checkpoint; make one before going on")
        if self.file is None:
            with suppress(FileNotFoundError):
                if self.path.lstat().st_size == 0:  # left by an interruption of `MappedFile` below
                    MappedFile.remove(self.path)
            self.file, self._is_named = MappedFile(self.path, create=True, mode=self._mode()), False
        file, twice = self.file, max(2 * self._capacity, (1 << 20) // self.nbytes)
        capacity = max(needed, min(twice, self.n_rows, MOST_ENTRIES))
        try:
            file.reserve(self._size(capacity))
        except NoSpace:
            capacity = needed
            file.reserve(self._size(capacity))
        rows, sums = np.empty(capacity, np.int64), np.zeros(capacity, np.uint32)
        rows[: self.n_entries] = self._row_of_entry[: self.n_entries]
        sums[: self.n_entries] = self._sums[: self.n_entries]
        # Entries fill the file in order. In pages of 2 MB, writing and syncing them takes half the time.
        large = LARGE <= capacity * self.nbytes <= available_bytes() // 4
        file.map(ENTRIES_AT, self.nbytes, count=capacity, large_pages=large)
        self._row_of_entry, self._sums, self._capacity = rows, sums, capacity

    def _size(self, n_entries: int) -> int:
        return index_at(n_entries, self.nbytes) + 8 * n_entries + SEALED_ROOM

    def seal(self, state: State, decision: Decision | None, *, base: str) -> Sealed:
        """Make all entries the checkpoint `state`, durably. `base` is the word of the checkpoint before."""
        encode_state(state)  # raises if it will not fit into the table's header
        self._grow(self.n_entries)
        file = self.file
        assert file is not None
        file.check_name()
        path, token, relative, before = (None,) * 4 if decision is None else astuple(decision)
        names = {"decision": path, "token": token, "relative": relative, "before": before}
        about = dump({"state": asdict(state), "base": base, **names})
        if len(about) > SEALED_ROOM:
            raise ValueError(f"the path of a decision is too long: {len(about)} bytes in the journal")
        if not self._is_named:  # otherwise a sealed journal might have no name after a loss of power
            MappedFile.sync_folder(self.path.parent)
            self._is_named = True
        rows, sums = self._rows(), self._known_sums()
        rest = rows.tobytes() + about
        file.write(index_at(self.n_entries, self.nbytes), rest)
        seal = {
            "table": self.table,
            "nbytes": self.nbytes,
            "n_slots": self.n_entries,
            "sealed": len(about),
            "digest": _digest(sums, rest),
        }
        self.is_sealed = True
        file.write(0, encode(JOURNAL, seal, PAGE).ljust(PAGE, b"\0"))
        file.sync()
        return Sealed(self.table, state, base, decision, rows, self.records, sums)

    def _rows(self) -> NDArray[np.int64]:
        """Return the changed rows in the order of their entries; -1 for an entry without a row."""
        rows: NDArray[np.int64] = self._row_of_entry[: self.n_entries].copy()
        if self._entry_of_row is not None:
            rows[self._entry_of_row[rows] != np.arange(1, self.n_entries + 1)] = -1
        return rows

    def _known_sums(self) -> Sums:
        """Return the checksums of all entries. Those that an interrupted copy left unknown are computed."""
        sums = self._sums[: self.n_entries]
        unknown = np.flatnonzero(sums == 0)
        sums[unknown] = row_sums(self.records[unknown])
        return sums

    def unseal(self, *, durably: bool) -> None:
        """Remove the seal.

        A seal that reappears after a loss of power is harmless once its records are in the table. If the
        entries are unchanged, they are copied again. Otherwise the checksum of the seal is wrong.
        """
        if self.is_sealed:
            self._mark(is_changed=self.n_entries > 0)
            if durably:
                assert self.file is not None
                self.file.sync()
            self.is_sealed = False

    def clear(self, n_rows: int) -> None:
        """Forget all changed rows of a table, which has `n_rows` rows now. The file keeps its space."""
        if self._entry_of_row is not None and n_rows == self.n_rows:
            self._entry_of_row[self._row_of_entry[: self.n_entries]] = 0
        else:
            self._entry_of_row = None
        self.n_rows, self.n_entries, self._n_lost = n_rows, 0, 0

    def close(self, *, remove: bool) -> None:
        """Release memory and file. A sealed journal is not removed."""
        file, self.file, self._entry_of_row, self.n_entries = self.file, None, None, 0
        if file is not None:
            file.close()
            if remove and not self.is_sealed:
                with suppress(FlatbedError):  # recovery drops a file without a seal
                    MappedFile.remove(self.path)


def index_at(n_entries: int, nbytes: int) -> int:
    """Return the offset of the rows of the entries."""
    return -(-(ENTRIES_AT + n_entries * nbytes) // PAGE) * PAGE


def _digest(sums: Sums, rest: bytes) -> str:
    """Hash the checksums of all entries, and what follows the entries in the file."""
    return hashlib.sha256(sums.tobytes() + rest).hexdigest()


def _first_page(file: MappedFile) -> bytes:
    page = np.zeros(PAGE, np.uint8)
    file.read(0, page)
    return page.tobytes()


def has_changes(file: MappedFile, table: str) -> bool:
    """Return whether rows of a table have changed, given its journal without a complete seal."""
    return table.encode() in _first_page(file)


def read_sealed(file: MappedFile) -> Sealed | None:
    """Read a journal and map its entries; None without a complete seal."""
    page = _first_page(file)
    magic = page[: len(JOURNAL)]
    if not any(magic):
        return None
    if magic != JOURNAL:
        raise FlatbedError(f"{file.path} is no journal of a table, but has the name of one; move it away")
    try:
        return _sealed(file, decode(magic, page))
    except OtherVersion as error:
        raise FlatbedError(
            f"cannot use {file.path}: {error}; open the table with that flatbed once"
        ) from None
    except (KeyError, TypeError, ValueError, OverflowError, DamagedFileError):
        return None


def _sealed(file: MappedFile, seal: dict[str, Any]) -> Sealed:
    n_entries, nbytes, length = (int(seal[name]) for name in ("n_slots", "nbytes", "sealed"))
    at, n_bytes = index_at(n_entries, nbytes), 8 * n_entries + length
    if min(n_entries, nbytes - 1, length) < 0 or at + n_bytes > file.size:
        raise DamagedFileError("it is shorter than its seal says")
    rest = np.empty(n_bytes, np.uint8)
    file.read(at, rest)
    records = file.map(ENTRIES_AT, nbytes, count=n_entries)
    sums = row_sums(records)
    if _digest(sums, rest.tobytes()) != seal["digest"]:
        raise DamagedFileError("its checksum is wrong")
    rows, sealed = rest[: 8 * n_entries].view(np.int64), load(rest[8 * n_entries :].tobytes())
    parts: list[Any] = [sealed[name] for name in ("decision", "token", "relative", "before")]
    is_whole = all(isinstance(part, str) for part in parts[:3]) and isinstance(parts[3], str | None)
    if parts[0] is not None and not is_whole:
        raise DamagedFileError("its decision is no string")
    decision, state = None if parts[0] is None else Decision(*parts), state_of(sealed["state"])
    if len(rows) and (rows.min() < -1 or rows.max() >= state.n_rows):
        raise DamagedFileError("its rows are out of range")
    return Sealed(str(seal["table"]), state, str(sealed["base"]), decision, rows, records, sums)


def apply(table: MappedFile, sealed: Sealed) -> None:
    """Copy sealed records, their checksums and the state to the table. Repeat it after an interruption."""
    rows, records, state = sealed.rows, sealed.records, sealed.state
    # `applying` is written before the first record changes. Otherwise a half-changed table whose decision or
    # journal is missing would look like the checkpoint before.
    table.write(STATE_AT, encode_state(replace(state, applying=True)))
    table.sync()
    order = np.argsort(rows, kind="stable")
    order = order[np.searchsorted(rows, 0, sorter=order) :]
    step, at_once = (max(1, nbytes // records.dtype.itemsize) for nbytes in (CHUNK, CACHED))

    def copy(part: slice) -> None:
        buffer = np.empty(at_once, records.dtype)
        for start in range(part.start, min(part.stop, len(some)), at_once):
            entries = some[start : min(start + at_once, part.stop)]
            copied = np.take(records, entries, out=buffer[: len(entries)], mode="clip")
            table.scatter(rows[entries], copied)

    with closing(Workers()) as workers, progress(f"saving {table.path.name}", len(order), "rows") as advance:
        for start in range(0, len(order), step):
            some = order[start : start + step]
            split(workers, copy, len(some), n_parts=len(some) * records.dtype.itemsize // MEMORY_PART)
            table.scatter_sums(rows[some], sealed.sums[some])
            advance(len(some))
    table.write(STATE_AT, encode_state(state))
    table.sync()
