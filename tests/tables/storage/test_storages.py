"""One contract for all storages: records go in and come out, wherever they live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.tables.record import Field, Record
from flatbed.tables.storage.base import Storage, device_storage, host_storage
from flatbed.tables.storage.disk import DiskStorage

Make = Callable[[Record, Path], Any]
N_ROWS = 37
RECORDS = {
    "small": Record((Field("weight", torch.bfloat16, 3),)),
    "weight": Record((Field("weight", torch.float32, 5),)),
    "adam": Record(
        (
            Field("weight", torch.float16, 40),
            Field("exp_avg", torch.float32, 40),
            Field("exp_avg_sq", torch.float32, 40),
            Field("step", torch.float32, 1),
        )
    ),
}


def first_records(record: Record, n_rows: int = N_ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(n_rows)
    return torch.randint(256, (n_rows, record.nbytes), dtype=torch.uint8, generator=generator)


def in_memory(make: Any, on: str) -> Make:
    def build(record: Record, folder: Path) -> Storage:
        storage: Storage = make(record, N_ROWS, torch.device(on))
        storage.write_(0, first_records(record))
        return storage

    return build


def disk(record: Record, folder: Path) -> Storage:
    def fill(start: int, stop: int, records: Tensor) -> None:
        records.copy_(first_records(record)[start:stop])

    return DiskStorage.create(folder / "table", record, N_ROWS, fill=fill)


MAKERS = [
    pytest.param(in_memory(device_storage, "cpu"), id="device"),
    pytest.param(in_memory(host_storage, "cpu"), id="host"),
    pytest.param(disk, id="disk"),
    pytest.param(in_memory(device_storage, "cuda:0"), id="device on GPU", marks=pytest.mark.gpu),
    pytest.param(in_memory(host_storage, "cuda:0"), id="host for GPU", marks=pytest.mark.gpu),
]


@pytest.fixture(params=RECORDS.values(), ids=list(RECORDS))
def record(request: pytest.FixtureRequest) -> Record:
    return request.param


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


@pytest.fixture
def storage(make: Make, record: Record, tmp_path: Path) -> Any:
    made = make(record, tmp_path)
    yield made
    made.close()


def ids(storage: Storage, *rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=storage.device)


def test_attributes(storage: Storage, record: Record) -> None:
    assert storage.record == record
    assert storage.n_rows == N_ROWS
    if storage.memory is not None:
        assert storage.memory.shape == (N_ROWS, record.nbytes)
        assert storage.memory.dtype == torch.uint8
        assert torch.equal(storage.memory.cpu(), first_records(record))
        assert storage.memory.data_ptr() % 16 == 0


def check_rows(storage: Storage, expected: Tensor) -> None:
    assert torch.equal(storage.read(0, N_ROWS).cpu(), expected)
    for rows in ([], [0], [N_ROWS - 1, 0, 5, 5, 5], list(range(N_ROWS))):
        for nbytes in (None, storage.record.weight.nbytes):
            found = storage.gather(ids(storage, *rows), nbytes)
            assert (found.device, found.dtype) == (storage.device, torch.uint8)
            assert torch.equal(found.cpu(), expected[rows][:, :nbytes])


def test_scatter(storage: Storage, record: Record) -> None:
    expected = first_records(record)
    check_rows(storage, expected)
    for n, rows in enumerate(([], [7], [N_ROWS - 1, 3, 0], list(range(N_ROWS))[::-1], [4, 7])):
        given = torch.full((len(rows), record.nbytes), 10 + n, dtype=torch.uint8)
        storage.scatter_(ids(storage, *rows), given.to(storage.device))
        expected[rows] = given
        check_rows(storage, expected)


def test_read_and_write(storage: Storage, record: Record) -> None:
    expected = first_records(record)
    for start, stop in ((0, 0), (0, 1), (5, 20), (N_ROWS - 1, N_ROWS), (0, N_ROWS), (N_ROWS, N_ROWS)):
        assert torch.equal(storage.read(start, stop).cpu(), expected[start:stop])
        given = expected[start:stop] ^ 255
        storage.write_(start, given)
        expected[start:stop] = given
        check_rows(storage, expected)


def test_rows_are_copied_both_ways(storage: Storage, record: Record) -> None:
    given = torch.full((2, record.nbytes), 3, dtype=torch.uint8, device=storage.device)
    storage.scatter_(ids(storage, 1, 2), given)
    storage.write_(4, given)
    for held in (given, storage.gather(ids(storage, 1, 2)), storage.read(4, 6)):
        held.zero_()
    assert (storage.gather(ids(storage, 1, 2, 4, 5)) == 3).all()


def test_after_close(make: Make, record: Record, tmp_path: Path) -> None:
    storage = make(record, tmp_path)
    rows, records = ids(storage, 1), torch.zeros((1, record.nbytes), dtype=torch.uint8, device=storage.device)
    storage.close()
    storage.close()
    uses: list[Callable[[], Any]] = [
        lambda: storage.gather(rows),
        lambda: storage.scatter_(rows, records),
        lambda: storage.read(0, 1),
        lambda: storage.write_(0, records),
    ]
    for use in uses:
        with pytest.raises(FlatbedError, match="closed"):
            use()
