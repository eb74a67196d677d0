"""Rows of arrays and files by number: every layout, every way, and what is said of mistakes."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatbed.cuda.driver import DriverError
from flatbed.data import row_sources as row_ways
from flatbed.data.row_reader import RowReader
from flatbed.data.row_sources import (
    Addressed,
    Layout,
    OnHost,
    Registered,
    copied,
    find_way,
    gathered,
    in_place,
)
from flatbed.data.staging import Carrier
from flatbed.errors import FlatbedError
from tests.data.fake_streams import CPU, lane, ring, threads

IDS = np.array([[3, 0], [9, 3], [8, 9]], np.int32)


def numbers(*shape: int, dtype: Any = "f4", into: int = 0) -> np.ndarray[Any, Any]:
    """Random bytes that begin so many bytes after a multiple of 64."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(nbytes).integers(0, 100, nbytes + 192).astype(np.uint8)
    begin = -raw.__array_interface__["data"][0] % 64 + into
    return raw[begin : begin + nbytes].view(dtype).reshape(shape)


ARRAYS = {
    "matrix": lambda: numbers(10, 4),
    "vector": lambda: numbers(1000, dtype="i8")[:10],
    "images": lambda: numbers(10, 5, 7, 3, dtype="u1"),
    "columns": lambda: numbers(10, 40)[:, 3:20],
    "every other": lambda: numbers(20, 4)[::2],
    "backward": lambda: numbers(10, 4)[::-1],
    "fortran": lambda: np.asfortranarray(numbers(10, 4, 3)),
    "swapped": lambda: numbers(10, 3, dtype=">i4"),
    "swapped complex": lambda: (np.arange(30).reshape(10, 3) * (1 + 2j)).astype(">c16"),
    "bool": lambda: np.arange(30).reshape(10, 3) % 2 == 0,
    "unsigned": lambda: numbers(10, 3, dtype="u2"),
    "half": lambda: np.arange(30.0).reshape(10, 3).astype("f2"),
    "unaligned": lambda: numbers(10, 3, dtype="f8", into=1),
    "repeated": lambda: np.broadcast_to(np.arange(5), (10, 5)),
}


def expected(array: np.ndarray[Any, Any], ids: Any = IDS) -> Tensor:
    found = array[np.asarray(ids)]
    return torch.from_numpy(np.ascontiguousarray(found, found.dtype.newbyteorder("=")))


def same(found: Tensor, want: Tensor) -> bool:
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    bits = [one.cpu().contiguous().reshape(-1).view(torch.uint8) for one in (found, want)]
    return torch.equal(*bits)


# ---- on a CPU


@pytest.mark.parametrize("name", ARRAYS)
def test_every_array_on_a_cpu(name: str) -> None:
    array = ARRAYS[name]()
    before = array.copy()
    reader = RowReader(array, device="cpu")
    assert (len(reader), reader.way) == (10, "cpu")
    found = reader[IDS]
    assert same(found, expected(array))
    found.zero_()
    assert np.array_equal(array, before), "rows are copies"


@pytest.mark.parametrize(
    "ids",
    [
        [3, 0, 9],
        (3, 0),
        7,
        np.int16(7),
        range(2, 9, 3),
        np.array([[1, 2]], np.uint64),
        np.array([], np.int64),
        torch.tensor([4, 4], dtype=torch.uint8),
        torch.zeros((2, 0), dtype=torch.int32),
        np.arange(10)[::-3],
    ],
    ids=repr,
)
def test_every_kind_of_ids(ids: Any) -> None:
    array = numbers(10, 3)
    want = expected(array, np.asarray(ids, np.int64))
    reader = RowReader(array, device="cpu")
    assert same(reader[ids], want)
    assert same(reader(ids), want)


def test_slices() -> None:
    array = numbers(10, 3)
    reader = RowReader(array, device="cpu")
    assert same(reader[2:9:3], torch.from_numpy(array[2:9:3].copy()))
    assert same(reader[-2:], torch.from_numpy(array[-2:].copy()))
    assert reader[20:].shape == (0, 3)


