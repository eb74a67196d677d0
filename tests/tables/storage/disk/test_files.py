"""Tables in a file: files found there, locks, forks, ends, and full disks."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatbed
from flatbed.errors import FlatbedError
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.disk.checked_records import file_size
from flatbed.tables.storage.disk.format import RECORDS_AT
from flatbed.tables.storage.disk.mapped_file import MappedFile
from tests import programs
from tests.tables.storage.disk.crash_model import (
    NBYTES,
    RECORD,
    WIDER,
    everything,
    failing,
    files,
    fill,
    made,
    random_records,
)

# ---- files that are there already, and files that are not


def test_existing_files_are_kept(tmp_path: Path) -> None:
    made(tmp_path).close()
    before = files(tmp_path)
    with pytest.raises(FlatbedError, match="exists already"):
        made(tmp_path)
    assert files(tmp_path) == before


def test_sealed_journal_of_a_table_that_is_gone_is_refused(tmp_path: Path) -> None:
    storage = made(tmp_path)
    storage.scatter_(torch.arange(50), random_records(50))
    storage.prepare(decision=tmp_path / "decision", token="a")
    storage.close()
    sealed = (tmp_path / "table.journal").read_bytes()
    (tmp_path / "decision").write_text('{"token": "a"}')
    (tmp_path / "table").unlink()
    before = files(tmp_path)
    with pytest.raises(FlatbedError, match=r"table.journal holds a checkpoint of a table that is not here"):
        DiskStorage.create(tmp_path / "table", RECORD, 60, fill=fill)
    assert files(tmp_path) == before
    DiskStorage.create(tmp_path / "table2", RECORD, 60, fill=fill).close()
    shutil.move(tmp_path / "table2", tmp_path / "table")
    with pytest.raises(FlatbedError, match="belongs to another table"):
        DiskStorage.open(tmp_path / "table")
    assert (tmp_path / "table.journal").read_bytes() == sealed


def test_table_without_its_journal_is_refused(tmp_path: Path) -> None:
    storage = made(tmp_path)
    storage.scatter_(torch.arange(50), random_records(50))

    with failing(MappedFile, "scatter", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        storage.checkpoint({"step": 1})
    storage.close()
    shutil.move(tmp_path / "table.journal", tmp_path / "elsewhere")
    before = files(tmp_path)
    with pytest.raises(FlatbedError, match=r"journal .*table.journal is missing or damaged"):
        DiskStorage.open(tmp_path / "table")
    assert files(tmp_path) == before
    shutil.move(tmp_path / "elsewhere", tmp_path / "table.journal")
    assert DiskStorage.open(tmp_path / "table").meta == {"step": 1}


def test_no_table(tmp_path: Path) -> None:
    with pytest.raises(FlatbedError, match="no table at"):
        DiskStorage.open(tmp_path / "table")
    with pytest.raises(FlatbedError, match="Is a directory"):
        DiskStorage.open(tmp_path)
    with pytest.raises(FlatbedError, match="no folder"):
        DiskStorage.create(tmp_path / "no" / "table", RECORD, 5, fill=fill)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FlatbedError, match="no regular file"):
        DiskStorage.open(tmp_path / "pipe")


def test_drafts_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / ".table.01234567.part").write_bytes(b"left by a killed process")
    (tmp_path / ".table.89abcdef.part").symlink_to(tmp_path / "victim")
    made(tmp_path).close()
    assert sorted(files(tmp_path)) == [".table.89abcdef.part", "table", "victim"]
    assert (tmp_path / "victim").read_bytes() == b"precious"


def as_file(path: Path, victim: Path) -> None:
    path.write_bytes(victim.read_bytes())


@pytest.mark.parametrize("place", [Path.symlink_to, Path.hardlink_to, as_file])
def test_files_of_other_programs_are_never_overwritten(place: Any, tmp_path: Path) -> None:
    victim, storage = tmp_path / "victim", made(tmp_path)
    victim.write_bytes(b"precious")
    place(tmp_path / "table.journal", victim)
    with pytest.raises(FlatbedError, match=r"table\.journal"):
        storage.scatter_(torch.arange(3), random_records(3))
    storage.close()
    with pytest.raises(FlatbedError, match=r"table\.journal"):
        DiskStorage.open(tmp_path / "table")
    assert victim.read_bytes() == b"precious"


def test_modes_are_kept(tmp_path: Path) -> None:
    storage = made(tmp_path)
    (tmp_path / "table").chmod(0o640)
    storage = storage.rebuilt(WIDER, fill=fill)
    storage.scatter_(torch.arange(3), random_records(3, WIDER.nbytes))
    for name in ("table", "table.journal"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    storage.close()


def test_journal_takes_the_mode_that_the_table_has_by_then(tmp_path: Path) -> None:
    storage = made(tmp_path)
    (tmp_path / "table").chmod(0o600)
    storage.scatter_(torch.arange(3), random_records(3))
    assert stat.S_IMODE((tmp_path / "table.journal").stat().st_mode) == 0o600
    storage.close()


def renamed(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replaced(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["table", "table.journal"])
@pytest.mark.parametrize("lose", [Path.unlink, renamed, replaced])
def test_checkpoint_of_a_file_that_lost_its_name_raises(name: str, lose: Any, tmp_path: Path) -> None:
    """Rows stay in the journal, and can be saved elsewhere."""
    storage = made(tmp_path)
    storage.scatter_(torch.arange(5), random_records(5))
    now = everything(storage)
    lose(tmp_path / name)
    changes: list[Callable[[], Any]] = [
        storage.checkpoint,
        lambda: storage.prepare(decision=tmp_path / "decision", token="a"),
        lambda: storage.resize(200, fill=fill),
    ]
    if name == "table":  # rows are read from the journal before the file is replaced
        changes.append(lambda: storage.rebuilt(RECORD, fill=fill))
    for change in changes:
        with pytest.raises(FlatbedError, match=rf"{name} was removed or replaced.*put it back"):
            change()
        storage.release()
        assert (storage.unsaved_rows, storage.generation) == (5, 0)
        assert np.array_equal(everything(storage), now)
    if lose is renamed:
        (tmp_path / "elsewhere").rename(tmp_path / name)
        storage.checkpoint()
        storage.close()
        assert np.array_equal(everything(DiskStorage.open(tmp_path / "table")), now)


def test_two_names_of_one_file(tmp_path: Path) -> None:
    storage = made(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "table")
    with pytest.raises(FlatbedError, match="is open already"):
        DiskStorage.open(tmp_path / "link")
    storage.close()
    with closing(DiskStorage.open(tmp_path / "link")) as storage:
        assert storage.path == tmp_path / "table"


@pytest.mark.parametrize("name", ["workers", "writer", "table", "journal"])
def test_interrupted_close_keeps_no_lock(tmp_path: Path, name: str) -> None:
    storage = made(tmp_path)
    owner = getattr(storage._files, name)
    with failing(owner, "close", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        storage.close()
    storage.close()
    DiskStorage.open(tmp_path / "table").close()


def test_holes_are_filled_and_the_room_of_an_unfinished_growth_is_given_back(tmp_path: Path) -> None:
    DiskStorage.create(tmp_path / "table", RECORD, 10_000, fill=lambda *_: None).close()
    with open(tmp_path / "table", "r+b") as file:
        head = file.read(RECORDS_AT)
        file.truncate(0)
        file.seek(0)
        file.write(head)
        file.truncate(file_size(10_000, NBYTES) + 5_000)
    with closing(DiskStorage.open(tmp_path / "table")) as storage:
        found = (tmp_path / "table").stat()
        assert found.st_blocks * 512 < 100_000  # a file that claims to be large reserves nothing by itself
        storage.checkpoint()
        found = (tmp_path / "table").stat()
        assert found.st_blocks * 512 >= found.st_size == file_size(10_000, NBYTES)


# ---- locks, forks, ends


def test_forgotten_storage_gives_everything_back(tmp_path: Path) -> None:
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    storage = made(tmp_path)
    storage.scatter_(torch.arange(3), random_records(3))
    storage.checkpoint()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del storage
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert list(files(tmp_path)) == ["table"]
    DiskStorage.open(tmp_path / "table").close()


FORKED = """
import atexit, os, sys
from tests.tables.storage.disk.test_files import *
folder = Path(sys.argv[1])
storage = made(folder)
storage.scatter_(torch.arange(5), random_records(5))
inside, outside = os.pipe()
ready, told = os.pipe()
child = os.fork()
if not child:
    for use in (lambda: storage.gather(torch.arange(3)), lambda: storage.read(0, 3),
                lambda: storage.scatter_(torch.arange(3), random_records(3)),
                lambda: storage.checkpoint(), lambda: storage.commit()):
        try:
            use()
        except FlatbedError as error:
            assert "is closed" in str(error), error
        else:
            os._exit(1)
    storage.close()
    del storage
    gc.collect()
    assert "table" not in Path("/proc/self/maps").read_text()
    try:
        DiskStorage.open(folder / "table")
    except FlatbedError as error:
        assert "is open already" in str(error) and "close it there first" in str(error), error
    else:
        os._exit(2)
    other = made(folder / "child")  # a table of its own is no problem
    other.checkpoint()
    os.write(told, b"!")
    os.close(outside)
    os.read(inside, 1)  # lives until the parent has closed its own end
    atexit._run_exitfuncs()
    os._exit(0)
