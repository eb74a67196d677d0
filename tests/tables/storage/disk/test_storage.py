"""Tables in a file: the contract of storages, and checkpoints."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import flatbed
from flatbed.errors import FlatbedError
from flatbed.tables.storage import base
from flatbed.tables.storage.disk import DiskStorage, ReadOnlyStorage, checked_records, journal
from flatbed.tables.storage.disk.checked_records import file_size
from flatbed.tables.storage.disk.mapped_file import MappedFile
from tests.tables.storage.disk.crash_model import (
    NBYTES,
    RECORD,
    WIDER,
    everything,
    failing,
    files,
    fill,
    filled,
    made,
    random_records,
)

# ---- the contract of storages


def test_creation_fills_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHUNK_BYTES", 16 * NBYTES)
    asked = []

    def noted(start: int, stop: int, records: torch.Tensor) -> None:
        assert not records.any()
        asked.extend(range(start, stop))
        fill(start, stop, records)

    storage = DiskStorage.create(tmp_path / "table", RECORD, 33, fill=noted)
    assert asked == list(range(33))
    assert np.array_equal(everything(storage), filled(0, 33, NBYTES))
    storage.close()
    assert (tmp_path / "table").stat().st_size == file_size(33, NBYTES)


@pytest.mark.parametrize("part", [1 << 20, NBYTES], ids=["one thread", "many threads"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("n_ids", [0, 50, 100])
def test_gather_is_in_the_order_of_the_ids(
    tmp_path: Path, n_ids: int, checkpoint: bool, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_records, "READ_PART", part)
    monkeypatch.setattr(checked_records, "MEMORY_PART", part)
    storage, model = made(tmp_path), filled(0, 100, NBYTES)
    ids, records = torch.randperm(100)[:n_ids], random_records(n_ids)
    storage.scatter_(ids, records)
    model[ids.numpy()] = records.numpy()
    assert storage.unsaved_rows == n_ids
    if checkpoint:
        storage.checkpoint()
    for asked in (torch.randint(0, 100, (257,)), torch.arange(100), ids, ids.int(), torch.empty(0).long()):
        for nbytes in (1, 2, 12, 32, NBYTES):
            assert np.array_equal(storage.gather(asked, nbytes).numpy(), model[asked.numpy(), :nbytes])
    assert np.array_equal(storage.read(10, 60).numpy(), model[10:60])
    assert storage.read(7, 7).shape == (0, NBYTES)
    storage.close()


@pytest.mark.parametrize("bad", [-1, 100, 2**40])
def test_ids_out_of_range(tmp_path: Path, bad: int) -> None:
    storage = made(tmp_path)
    ids = torch.tensor([5, bad, 7])
    with pytest.raises(IndexError, match=f"id {bad} at position 1 is out of range .* 100 rows"):
        storage.gather(ids)
    with pytest.raises(IndexError, match="out of range"):
        storage.scatter_(ids, random_records(3))
    with pytest.raises(IndexError, match="out of range"):
        storage.write_(99, random_records(2))
    assert storage.unsaved_rows == 0
    storage.close()


def test_meta_is_json_of_limited_size(tmp_path: Path) -> None:
    storage = made(tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        storage.checkpoint({"tensor": torch.zeros(1)})
    storage.scatter_(torch.arange(3), random_records(3))
    with pytest.raises(ValueError, match="file of their own"):
        storage.checkpoint({"much": "x" * 100_000})
    assert (storage.unsaved_rows, storage.generation, storage.meta) == (3, 0, {"step": 0})
    meta = {"much": "x" * 50_000, "nested": {"list": [1, 2]}, "∞": float("inf")}
    storage.checkpoint(meta)
    storage.close()
    assert DiskStorage.open(tmp_path / "table").meta == meta


# ---- checkpoints


def test_only_checkpoints_reach_the_file(tmp_path: Path) -> None:
    storage = made(tmp_path)
    before = (tmp_path / "table").read_bytes()
    storage.scatter_(torch.arange(100), random_records(100))
    assert (tmp_path / "table").read_bytes() == before
    storage.close()
    assert files(tmp_path) == {"table": before}
    storage = DiskStorage.open(str(tmp_path / "table"))
    storage.checkpoint()
    assert (storage.generation, storage.meta, storage.record) == (1, {"step": 0}, RECORD)


class DiskMachine(RuleBasedStateMachine):
    """Any order of calls, against arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.storage = made(self.folder, 20)
        self.now, self.saved = filled(0, 20, NBYTES), filled(0, 20, NBYTES)
        self.generation, self.prepared, self.random = 0, False, np.random.default_rng(0)

    def records(self, n: int) -> torch.Tensor:
        return torch.from_numpy(self.random.integers(0, 256, (n, NBYTES), np.uint8))

    def completed(self) -> None:
        self.saved, self.prepared = self.now.copy(), False
        self.generation += 1

    @precondition(lambda self: not self.prepared)
    @rule(ids=st.sets(st.integers(0, 19)))
    def scatter(self, ids: set[int]) -> None:
        rows, records = sorted(ids, key=lambda i: i * 7 % 20), self.records(len(ids))
        self.storage.scatter_(torch.tensor(rows, dtype=torch.int64), records)
        self.now[rows] = records.numpy()

    @precondition(lambda self: not self.prepared)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.now)))
        records = self.records(data.draw(st.integers(0, len(self.now) - start)))
        self.storage.write_(start, records)
        self.now[start : start + len(records)] = records.numpy()

    @precondition(lambda self: not self.prepared)
    @rule()
    def checkpoint(self) -> None:
        self.storage.checkpoint({"generation": self.generation + 1})
        self.completed()

    @precondition(lambda self: not self.prepared)
    @rule()
    def prepare(self) -> None:
        (self.folder / "decision").write_text('{"token": "of another checkpoint"}')
        self.storage.prepare(
            {"generation": self.generation + 1}, decision=self.folder / "decision", token=str(self.generation)
        )
        self.prepared = True

    @precondition(lambda self: self.prepared)
    @rule()
    def commit(self) -> None:
        self.storage.commit()
        self.completed()

    @precondition(lambda self: self.prepared)
    @rule(decided=st.booleans(), kept=st.booleans())
    def settle(self, decided: bool, kept: bool) -> None:
        """The next change completes what was decided, and drops what was not."""
        if decided:
            (self.folder / "decision").write_text(json.dumps({"token": str(self.generation)}))
            self.completed()
        elif not kept:
            (self.folder / "decision").unlink()
        self.storage.release()
        self.prepared = False
        self.scatter({0, 5})

    @precondition(lambda self: not self.prepared)
    @rule(more=st.integers(0, 50))
    def resize(self, more: int) -> None:
        n_rows = len(self.now)
        self.storage.resize(n_rows + more, fill=fill, meta={"generation": self.generation + 1})
        self.now = np.concatenate([self.now, filled(n_rows, n_rows + more, NBYTES)])
        self.completed()

    @rule(decided=st.booleans())
    def reopen(self, decided: bool) -> None:
        self.storage.close()
        if self.prepared and decided:
            (self.folder / "decision").write_text(json.dumps({"token": str(self.generation)}))
            self.completed()
        self.storage = DiskStorage.open(self.folder / "table")
        self.now, self.prepared = self.saved.copy(), False

    @invariant()
    def same(self) -> None:
        assert np.array_equal(everything(self.storage), self.now)
        ids = torch.from_numpy(self.random.integers(0, len(self.now), 30))
        assert np.array_equal(self.storage.gather(ids).numpy(), self.now[ids.numpy()])
        assert self.storage.generation == self.generation
        assert self.storage.meta.get("generation", 0) == self.generation

    def teardown(self) -> None:
        self.storage.close()
        shutil.rmtree(self.folder)