def test_files_are_mapped(tmp_path: Path) -> None:
    array = numbers(10, 3)
    np.save(tmp_path / "a.npy", array)
    for path in (tmp_path / "a.npy", str(tmp_path / "a.npy")):
        with RowReader(path, device="cpu") as reader:
            assert same(reader[IDS], expected(array))
            way = reader._way
            assert isinstance(way, OnHost)
            assert row_ways._is_file(way.array)
    assert not row_ways._is_file(array)
    with RowReader(np.load(tmp_path / "a.npy", mmap_mode="r+")[2:], device="cpu") as reader:
        assert same(reader[[7, 0]], expected(array, [9, 2]))


def test_empty_arrays() -> None:
    assert RowReader(np.zeros((0, 3)), device="cpu")[[]].shape == (0, 3)
    assert RowReader(np.zeros((3, 0), np.float32), device="cpu")[[2, 2]].shape == (2, 0)
    with pytest.raises(IndexError, match="id 0 at position 0 is out of range for a table of 0 rows"):
        RowReader(np.zeros((0, 3)), device="cpu")[[0]]


def test_the_array_is_held_and_let_go() -> None:
    array = numbers(10, 3)
    held = weakref.ref(array.base)
    reader = RowReader(array, device="cpu")
    want = expected(array)
    del array
    assert held() is not None
    assert same(reader[IDS], want)
    reader.close()
    reader.close()
    gc.collect()
    assert held() is None
    with pytest.raises(FlatbedError, match="this reader is closed: make it again"):
        reader[IDS]
    assert repr(reader) == "RowReader(10 × 3 float32, device='cpu', closed)"


