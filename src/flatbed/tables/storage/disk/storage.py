"""Records in a file: tables larger than memory, with checkpoints that a crash cannot tear."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.tables.files import NotSynced
from flatbed.tables.record import Record
from flatbed.tables.storage.base import CPU, Fill
from flatbed.tables.storage.disk.checked_records import (
    as_records,
    check_rows,
    drop_sums,
    file_size,
    replace_sums,
    rows_of,
    take,
    write_rows,
)
from flatbed.tables.storage.disk.draft import Draft
from flatbed.tables.storage.disk.format import RECORDS_AT, Identity, State, normal
from flatbed.tables.storage.disk.journal import Decision, Sealed, apply
from flatbed.tables.storage.disk.mapped_file import MappedFile, Sums
from flatbed.tables.storage.disk.open_files import OpenFiles, open_files
from flatbed.tables.workers import Call

T = TypeVar("T")
Meta = Mapping[str, Any]
UNKNOWN = "the last checkpoint failed, and what of it is on the disk is not known"
REMEDY = (
    "Save the rows to another disk (table.save), and open the table again (after table.close(discard=True)): "
    "it has this checkpoint or the one before, whole"
)


class DiskStorage:
    """Records of a table in a file, with changed rows in a journal next to it.

    The file changes while a checkpoint is copied to it, and in `resize`. Rows changed since are in
    `PATH.journal`; `close` and a crash drop them. File and journal together always hold the last durable
    checkpoint, whole.
    """

    device = CPU
    memory: Tensor | None = None
    reach: torch.device | None = None

    def __init__(self, files: OpenFiles, identity: Identity, state: State) -> None:
        """Use `create` or `open`."""
        self.record, self.n_rows, self.path = identity.record, state.n_rows, files.table.path
        self._state = state
        self._files = files
        self._readers: set[int] = set()  # threads that read the file without the lock
        self._sealed: Sealed | None = None  # the next checkpoint, durable, and not yet in the table
        self._is_held = False  # between `prepare` and `release`, rows cannot change
        self._broken: str | None = None
        self._finalizer = weakref.finalize(self, OpenFiles.close_forgotten, files)

    # ---- files

    @classmethod
    def create(
        cls, path: str | Path, record: Record, n_rows: int, *, fill: Fill, meta: Meta | None = None
    ) -> DiskStorage:
        """Create a table's file. It gets its name when it is complete."""
        path, state = Path(os.path.realpath(path)), State(n_rows, 0, normal(meta), word=secrets.token_hex(8))
        made = cls(*Draft(path, record, state, fill=fill).publish())
        made._files.table.checked = None  # this process has written all rows itself
        return made

    @classmethod
    def open(cls, path: str | Path) -> DiskStorage:
        """Open a table's file as its last completed checkpoint left it."""
        return cls(*open_files(Path(os.path.realpath(path))))

    def close(self) -> None:
        """Close the file. Rows changed since the last checkpoint are lost; a second call does nothing."""
        if self._files.is_open:
            with self._files.lock:
                self._wait_for_readers()
                self._files.close()

    def check(self) -> None:
        self._files.check()

    def check_name(self) -> None:
        """Raise if the file was removed, renamed or replaced since it was opened; not if it was closed."""
        if self._files.is_open:
            self._files.table.check_name()

    def serves(self, device: torch.device) -> bool:
        """Return True: rows are copied to any device."""
        return True

    # ---- present checkpoints

    @property
    def meta(self) -> dict[str, Any]:
        """The `meta` of the last completed checkpoint."""
        return normal(self._state.meta)

    def meta_of(self, token: str) -> dict[str, Any] | None:
        """Return the `meta` of the checkpoint with this token: the last, or a prepared one."""
        sealed = [] if self._sealed is None else [self._sealed.state]
        for state in (self._state, *sealed):
            if state.meta.get("token") == token:
                return normal(state.meta)
        return None

    @property
    def generation(self) -> int:
        """Number of checkpoints completed since the file was made."""
        return self._state.generation

    @property
    def unsaved_rows(self) -> int:
        """Rows in the journal: those that changed since the last checkpoint, but for changes in a cache."""
        return self._files.journal.n_entries

    def count_unsaved(self, cached: Tensor) -> int:
        """Count rows that changed since the last checkpoint: `cached` ones, and those in the journal."""
        return self.unsaved_rows + self._files.journal.count_missing(rows_of(cached, self.n_rows))

    # ---- rows

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        out = torch.empty((ids.numel(), nbytes or self.record.nbytes), dtype=torch.uint8, device=CPU)
        order = self.collect(ids, out)
        if (np.diff(order) > 0).all():
            return out
        return out.index_select(0, torch.from_numpy(order.argsort()))

    def collect(self, ids: Tensor, into: Tensor) -> NDArray[np.int64]:
        """Copy records, or their first bytes, in the fastest order; return that order as positions in `ids`.

        Records in the journal come first, then those in the file. The file is read without the lock, since a
        disk is slow.
        """
        out, workers, thread = as_records(into.numpy()), self._files.workers, get_ident()
        try:
            with self._files.lock:
                self._begin()
                rows = rows_of(ids, self.n_rows)
                journal, table, records = self._files.journal, self._files.table, self._files.table.rows
                entries = journal.entries(rows)
                changed, others = np.flatnonzero(entries >= 0), np.flatnonzero(entries < 0)
                if journal.file is not None:
                    take(journal.records, entries[changed], out[: len(changed)], workers, journal.file)
                assert records is not None
                self._readers.add(thread)
            take(records, rows[others], out[len(changed) :], workers, table)
            check_rows(table, rows[others], workers)  # after the copy, which has read the pages in parallel
        finally:
            # Not by a context manager: Ctrl-C in its exit could leave the thread registered.
            self._readers.discard(thread)
        return np.concatenate((changed, others))

    def _wait_for_readers(self) -> None:
        """Wait until no other thread reads the file. The caller holds the lock, so none begins to read."""
        while self._readers - {get_ident()}:
            time.sleep(0.001)

    def scatter_(self, ids: Tensor, records: Tensor, sums: Tensor | None = None) -> None:
        """Replace the records of rows; they reach the file with the next checkpoint.

        `sums`: their checksums, if they are known (`device_row_sums`).
        """
        with self._files.lock:
            self._begin(change=ids.numel() > 0)
            rows = rows_of(ids, self.n_rows)
            if len(rows):
                given = as_records(records.detach().cpu().contiguous().numpy())
                known = None if sums is None else sums.numpy().astype(np.uint32)
                self._files.journal.put(rows, given, self._files.workers, known)

    def submit(self, function: Callable[..., T], *args: Any, in_order: bool = False) -> Call[T]:
        """Run a function in a thread that copies rows; `in_order`: in the writing thread, in call order."""
        self._files.check()
        call = Call(function, *args)
        (self._files.writer if in_order else self._files.workers).submit(call)
        return call

    def expect_changes(self, n_rows: int) -> None:
        """Include at most `n_rows` changed rows of a cache, which the journal lacks, in the note at exit."""
        self._files.n_cached = n_rows

    def has_room(self, n_rows: int) -> bool:
        """Return whether any `n_rows` rows can certainly change. Takes no lock; see `make_room`."""
        self._files.check()
        journal = self._files.journal
        return self._broken is None and not journal.is_sealed and journal.has_room(n_rows)

    def make_room(self, ids: Tensor, *, also: int = 0) -> None:
        """Reserve disk space for changes of these rows and of `also` others, or raise."""
        with self._files.lock:
            self._begin(change=True)
            self._files.journal.make_room(rows_of(ids, self.n_rows), also=also)

    def read(self, start: int, stop: int) -> Tensor:
        with self._files.lock:
            self._begin()
            out = np.empty((stop - start, self.record.nbytes), np.uint8)
            # Not through the mapping, which is advised for random rows and reads nothing ahead.
            if self._files.table.read(RECORDS_AT + start * self.record.nbytes, out) < out.nbytes:
                raise FlatbedError(f"{self.path} was cut short while it was open; restore it from a copy")
            rows = np.arange(start, stop)
            entries = self._files.journal.entries(rows)
            check_rows(self._files.table, rows[entries < 0], self._files.workers)
            changed = entries >= 0
            as_records(out)[changed] = self._files.journal.records[entries[changed]]
        return torch.from_numpy(out)

    def write_(self, start: int, records: Tensor) -> None:
        self.scatter_(torch.arange(start, start + len(records), device=self.device), records)

    # ---- new checkpoints

    def checkpoint(self, meta: Meta | None = None) -> None:
        """Make all rows as they are now, and `meta`, durable. Without `meta`, the last one stays.

        When this returns, they survive a loss of power. After a crash before that, the table has this
        checkpoint or the one before, whole.
        """
        with self._files.lock:
            self._begin(change=True)
            self._seal(self._next(meta), None)
            self.commit()

    def prepare(self, meta: Meta | None = None, *, decision: str | Path, token: str) -> None:
        """Make the next checkpoint durable in the journal. No row can change until `release` or `commit`.

        After a crash, the new checkpoint holds if the JSON file `decision` has this token
        (`{"token": ...}`); otherwise the one before does. Write that file atomically.
        """
        self.release()
        with self._files.lock:
            self._begin(change=True)
            self._seal(self._next(meta), Decision.of(decision, token, table=self.path))
            self._is_held = True

    def release(self) -> None:
        """Let rows change again. The next change commits a prepared checkpoint if its decision was made."""
        self._is_held = False

    def settle(self) -> None:
        """Complete or drop a checkpoint that was prepared, as the next change would."""
        if self._files.journal.is_sealed:
            with self._files.lock:
                self._begin(change=True)

    def _begin(self, *, change: bool = False) -> None:
        """Check that the files are open. Before a change, complete or drop an interrupted checkpoint.

        The caller holds the lock. This is not a context manager that takes it, since Ctrl-C in the manager's
        exit could leave the lock taken.
        """
        self._files.check()
        if not change:
            return
        if self._broken is not None:
            raise FlatbedError(f"{self.path} cannot be changed: {self._broken}. {REMEDY}")
        if not self._files.journal.is_sealed:
            return
        if self._is_held:
            raise FlatbedError(f"{self.path} cannot change while flatbed.save_checkpoint saves it")
        decision = None if self._sealed is None else self._sealed.decision
        if self._sealed is None or (decision is not None and not decision.outcome(self.path)):
            self._unseal()
            return
        if decision is not None:
            MappedFile.sync_folder(Path(decision.path).parent)  # a killed save may not have synced it
        self.commit()

    def commit(self) -> None:
        """Complete a prepared checkpoint. After an interruption, call it again."""
        with self._files.lock:
            self._begin()
            assert self._sealed is not None, "call prepare first"
            journal = self._files.journal
            self._wait_for_readers()
            self._sealed = sealed = replace(self._sealed, decision=None)  # it is decided
            try:
                apply(self._files.table, sealed)
            except NotSynced as error:
                raise NotSynced(
                    f"{error}. This checkpoint is whole in {journal.path}, which must stay beside the table. "
                    "The next change or checkpoint, or opening the table again, copies it once more"
                ) from error
            journal.clear(sealed.state.n_rows)
            self._state, self.n_rows, self._sealed = sealed.state, sealed.state.n_rows, None
            self._is_held = False
            # Last, since an interrupted commit is repeated, and recovery after a kill needs the journal.
            journal.unseal(durably=False)

    def resize(self, n_rows: int, *, fill: Fill, meta: Meta | None = None) -> DiskStorage:
        """Add rows at the end. New rows and all changed rows become a checkpoint."""
        with self._files.lock:
            self._begin(change=True)
            table, nbytes = self._files.table, self.record.nbytes
            state = replace(self._next(meta), n_rows=n_rows)
            table.reserve(file_size(n_rows, nbytes))
            self._wait_for_readers()
            sums = self._sums().copy()
            try:
                drop_sums(table, nbytes)  # the new rows are written over them
                added = write_rows(table, self.record, range(self.n_rows, n_rows), fill=fill)
                replace_sums(table, nbytes, np.concatenate((sums, added)))
                self._seal(state, None)
                self.commit()
            except BaseException:
                if self._sealed is not None:
                    self.commit()  # the new rows are durable
                elif self._state is not state and self._files.journal.is_sealed:  # perhaps they are durable
                    self._broken = UNKNOWN
                elif self._state is not state:
                    replace_sums(table, nbytes, sums)
                raise
        return self

    def rebuilt(
        self, record: Record, *, fill: Fill, device: torch.device = CPU, meta: Meta | None = None
    ) -> DiskStorage:
        """Replace the file by one with other records. This is a checkpoint, and closes this storage.

        `fill` may read from this storage. After an error, this storage and its file are as they were.
        """
        with self._files.lock, ExitStack() as undo:
            draft = self.draft(record, fill=fill, meta=meta)
            undo.callback(draft.discard)
            return self.replaced_by(draft)

    def draft(self, record: Record, *, fill: Fill, meta: Meta | None = None) -> Draft:
        """Make a file with other records that can replace this one."""
        with self._files.lock:
            self._begin(change=True)
            self._files.table.check_name()
            replaced = self._files.journal.table
            return Draft(self.path, record, self._next(meta), fill=fill, replaces=replaced)

    def replaced_by(self, draft: Draft) -> DiskStorage:
        """Replace the file by a draft. This is a checkpoint, and closes this storage."""
        with self._files.lock:
            self._begin(change=True)
            self._wait_for_readers()
            made = draft.publish()
            self._files.close()
        return DiskStorage(*made)

    def _next(self, meta: Meta | None) -> State:
        meta = self._state.meta if meta is None else normal(meta)
        return State(self.n_rows, self.generation + 1, dict(meta), word=secrets.token_hex(8))

    def _seal(self, state: State, decision: Decision | None) -> None:
        table = self._files.table
        table.check_name()
        table.fill_holes()
        self._sums()
        try:
            self._sealed = self._files.journal.seal(state, decision, base=self._state.word)
        except NotSynced as error:
            # The system drops what it could not write, so a second attempt would prove nothing.
            self._broken = UNKNOWN
            raise NotSynced(f"{error}. {REMEDY}") from error
        except BaseException:
            self._unseal()
            raise

    def _sums(self) -> Sums:
        """Return the checksums of all rows. After a `resize` that was killed, all are unknown."""
        table = self._files.table
        if table.sums is None:
            replace_sums(table, self.record.nbytes, np.zeros(self.n_rows, np.uint32))
        assert table.sums is not None
        return table.sums

    def _unseal(self) -> None:
        """Remove the seal durably, if there is one. If this is interrupted, the next change repeats it."""
        try:
            self._files.journal.unseal(durably=True)
        except NotSynced:
            self._broken = UNKNOWN
            raise
        self._sealed = None