os.read(ready, 1)
storage.checkpoint({"step": 1})
expected = everything(storage)
storage.close()
again = DiskStorage.open(folder / "table")  # although the child still lives
assert np.array_equal(everything(again), expected)
os.close(outside)
_, status = os.waitpid(child, 0)
assert status == 0
assert again.meta == {"step": 1}
again.scatter_(torch.arange(5), random_records(5))
again.checkpoint()
print("fine")
"""


def test_forked_processes_let_go(tmp_path: Path) -> None:
    (tmp_path / "child").mkdir()
    done = programs.run(FORKED, tmp_path)
    assert (done.stdout, done.stderr) == ("fine\n", "")


# ---- no room


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """As if the disk were full, for any user: no file can pass this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_a_table(tmp_path: Path) -> None:
    with (
        largest_file(1 << 20),
        pytest.raises(FlatbedError, match=r"needs [\d,]+ bytes, and its disk has [\d,]+ bytes"),
    ):
        made(tmp_path, 100_000)
    assert files(tmp_path) == {}
    for n_rows in (2**50, 2**62):
        with pytest.raises(FlatbedError, match=r"needs [\d,]+ bytes"):
            made(tmp_path, n_rows)
    assert files(tmp_path) == {}


def test_no_room_for_changes(tmp_path: Path) -> None:
    """A full disk stops changes and growth, and neither reading nor the next checkpoint."""
    storage = made(tmp_path, 50_000)
    storage.scatter_(torch.arange(10_000), random_records(10_000))
    now = everything(storage)
    sizes = [(tmp_path / name).stat().st_size for name in ("table", "table.journal")]
    with largest_file(sizes[1] + 200_000):
        for change in (
            lambda: storage.scatter_(torch.arange(5_000, 50_000), random_records(45_000)),
            lambda: storage.resize(100_000, fill=fill),
        ):
            with pytest.raises(FlatbedError, match="free some space"):
                change()
            assert np.array_equal(everything(storage), now)
            assert (storage.unsaved_rows, storage.n_rows) == (10_000, 50_000)
            assert [(tmp_path / name).stat().st_size for name in ("table", "table.journal")] == sizes
        exactly = torch.arange(5_000, 11_000)  # twice as many would not fit, but these do
        storage.scatter_(exactly, random_records(6_000))
        now = everything(storage)
        storage.checkpoint({"step": 1})
    storage.close()
    storage = DiskStorage.open(tmp_path / "table")
    assert np.array_equal(everything(storage), now)
    assert storage.meta == {"step": 1}