# ---- mistakes


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([2, 10], IndexError, r"id 10 at position 1 is out of range for a table of 10 rows \(0 to 9\)"),
        (np.array([[0], [-1]]), IndexError, r"id -1 at position \(1, 0\) is out of range"),
        (-1, IndexError, "id -1"),
        (np.array([1.0]), TypeError, "ids must be integers; found a numpy array of float64"),
        (torch.ones(3, dtype=torch.bool), TypeError, "ids must be integers; found a tensor of torch.bool"),
        ("3", TypeError, "found str"),
        (np.array([2**63], np.uint64), IndexError, "larger than any table"),
    ],
)
def test_wrong_ids(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RowReader(numbers(10, 3), device="cpu")[ids]


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (
            np.zeros(3, [("a", "i4"), ("b", "f4")]),
            TypeError,
            r"structured array with the fields a, b.*array\['a'\]",
        ),
        (np.array([None, 3]), TypeError, r"found an array of object: convert it with \.astype"),
        (np.array(["x"]), TypeError, "found an array of <U1"),
        (np.array(3.0), ValueError, "at least one dimension; found a single number"),
        (torch.ones(3), TypeError, r"found Tensor: give tensor\.numpy\(\)"),
        ([[1, 2]], TypeError, "from a numpy array or from the path of a .npy file; found list"),
        (np.ma.masked_array([1, 2]), TypeError, r"masked array are not read: give array\.data"),
    ],
)
def test_wrong_arrays(array: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RowReader(array, device="cpu")


def test_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("not an array")
    np.savez(tmp_path / "two.npz", a=np.ones(2), b=np.ones(2))
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    with pytest.raises(FileNotFoundError, match="missing"):
        RowReader(tmp_path / "missing.npy", device="cpu")
    for name in ("text.npy", "objects.npy"):
        with pytest.raises(ValueError, match=rf"{name} is not a \.npy file of numbers: .*numpy\.save"):
            RowReader(tmp_path / name, device="cpu")
    np.save(tmp_path / "short.npy", np.ones(1000))
    os.truncate(tmp_path / "short.npy", 999)
    with pytest.raises(ValueError, match=r"short\.npy is a \.npy file, but cut short or damaged"):
        RowReader(tmp_path / "short.npy", device="cpu")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        RowReader(tmp_path, device="cpu")
    with pytest.raises(ValueError, match=r"two\.npz is an \.npz archive \(of a, b\), which cannot be mapped"):
        RowReader(tmp_path / "two.npz", device="cpu")


def test_wrong_options() -> None:
    with pytest.raises(TypeError, match="copy must be True, False or None; found 'yes'"):
        RowReader(numbers(3, 3), device="cpu", copy="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot be copied or pickled: make another one"):
        pickle.dumps(RowReader(numbers(3, 3), device="cpu"))


def test_in_a_forked_child_a_gpus_reader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RowReader(numbers(10, 3), device="cpu")
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    assert reader[[1]].shape == (1, 3), "an array can be read anywhere"
    reader.device = torch.device("cuda", 0)
    with pytest.raises(FlatbedError, match=r"belongs to process .* should hand out ids"):
        reader[[1]]


# ---- kernels, interpreted


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def addressed(array: np.ndarray[Any, Any]) -> Addressed:
    layout = Layout(CPU, row_bytes=array[0].nbytes, stride=array.strides[0], extent=row_ways._extent(array))
    return Addressed("in place", None, row_ways._address(array), layout, owner=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("into", [0, 1, 4, 24])
@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        (4, "f4"),
        (1, "f4"),
        (3, "u1"),
        (6, "f4"),
        (37, "u1"),
        (25, "f8"),
        (512, "f4"),
        (531, "f4"),
        (2049, "u1"),
    ],
)
def test_rows_of_any_size_that_begin_anywhere(row: int, dtype: str, into: int) -> None:
    """The first and the last among them: nothing beyond the last block is read."""
    array = numbers(50, row, dtype=dtype, into=into)
    ids = torch.tensor([0, 49, 3, 48, 1, 49, 31])
    found = addressed(array).gather(ids)
    assert found.is_contiguous()
    assert same(found.view(-1).view(torch.uint8), expected(array, ids).view(-1).view(torch.uint8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("columns", [(0, 30), (3, 8), (40, 50)])
def test_rows_with_gaps(columns: tuple[int, int]) -> None:
    array = numbers(40, 50, dtype="u2")[:, slice(*columns)]
    ids = torch.tensor([39, 0, 17])
    found = addressed(array).gather(ids)
    assert same(found.view(-1), expected(array, ids).view(-1).view(torch.uint8))


def test_a_copy_is_dense_and_in_order() -> None:
    for name in ("swapped", "fortran", "columns", "backward", "matrix"):
        array = ARRAYS[name]()
        way = copied(array, CPU)
        assert way is not None
        assert (way.name, way.memory) == ("copied", "plain")
        flat = way._blocks.view(-1)[: array.size * array.itemsize]
        want = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1).view(np.uint8)
        assert np.array_equal(flat.numpy(), want)
        way.close()


# ---- gathered by the host


@pytest.mark.parametrize("name", ARRAYS)
def test_rows_through_the_ring(name: str) -> None:
    array = ARRAYS[name]()
    ids = np.random.default_rng(0).integers(0, 10, 700)
    with lane() as through:
        found = gathered(array, torch.from_numpy(ids), Carrier(ring(3), through))
        through.settle()
    want = expected(array, ids)
    assert same(found.view(want.dtype).view(want.shape), want)
    assert not threads()


def test_rows_that_are_larger_than_a_chunk() -> None:
    array = numbers(10, 3000)
    with lane() as through:
        found = gathered(array, torch.tensor([9, 0, 9]), Carrier(ring(3, 4096), through))
        through.settle()
    assert same(found.view(torch.float32), expected(array, [9, 0, 9]))


# ---- which way, as the driver allows


class Driver:
    """Registers what it is asked to, unless told otherwise."""

    def __init__(self, refuse: bool = False, read_only: bool = True) -> None:
        self.refuse, self.read_only = refuse, read_only
        self.held: dict[int, tuple[int, int]] = {}

    def can_register(self, gpu: int) -> bool:
        return True

    def _context(self, gpu: int) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def _call(self, name: str, address: int, nbytes: int, flags: int) -> None:
        assert name == "cuMemHostRegister_v2"
        if self.refuse or (flags & row_ways.READ_ONLY and not self.read_only):
            raise DriverError("refused")
        assert address not in self.held, "registered twice"
        self.held[address] = (nbytes, flags)

    def unregister(self, gpu: int, address: int) -> None:
        del self.held[address]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A GPU that is not there; what is staged or copied is only named."""
    made = Driver()
    monkeypatch.setattr(row_ways.cuda_host, "driver", lambda: made)
    monkeypatch.setattr(row_ways, "use_triton", lambda device: True)
    monkeypatch.setattr(row_ways, "_was_pinned", lambda address, nbytes: False)
    monkeypatch.setattr(row_ways, "Staged", lambda *args: "staged")
    monkeypatch.setattr(row_ways, "copied", lambda *args: "copied")
    return made


GPU = torch.device("cuda", 0)


def chosen(array: Any, copy: bool | None) -> Any:
    return find_way(array, GPU, copy=copy)


def test_pages_of_an_array_are_pinned_once_and_unpinned_with_its_last_reader(driver: Driver) -> None:
    array = numbers(1000, 30)
    one, other = chosen(array, None), chosen(array[10:500], False)
    assert one.name == other.name == "in place"
    ((begin, (nbytes, flags)),) = driver.held.items()
    address = array.__array_interface__["data"][0]
    assert begin % 4096 == nbytes % 4096 == 0
    assert begin <= address
    assert address + array.nbytes <= begin + nbytes
    assert flags == 3
    one.close()
    assert driver.held
    del other, one
    gc.collect()
    assert not driver.held


def test_neighbours_in_one_page_share_its_pin(driver: Driver) -> None:
    """Memory of the heap does not begin with a page: three arrays, the middle one pinned last."""
    memory = numbers(9000, 30)
    first, middle, last = memory[:3000], memory[3000:6000], memory[6000:]
    ways = [chosen(array, False) for array in (first, last, middle)]
    assert [way.name for way in ways] == ["in place"] * 3
    pages = sorted((begin, begin + nbytes) for begin, (nbytes, _) in driver.held.items())
    assert len(pages) == 3
    assert pages[0][1] == pages[1][0]
    assert pages[1][1] == pages[2][0]
    for way, n_left in zip(ways, (3, 3, 0), strict=True):  # the middle one needs its neighbours' pages
        way.close()
        assert len(driver.held) == n_left


def test_why_an_array_is_not_read_in_place(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[Any] = []
    monkeypatch.setattr(row_ways, "Staged", lambda array, device, why: reasons.append(why))
    driver.refuse = True
    chosen(numbers(1000, 30), False)
    chosen(ARRAYS["fortran"](), False)
    assert reasons == ["refused", None]


def test_an_array_is_kept_while_it_is_pinned(driver: Driver) -> None:
    array = numbers(1000, 30)
    held = weakref.ref(array.base)
    way = chosen(array, None)
    del array
    gc.collect()
    assert held() is not None
    del way
    gc.collect()
    assert held() is None
    assert not driver.held


def test_what_may_not_be_written_to_is_pinned_for_reading(driver: Driver, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", numbers(1000, 30))
    way = chosen(np.load(tmp_path / "a.npy", mmap_mode="r"), None)
    assert [flags for _, flags in driver.held.values()] == [3 | row_ways.READ_ONLY]
    way.close()
    driver.read_only = False
    locked = numbers(1000, 30)
    locked.flags.writeable = False
    way = chosen(locked, None)
    assert [flags for _, flags in driver.held.values()] == [3]
    way.close()
    assert not driver.held


def test_what_is_done_where_pinning_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    array = numbers(1000, 30)
    assert chosen(array, True) == "copied"
    driver.refuse = True
    assert chosen(array, None) == "copied"
    assert chosen(array, False) == "staged"
    monkeypatch.setattr(row_ways.memory, "available_bytes", lambda: array.nbytes)
    assert chosen(array, None) == "staged", "there is no room for a copy"
    monkeypatch.setattr(row_ways, "copied", lambda *args: None)
    assert chosen(array, True) == "staged"
    monkeypatch.setattr(row_ways, "use_triton", lambda device: False)
    assert chosen(array, None) == "staged"
    assert not driver.held


def test_arrays_that_kernels_cannot_read_in_place(driver: Driver) -> None:
    for name in ("fortran", "backward", "swapped", "repeated"):
        assert chosen(ARRAYS[name](), None) == "copied"
    assert chosen(numbers(3, 1), None) == "copied", "too small for blocks around rows"
    assert not driver.held


def test_a_file_that_does_not_fit_into_memory_is_not_pinned(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", numbers(1000, 30))
    array = np.load(tmp_path / "a.npy", mmap_mode="r")
    monkeypatch.setattr(row_ways.memory, "available_bytes", lambda: array.nbytes - 1)
    with pytest.raises(DriverError, match="needs memory for all of it"):
        in_place(array, GPU)
    assert in_place(numbers(1000, 30), GPU).name == "in place"
    assert chosen(array, None) == "staged"


def test_a_forked_child_unpins_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    array = numbers(1000, 30)
    way = chosen(array, None)
    here = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: here + 1)
        assert isinstance(way._owner, Registered)
        way._owner.close()
    assert driver.held


# ---- on a GPU


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("name", ARRAYS)
def test_every_array_on_a_gpu(cuda: torch.device, name: str, copy: bool | None) -> None:
    array = ARRAYS[name]()
    with RowReader(array, copy=copy) as reader:
        assert reader.device == cuda
        found = reader[IDS]
        assert found.device == cuda
        assert same(found, expected(array)), repr(reader)
        assert same(reader[torch.from_numpy(IDS).to(cuda)], expected(array))


@pytest.mark.gpu
@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("row", [4, 12, 128, 129, 512, 2048, 150_528, 4099])
def test_many_rows_on_a_gpu(row: int, copy: bool | None) -> None:
    array = np.random.default_rng(0).integers(0, 255, (max(100, 20_000_000 // row), row), np.uint8)
    ids = np.random.default_rng(1).integers(0, len(array), 20_000_000 // row, np.int32)
    ids[-3:] = len(array) - 1
    with RowReader(array, copy=copy) as reader:
        assert reader.way == {None: "in place", True: "copied", False: "in place"}[copy]
        assert same(reader[ids], torch.from_numpy(array[ids]))
        with pytest.raises(IndexError, match=f"id {len(array)} at position 1"):
            reader[[0, len(array)]]


@pytest.mark.gpu
def test_files_on_a_gpu(tmp_path: Path) -> None:
    array = numbers(5000, 129)
    np.save(tmp_path / "a.npy", array)
    ids = np.random.default_rng(1).integers(0, 5000, 3000, np.int32)
    for copy in (None, True, False):
        with RowReader(tmp_path / "a.npy", copy=copy) as reader:
            assert same(reader[ids], expected(array, ids)), repr(reader)


@pytest.mark.gpu
def test_staged_rows_on_a_gpu(cuda: torch.device) -> None:
    array = numbers(50_000, 129)
    way = row_ways.Staged(array, cuda)
    for seed in range(5):
        ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 50_000, 30_000))
        torch.cuda._sleep(2_000_000)
        found = way.gather(ids)
        assert same(found.view(torch.float32), expected(array, ids))
    way.close()


@pytest.mark.gpu
def test_a_reader_that_goes_while_a_kernel_reads(cuda: torch.device) -> None:
    for copy in (None, True):
        array = numbers(100_000, 128)
        want = expected(array, np.arange(0, 100_000, 7))
        torch.cuda._sleep(50_000_000)
        found = RowReader(array, copy=copy)[np.arange(0, 100_000, 7)]
        del array
        gc.collect()
        assert same(found, want)


@pytest.mark.gpu
def test_two_readers_of_one_array_and_an_array_that_is_pinned() -> None:
    array = numbers(5000, 33)
    one, other = RowReader(array, copy=False), RowReader(array[100:], copy=False)
    assert one.way == other.way == "in place"
    assert same(one[[100]], other[[0]])
    one.close()
    assert same(other[[4899]], expected(array, [4999]))
    pinned = torch.arange(100_000.0).pin_memory().numpy().reshape(-1, 10)
    with RowReader(pinned, copy=False) as reader:
        assert reader.way == "in place"
        assert same(reader[[9999, 0]], expected(pinned, [9999, 0]))


@pytest.mark.gpu
def test_neighbours_in_one_page_are_all_read_in_place() -> None:
    memory = numbers(9000, 33)
    parts = memory[:3000], memory[6000:], memory[3000:6000]
    readers = [RowReader(part, copy=False) for part in parts]
    for reader, part in zip(readers, parts, strict=True):
        assert reader.way == "in place", repr(reader)
        assert same(reader[[2999, 0, 17]], expected(part, [2999, 0, 17]))
    readers[0].close()
    readers[1].close()
    assert same(readers[2][[2999, 0]], expected(parts[2], [2999, 0]))
    readers[2].close()
