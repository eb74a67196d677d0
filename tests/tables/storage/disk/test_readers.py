"""Reads without the lock: a slow disk delays its reader alone, and no file changes while it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from flatbed.tables.record import Field, Record
from flatbed.tables.storage.disk import DiskStorage, checked_records
from flatbed.tables.storage.disk import storage as disk_storage
from tests.tables.storage.disk.crash_model import (
    NBYTES,
    everything,
    fill,
    filled,
    made,
    random_records,
)

SOON = 0.2
LATE = 200.0


class SlowDisk:
    """The next read of the records `slow` does not end until it may go on."""

    def __init__(self) -> None:
        self.slow: Any = None
        self.began, self.goes_on = threading.Event(), threading.Event()
        self._take = disk_storage.take

    def take(self, records: Any, *given: Any, **options: Any) -> None:
        if self.slow is records:
            self.slow = None
            self.began.set()
            assert self.goes_on.wait(LATE)
        self._take(records, *given, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk()
    monkeypatch.setattr(disk_storage, "take", slow.take)
    yield slow
    slow.goes_on.set()


class Doing:
    """Something that another thread does."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self.result: Future[Any] = Future()
        threading.Thread(target=self._run, args=(what,), daemon=True).start()

    def _run(self, what: Callable[[], Any]) -> None:
        try:
            self.result.set_result(what())
        except BaseException as error:
            self.result.set_exception(error)

    def done(self) -> Any:
        return self.result.result(LATE)

    def waits(self) -> bool:
        return not wait([self.result], SOON).done


def slow_reader(table: DiskStorage, disk: SlowDisk, rows: range) -> Doing:
    disk.slow = table._files.table.rows
    reader = Doing(lambda: table.gather(torch.tensor(rows)))
    assert disk.began.wait(LATE)
    return reader


def test_others_read_and_write_meanwhile(tmp_path: Path, disk: SlowDisk) -> None:
    """A reader gets the rows as they were when it came."""
    table = made(tmp_path)
    before = random_records(5)
    table.scatter_(torch.arange(5), before)
    reader = slow_reader(table, disk, range(20))
    assert torch.equal(table.gather(torch.arange(50, 60)), torch.from_numpy(filled(50, 60, NBYTES)))
    after = random_records(10)
    table.scatter_(torch.arange(10), after)
    assert torch.equal(table.gather(torch.arange(10)), after)
    assert not reader.result.done()
    disk.goes_on.set()
    expected = torch.cat([before, torch.from_numpy(filled(5, 20, NBYTES))])
    assert torch.equal(reader.done(), expected)
    table.close()


ENDS: dict[str, Callable[[DiskStorage], Any]] = {
    "checkpoint": lambda table: table.checkpoint({"step": 1}),
    "resize": lambda table: table.resize(200, fill=fill),
    "rebuilt": lambda table: table.rebuilt(
        table.record, fill=lambda start, stop, records: records.copy_(table.read(start, stop))
    ).close(),
    "close": lambda table: table.close(),
}


@pytest.mark.parametrize("what", ENDS)
def test_file_stays_as_it_is_while_it_is_read(what: str, tmp_path: Path, disk: SlowDisk) -> None:
    table = made(tmp_path)
    expected = torch.from_numpy(everything(table).copy())
    reader = slow_reader(table, disk, range(100))
    table.scatter_(torch.arange(100), random_records(100))
    other = Doing(lambda: ENDS[what](table))
    assert other.waits()
    disk.goes_on.set()
    assert torch.equal(reader.done(), expected)
    other.done()
    table.close()


def test_many_readers_and_checkpoints(tmp_path: Path) -> None:
    """Every row that is read is whole, and is never older than one that was read before."""
    table, stop = made(tmp_path), threading.Event()
    table.scatter_(torch.arange(100), torch.zeros(100, NBYTES, dtype=torch.uint8))

    def read() -> None:
        last = torch.zeros(100, dtype=torch.uint8)
        while not stop.is_set():
            found = table.gather(torch.arange(100))
            assert (found == found[:, :1]).all(), "a torn row"
            assert (found[:, 0] >= last).all(), "an older row"
            last = found[:, 0]

    readers = [Doing(read) for _ in range(3)]
    draw = torch.Generator().manual_seed(0)
    for number in range(1, 101):
        rows = torch.randperm(100, generator=draw)[:60]
        table.scatter_(rows, torch.full((60, NBYTES), number, dtype=torch.uint8))
        if number % 4 == 0:
            table.checkpoint()
    stop.set()
    for reader in readers:
        reader.done()
    table.close()


# ---- threads


@pytest.mark.parametrize("in_journal", [False, True])
def test_many_threads_read_from_the_disk_and_few_from_the_page_cache(
    in_journal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of the rows is in the journal, which is in the page cache."""
    record = Record((Field("weight", torch.float32, 256),))
    n_rows = 2 * checked_records.READ_PART // record.nbytes  # for two threads
    table, n_faults = made(tmp_path, 2 * n_rows, record), count()
    if in_journal:
        table.scatter_(torch.arange(n_rows), torch.zeros(n_rows, record.nbytes, dtype=torch.uint8))
    is_cold, parts, split, take = True, list[int](), checked_records.split, disk_storage.take

    def noted(*args: Any, n_parts: int) -> None:
        parts.append(n_parts)
        split(*args, n_parts=n_parts)

    def slow(*args: Any) -> None:
        waits = is_cold and args[-1] is table._files.table
        monkeypatch.setattr(checked_records, "_disk_faults", lambda: n_rows * next(n_faults) if waits else 0)
        take(*args)

    monkeypatch.setattr(checked_records, "split", noted)
    monkeypatch.setattr(disk_storage, "take", slow)
    for _ in range(3):
        table.gather(torch.arange(2 * n_rows))
    assert parts == ([2, 2, 0, 2, 0, 2] if in_journal else [4, 4, 4])
    is_cold = False
    parts.clear()
    for _ in range(2):
        table.gather(torch.arange(2 * n_rows))
    assert parts == ([0, 2, 0, 0] if in_journal else [4, 0])
    table.close()


def test_failed_reader_delays_no_other_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(disk_storage, "take", fail)
        with pytest.raises(MemoryError):
            table.gather(torch.arange(10))
    Doing(table.checkpoint).done()
    Doing(table.close).done()
