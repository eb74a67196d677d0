"""Records in a file: tables larger than memory, with checkpoints that a crash cannot tear."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatbed.cuda.streams import OrderedLock
from flatbed.errors import FlatbedError
from flatbed.tables.record import Record
from flatbed.tables.storage.disk.copy_pool import Fill, as_records, empty, take, write_rows
from flatbed.tables.storage.disk.file import MappedFile, NotSynced, Records, lock
from flatbed.tables.storage.disk.format import (
    PAGE,
    RECORDS_AT,
    STATE_AT,
    Identity,
    State,
    decode_identity,
    encode_identity,
    encode_state,
    normal,
)
from flatbed.tables.storage.disk.journal import Decision, Journal, apply, read_sealed
from flatbed.tables.storage.disk.recovery import journal_of, recover
from flatbed.tables.storage.disk.resources import Held, tell_at_exit

T = TypeVar("T")


class Readers:
    """Who reads from a table's file without the tier's lock.

    They begin with the lock; whoever has it and is about to change the file, or to close it, waits for them.
    Known by their threads: one that was interrupted on its way out does not read any more if it waits here.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self._done = threading.Condition()

    def __enter__(self) -> None:
        with self._done:
            self._threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._done:
            self._threads.discard(threading.get_ident())
            self._done.notify_all()

    def wait(self) -> None:
        """Until nobody reads."""
        me = {threading.get_ident()}
        with self._done:
            self._done.wait_for(lambda: self._threads <= me)


