"""Rows of arrays and files by id: every layout, and every way to read them."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatbed.cuda import host_memory
from flatbed.data import Prefetcher, row_reader
from flatbed.data.row_reader import CopiedRows, GatheredRows, RowReader
from flatbed.errors import FlatbedError
from tests.data.fakes import CPU, LAYOUTS, PAIRS

IDS = np.array([[3, 0], [9, 3], [8, 9]], np.int32)


def numbers(*shape: int, dtype: Any = "f4", begin: int = 0) -> np.ndarray[Any, Any]:
    """Random bytes that begin so many bytes after a multiple of 64."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(nbytes).integers(0, 100, nbytes + 192).astype(np.uint8)
    begin += -raw.__array_interface__["data"][0] % 64
    return raw[begin : begin + nbytes].view(dtype).reshape(shape)


ARRAYS = {
    "matrix": lambda: numbers(10, 4),
    "vector": lambda: numbers(1000, dtype="i8")[:10],
    "bytes": lambda: numbers(10, dtype="u1"),
    "images": lambda: numbers(10, 5, 7, 3, dtype="u1"),
    "large rows": lambda: numbers(10, 5001, dtype="u1"),
    "columns": lambda: numbers(10, 40)[:, 3:20],
    "every other": lambda: numbers(20, 4)[::2],
    "backward": lambda: numbers(10, 4)[::-1],
    "fortran": lambda: np.asfortranarray(numbers(10, 4, 3)),
    "swapped": lambda: numbers(10, 3, dtype=">i4"),
    "swapped complex": lambda: (np.arange(30).reshape(10, 3) * (1 + 2j)).astype(">c16"),
    "bool": lambda: np.arange(30).reshape(10, 3) % 2 == 0,
    "unsigned": lambda: numbers(10, 3, dtype="u2"),
    "half": lambda: np.arange(30.0).reshape(10, 3).astype("f2"),
    "unaligned": lambda: numbers(10, 3, dtype="f8", begin=1),
    "repeated": lambda: np.broadcast_to(np.arange(5), (10, 5)),
}


def expected(array: np.ndarray[Any, Any], ids: Any = IDS) -> Tensor:
    found = array[np.asarray(ids)]
    return torch.from_numpy(np.ascontiguousarray(found, found.dtype.newbyteorder("=")))


def is_same(found: Tensor, want: Tensor) -> bool:
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    bits = [one.cpu().contiguous().reshape(-1).view(torch.uint8) for one in (found, want)]
    return torch.equal(*bits)


WAYS = pytest.mark.parametrize(
    "way",
    ["cpu", "copied on the cpu", *(pytest.param(way, marks=pytest.mark.gpu) for way in ("copied", "staged"))],
)


def reader_of(array: np.ndarray[Any, Any], way: str) -> RowReader:
    """Read rows in one of the ways; also as a GPU does from a copy, with the reference of its kernel."""
    if way in ("copied", "staged"):
        return RowReader(array, device="cuda", copy=way == "copied")
    reader = RowReader(array, device="cpu")
    if way == "copied on the cpu":
        reader._source = CopiedRows(array, CPU)
    return reader


@WAYS
@pytest.mark.parametrize("name", ARRAYS)
def test_every_array(name: str, way: str) -> None:
    array = ARRAYS[name]()
    before = array.copy()
    with reader_of(array, way) as reader:
        assert reader.mode == way.split()[0]
        assert len(reader) == 10
        found = reader[IDS]
        assert found.device == reader.device
        assert is_same(found, expected(array))
        found.zero_()
        assert np.array_equal(array, before), "rows are copies"
        assert is_same(reader(torch.from_numpy(IDS).to(reader.device)), expected(array))
        with pytest.raises(IndexError, match="id 10"):
            reader[[10]]


