"""Cached tables when something fails: nothing is lost, and a full disk stops no checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flatbed
from flatbed.errors import FlatbedError
from flatbed.tables.cache import write_behind
from flatbed.tables.storage.disk import DiskStorage
from tests.tables.storage.disk.test_files import largest_file
from tests.tables.tables import Twins, cached_rows, everything, step

ROWS, DIM = 30, 3


def embedding(folder: Path, n_slots: int) -> Any:
    return flatbed.Embedding(ROWS, DIM, storage="disk", path=folder / "table", seed=1, cache_rows=n_slots)


# ---- reads and writes that fail


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "set_cache": lambda emb: emb.table.set_cache(3),
    "resize": lambda emb: emb.table.resize(ROWS + 1),
    "save": lambda emb: emb.state_dict(),
    "checkpoint": lambda emb: emb.table.checkpoint(),
    "drop_state": lambda emb: (emb.table.drop_state(), emb.read_rows([1])),
    "close": lambda emb: emb.table.close(),
}


def no_space(*_: Any, **__: Any) -> None:
    raise FlatbedError("no space left")


@pytest.mark.parametrize("what", OUTSIDE)
def test_changed_rows_survive_a_failed_write_back(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins("disk", tmp_path).train()
    with monkeypatch.context() as patch:
        patch.setattr(DiskStorage, "scatter_", no_space)
        with pytest.raises(FlatbedError, match="no space left"):
            OUTSIDE[what](twins.cached)
    assert torch.equal(*(everything(emb)[0] for emb in twins.both))
    monkeypatch.setattr(DiskStorage, "scatter_", no_space)
    twins.cached.table.close(discard=True)


def test_failed_writes_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer thread fails; the next admission tries again and raises, and nothing is lost."""
    twins = Twins("disk", tmp_path, n_slots=4).train()
    emb = twins.cached
    emb.table.checkpoint()
    twins.step([1, 2, 8, 29])
    n_failed = 0

    def fail(*_: Any, **__: Any) -> None:
        nonlocal n_failed
        n_failed += 1
        raise FlatbedError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DiskStorage, "scatter_", fail)
        emb.table.warm([10, 11])  # evicts rows
        for _ in range(2):
            with pytest.raises(FlatbedError, match="the disk is gone"):
                emb(torch.tensor([12]))
        assert n_failed == 3
        assert emb.table._store.unsaved_rows == 4  # in the cache, and on their way to the journal
    twins.check()
    emb.table.checkpoint()
    twins.check()


@pytest.mark.parametrize("many", [1, 1000])
def test_failed_reads_change_nothing(many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "MANY", many)
    twins = Twins("disk", tmp_path, n_slots=4).train()
    before = cached_rows(twins.cached)
    with monkeypatch.context() as patch:
        patch.setattr(DiskStorage, "collect", no_space)
        for rows in ([10, 11], [12, 13, 14]):
            with pytest.raises(FlatbedError, match="no space left"):
                twins.cached(torch.tensor(rows))
    assert cached_rows(twins.cached) <= before  # rows that had not changed may be dropped
    twins.step([10, 11, 1], [12, 2])
    twins.check()
    twins.cached.table.checkpoint()
    twins.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_process_waits_for_no_thread_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent's writer thread is busy, and does not exist in the child."""
    go_on, scatter = threading.Event(), DiskStorage.scatter_
    monkeypatch.setattr(DiskStorage, "scatter_", lambda *args: go_on.wait(60) and scatter(*args))
    emb = embedding(tmp_path, 4)
    emb(torch.arange(4))
    emb.write_rows(range(4), torch.ones(4, DIM))
    emb.table.warm(range(4, 8))  # evicts rows
    child = os.fork()
    if child == 0:  # no pytest in here
        emb.table.close(discard=True)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    go_on.set()
    assert os.waitstatus_to_exitcode(status) == 7
    assert torch.equal(emb.read_rows(range(4)), torch.ones(4, DIM))
    emb.table.close(discard=True)


# ---- full disks


WIDE = 380  # records of 1,536 bytes: a new journal has room for 682 of them
MANY = 3000
FIRST_ROOM = 682


def wide(folder: Path, n_slots: int, device: str = "cpu") -> tuple[Any, Any]:
    options: dict[str, Any] = {"storage": "disk", "path": folder / "wide", "device": device}
    emb = flatbed.Embedding(MANY, WIDE, seed=1, cache_rows=n_slots, **options)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    step(emb, optimizer, [0])  # creates the journal
    return emb, optimizer


def part(number: int) -> range:
    return range(100 * number, 100 * number + 100)


def until_full(change: Callable[[int], None], most: int = 20) -> int:
    """Number of changes until the disk is full."""
    for number in range(most):
        try:
            change(number)
        except FlatbedError as error:
            assert "free some space" in str(error)  # noqa: PT017
            return number
    return most


def test_full_disk_loses_nothing(tmp_path: Path) -> None:
    """A lookup or a step raises; training goes on when there is room again."""
    emb, optimizer = wide(tmp_path, 500)
    plain = flatbed.Embedding(MANY, WIDE, seed=1, cache_rows=0)
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


@pytest.mark.parametrize("device", ["cpu"])  # with a GPU, the limit would stop Triton's files as well
@pytest.mark.parametrize("n_slots", [300, 2000])
@pytest.mark.parametrize("how", ["step", "write_rows", "prefetched"])
def test_full_disk_does_not_stop_the_next_checkpoint(
    how: str, n_slots: int, device: str, tmp_path: Path
) -> None:
    """Changes without room are refused; changes that were accepted can be made durable."""
    emb, optimizer = wide(tmp_path, n_slots, device)

    def change(number: int) -> None:
        if how == "write_rows":
            emb(part(number))
            emb.write_rows(part(number), torch.full((100, WIDE), float(number)))
        elif how == "step":
            step(emb, optimizer, part(number))
        else:
            for ids in flatbed.Prefetcher([torch.tensor(part(number))], {emb: lambda batch: batch}):
                step(emb, optimizer, ids)

    with largest_file((tmp_path / "wide.journal").stat().st_size):
        assert until_full(change) == FIRST_ROOM // 100
        optimizer.zero_grad()
        change(0)  # changed rows have their room already
        expected = emb.read_rows(range(MANY))
        emb.table.checkpoint()
    emb.table.close(discard=True)
    assert torch.equal(flatbed.load_table(tmp_path / "wide").read_rows(range(MANY)), expected.cpu())


def test_a_journal_reserves_no_more_than_rows_that_were_in_the_cache(tmp_path: Path) -> None:
    """Rows that change in every step count once."""
    emb, optimizer = wide(tmp_path, 1000)
    before = (tmp_path / "wide.journal").stat().st_size
    for number in range(60):
        step(emb, optimizer, part(number % 2))
        if number == 30:
            emb.table.checkpoint()
    assert (tmp_path / "wide.journal").stat().st_size == before
    emb.table.close(discard=True)


def test_a_journal_reserves_no_more_than_all_rows(tmp_path: Path) -> None:
    """Its room is for twice the slots of the cache, and for the rows of a step."""
    emb, optimizer = wide(tmp_path, 1000)
    for number in range(30):
        step(emb, optimizer, part(number))
    assert (tmp_path / "wide.journal").stat().st_size < 1.05 * MANY * 4 * (WIDE + 4)
    emb.table.close(discard=True)
