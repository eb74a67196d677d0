"""Rows that the disk or memory has changed are found when they are first read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import flatbed
from flatbed.cli import app
from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.tables.storage.disk import DiskStorage, ReadOnlyStorage
from flatbed.tables.storage.disk.checked_records import file_size, row_sums, sums_at
from flatbed.tables.storage.disk.format import (
    JOURNAL,
    OLD_JOURNAL,
    PAGE,
    RECORDS_AT,
    STATE_AT,
    decode,
    encode,
)
from flatbed.tables.storage.disk.journal import index_at
from tests.tables.storage.disk.crash_model import (
    NBYTES,
    everything,
    failing,
    fill,
    filled,
    made,
    random_records,
    without_sums,
)

N_ROWS = 100


def flip(path: Path, row: int, bit: int) -> None:
    """Flip a bit of a row in the file."""
    flip_at(path, RECORDS_AT + row * NBYTES, bit)


def flip_at(path: Path, offset: int, bit: int) -> None:
    """Flip a bit after an offset in the file."""
    with open(path, "r+b") as file:
        file.seek(offset + bit // 8)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1 << bit % 8]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table with a checkpoint that changed rows 0 to 49."""
    with closing(made(tmp_path, N_ROWS)) as storage:
        storage.scatter_(torch.arange(50), random_records(50))
        storage.checkpoint()
    return tmp_path / "table"


