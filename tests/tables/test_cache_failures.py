"""Tables with a row cache, when something fails: nothing is lost, and a full disk stops no checkpoint."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flatbed
from flatbed.errors import FlatbedError
from flatbed.kernels import cache as decisions
from flatbed.tables.cache import host
from flatbed.tables.cache.host import Copies, Leaving
from flatbed.tables.grads import RowGrads
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.disk.file import MappedFile, NoSpace
from flatbed.tables.storage.disk.journal import Journal
from tests.tables.storage.disk.test_files import largest_file
from tests.tables.tables import everything
from tests.tables.test_cache_tables import DIM, ROWS, Twins, embedding, step

# ---- what can fail


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "set_cache": lambda emb: emb.table.set_cache(3),
    "resize": lambda emb: emb.table.resize(ROWS + 1),
    "save": lambda emb: emb.state_dict(),
    "checkpoint": lambda emb: emb.table.checkpoint(),
    "another optimizer": lambda emb: (emb.table.drop_state(), emb.read_rows([1])),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_changed_rows_outlast_a_failure_to_bring_them_home(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins("disk", tmp_path).train()
    expected = everything(twins.cached)[0]

    def fail(self: DiskStorage, ids: Tensor, records: Tensor) -> None:
        raise FlatbedError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(DiskStorage, "scatter_", fail)
        with pytest.raises(FlatbedError, match="no space left"):
            OUTSIDE[what](twins.cached)
    assert torch.equal(everything(twins.cached)[0], expected)


def test_rows_that_could_not_be_written_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave in a thread of their own: whoever comes next hears of it, and nothing is lost."""
    twins = Twins("disk", tmp_path, n_slots=4).train()
    emb = twins.cached
    everything(emb)  # which writes all home
    twins.step([1, 2, 8, 29])
    expected = everything(twins.plain)[0]
    cache = emb.table.store.cache
    n_failed = 0

    def fail(self: DiskStorage, ids: Tensor, records: Tensor) -> None:
        nonlocal n_failed
        n_failed += 1
        raise FlatbedError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DiskStorage, "scatter_", fail)
        cache.come(torch.tensor([10, 11]))  # rows leave for these
        for _ in range(2):
            with pytest.raises(FlatbedError, match="the disk is gone"):
                cache.come(torch.tensor([12]))
        assert n_failed == 3
    assert torch.equal(everything(emb)[0], expected)
    emb.table.checkpoint()
    assert torch.equal(everything(emb)[0], expected)
    check_room(emb)


@pytest.mark.parametrize("many", [1, 1000])
def test_no_more_rows_are_read_than_can_come(
    many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch that is larger than the cache."""
    monkeypatch.setattr(host, "MANY", many)
    twins = Twins("disk", tmp_path, n_slots=4).train()
    cache = twins.cached.table.store.cache
    collect, read = DiskStorage.collect, []

    def counted(self: DiskStorage, ids: Tensor, into: Tensor) -> Any:
        read.append(len(ids))
        return collect(self, ids, into)

    monkeypatch.setattr(DiskStorage, "collect", counted)
    n_here = int((cache.tags.slot_of_row[:20] >= 0).sum())
    cache.come(torch.arange(20))
    assert read == [4 - n_here]
    twins.check()


@pytest.mark.parametrize("many", [1, 1000])
def test_rows_that_cannot_be_read(many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread of the disk's, or here: all is as it was, though what has changed may be home."""
    monkeypatch.setattr(host, "MANY", many)
    twins = Twins("disk", tmp_path, n_slots=4).train()
    cache = twins.cached.table.store.cache
    before = cache.tags.slot_of_row.clone(), cache.tags.dirty.clone()

    def fail(self: DiskStorage, ids: Tensor, into: Tensor) -> None:
        raise FlatbedError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DiskStorage, "collect", fail)
        for rows in ([10, 11], [12, 13, 14]):
            with pytest.raises(FlatbedError, match="the disk is gone"):
                cache.come(torch.tensor(rows))
    assert torch.equal(cache.tags.slot_of_row, before[0])
    assert torch.equal(cache.tags.dirty, before[1])
    twins.step([10, 11, 1], [12, 2])
    twins.check()
    twins.cached.table.checkpoint()
    twins.check()
    check_room(twins.cached)


