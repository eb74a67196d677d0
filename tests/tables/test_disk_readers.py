"""A slow disk keeps whoever reads from it waiting, and nobody else; nothing goes while it is being read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.disk import storage as tier
from tests.tables.crash_model import NBYTES, everything, fill, filled, made, random_records

SOON = 0.2
LATE = 20.0


class SlowDisk:
    """Reads from the table's file that begin while it is slow do not end until it is not."""

    def __init__(self) -> None:
        self.slow = False
        self.began, self.goes_on = threading.Event(), threading.Event()
        self._take = tier.take

    def take(self, *given: Any, **options: Any) -> None:
        if self.slow:
            self.slow = False
            self.began.set()
            assert self.goes_on.wait(LATE)
        self._take(*given, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk()
    monkeypatch.setattr(tier, "take", slow.take)
    yield slow
    slow.goes_on.set()


class Doing(threading.Thread):
    """Something that another thread does."""

    def __init__(self, what: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.what, self.result, self.error = what, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.what()
        except BaseException as error:
            self.error = error

    def done(self) -> Any:
        self.join(LATE)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result

    def waits(self) -> bool:
        self.join(SOON)
        return self.is_alive()


def slow_reader(table: DiskStorage, disk: SlowDisk, rows: range) -> Doing:
    disk.slow = True
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
    assert reader.is_alive()
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
def test_the_file_stays_as_it_is_while_it_is_read(what: str, tmp_path: Path, disk: SlowDisk) -> None:
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


def test_a_reader_that_fails_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tier, "take", fail)
        with pytest.raises(MemoryError):
            table.gather(torch.arange(10))
    Doing(table.checkpoint).done()
    Doing(table.close).done()


def test_many_readers_and_checkpoints(tmp_path: Path) -> None:
    """Every row that is read is whole, and is never older than one that was read before."""
    table = made(tmp_path)
    table.scatter_(torch.arange(100), torch.zeros(100, NBYTES, dtype=torch.uint8))
    stop = threading.Event()

    def read() -> int:
        n_reads, last = 0, torch.zeros(100, dtype=torch.uint8)
        while not stop.is_set():
            found = table.gather(torch.arange(100))
            assert (found == found[:, :1]).all(), "a torn row"
            assert (found[:, 0] >= last).all(), "an older row"
            last, n_reads = found[:, 0], n_reads + 1
        return n_reads

    readers = [Doing(read) for _ in range(3)]
    draw = torch.Generator().manual_seed(0)
    for number in range(1, 101):
        rows = torch.randperm(100, generator=draw)[:60]
        table.scatter_(rows, torch.full((60, NBYTES), number, dtype=torch.uint8))
        if number % 4 == 0:
            table.checkpoint()
    stop.set()
    assert all(reader.done() > 0 for reader in readers)
    table.close()


# ---- how many threads


def shares(hands: CopyPool, n_rows: int, nbytes: int, seconds: float = 0.0) -> list[range]:
    """What each thread was given, in order."""
    given: list[range] = []

    def part(some: slice) -> None:
        time.sleep(seconds)
        given.append(range(some.start, some.stop))

    hands.spread(part, n_rows, nbytes=nbytes)
    return sorted(given, key=lambda share: share.start)


def test_as_many_threads_as_it_takes() -> None:
    with closing(CopyPool(THREADS)) as hands:
        assert len(shares(hands, 20_000, 1000)) == THREADS  # nothing is known yet
        assert len(shares(hands, 20_000, 1000)) == FEW
        assert len(shares(hands, 1, 1000)) == 1
        assert len(shares(hands, 20_000, 1000, seconds=0.1)) == FEW  # as from a disk
        found = shares(hands, 20_000, 1000)
        assert len(found) == THREADS
        assert [row for share in found for row in share] == list(range(20_000))


def test_few_threads_where_nobody_waits() -> None:
    with closing(CopyPool(THREADS)) as hands:
        unhurried = hands.unhurried()
        shares(unhurried, 20_000, 1000)
        assert len(shares(unhurried, 20_000, 1000)) == 1
        assert len(shares(unhurried, 40_000, 1000)) == 2
        assert len(shares(unhurried, 1_000_000, 1000)) == FEW
        assert len(shares(unhurried, 20_000, 1000, seconds=0.4)) == 1
        assert len(shares(unhurried, 20_000, 1000)) == THREADS
        assert len(shares(hands, 0, 1000)) == 1  # its own affair


def test_what_is_in_the_queue_of_a_pool_without_threads_is_done_once() -> None:
    """The queue comes before the thread, which the system may refuse."""
    done: list[int] = []
    with closing(CopyPool(1)) as hands:
        submit = hands._pool.submit

        def refuse(do: Any) -> Any:
            submit(do)
            raise RuntimeError("can't start new thread")

        for number in range(5):
            hands._pool.submit = refuse if number % 2 else submit  # type: ignore[method-assign]
            assert hands.submit(lambda i: done.append(i) or i, number).result() == number  # type: ignore[func-returns-value]
        hands._pool.submit = submit  # type: ignore[method-assign]
        failed = hands.submit(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failed.result()
    assert done == list(range(5))


def test_a_reader_that_was_interrupted_on_its_way_out() -> None:
    """Control-C in the line before it is gone: its own thread does not wait for it."""
    readers = tier.Readers()
    readers.__enter__()
    readers.wait()
    waited = threading.Thread(target=readers.wait, daemon=True)
    waited.start()
    waited.join(0.1)
    assert waited.is_alive()
    with readers:
        pass
    waited.join(LATE)
    assert not waited.is_alive()