@pytest.mark.parametrize("nbytes", [16, 128, 1536])
def test_every_flipped_bit_changes_a_checksum(nbytes: int) -> None:
    generator = np.random.default_rng(nbytes)
    record = generator.integers(0, 256, nbytes, np.uint8)
    bits = np.unique(np.concatenate((np.arange(256), generator.integers(0, 8 * nbytes, 4000)))) % (8 * nbytes)
    rows = np.tile(record, (len(bits), 1))
    rows[np.arange(len(bits)), bits // 8] ^= (1 << bits % 8).astype(np.uint8)
    before = row_sums(record[None].view(f"V{nbytes}")[:, 0])
    assert before != 0
    assert (row_sums(rows.view(f"V{nbytes}")[:, 0]) != before).all()
    zeros = np.zeros((1, nbytes), np.uint8).view(f"V{nbytes}")[:, 0]
    assert row_sums(zeros) != 0  # which is "unknown"


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_signs_that_flip_together_change_a_checksum(dtype: type) -> None:
    """They are the last bits of words."""
    values = np.random.default_rng(0).standard_normal((1000, 64)).astype(dtype)
    last, pair, all_of_it = values.copy(), values.copy(), -values
    last[:, [-1, -5]] *= -1
    pair[:, [1, 3]] *= -1
    before, *others = (
        row_sums(rows.view(np.uint8).view(f"V{rows.nbytes // 1000}")[:, 0])
        for rows in (values, last, pair, all_of_it)
    )
    assert not any((sums == before).any() for sums in others)


READS: dict[str, Callable[[Path, int], object]] = {
    "gather": lambda path, row: DiskStorage.open(path).gather(torch.tensor([3, row, 4])),
    "gather weights": lambda path, row: DiskStorage.open(path).gather(torch.tensor([row]), 4),
    "read": lambda path, row: DiskStorage.open(path).read(row - 1, row + 2),
    "read only": lambda path, row: ReadOnlyStorage(path).gather(torch.tensor([row])),
    "all": lambda path, row: ReadOnlyStorage(path).check_rows(),
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize(("row", "bit"), [(7, 8 * NBYTES - 1), (98, 100)])
def test_one_flipped_bit_is_found(path: Path, how: str, row: int, bit: int) -> None:
    flip(path, row, bit)
    with pytest.raises(DamagedFileError, match=rf"row {row} in .*table .*checksum .*restore"):
        READS[how](path, row)


def test_other_rows_can_be_read_and_the_damaged_one_be_replaced(path: Path) -> None:
    flip(path, 7, 3)
    with closing(DiskStorage.open(path)) as storage:
        others = torch.tensor([row for row in range(N_ROWS) if row != 7])
        kept = storage.gather(others)
        storage.scatter_(torch.tensor([7]), torch.ones(1, NBYTES, dtype=torch.uint8))
        assert storage.gather(torch.tensor([7])).eq(1).all()
        assert torch.equal(torch.from_numpy(everything(storage))[others], kept)
        storage.checkpoint()
        assert len(everything(storage)) == N_ROWS
    with closing(DiskStorage.open(path)) as storage:
        assert storage.gather(torch.tensor([7])).eq(1).all()


def test_a_table_says_which_row_is_damaged(tmp_path: Path) -> None:
    emb = flatbed.Embedding(N_ROWS, NBYTES // 4, storage="disk", path=tmp_path / "t.bed")
    emb(torch.tensor([1]))
    emb.table.close()
    flip(tmp_path / "t.bed", 30, 9)
    with flatbed.load_table(tmp_path / "t.bed") as table, pytest.raises(DamagedFileError, match="row 30"):
        table.read_rows(range(N_ROWS))


def test_a_file_of_an_earlier_version_gets_checksums_as_rows_change(path: Path) -> None:
    rows = everything(DiskStorage.open(path))
    without_sums(path, N_ROWS)
    assert ReadOnlyStorage(path).check_rows() == 0
    with closing(DiskStorage.open(path)) as storage:
        assert np.array_equal(everything(storage), rows)
        storage.scatter_(torch.tensor([60, 61]), random_records(2))
        storage.checkpoint()
    assert ReadOnlyStorage(path).check_rows() == 2
    flip(path, 10, 0)  # unknown
    flip(path, 61, 0)
    with closing(DiskStorage.open(path)) as storage:
        assert storage.gather(torch.tensor([10])).shape == (1, NBYTES)
        with pytest.raises(DamagedFileError, match="row 61"):
            storage.gather(torch.tensor([61]))


def test_a_table_that_grows_keeps_its_checksums(path: Path) -> None:
    with closing(DiskStorage.open(path)) as storage:

        def failing(start: int, stop: int, records: torch.Tensor) -> None:
            raise RuntimeError("no rows today")

        storage.scatter_(torch.tensor([3, 99]), random_records(2))
        now = everything(storage)
        with pytest.raises(RuntimeError):
            storage.resize(5_000, fill=failing)
        assert path.stat().st_size == file_size(N_ROWS, NBYTES)
        assert (storage.n_rows, storage.unsaved_rows) == (N_ROWS, 2)
        assert np.array_equal(everything(storage), now)
    assert ReadOnlyStorage(path).check_rows() == N_ROWS
    with closing(DiskStorage.open(path)) as storage:
        for n_rows in (N_ROWS + 1, 700):
            storage.resize(n_rows, fill=fill)
            assert np.array_equal(everything(storage)[N_ROWS:], filled(N_ROWS, n_rows, NBYTES))
    assert ReadOnlyStorage(path).check_rows() == 700
    flip(path, 699, 5)
    with pytest.raises(DamagedFileError, match="row 699"):
        ReadOnlyStorage(path).check_rows()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")], ids=repr)
def test_a_growth_that_fails_at_its_first_sync_keeps_the_checksums(path: Path, error: BaseException) -> None:
    with closing(DiskStorage.open(path)) as storage:
        with failing(os, "fsync", error), pytest.raises((KeyboardInterrupt, FlatbedError)):
            storage.resize(5_000, fill=fill)
        storage.scatter_(torch.tensor([3]), random_records(1))
        storage.checkpoint()
    assert ReadOnlyStorage(path).check_rows() == N_ROWS


def test_a_growth_drops_the_checksums_before_it_writes_over_them(path: Path) -> None:
    """Otherwise a file that a kill leaves might have some of both."""
    found = []

    def checking(start: int, stop: int, records: torch.Tensor) -> None:
        found.append(ReadOnlyStorage(path).check_rows())
        fill(start, stop, records)

    with closing(DiskStorage.open(path)) as storage:
        storage.resize(N_ROWS + 1, fill=checking)
    assert found == [0]


def test_a_reader_is_not_disturbed_by_a_trainer_that_adds_rows(path: Path) -> None:
    with closing(DiskStorage.open(path)) as storage, closing(ReadOnlyStorage(path)) as reader:
        found = []

        def reading(start: int, stop: int, records: torch.Tensor) -> None:
            fill(start, stop, records)
            if start > N_ROWS:
                found.append(reader.gather(torch.arange(N_ROWS)))

        storage.resize(600_000, fill=reading)  # in chunks: the first is over the checksums by the second
        assert found
        assert all(torch.equal(rows, storage.gather(torch.arange(N_ROWS), rows.shape[1])) for rows in found)


def test_check_command(path: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(path)])
    assert (done.exit_code, "100 of 100 rows" in done.output) == (0, True)
    flip(path, 7, 3)
    done = CliRunner().invoke(app, ["check", str(path)])
    assert (done.exit_code, "row 7 " in done.output) == (1, True)
    assert CliRunner().invoke(app, ["check", "--forget", str(path)]).exit_code == 0
    done = CliRunner().invoke(app, ["check", str(path)])
    assert (done.exit_code, "without checksums" in done.output) == (0, True)
    with closing(DiskStorage.open(path)) as storage:
        assert len(everything(storage)) == N_ROWS


def test_every_flipped_bit_before_the_checksums_is_found(path: Path) -> None:
    for bit in range(8 * 16):
        flip_at(path, sums_at(N_ROWS, NBYTES), bit)
        with pytest.raises(DamagedFileError, match=r"mark .*checksums of .*restore .*--forget"):
            ReadOnlyStorage(path)
        with pytest.raises(DamagedFileError, match=r"mark .*checksums of .*restore .*--forget"):
            DiskStorage.open(path)
        flip_at(path, sums_at(N_ROWS, NBYTES), bit)
    assert ReadOnlyStorage(path).check_rows() == N_ROWS
    flip_at(path, sums_at(N_ROWS, NBYTES), 5)
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 1
    assert CliRunner().invoke(app, ["check", "--forget", str(path)]).exit_code == 0
    assert ReadOnlyStorage(path).check_rows() == 0


def test_file_that_is_cut_within_its_checksums_is_refused(path: Path) -> None:
    for size in (sums_at(N_ROWS, NBYTES), sums_at(N_ROWS, NBYTES) + 7, file_size(N_ROWS, NBYTES) - 1):
        os.truncate(path, size)
        with pytest.raises(DamagedFileError, match="cut short"):
            DiskStorage.open(path)


@pytest.mark.parametrize("is_written", [False, True])
def test_growth_that_a_kill_ends_keeps_the_rows(path: Path, is_written: bool) -> None:
    """Its new rows were over the checksums, which are unknown afterwards."""
    copy = path.with_name("copy")

    def copying(start: int, stop: int, records: torch.Tensor) -> None:
        fill(start, stop, records)
        if start > N_ROWS or not is_written:
            copy.write_bytes(path.read_bytes())
            raise KeyboardInterrupt

    with closing(DiskStorage.open(path)) as storage:
        rows = everything(storage)
        with pytest.raises(KeyboardInterrupt):
            storage.resize(600_000, fill=copying)
    for _ in range(2):
        assert ReadOnlyStorage(copy).check_rows() == 0
        with closing(DiskStorage.open(copy)) as storage:
            assert np.array_equal(everything(storage), rows)
        assert copy.stat().st_size == file_size(N_ROWS, NBYTES) + 1
    with closing(DiskStorage.open(copy)) as storage:
        storage.checkpoint()
    assert copy.stat().st_size == file_size(N_ROWS, NBYTES)
    assert np.array_equal(everything(DiskStorage.open(copy)), rows)


def test_every_flipped_bit_of_a_header_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "t.bed"
    table = flatbed.Embedding(2, 2, storage="disk", path=path).table
    table.checkpoint()
    table.close()
    data = path.read_bytes()
    lengths = {at: 56 + int.from_bytes(data[at + 20 : at + 24], "little") for at in (0, STATE_AT)}
    used = [8 * at + bit for at, length in lengths.items() for bit in range(8 * length)]
    opens = [lambda: flatbed.load_table(path), lambda: flatbed.load_table(path, read_only=True)]
    for bit in used:
        flip_at(path, 0, bit)
        if bit == 8 * STATE_AT:
            opens.pop()  # waits for a trainer that might write it
        for load in opens:
            with pytest.raises(DamagedFileError, match=str(path)):
                load()
        flip_at(path, 0, bit)
    flatbed.load_table(path).close()


@pytest.mark.parametrize("damage", [False, True])
def test_sealed_journal_of_an_earlier_version_is_completed(tmp_path: Path, damage: bool) -> None:
    """It has a hash of all records in place of one of their checksums."""
    storage, journal = made(tmp_path, N_ROWS), tmp_path / "table.journal"
    before = everything(storage)
    storage.scatter_(torch.arange(50), random_records(50))
    after = everything(storage)
    storage.prepare(decision=tmp_path / "decision", token="a")
    seal, data = decode(JOURNAL, journal.read_bytes()[:PAGE]), journal.read_bytes()
    storage.release()
    storage.close()
    end = index_at(50, NBYTES) + 8 * 50 + seal["sealed"]
    seal["digest"] = sha256(sha256(data[PAGE:end]).digest()).hexdigest()
    page = encode(OLD_JOURNAL, seal, PAGE).ljust(PAGE, b"\0")
    flipped = bytes([data[PAGE] ^ damage])
    journal.write_bytes(page + flipped + data[PAGE + 1 :])
    (tmp_path / "decision").write_text('{"token": "a"}')
    with closing(DiskStorage.open(tmp_path / "table")) as storage:
        assert np.array_equal(everything(storage), before if damage else after)


def test_journal_in_which_two_signs_differ_is_not_completed(tmp_path: Path) -> None:
    """A loss of power may leave the seal, and a row as it was in an earlier checkpoint."""
    storage, journal = made(tmp_path, N_ROWS), tmp_path / "table.journal"
    before = everything(storage)
    storage.scatter_(torch.arange(50), random_records(50))
    storage.prepare(decision=tmp_path / "decision", token="a")
    storage.release()
    storage.close()
    data = bytearray(journal.read_bytes())
    data[PAGE + 7] ^= 0x80
    data[PAGE + 15] ^= 0x80
    journal.write_bytes(data)
    (tmp_path / "decision").write_text('{"token": "a"}')
    with closing(DiskStorage.open(tmp_path / "table")) as storage:
        assert np.array_equal(everything(storage), before)
