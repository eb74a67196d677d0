"""Rows that the disk or memory has changed are found when they are first read."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import flatbed
from flatbed.cli import app
from flatbed.errors import DamagedFileError
from flatbed.tables.storage import base
from flatbed.tables.storage.disk import DiskStorage, ReadOnlyStorage, checked_records, journal
from flatbed.tables.storage.disk.checked_records import (
    as_records,
    device_row_sums,
    file_size,
    row_sums,
    sums_at,
)
from flatbed.tables.storage.disk.format import RECORDS_AT, STATE_AT
from tests.cases import DEVICES
from tests.tables.storage.disk.crash_model import (
    NBYTES,
    everything,
    fill,
    filled,
    made,
    random_records,
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


@DEVICES
@pytest.mark.parametrize("nbytes", [16, 128, 1536])
@pytest.mark.parametrize("n_at_once", [1, 70, 300])
def test_a_device_computes_the_same_checksums(
    n_at_once: int, nbytes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_records, "DEVICE_PART", n_at_once * nbytes)
    records = torch.from_numpy(
        np.random.default_rng(nbytes).integers(256, size=(300, nbytes), dtype=np.uint8)
    )
    records[:3], records[3:6] = 0, 255
    sums = device_row_sums(records.to(device)).cpu()
    assert sums.tolist() == row_sums(as_records(records.numpy())).tolist()


@pytest.mark.parametrize("error", [0, 1])
@pytest.mark.parametrize("part", [256, 1 << 20])  # several threads copy, or one
def test_rows_with_known_checksums(
    part: int, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MEMORY_PART", part)
    records = random_records(50)
    with closing(made(tmp_path, N_ROWS)) as storage:
        storage.scatter_(torch.arange(50), records, device_row_sums(records) + error)
        storage.checkpoint()
    with closing(DiskStorage.open(tmp_path / "table")) as storage:
        if error:
            with pytest.raises(DamagedFileError):
                storage.gather(torch.arange(50))
        else:
            assert torch.equal(storage.gather(torch.arange(50)), records)


def test_a_check_names_all_damaged_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHUNK_BYTES", 8 * NBYTES)
    wrong = [3, 4, 40, 90]
    for row in wrong:
        flip(path, row, 3)
    with (
        closing(ReadOnlyStorage(path)) as storage,
        pytest.raises(DamagedFileError, match="row 3, 4, 40, 90 is"),
    ):
        storage.check_rows()
    monkeypatch.setattr(checked_records, "MAX_LISTED", 2)
    with (
        closing(ReadOnlyStorage(path)) as storage,
        pytest.raises(DamagedFileError, match="row 3, 4 and 2 others"),
    ):
        storage.check_rows()


@pytest.mark.parametrize("nbytes", [16, 128, 1536])
def test_every_flipped_bit_changes_a_checksum(nbytes: int) -> None:
    """Also signs that flip together, which are the last bits of words."""
    generator = np.random.default_rng(nbytes)
    record = generator.integers(0, 256, nbytes, np.uint8)
    bits = np.unique(np.concatenate((np.arange(256), generator.integers(0, 8 * nbytes, 4000)))) % (8 * nbytes)
    rows = np.tile(record, (len(bits) + 3, 1))
    rows[np.arange(len(bits)), bits // 8] ^= (1 << bits % 8).astype(np.uint8)
    rows[-3, 3::4] ^= 128
    rows[-2, [3, 11]] ^= 128
    rows[-1, [7, 15]] ^= 128
    before = row_sums(as_records(record[None]))
    assert (row_sums(as_records(rows)) != before).all()
    assert row_sums(as_records(np.zeros((1, nbytes), np.uint8))) != 0  # which is "unknown"


READS: dict[str, Callable[[Path, int], object]] = {
    "gather": lambda path, row: DiskStorage.open(path).gather(torch.tensor([3, row, 4])),
    "gather weights": lambda path, row: DiskStorage.open(path).gather(torch.tensor([row]), 4),
    "read": lambda path, row: DiskStorage.open(path).read(row - 1, row + 2),
    "read only": lambda path, row: ReadOnlyStorage(path).gather(torch.tensor([row])),
    "all": lambda path, row: ReadOnlyStorage(path).check_rows(),
    "table": lambda path, row: flatbed.load_table(path).read_rows(range(N_ROWS)),
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize(("row", "bit"), [(7, 8 * NBYTES - 1), (98, 100)])
def test_one_flipped_bit_is_found(path: Path, how: str, row: int, bit: int) -> None:
    flip(path, row, bit)
    with pytest.raises(DamagedFileError, match=rf"in .*table the checksum of row {row} is wrong: restore"):
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


def test_growth_seen_by_a_reader_and_by_a_kill(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New rows are written over the checksums, which are dropped before, and unknown after a kill."""
    monkeypatch.setattr(base, "CHUNK_BYTES", 100 * NBYTES)
    killed = [path.with_name("first"), path.with_name("second")]

    def copying(start: int, stop: int, records: torch.Tensor) -> None:
        fill(start, stop, records)
        assert ReadOnlyStorage(path).check_rows() == 0
        assert torch.equal(reader.gather(torch.arange(N_ROWS)), rows[:, : reader.record.nbytes])
        killed[start > N_ROWS].write_bytes(path.read_bytes())

    with closing(DiskStorage.open(path)) as storage, closing(ReadOnlyStorage(path)) as reader:
        rows = torch.from_numpy(everything(storage))
        storage.resize(N_ROWS + 200, fill=copying)
    for copy in killed:
        for _ in range(2):
            assert ReadOnlyStorage(copy).check_rows() == 0
            with closing(DiskStorage.open(copy)) as storage:
                assert np.array_equal(everything(storage), rows.numpy())
        with closing(DiskStorage.open(copy)) as storage:
            storage.scatter_(torch.tensor([3]), random_records(1))
            storage.checkpoint()
        assert copy.stat().st_size == file_size(N_ROWS, NBYTES)
        assert ReadOnlyStorage(copy).check_rows() == 1


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