@WAYS
@pytest.mark.parametrize("interpret", ["0", "1"])
def test_every_layout_of_ids(way: str, interpret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cpu" in way:  # one process cannot both compile and interpret
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    array = numbers(10, 3)
    with reader_of(array, way) as reader:
        for ids in LAYOUTS.values():
            assert is_same(reader[ids], expected(array, ids))
        pairs = PAIRS.to(reader.device)
        for ids in (pairs[:, 0], pairs.int()[:, 1], pairs.t(), pairs[:1, 0].expand(4000), pairs[:0]):
            assert is_same(reader[ids], expected(array, ids.cpu()))


def test_slices() -> None:
    array = numbers(10, 3)
    reader = RowReader(array, device="cpu")
    for part in (slice(None), slice(2, 5), slice(None, None, -3), slice(8, 100), slice(5, 2), [3, 0], 7):
        assert is_same(reader[part], torch.from_numpy(array[part].copy()))


def test_files_are_mapped(tmp_path: Path) -> None:
    array = numbers(10, 3)
    np.save(tmp_path / "a.npy", array)
    for path in (tmp_path / "a.npy", str(tmp_path / "a.npy")):
        with RowReader(path, device="cpu") as reader:
            assert is_same(reader[IDS], expected(array))
    with RowReader(np.load(tmp_path / "a.npy", mmap_mode="r+")[2:], device="cpu") as reader:
        assert is_same(reader[[7, 0]], expected(array, [9, 2]))


def test_empty_arrays() -> None:
    assert RowReader(np.zeros((0, 3)), device="cpu")[[]].shape == (0, 3)
    assert RowReader(np.zeros((3, 0), np.float32), device="cpu")[[2, 2]].shape == (2, 0)
    with pytest.raises(IndexError, match="id 0 at position 0"):
        RowReader(np.zeros((0, 3)), device="cpu")[[0]]


def test_the_array_is_held_until_close() -> None:
    array = numbers(10, 3)
    held = weakref.ref(array.base)
    reader = RowReader(array, device="cpu")
    want = expected(array)
    del array
    assert held() is not None
    assert is_same(reader[IDS], want)
    reader.close()
    reader.close()
    gc.collect()
    assert held() is None
    with pytest.raises(FlatbedError, match="closed"):
        reader[IDS]
    assert repr(reader) == "RowReader(10 × 3 float32, device='cpu', closed)"


def test_copies_are_chosen_by_the_memory_that_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, array = torch.device("cuda", 0), numbers(10, 4)
    monkeypatch.setattr(row_reader, "use_triton", lambda device: True)
    made = row_reader._source_for
    nbytes = array.nbytes  # rows of 16 bytes
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2 * nbytes)
    assert isinstance(made(array, gpu, None), GatheredRows)
    assert isinstance(made(array, gpu, False), GatheredRows)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2 * nbytes + 2)
    monkeypatch.setattr(row_reader, "CopiedRows", type("Fake", (CopiedRows,), {"__init__": lambda *_: None}))
    assert isinstance(made(array, gpu, None), CopiedRows)
    assert isinstance(made(array, gpu, False), GatheredRows)


# ---- mistakes


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (np.zeros(3, [("a", "i4"), ("b", "f4")]), TypeError, "'a'.*one field"),
        (np.array([None, 3]), TypeError, r"object: convert it with \.astype"),
        (np.array(3.0), ValueError, "single number"),
        ([[1, 2]], TypeError, r"\.npy file; found list"),
        (np.ma.masked_array([1, 2]), TypeError, r"masked array.*array\.filled"),
    ],
)
def test_wrong_arrays(array: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RowReader(array, device="cpu")


def test_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("not an array")
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    np.save(tmp_path / "short.npy", np.ones(1000))
    os.truncate(tmp_path / "short.npy", 999)
    for name in ("text.npy", "objects.npy", "short.npy"):
        with pytest.raises(ValueError, match=rf"{name} is not .*numpy\.save"):
            RowReader(tmp_path / name, device="cpu")


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("row", [1, 15, 16, 17, 2048, 2049, 5000])
def test_many_rows_on_a_gpu(row: int, copy: bool) -> None:
    array = numbers(5000, row, dtype="u1", begin=3)
    ids = np.random.default_rng(0).integers(0, 5000, 20_000)
    with RowReader(array, device="cuda", copy=copy) as reader:
        found = [reader[ids] for _ in range(3)]
        assert all(is_same(one, expected(array, ids)) for one in found)


@pytest.mark.gpu
def test_a_reader_that_is_closed_while_a_kernel_reads() -> None:
    array = numbers(100_000, 64)
    ids = torch.randint(0, 100_000, (50_000,))
    for _ in range(5):
        reader = RowReader(array, device="cuda", copy=True)
        torch.cuda._sleep(20_000_000)
        found = reader[ids]
        reader.close()
        assert is_same(found, expected(array, ids.numpy()))


@pytest.mark.gpu
def test_copies_of_neighbours_in_memory_are_not_disturbed() -> None:
    """Registered memory is rounded to pages: plain copies of its neighbours in the same page would fail."""
    arrays = [numbers(100, 7) for _ in range(200)]
    readers = [RowReader(array, device="cuda") for array in arrays[::2]]
    list(Prefetcher(arrays[1::4], device="cuda", pin=True))
    for array in arrays:
        assert is_same(torch.from_numpy(array).to("cuda"), torch.from_numpy(array))
    for reader, array in zip(readers, arrays[::2], strict=True):
        assert is_same(reader[IDS], expected(array))