class DiskStorage:
    """The records of a table, in a file.

    The file itself changes only in `checkpoint`: rows changed since lie in `PATH.journal`, and are dropped
    by `close` and by a crash. So the file always holds the last completed checkpoint, whole.

    >>> import tempfile
    >>> from flatbed.tables.record import Field
    >>> record = Record((Field("weight", torch.float32, 4),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tier = DiskTier.create(f"{folder}/table", record, 1000, fill=lambda start, stop, records: None)
    ...     tier.scatter_(torch.tensor([3, 5]), torch.ones(2, record.nbytes, dtype=torch.uint8))
    ...     tier.checkpoint({"step": 1})
    ...     tier.close()
    ...     tier = DiskTier.open(f"{folder}/table")
    ...     tier.meta, tier.gather(torch.tensor([5]), 2)
    ({'step': 1}, tensor([[1, 1]], dtype=torch.uint8))
    """

    device = torch.device("cpu")
    memory: Tensor | None = None

    def __init__(self, held: Held, identity: Identity, state: State) -> None:
        """Use `create` or `open`."""
        self.record, self.n_rows, self.path = identity.record, state.n_rows, held.table.path
        self._state = state
        self._held = held
        self._lock = OrderedLock("file")
        self._readers = Readers()
        self._sealed: State | None = None  # on the disk, and not yet in the table
        self._decided = False  # by a file of its own
        self._committing = False
        self._broken: str | None = None
        self._finalizer = weakref.finalize(self, Held.forgotten, held)
        tell_at_exit()

    @classmethod
    def create(
        cls,
        path: str | Path,
        record: Record,
        n_rows: int,
        *,
        fill: Fill,
        meta: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> DiskStorage:
        """Make a table's file; its name appears when it is complete. With `replace`, instead of another."""
        if n_rows < 0:
            raise ValueError(f"a table has 0 rows or more, not {n_rows}")
        path = Path(os.path.realpath(path))
        identity = Identity(secrets.token_hex(16), record, _predecessor(path))
        state = State(n_rows, 0, normal(meta))
        with ExitStack() as others:
            if path.exists():
                if not replace:
                    raise _exists(path)
                others.callback(os.close, lock(path))  # nobody may be using what is replaced
            held = _build(path, identity, state, fill=fill, replace=replace)
        held.drop_journal()  # of the table that was there before
        return cls(held, identity, state)

    @classmethod
    def open(cls, path: str | Path) -> DiskStorage:
        """Open a table's file as its last completed checkpoint left it."""
        path = Path(os.path.realpath(path))
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
        return cls(Held(descriptor, table, journal), identity, state)

    @property
    def meta(self) -> dict[str, Any]:
        """What the last completed checkpoint was given."""
        return normal(self._state.meta)

    @property
    def generation(self) -> int:
        """How many checkpoints were completed since the file was made."""
        return self._state.generation

    @property
    def dirty_rows(self) -> int:
        """How many rows changed since the last completed checkpoint."""
        return self._held.journal.n_slots

    def gather(self, ids: Tensor, nbytes: int | None = None, *, into: Tensor | None = None) -> Tensor:
        """Copies of the records of these rows, (n, nbytes) of uint8; or of their first `nbytes` bytes.

        `into`: memory for them, pinned for example.
        """
        nbytes = self.record.nbytes if nbytes is None else nbytes
        if not 0 < nbytes <= self.record.nbytes:
            raise ValueError(f"a record has {self.record.nbytes} bytes, of which {nbytes} cannot be read")
        with ExitStack() as reading:
            with self._use():
                rows, hands = self._rows(ids), self._held.readers
                found, out = empty(len(rows), nbytes, into)
                changed, slots = self._changed(rows)
                if len(changed) == len(rows):
                    self._held.journal.take(slots, into=found, hands=hands)
                    return torch.from_numpy(out)
                if len(changed):
                    self._held.journal.take(slots[changed], into=found, where=changed, hands=hands)
                records = self._records
                reading.enter_context(self._readers)
            # What follows may wait for the disk, and others need not wait for it.
            if not len(changed):
                take(records, rows, into=found, hands=hands)
            else:
                others = np.flatnonzero(slots < 0)
                take(records, rows[others], into=found, where=others, hands=hands)
        return torch.from_numpy(out)

    def collect(self, ids: Tensor, into: Tensor) -> NDArray[np.int64]:
        """`gather` of whole records in the order that is quickest, which is returned: places in `ids`.

        For a thread that nobody waits for yet.
        """
        with ExitStack() as reading:
            with self._use():
                rows, hands = self._rows(ids), self._held.collectors
                found, _ = empty(len(rows), self.record.nbytes, into)
                changed, slots = self._changed(rows)
                n_changed = len(changed)
                if n_changed:
                    self._held.journal.take(slots[changed], into=found[:n_changed], hands=hands)
                records = self._records
                reading.enter_context(self._readers)
            others = np.flatnonzero(slots < 0) if n_changed else np.arange(len(rows))
            take(records, rows[others], into=found[n_changed:], hands=hands)
        return np.concatenate((changed, others))

    def scatter_(self, ids: Tensor, records: Tensor, *, waited_for: bool = True) -> None:
        """Replace the records of these rows; they reach the file with the next checkpoint."""
        hands = self._held.writers if waited_for else self._held.senders
        with self._use(change=True):
            rows = self._rows(ids)
            given = self._given(records, len(rows))
            if len(rows):
                self._held.journal.put(rows, given, n_rows=self.n_rows, hands=hands)

    def send(self, ids: Tensor, records: Tensor, *, after: Callable[[], None]) -> Future[None]:
        """`scatter_` in another thread, one after the other, once `after` returns."""
        self._held.check()
        return self._held.sender.submit(self._scatter_after, after, ids, records)

    def _scatter_after(self, after: Callable[[], None], ids: Tensor, records: Tensor) -> None:
        after()
        self.scatter_(ids, records, waited_for=False)

    def aside(self, do: Callable[..., T], *given: Any) -> Future[T]:
        """Have something done by a thread that reads, while others do."""
        self._held.check()
        return self._held.readers.submit(do, *given)

    def count_also(self, n_elsewhere: Callable[[], int]) -> None:
        """Have changed rows that are elsewhere counted among those that an exit would lose."""
        self._held.n_elsewhere = n_elsewhere

    def has_room(self, n_rows: int) -> bool:
        """Whether it is plain, without waiting for anyone, that so many rows can change, whichever they are.

        Else `make_room` finds out.
        """
        self._held.check()
        usable = self._broken is None and self._sealed is None
        return usable and self._held.journal.has_room(n_rows, n_rows=self.n_rows)

    def make_room(self, ids: Tensor, *, also: int = 0) -> None:
        """Raise now if there is no room on the disk for changes of these rows, and of so many others."""
        with self._use(change=True):
            self._held.journal.make_room(self._rows(ids), also=also, n_rows=self.n_rows)

    def unchanged(self, ids: Tensor) -> Tensor:
        """Which of these rows are as the last checkpoint has them: (n,) of bool. Others have their room.

        Waits for nobody: others may be writing, but not these rows.
        """
        self._held.check()
        rows = self._rows(ids)
        slots = self._held.journal.slots(rows)
        return torch.from_numpy(np.ones(len(rows), np.bool_) if slots is None else slots < 0)

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of consecutive records."""
        if not 0 <= start <= stop <= self.n_rows:
            raise IndexError(f"rows {start} to {stop} are out of range for a table of {self.n_rows} rows")
        with self._use():
            found, out = empty(stop - start, self.record.nbytes)
            # Not through the mapping, which expects rows at random and reads nothing ahead.
            if self._held.table.read(RECORDS_AT + start * self.record.nbytes, out) < out.nbytes:
                raise FlatbedError(f"{self.path} was cut short while it was open; restore it from a copy")
            changed, slots = self._changed(slice(start, stop))
            found[changed] = self._held.journal.records[slots[changed]]
        return torch.from_numpy(out)

    def write_(self, start: int, records: Tensor) -> None:
        """Replace consecutive records."""
        stop = start + len(records)
        if not 0 <= start <= stop <= self.n_rows:
            raise IndexError(f"rows {start} to {stop} are out of range for a table of {self.n_rows} rows")
        self.scatter_(torch.arange(start, stop, device=self.device), records)

    def flush(self) -> None:
        """Do nothing: rows arrive with the next checkpoint, and not before."""

    def checkpoint(self, meta: Mapping[str, Any] | None = None) -> None:
        """Make all rows as they are now, and `meta`, what the file holds; without `meta`, it stays as it was.

        When it returns, they outlast a loss of power. Until then, the file holds the checkpoint before.
        """
        with self._use():
            if self._sealed is not None and not self._decided:
                self.commit()  # of a checkpoint that was interrupted
            with self._use(change=True):
                self._seal(self._next(meta), None)
                self.commit()

    def prepare(self, meta: Mapping[str, Any] | None = None, *, decision: str | Path, token: str) -> None:
        """Do all of a checkpoint that can fail; until `commit` or `abort` follows, no row can change.

        After a crash, the table is at the new checkpoint if the JSON file `decision` holds this token
        (`{"token": ...}`), and at the one before if it holds another or is not there. Write it atomically.
        """
        if not isinstance(token, str):
            raise TypeError(f"a token is text, not {type(token).__name__}")
        with self._use(change=True):
            self._seal(self._next(meta), Decision(os.path.abspath(decision), token))

    def commit(self) -> None:
        """Complete what `prepare` began. If it is interrupted, it can be called again."""
        with self._use():
            if self._sealed is None:
                raise FlatbedError(f"no checkpoint of {self.path} was prepared; call prepare() first")
            held, state = self._held, self._sealed
            self._readers.wait()
            self._committing = True
            apply(held.table, held.journal.records, rows=held.journal.rows(), state=state)
            if state.n_rows != self.n_rows:
                held.table.map(RECORDS_AT, self.record.nbytes, count=state.n_rows, random=True)
            held.journal.unseal(durably=False)
            held.keep_journal = self._committing = False
            held.journal.clear(same_rows=state.n_rows == self.n_rows)
            self._state, self.n_rows, self._sealed = state, state.n_rows, None

    def abort(self) -> None:
        """Take `prepare` back: changed rows stay changed, and wait for another checkpoint."""
        with self._use():
            if self._sealed is None:
                raise FlatbedError(f"no checkpoint of {self.path} was prepared; there is nothing to abort")
            if self._committing:
                raise FlatbedError(
                    f"a checkpoint of {self.path} is half copied; call commit() to complete it"
                )
            self._held.journal.unseal(durably=True)
            self._held.keep_journal, self._sealed = False, None

    def resize(self, n_rows: int, *, fill: Fill, meta: Mapping[str, Any] | None = None) -> None:
        """Add rows at the end; they and all changed rows become a checkpoint."""
        if n_rows < self.n_rows:
            raise ValueError(f"a table of {self.n_rows} rows can grow, but not shrink to {n_rows}")
        with self._use(change=True):
            table, before = self._held.table, self._held.table.size
            state = replaced(self._next(meta), n_rows=n_rows)
            try:
                table.reserve(RECORDS_AT + n_rows * self.record.nbytes)
                write_rows(table, self.record, range(self.n_rows, n_rows), fill=fill)
                table.sync()
                self._seal(state, None)
            except BaseException:
                if self._broken is None:  # else the seal may have reached the disk, and needs the rows
                    table.truncate(before)
                raise
            self.commit()

    def rebuilt(self, record: Record, *, fill: Fill, meta: Mapping[str, Any] | None = None) -> DiskStorage:
        """The table with other records, in this one's place: a checkpoint, after which this tier is closed.

        `fill` may read from this tier. If anything fails, this tier and its file are as they were.
        """
        with self._use(change=True):
            identity = Identity(secrets.token_hex(16), record, replaces=self._held.journal.table)
            state = self._next(meta)
            held = _build(self.path, identity, state, fill=fill, replace=True)
            self._readers.wait()
            self._held.close()
        return DiskStorage(held, identity, state)

    def close(self) -> None:
        """Give the file back. Rows changed since the last checkpoint are lost; closing twice is allowed."""
        if self._held.here():
            with self._lock:
                self._readers.wait()
                self._held.close()

    def _next(self, meta: Mapping[str, Any] | None) -> State:
        meta = self._state.meta if meta is None else normal(meta)
        return State(self.n_rows, self.generation + 1, dict(meta))

    def _seal(self, state: State, decision: Decision | None) -> None:
        journal = self._held.journal
        self._held.keep_journal = True
        self._broken = "the last checkpoint failed, and what of it is on the disk is not known"
        try:
            journal.seal(state, decision, n_rows=self.n_rows)
        except NotSynced:
            raise  # the system forgets what it could not write, so trying again would prove nothing
        except BaseException:
            journal.unseal(durably=True)
            self._held.keep_journal, self._broken = False, None
            raise
        self._sealed, self._decided, self._broken = state, decision is not None, None

    @property
    def _records(self) -> Records:
        if self._held.table.rows is None:
            raise FlatbedError(f"{self.path} is closed")
        return self._held.table.rows

    def _rows(self, ids: Tensor) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = ids.to("cpu", torch.int64).reshape(-1).numpy()
        if len(rows) and (rows.min() < 0 or rows.max() >= self.n_rows):
            at = int(np.argmax((rows < 0) | (rows >= self.n_rows)))
            raise IndexError(
                f"id {rows[at]} is out of range for a table of {self.n_rows} rows (batch position {at})"
            )
        return rows

    def _given(self, records: Tensor, n_rows: int) -> Records:
        if records.dtype != torch.uint8 or records.shape != (n_rows, self.record.nbytes):
            raise ValueError(
                f"expected uint8 records of shape {(n_rows, self.record.nbytes)}, found {records.dtype} of "
                f"shape {tuple(records.shape)}"
            )
        return as_records(records.detach().cpu().contiguous().numpy())

    def _changed(self, rows: NDArray[np.int64] | slice) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Which of these rows lie in the journal, and the slots of all of them (-1: none)."""
        slots = self._held.journal.slots(rows)
        if slots is None:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        return np.flatnonzero(slots >= 0), slots

    @contextmanager
    def _use(self, *, change: bool = False) -> Iterator[None]:
        self._held.check()  # before the lock, which another thread may have held when this process was forked
        with self._lock:
            self._held.check()
            if change and self._broken is not None:
                raise FlatbedError(
                    f"{self.path} cannot be changed: {self._broken}; close it and open it again, which goes "
                    "back to the last checkpoint"
                )
            if change and self._sealed is not None:
                raise FlatbedError(
                    f"a checkpoint of {self.path} is half made; call commit() or abort() first"
                )
            yield


def _exists(path: Path) -> FlatbedError:
    return FlatbedError(f"{path} exists already: open it, choose another path, or delete it first")


def _predecessor(path: Path) -> str | None:
    """The table that was in this place and may have left a journal."""
    journal = journal_of(path)
    if journal.exists():
        with closing(MappedFile(journal)) as file:
            sealed = read_sealed(file)
        if sealed is not None:
            return sealed.table
    try:
        with open(path, "rb") as table:
            return decode_identity(path, table.read(PAGE)).table
    except (OSError, FlatbedError):
        return None


def _build(path: Path, identity: Identity, state: State, *, fill: Fill, replace: bool) -> Held:
    """Write a whole table under another name, then give it its own."""
    first, second = encode_identity(identity), encode_state(state)
    draft = path.with_name(path.name + ".new")
    nbytes = identity.record.nbytes
    with ExitStack() as undo:
        descriptor = lock(draft, create=True)
        undo.callback(os.close, descriptor)
        undo.callback(MappedFile.remove, draft)
        table = MappedFile(draft)
        undo.callback(table.close)
        table.truncate(0)  # somebody may have begun one before, and ended
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
    return Held(descriptor, table, Journal(journal_of(path), identity.table, nbytes=nbytes))