@pytest.mark.parametrize("how", ["flush", "evict"])
@pytest.mark.parametrize("function", ["evict", "insert"])
def test_rows_outlast_an_interruption_anywhere(function: str, how: str, tmp_path: Path) -> None:
    """Before each line of what changes the map, whatever is done next."""
    n_lines = 0
    for number in range(1, 20):
        folder = tmp_path / str(number)
        folder.mkdir()
        emb = embedding("disk", folder, 6)
        emb.write_rows(range(6), torch.randn(6, DIM))
        emb(torch.arange(2))  # the cache is made
        cache = emb.table.store.cache
        cache.come(torch.arange(6))
        emb.write_rows(range(6), torch.randn(6, DIM))
        if not interrupted(lambda cache=cache: cache.come(torch.tensor([9, 10])), function, number):
            emb.table.close(discard=True)
            break
        n_lines += 1
        expected = emb.read_rows(range(ROWS)).clone()
        back = [row for row in range(6) if cache.tags.slot_of_row[row] < 0] or [9, 10]
        back = [9, 10] if function == "insert" else back
        cache.come(torch.tensor(back))
        expected[back] = torch.randn(len(back), DIM)
        emb.write_rows(back, expected[back])
        for row in range(11, 23) if how == "evict" else ():
            cache.come(torch.tensor([row]))
            assert torch.equal(emb.read_rows(range(ROWS)), expected)
        cache.flush()
        assert torch.equal(emb.read_rows(range(ROWS)), expected)
        cache.drop()
        assert torch.equal(emb.read_rows(range(ROWS)), expected)
        emb.table.close(discard=True)
    assert n_lines > 3