TestMachine = DiskMachine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


def test_prepare_keeps_rows_still(tmp_path: Path) -> None:
    storage = made(tmp_path)
    storage.scatter_(torch.arange(5), random_records(5))
    now = everything(storage)
    storage.prepare(decision=tmp_path / "decision", token="a")
    for change in (
        lambda: storage.scatter_(torch.arange(3), random_records(3)),
        lambda: storage.checkpoint(),
        lambda: storage.resize(200, fill=fill),
        lambda: storage.rebuilt(WIDER, fill=fill),
    ):
        with pytest.raises(FlatbedError, match=r"cannot change while .*save_checkpoint"):
            change()
        assert np.array_equal(everything(storage), now)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"token": "mine", "more": 1}'])
def test_contents_of_a_decision(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = made(tmp_path)
    storage.scatter_(torch.arange(100), random_records(100))
    now = everything(storage)
    storage.prepare({"step": 1}, decision="decision", token="mine")
    storage.close()
    monkeypatch.chdir("/")
    (tmp_path / "decision").write_text(text)
    before = files(tmp_path)
    if "mine" not in text:
        with pytest.raises(FlatbedError, match="cannot be read"):
            DiskStorage.open(tmp_path / "table")
        assert files(tmp_path) == before
        return
    for _ in range(2):
        storage = DiskStorage.open(tmp_path / "table")
        assert (storage.generation, storage.meta) == (1, {"step": 1})
        assert np.array_equal(everything(storage), now)
        storage.close()
        (tmp_path / "decision").unlink(missing_ok=True)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"), [(MappedFile, "scatter"), (journal.Journal, "clear"), (journal.Journal, "unseal")]
)
def test_interrupted_commit_is_repeated(owner: type, name: str, done: bool, tmp_path: Path) -> None:
    """Also if a kill ends the repetition."""
    (tmp_path / "live").mkdir()
    storage = made(tmp_path / "live")
    storage.scatter_(torch.arange(50), random_records(50))
    now = everything(storage)
    real = getattr(owner, name)

    def interrupt(*args: Any, **options: Any) -> None:
        if done:
            real(*args, **options)
        raise KeyboardInterrupt

    def kill(*_: Any) -> None:
        if not (tmp_path / "killed").exists():
            shutil.copytree(tmp_path / "live", tmp_path / "killed")
            raise KeyboardInterrupt

    with mock.patch.object(owner, name, interrupt), pytest.raises(KeyboardInterrupt):
        storage.checkpoint({"step": 1})
    assert np.array_equal(everything(storage), now)
    with mock.patch.object(MappedFile, "sync", kill), pytest.raises(KeyboardInterrupt):
        storage.checkpoint({"step": 2})
    assert np.array_equal(everything(DiskStorage.open(tmp_path / "killed" / "table")), now)
    storage.scatter_(torch.arange(3), torch.from_numpy(now[:3]))  # completes it first
    assert (storage.generation, storage.meta, storage.unsaved_rows) == (1, {"step": 1}, 3)
    storage.checkpoint({"step": 3})
    storage.close()
    assert np.array_equal(everything(DiskStorage.open(tmp_path / "live" / "table")), now)


