"""A table's file that is only read: without lock or write access, in any number of processes."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.progress import progress
from flatbed.tables.record import Record
from flatbed.tables.storage.base import CPU, row_blocks
from flatbed.tables.storage.disk.checked_records import (
    DamagedRowsError,
    as_records,
    check_rows,
    has_sums,
    head,
    map_records,
    rows_of,
    take,
)
from flatbed.tables.storage.disk.format import RECORDS_AT, STATE_AT, State, normal, read_header
from flatbed.tables.storage.disk.journal import read_sealed
from flatbed.tables.storage.disk.mapped_file import MappedFile, Records
from flatbed.tables.storage.disk.recovery import journal_of
from flatbed.tables.workers import Workers

PATIENCE = 10.0  # seconds for which a state may stay unreadable
STAMP = 56  # bytes: the prefix of a state, with its checksum

Stamp = tuple[int, bytes]
"""Inode and first bytes of the state. If either differs, rows may have changed."""


@dataclass(frozen=True, eq=False)
class OpenVersion:
    """A version of the file. It stays open while a thread reads it, and is closed when it is collected."""

    file: MappedFile
    rows: Records
    record: Record
    state: State
    stamp: Stamp
    changed: tuple[NDArray[np.int64], Records] | None
    """Rows of a checkpoint that is being copied to the file, sorted, and their records."""


class ReadOnlyStorage:
    """Weights of a table's file, as of the last completed checkpoint.

    Another process may train the table meanwhile. Every read compares the file's state before and after, and
    is repeated if a checkpoint was copied to the file in between. While a checkpoint is being copied, or if
    the process that copied it was killed, its rows are read from its journal.
    """

    device = CPU
    memory: Tensor | None = None
    reach: torch.device | None = None

    def __init__(self, path: str | Path) -> None:
        self._version: OpenVersion | None = None
        self._is_closed = False
        self.meta: dict[str, Any] = {}
        self.path = Path(os.path.realpath(path))
        self._workers = Workers()
        version = self._open()
        self.n_rows, self.record = version.state.n_rows, version.record

    def _open(self) -> OpenVersion:
        """Map the file as it is now, and the rows of a checkpoint that is being copied to it.

        Other threads may still read the old version, which is closed when its last reader is done.
        """
        if not self.path.exists():
            raise FlatbedError(f"there is no table at {self.path}; check the path")
        deadline = time.monotonic() + PATIENCE
        while (version := self._read()) is None:
            if time.monotonic() > deadline:
                raise DamagedFileError(
                    f"{self.path} was being changed when its process ended, and its journal is missing or "
                    "damaged; open it once for training, or restore it from a copy"
                )
            time.sleep(0.01)
        self._version = None if self._is_closed else version  # another thread may have closed it meanwhile
        self.meta = {**normal(version.state.meta), "scalars": {}}
        return version

    def _read(self) -> OpenVersion | None:
        """Read header, state and journal; None if they do not fit together at this moment."""
        file = MappedFile(self.path, read_only=True)
        stamp = self._stamp_of(file)
        try:
            file.check_name()
        except FlatbedError:
            return None  # the stamp belongs to a file that has replaced this one
        identity, state = read_header(file)
        if state is None:
            return None
        record, nbytes = Record((identity.record.weight,)), identity.record.nbytes
        changed = self._changed_rows(identity.table, nbytes, state) if state.applying else None
        if (state.applying and changed is None) or self._stamp_of(file) != stamp:
            return None
        is_first = self._version is None and not self._is_closed
        n_rows = state.n_rows if is_first else self.n_rows
        rows = map_records(file, state.n_rows, nbytes)[:n_rows]
        if state.n_rows < n_rows or (not is_first and record != self.record):
            raise FlatbedError(f"{self.path} was replaced by another table; load it again")
        return OpenVersion(file, rows, record, state, stamp, changed)

    def _changed_rows(
        self, table: str, nbytes: int, state: State
    ) -> tuple[NDArray[np.int64], Records] | None:
        """Return the rows of a sealed journal, sorted, and their records."""
        try:
            file = MappedFile(journal_of(self.path), read_only=True)
        except FlatbedError:
            return None
        with closing(file):
            sealed = read_sealed(file)
            is_ours = sealed is not None and (sealed.table, sealed.state.word) == (table, state.word)
            if sealed is None or not is_ours or sealed.records.itemsize != nbytes:
                return None
            order = np.argsort(sealed.rows, kind="stable")
            return sealed.rows[order], sealed.records[order]

    def _stamp_of(self, file: MappedFile) -> Stamp:
        beginning = np.zeros(STAMP, np.uint8)
        file.read(STATE_AT, beginning)
        try:
            number = os.stat(self.path).st_ino
        except OSError:
            number = 0
        return number, beginning.tobytes()

    # ---- rows

    def gather(self, ids: Tensor, nbytes: int | None = None) -> Tensor:
        rows = rows_of(ids, self.n_rows)
        out = np.empty((len(rows), self.record.nbytes if nbytes is None else nbytes), np.uint8)
        while True:
            version = self.refresh()
            take(version.rows, rows, as_records(out), self._workers, version.file)
            unchanged = rows
            if version.changed is not None and len(version.changed[0]):
                changed, records = version.changed
                at = np.searchsorted(changed, rows).clip(max=len(changed) - 1)
                found = np.flatnonzero(changed[at] == rows)
                as_records(out)[found] = head(records, out.shape[1])[at[found]]
                unchanged = rows[changed[at] != rows]
            stamp = version.stamp
            try:
                check_rows(version.file, unchanged, self._workers)
            except DamagedFileError:
                # If another process resizes the table, it writes rows over the checksums: read again.
                is_summed = has_sums(version.file, version.state.n_rows, version.rows.itemsize)
                if is_summed and self._stamp_of(version.file) == stamp:
                    raise
            if self._stamp_of(version.file) == stamp:
                return torch.from_numpy(out)

    def check_rows(self) -> int:
        """Compare all rows with their checksums, and return the number of rows that have one."""
        version, damaged = self.refresh(), list[int]()
        nbytes = version.rows.itemsize
        with progress(f"checking {self.path.name}", self.n_rows, "rows") as advance:
            for start, stop in row_blocks(0, self.n_rows, nbytes):
                # This loads pages ahead. The mapping does not, since it is advised for random rows.
                version.file.read(RECORDS_AT + start * nbytes, np.empty((stop - start) * nbytes, np.uint8))
                try:
                    self.gather(torch.arange(start, stop, device=CPU), 1)
                except DamagedRowsError as error:
                    damaged += error.rows
                advance(stop - start)
        if damaged:
            raise DamagedRowsError(self.path, damaged)
        sums = self.refresh().file.sums
        return 0 if sums is None else int(np.count_nonzero(sums[: self.n_rows]))

    def refresh(self) -> OpenVersion:
        """Open the file again if it has another checkpoint by now, and set `meta`."""
        version = self._version
        if version is None:
            raise FlatbedError(f"{self.path} is closed; load it again")
        return version if self._stamp_of(version.file) == version.stamp else self._open()

    def meta_of(self, token: str) -> dict[str, Any] | None:
        """Return the `meta` of the file's present checkpoint, if it has this token."""
        self.refresh()
        return self.meta if self.meta.get("token") == token else None

    def read(self, start: int, stop: int) -> Tensor:
        return self.gather(torch.arange(start, stop, device=CPU))

    # ---- the rest of the protocol

    def serves(self, device: torch.device) -> bool:
        """Return True: rows are copied to any device."""
        return True

    def check(self) -> None:
        if self._is_closed:
            raise FlatbedError(f"{self.path} is closed; load it again")

    def close(self) -> None:
        """Close the file, unless another thread still reads it; a second call does nothing."""
        self._is_closed, self._version = True, None
        self._workers.close()

    def __del__(self) -> None:
        """Close the file of a table that was forgotten."""
        self.close()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: the table is read-only."""
        raise FlatbedError(f"{self.path} was loaded with read_only=True: load it without, to change it")

    scatter_ = write_ = rebuilt = resize = _refuse