def interrupted(do: Callable[[], Any], function: str, number: int) -> bool:
    """Whether it came as far as this line of the function."""
    seen = 0

    def trace(frame: Any, event: str, given: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename != decisions.__file__ or frame.f_code.co_name != function:
            return None
        seen += event == "line"
        if seen == number:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_forked_process_waits_for_no_thread_of_its_parent(tmp_path: Path) -> None:
    emb = embedding("disk", tmp_path, 4)
    flatbed.optim.Adam(emb, lr=0.1)
    emb(torch.arange(4)).sum().backward()
    cache = emb.table.store.cache
    cache._leaving = Leaving(torch.empty(0), Copies(torch.empty(0)), 3, Future())  # that nobody will complete
    cache._process -= 1
    assert cache.n_unsaved == 0
    cache._let_leave()
    assert cache._leaving is None
    emb.table.close(discard=True)


def test_a_failed_write_is_heard_of_before_the_step(tmp_path: Path) -> None:
    emb = embedding("disk", tmp_path, 8)
    flatbed.optim.Adam(emb, lr=0.1)
    emb(torch.arange(4)).sum().backward()
    cache = emb.table.store.cache
    cache.make_room(torch.arange(4))
    failed: Future[None] = Future()
    failed.set_exception(OSError("the disk is gone"))
    wrong = torch.zeros(1, 3, dtype=torch.uint8)  # what cannot be written now, either
    cache._leaving = Leaving(torch.tensor([1]), Copies(wrong), 0, failed)
    with pytest.raises(ValueError, match="expected 1 records"):
        cache.make_room(torch.arange(4))
    cache._leaving = None
    emb.table.close(discard=True)


@pytest.mark.parametrize("fails", [False, True])
def test_copies_are_waited_for_whoever_captures_a_graph(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread that knows nothing of the GPU, nor of what others capture on it."""
    said: list[Any] = []

    @contextmanager
    def within(*what: Any) -> Iterator[None]:
        said.append(("in", *what))
        try:
            yield
        finally:
            said.append(("out", *what))

    class Event:
        def synchronize(self) -> None:
            said.append("wait")
            if fails:
                raise RuntimeError("the GPU is gone")

    gpu, event = torch.device("cuda", 1), Event()
    monkeypatch.setattr(host, "relaxed_capture", lambda: within("relaxed"), raising=False)
    monkeypatch.setattr(torch.cuda, "device", within)
    copies = Copies(torch.zeros(3), event, gpu)  # type: ignore[arg-type]
    if fails:
        with pytest.raises(RuntimeError, match="the GPU is gone"):
            copies.wait()
    else:
        copies.wait()
    assert said == [("in", "relaxed"), ("in", gpu), "wait", ("out", gpu), ("out", "relaxed")]
    said.clear()
    Copies(torch.zeros(3)).wait()
    assert not said, "they are on the host already"


def test_training_waits_for_nobody_who_moves_other_rows(tmp_path: Path) -> None:
    """The lock may be held as long as the disk takes; rows that came ahead of time need it not."""
    emb = embedding("disk", tmp_path, 8)
    flatbed.optim.Adam(emb, lr=0.1)
    emb(torch.arange(4)).sum().backward()  # the cache is made
    access, cache = emb.table.access, emb.table.store.cache
    rows = torch.tensor([1, 5])
    cache.make_room(rows)  # as every first step does
    ticket = cache.come_early(rows)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with cache.lock:
            held.set()
            done.wait(20)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert held.wait(20)
    trained = threading.Event()

    def train() -> None:
        access.make_room(torch.tensor([-1]), ticket)
        access.place_of(RowGrads(rows, torch.empty(0), ticket=ticket))
        trained.set()

    threading.Thread(target=train, daemon=True).start()
    try:
        assert trained.wait(20)
        assert cache.tags.dirty[cache.tags.slot_of_row[rows].long()].all()
    finally:
        done.set()
        holder.join(20)
    emb.table.close(discard=True)


def test_dropping_changes_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table on a full disk can be closed; its cached rows are dropped with the others."""
    twins = Twins("disk", tmp_path).train()

    def fail(self: DiskStorage, ids: Tensor, records: Tensor) -> None:
        raise FlatbedError("no space left")

    monkeypatch.setattr(DiskStorage, "scatter_", fail)
    twins.cached.table.close(discard=True)


# ---- full disks


WIDE = 380  # records of 1,536 bytes: a file for changes begins with room for 682 of them
MANY = 3000
FIRST_ROOM = 682


def wide(folder: Path, n_slots: int) -> tuple[Any, Any]:
    emb = flatbed.Embedding(MANY, WIDE, storage="disk", path=folder / "wide", cache_rows=n_slots)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    step(emb, optimizer, [0])  # from here on there is a file for changes
    return emb, optimizer


def part(number: int) -> range:
    return range(100 * number, 100 * number + 100)


def until_full(change: Callable[[int], None], most: int = 20) -> int:
    """How many changes there was room for."""
    for number in range(most):
        try:
            change(number)
        except FlatbedError as error:
            assert "free some space" in str(error)  # noqa: PT017
            return number
    return most


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """Training stops with an error, at a lookup or at a step; it goes on when there is room again."""
    emb, optimizer = wide(tmp_path, 500)
    plain = flatbed.Embedding(MANY, WIDE, cache_rows=0)
    other = flatbed.optim.SGD(plain, lr=0.1)
    step(plain, other, [0])
    every = torch.arange(MANY)
    with largest_file((tmp_path / "wide.journal").stat().st_size):
        done = until_full(lambda number: step(emb, optimizer, part(number)))
        optimizer.zero_grad()
        for number in range(done):
            step(plain, other, part(number))
        assert torch.equal(emb.read_rows(every), plain.read_rows(every))
    assert FIRST_ROOM - 100 <= 100 * done < 20 * 100
    for number in range(done, 20):
        for module, one in ((emb, optimizer), (plain, other)):
            step(module, one, part(number))
    assert torch.equal(emb.read_rows(every), plain.read_rows(every))
    emb.table.close(discard=True)


@pytest.mark.parametrize("how", ["step", "write_rows"])
def test_a_full_disk_does_not_stop_the_next_checkpoint(how: str, tmp_path: Path) -> None:
    """Changes are refused while there is no room for them; those that were accepted can be made durable."""
    emb, optimizer = wide(tmp_path, 2000)

    def change(number: int) -> None:
        if how == "step":
            step(emb, optimizer, part(number))
        else:
            emb(part(number))
            emb.write_rows(part(number), torch.full((100, WIDE), float(number)))

    with largest_file((tmp_path / "wide.journal").stat().st_size):
        assert until_full(change) == FIRST_ROOM // 100
        optimizer.zero_grad()
        change(0)  # rows that have changed already need no other room
        expected = emb.read_rows(range(MANY))
        emb.table.checkpoint()
    assert torch.equal(emb.read_rows(range(MANY)), expected)
    emb.table.close(discard=True)


# ---- the room that changed rows need


def check_room(emb: Any) -> None:
    """Every changed row has a place in the file of changes, or room for one."""
    store = emb.table.store
    cache, tier = store.cache, store.ensure_layout()
    n_unsaved = store.unsaved_rows
    cache.arrive()  # what was sent home
    waiting = cache.tags.row_of_slot[cache.tags.dirty != 0]
    owed = waiting[tier.unchanged(waiting)]
    assert sorted(cache.tags.row_of_slot[cache.owed].tolist()) == sorted(owed.tolist())
    assert cache.n_owed == len(owed)
    journal = tier._files.journal
    assert journal._capacity >= journal.n_slots + cache.n_owed
    assert store.unsaved_rows == n_unsaved == journal.n_slots + len(owed)


@pytest.mark.parametrize("n_slots", [3, 8, ROWS])
def test_room_is_kept_for_changed_rows(n_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through steps of any kind, checkpoints, and batches that come ahead of time."""
    reserve = MappedFile.reserve

    def exactly(self: MappedFile, size: int) -> None:
        if self.path.name.endswith(".journal") and size > exact[0]:
            raise NoSpace("only what must be")
        reserve(self, size)

    exact = [0]
    grow = Journal._grow

    def note(self: Journal, needed: int, n_rows: int) -> None:
        exact[0] = self._size(needed)
        grow(self, needed, n_rows)

    monkeypatch.setattr(Journal, "_grow", note)
    monkeypatch.setattr(MappedFile, "reserve", exactly)
    emb = embedding("disk", tmp_path, n_slots)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    draw = torch.Generator().manual_seed(0)
    for number in range(120):
        ids = torch.randint(0, ROWS, (int(torch.randint(1, 9, (), generator=draw)),), generator=draw)
        kind = number % 6
        if kind == 4:
            emb.write_rows(ids, torch.randn(len(ids), DIM))
        elif kind == 5:
            written_by_kernels(emb, torch.unique(ids))
        else:
            step(emb, optimizer, ids)
        check_room(emb)
        if number % 17 == 16:
            emb.table.checkpoint()
            check_room(emb)
            assert emb.table.store.unsaved_rows == 0
        elif number % 23 == 22:
            emb.table.store.flush(drop=number % 2 == 0)
            check_room(emb)
    emb.table.close(discard=True)


def written_by_kernels(emb: Any, rows: Tensor) -> None:
    """As a step on a GPU does it with rows that came ahead of time."""
    access, cache = emb.table.access, emb.table.store.cache
    ticket = cache.come_early(rows)
    if ticket is not None:
        access.make_room(torch.tensor([-1]), ticket)
        access.place_of(RowGrads(rows, torch.empty(0), ticket=ticket))
        ticket.end()