def job(folder: Path) -> Path:
    """A table and its folder, as a process left them that was killed after its decision."""
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "decision").write_text('{"token": "before"}')
    storage = made(folder)
    storage.scatter_(torch.arange(5), random_records(5))
    storage.prepare({"step": 1}, decision=folder / "run" / "decision", token="mine")
    (folder / "run" / "decision").write_text('{"token": "mine"}')
    storage.close()
    return folder


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("pipe", name) for name in ("run/decision", "table.journal", "table")),
        *(("endless", name) for name in ("run/decision", "table.journal", "table")),
        *(("huge", name) for name in ("run/decision", "table")),
    ],
)
def test_pipes_devices_and_huge_decisions_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    path = job(tmp_path / "job") / name
    data = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"")
        os.truncate(path, 1 << 40)
    with pytest.raises(FlatbedError, match=f"{path.name}|/dev/zero"):
        DiskStorage.open(tmp_path / "job" / "table")
    path.unlink()
    path.write_bytes(data)
    assert DiskStorage.open(tmp_path / "job" / "table").meta == {"step": 1}


def test_copied_job_asks_its_own_decision(tmp_path: Path) -> None:
    original = job(tmp_path / "original")
    shutil.copytree(original, tmp_path / "copy")
    (original / "run" / "decision").write_text('{"token": "later"}')
    storage = DiskStorage.open(tmp_path / "copy" / "table")
    assert (storage.generation, storage.meta) == (1, {"step": 1})


@pytest.mark.parametrize("is_deleted", [False, True])
@pytest.mark.parametrize(
    ("beside", "token"), [(False, "later"), (False, "before"), (False, None), (True, "later"), (True, None)]
)
def test_sealed_journal_is_refused_if_nothing_says_whether_it_was_decided(
    beside: bool, token: str | None, is_deleted: bool, tmp_path: Path
) -> None:
    """Table and journal were copied alone. The original's folder, or one beside the copy, holds a token."""
    original = job(tmp_path / "original")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("table", "table.journal"):
        shutil.copy(original / name, copy / name)
    decided = (copy if beside else original) / "run" / "decision"
    decided.parent.mkdir(exist_ok=True)
    if beside:
        shutil.rmtree(original)
    decided.unlink(missing_ok=True)
    if token is not None:
        decided.write_text(json.dumps({"token": token}))
    before = files(copy)
    names = rf"{copy}/table.journal holds .* {copy}/run/decision, .* is missing or of another time"
    with pytest.raises(FlatbedError, match=names):
        DiskStorage.open(copy / "table")
    assert files(copy) == before
    if is_deleted:
        (copy / "table.journal").unlink()
    else:
        decided.write_text('{"token": "mine"}')
    assert DiskStorage.open(copy / "table").meta == {"step": int(not is_deleted)}


