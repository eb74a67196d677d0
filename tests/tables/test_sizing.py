from __future__ import annotations

import pytest
import torch

import flatbed
from flatbed.tables.sizing import Example, Rates, batch_seconds, storage_for

GB = 10**9


@pytest.mark.parametrize(
    ("example", "optimizer"),
    [
        (Example(100 * GB), "Adam"),
        (Example(100 * GB, n_states=1), "Adagrad"),
        (Example(100 * GB, n_states=0, n_numbers=1), "RowwiseAdagrad"),
        (Example(100 * GB, dim=10, n_states=0), "SGD"),
    ],
)
def test_an_example_is_as_large_as_a_table(example: Example, optimizer: str) -> None:
    emb = flatbed.Embedding(example.n_rows, example.dim)
    getattr(flatbed.optim, optimizer)([emb.table], lr=0.1)
    assert emb.table.nbytes == example.n_rows * example.record.nbytes
    assert 0 <= example.nbytes - emb.table.nbytes < example.record.nbytes
    assert example.record.weight.dtype == torch.float32


def test_the_nearest_storage_with_room_beside_the_table() -> None:
    assert storage_for(80, {"device": 100, "host": 1000, "disk": 1000}) == "device"
    assert storage_for(81, {"device": 100, "host": 1000, "disk": 1000}) == "host"
    assert storage_for(100, {"host": 109, "disk": 125}) == "disk"
    assert storage_for(100, {"host": 109, "disk": 124}) is None
    assert storage_for(0, {}) is None


def test_the_time_of_a_batch_follows_the_way_of_its_bytes() -> None:
    with_gpu = Rates(host=100.0, device=400.0, to_device=10.0, from_device=20.0, disk_records=5.0)
    assert batch_seconds("device", 10, 40, with_gpu) == 2.0  # 400 bytes, read and written
    assert batch_seconds("host", 10, 40, with_gpu) == 60.0  # 40 s there, 20 s back
    assert batch_seconds("disk", 10, 40, with_gpu) == 2.0
    without = Rates(host=100.0)
    assert batch_seconds("host", 10, 40, without) == 16.0  # two copies, each read and written
    assert batch_seconds("device", 10, 40, without) is None
    assert batch_seconds("disk", 10, 40, without) is None
    assert batch_seconds("host", 10, 40, Rates()) is None