EXIT = """
import gc, os, sys, torch, flatbed
kept = []
for cache_rows in (0, 50):
    for how in ("lost", "collected", "flushed", "discarded", "saved"):
        path = f"{sys.argv[1]}/{how}-{cache_rows}"
        emb = flatbed.Embedding(100, 4, storage="disk", path=path, cache_rows=cache_rows, device="cpu")
        for n in (7,) if how == "collected" else (4, 7):
            emb(torch.arange(n))
            emb.write_rows(range(n), torch.ones(n, 4))
        emb.itself = emb.table
        if how == "flushed":
            emb.table.set_cache(0)
        if how in ("lost", "flushed"):
            kept.append(emb)
        elif how == "discarded":
            emb.table.close(discard=True)
        elif how == "saved":
            emb.table.checkpoint()
    del emb
    gc.collect()
    print("collected", file=sys.stderr)
"""


def test_lost_changes_are_told(tmp_path: Path) -> None:
    """At exit, and when a table is garbage collected. In a cache, changed rows are not counted one by one."""
    lines = programs.run(EXIT, tmp_path).stderr.splitlines()
    told = [line.partition(" changed since its last checkpoint and are dropped.")[0] for line in lines]
    assert told[:2] == [f"flatbed: 7 rows of {tmp_path / 'collected-0'}", "collected"]
    assert told[2:4] == [f"flatbed: up to 7 rows of {tmp_path / 'collected-50'}", "collected"]
    assert sorted(told[4:]) == [
        *(f"flatbed: 7 rows of {tmp_path / name}" for name in ("flushed-0", "flushed-50", "lost-0")),
        f"flatbed: up to 7 rows of {tmp_path / 'lost-50'}",
    ]


def test_a_mapping_lives_as_long_as_its_last_reader(tmp_path: Path) -> None:
    """Otherwise a thread that reads while another one closes the file would crash the process."""
    file = MappedFile(tmp_path / "file", create=True)
    file.write(0, bytes(range(64)))
    records = file.map(16, 8, count=4)
    file.close()
    assert records.tobytes() == bytes(range(16, 48))


def test_names_of_journals_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ending of files"):
        flatbed.Embedding(10, 4, storage="disk", path=tmp_path / "a.journal")