def test_sealed_journal_is_removed_if_its_decision_was_not_made(tmp_path: Path) -> None:
    decided = job(tmp_path / "job") / "run" / "decision"
    decided.write_text('{"token": "before"}')
    DiskStorage.open(tmp_path / "job" / "table").close()
    assert sorted(files(tmp_path / "job")) == ["table"]


@pytest.mark.parametrize("is_emptied", [False, True])
def test_first_save_into_a_folder_was_killed(is_emptied: bool, tmp_path: Path) -> None:
    """Its journal is removed if the folder has its version, and refused if someone has emptied the folder."""
    version = tmp_path / "run" / "v0000001-mine"
    version.mkdir(parents=True)
    storage = made(tmp_path)
    storage.scatter_(torch.arange(5), random_records(5))
    storage.prepare({"step": 1}, decision=tmp_path / "run" / "decision", token="mine")
    storage.close()
    if is_emptied:
        version.rmdir()
    with pytest.raises(FlatbedError, match="is missing or of") if is_emptied else nullcontext():
        assert DiskStorage.open(tmp_path / "table").meta == {"step": 0}
    assert sorted(files(tmp_path)) == ["table", *["table.journal"] * is_emptied]


def test_stale_journal_of_an_equal_generation_is_refused(tmp_path: Path) -> None:
    """The table was trained elsewhere for as many checkpoints, and copied back next to its old journal."""
    storage = made(tmp_path)
    storage.scatter_(torch.arange(5), random_records(5))
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "table", tmp_path / "elsewhere" / "table")
    storage.prepare({"step": 1}, decision=tmp_path / "decision", token="mine")
    (tmp_path / "decision").write_text('{"token": "mine"}')
    storage.close()
    other = DiskStorage.open(tmp_path / "elsewhere" / "table")
    for number in (1, 2):
        other.checkpoint({"step": 10 * number})
        shutil.copy(tmp_path / "elsewhere" / "table", tmp_path / "table")
        before = files(tmp_path)
        with pytest.raises(FlatbedError, match=f"checkpoint {number} .*copied at different times"):
            DiskStorage.open(tmp_path / "table")
        assert files(tmp_path) == before


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_interrupted_seal_is_taken_back(
    twice: bool, prepared: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if a second Control-C interrupts that."""
    storage = made(tmp_path)
    storage.scatter_(torch.arange(50), random_records(50))

    second = failing(MappedFile, "sync", KeyboardInterrupt()) if twice else nullcontext()
    prepare = partial(storage.prepare, decision=tmp_path / "decision", token="mine")
    with failing(journal, "encode", KeyboardInterrupt()), second, pytest.raises(KeyboardInterrupt):
        (prepare if prepared else storage.checkpoint)({"step": 1})
    assert storage.has_room(1) != twice
    if not twice:
        shutil.copytree(tmp_path, tmp_path / "killed")
        DiskStorage.open(tmp_path / "killed" / "table").close()
        assert f"rows of {tmp_path / 'killed' / 'table'} changed after" in capfd.readouterr().err
    storage.scatter_(torch.arange(40, 60), random_records(20))
    now = everything(storage)
    storage.checkpoint({"step": 1})
    storage.close()
    assert np.array_equal(everything(DiskStorage.open(tmp_path / "table")), now)


def test_resize_that_is_interrupted_twice_opens_again(tmp_path: Path) -> None:
    """The first Control-C follows the seal, the second one interrupts its removal."""
    storage = made(tmp_path)
    storage.scatter_(torch.arange(50), random_records(50))
    before, seal = everything(storage), journal.Journal.seal

    def sealed(self: journal.Journal, *args: Any, **options: Any) -> None:
        seal(self, *args, **options)
        raise KeyboardInterrupt

    second = failing(journal.Journal, "unseal", KeyboardInterrupt())
    with mock.patch.object(journal.Journal, "seal", sealed), second, pytest.raises(KeyboardInterrupt):
        storage.resize(5000, fill=fill)
    with pytest.raises(FlatbedError, match="open the table again"):
        storage.scatter_(torch.arange(10), random_records(10))
    storage.close()
    opened = DiskStorage.open(tmp_path / "table")
    assert np.array_equal(everything(opened)[: len(before)], before)


@pytest.mark.parametrize(("owner", "name"), [(MappedFile, "scatter"), (journal, "row_sums")])
def test_interrupted_scatter(owner: Any, name: str, tmp_path: Path) -> None:
    """Each row is as before or as after, and so is its checksum."""
    storage = made(tmp_path)
    storage.scatter_(torch.arange(20), random_records(20))
    before, records = everything(storage), random_records(30)
    after = before.copy()
    after[10:40] = records.numpy()
    with failing(owner, name, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        storage.scatter_(torch.arange(10, 40), records)
    found = everything(storage)
    assert ((found == before).all(1) | (found == after).all(1)).all()
    storage.scatter_(torch.arange(30, 50), random_records(20))
    now = everything(storage)
    storage.checkpoint()
    storage.close()
    assert np.array_equal(everything(DiskStorage.open(tmp_path / "table")), now)
    assert ReadOnlyStorage(tmp_path / "table").check_rows() == 100


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_failed_syncs_are_errors(tmp_path: Path, which: int) -> None:
    """A failed sync of the seal ends all changes; later ones can be tried again."""
    storage = made(tmp_path)
    storage.scatter_(torch.arange(50), random_records(50))
    now = everything(storage)
    broken = OSError(errno.EIO, "Input/output error")
    with (
        failing(os, "fsync", broken, at=which + 1),
        pytest.raises(FlatbedError, match=r"syncing .* failed: Input/output error; check") as raised,
    ):
        storage.checkpoint({"step": 1})
    assert ("table.save" if which < 2 else "whole in") in str(raised.value)
    assert np.array_equal(everything(storage), now)
    if which < 2:  # of the folder, and of the seal
        for change in (
            lambda: storage.scatter_(torch.arange(3), random_records(3)),
            lambda: storage.checkpoint(),
        ):
            with pytest.raises(FlatbedError, match="cannot be changed: the last checkpoint failed"):
                change()
    else:
        storage.commit()
        assert storage.generation == 1
    storage.close()
    storage = DiskStorage.open(tmp_path / "table")
    assert storage.generation == (which > 0)
    assert np.array_equal(everything(storage), now if which else filled(0, 100, NBYTES))


def test_table_whose_seal_was_not_synced_can_be_saved_elsewhere(tmp_path: Path) -> None:
    emb = flatbed.Embedding(20, 4, storage="disk", path=tmp_path / "t.bed", cache_rows=8)
    optimizer = flatbed.optim.Adam(emb)
    for ids in ([1, 2, 3], [4, 5, 6]):
        emb(torch.tensor(ids)).sum().backward()
        optimizer.step()
    now = emb.table.read_rows(range(20))
    broken = OSError(errno.EIO, "Input/output error")
    with failing(os, "fsync", broken, at=2), pytest.raises(FlatbedError, match=r"table\.save"):
        emb.table.checkpoint()
    emb.table.save(tmp_path / "elsewhere.safetensors")
    emb.table.close(discard=True)
    for path in ("elsewhere.safetensors", "t.bed"):
        with flatbed.load_table(tmp_path / path) as table:
            assert torch.equal(table.read_rows(range(20)), now)


@pytest.mark.parametrize("which", range(8))
def test_failed_syncs_of_a_growth(tmp_path: Path, which: int) -> None:
    """The file has the rows before or the rows after, and can be opened: even if its seal got through."""
    storage = made(tmp_path)
    broken = OSError(errno.EIO, "Input/output error")
    with failing(os, "fsync", broken, at=which + 1), pytest.raises(FlatbedError, match="Input/output error"):
        storage.resize(200, fill=fill)
    storage.close()
    n_rows = 100 if which < 5 else 200
    assert np.array_equal(everything(DiskStorage.open(tmp_path / "table")), filled(0, n_rows, NBYTES))
    assert ReadOnlyStorage(tmp_path / "table").check_rows() == n_rows


def test_rebuilt_with_other_records(tmp_path: Path) -> None:
    storage = made(tmp_path)
    storage.scatter_(torch.tensor([3, 99]), random_records(2))
    now = everything(storage)

    def carry(start: int, stop: int, records: torch.Tensor) -> None:
        records[:, :NBYTES] = storage.read(start, stop)

    with pytest.raises(ZeroDivisionError):
        storage.rebuilt(WIDER, fill=lambda start, stop, records: 1 // 0)  # type: ignore[arg-type,return-value]
    assert np.array_equal(everything(storage), now)
    assert list(files(tmp_path)) == ["table", "table.journal"]
    new = storage.rebuilt(WIDER, fill=carry, meta={"step": 1})
    with pytest.raises(FlatbedError, match="is closed"):
        storage.read(0, 1)
    assert (new.record, new.generation, new.meta, list(files(tmp_path))) == (WIDER, 1, {"step": 1}, ["table"])
    new.scatter_(torch.tensor([5]), random_records(1, WIDER.nbytes))
    expected = everything(new)
    new.checkpoint()
    new.close()
    assert np.array_equal(expected[[3, 99], :NBYTES], now[[3, 99]])
    assert np.array_equal(everything(DiskStorage.open(tmp_path / "table")), expected)
