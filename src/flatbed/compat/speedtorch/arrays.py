"""DataGadget and DataGadgetMM: arrays in memory or in .npy files. COM: co-occurrence matrices.

Switchers use the conversions of names, datatypes and ids, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed import FlatbedError

Array = np.ndarray[Any, Any]
FileName = str | os.PathLike[str]
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Datatypes that torch can copy but not index, and the datatypes that stand in for them."""


def as_dtype(given: Any) -> torch.dtype:
    """Convert a datatype of torch or numpy, or its name, to torch's."""
    if isinstance(given, torch.dtype):
        return given
    name = given if isinstance(given, str) else np.dtype(given).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a datatype must be torch's or its name, 'float32' for example; found {given!r}")
    return found


def to_numpy(values: Tensor) -> Array:
    """Return a tensor's numbers as a numpy array. numpy has no bfloat16, which becomes float32."""
    values = values.detach().cpu()
    array: Array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array


def as_array(values: Any) -> Array:
    """Return lists, tensors and arrays as a numpy array."""
    return to_numpy(values) if isinstance(values, Tensor) else np.asarray(values)


def flat_ids(ids: Any, more: Any = None) -> Array:
    """Return ids of any kind and shape as one array: all of `ids`, then all of `more`."""
    flat = as_array(ids).reshape(-1)
    return flat if more is None else np.concatenate([flat, as_array(more).reshape(-1)])


def row_ids(n_rows: int, ids: Array) -> Array:
    """Copy ids, (n,), to int64; raise if they are not row numbers."""
    if not len(ids):
        return ids.astype(np.int64)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers; found {ids.dtype}")
    if ids.min() < 0 or ids.max() >= n_rows:
        bad = ids[(ids < 0) | (ids >= n_rows)][0]
        raise IndexError(f"id {bad} is out of range for {n_rows} rows (0 to {n_rows - 1})")
    return ids.astype(np.int64)


def npy_path(name: FileName) -> Path:
    """Return the path of a .npy file to write; numpy adds its suffix to names without it."""
    path = Path(name)
    return path if path.suffix == ".npy" else path.with_name(f"{path.name}.npy")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a file to write, which then replaces `path`. An error leaves `path` as it was."""
    part = path.with_name(f"{path.name}.part")
    yield part
    os.replace(part, path)


def open_npy(name: FileName, mode: Any = "r") -> Array:
    """Map a .npy file into memory, without unpickling. The name may lack numpy's suffix."""
    path = Path(name) if Path(name).is_file() else npy_path(name)
    array: Array = np.load(path, mmap_mode=mode, allow_pickle=False)
    return array


def free_path(diskname: FileName, suffix: str) -> Path:
    """Return the first of `DISKNAME0.bed`, `DISKNAME1.bed`, … that does not exist yet."""
    number = 0
    while (path := Path(f"{diskname}{number}{suffix}")).exists():
        number += 1
    return path


def computing_device() -> torch.device:
    """Return the current GPU or, without one, the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def signed(values: Tensor) -> Tensor:
    """View unsigned numbers as signed ones of the same size."""
    return values.view(SIGNED.get(values.dtype, values.dtype))


def as_index(indexes: Any, device: torch.device) -> Any:
    """Convert the arrays and lists in an index to tensors."""
    if isinstance(indexes, tuple):
        return tuple(as_index(one, device) for one in indexes)
    if not isinstance(indexes, np.ndarray | Tensor | list | range):
        return indexes
    index = torch.as_tensor(as_array(indexes)).to(device)
    # torch refuses fractions, and would read uint8 as a mask.
    return index if index.is_floating_point() or index.dtype == torch.bool else index.long()


class PMemory:
    """A piece of pinned host memory of `size` bytes; of plain memory without a GPU."""

    def __init__(self, size: int) -> None:
        has_gpu = torch.cuda.is_available()
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=has_gpu)
        self.size, self.ptr = size, self._bytes.data_ptr()
        self.device_id = torch.cuda.current_device() if has_gpu else -1


def my_pinned_allocator(bsize: int) -> PMemory:
    """Allocate pinned host memory. flatbed pins its memory itself, and CuPy is not used."""
    return PMemory(bsize)


class ArrayViews:
    """The kind of memory of all rows, and SpeedTorch's names for them as an array or a tensor."""

    _storage: str = "device"
    CPUPinn: bool = False
    deviceType: str = "cuda"

    def _choose_storage(self) -> None:
        """Follow the arguments `CPUPinn` and `deviceType`. For classes on disk they change nothing."""
        is_on_host = self.CPUPinn or torch.device(self.deviceType).type == "cpu"
        if self._storage == "device" and is_on_host:
            self._storage = "host"

    getNumpyVersion: Callable[[], Any]
    getTorchVar: Callable[[], Any]

    def getCupyVar(self) -> Any:
        """Return what `getNumpyVersion` returns."""
        return self.getNumpyVersion()

    getCupyMM = getCupyVar
    CUPYcorpus = CUPYmemmap = property(getCupyVar)

    @property
    def pytorchGPUVar(self) -> Any:
        """All rows, as `getTorchVar` returns them."""
        return self.getTorchVar()


class StoredArray(ArrayViews):
    """An array as one tensor: on the GPU, in host memory or mapped from a file."""

    datatype: Any
    _init_method: str
    _tensor: Tensor | None = None

    def getTorchVar(self) -> Tensor:
        """Return the array as a tensor over its memory."""
        if self._tensor is None:
            raise FlatbedError(f"{type(self).__name__} has no array yet: call {self._init_method} first")
        return self._tensor

    def _store(self, array: Array) -> None:
        """Copy an array to memory."""
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
        device = computing_device()
        if self._storage == "device":
            self._tensor = tensor.to(device)
        else:
            self._tensor = tensor.pin_memory() if device.type == "cuda" else tensor

    def getData(self, indexes: Any) -> Tensor:
        """Copy rows by number, or a part by any index that tensors take, to the computing device."""
        whole = self.getTorchVar()
        part = signed(whole)[as_index(indexes, whole.device)]
        return part.view(whole.dtype).to(computing_device(), copy=True)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Replace rows by number, or any part."""
        whole = self.getTorchVar()
        given = dataObject if isinstance(dataObject, Tensor) else torch.as_tensor(as_array(dataObject))
        values = given.detach().to(whole.dtype).to(whole.device)
        signed(whole)[as_index(indexes, whole.device)] = signed(values)

    def getNumpyVersion(self) -> Any:
        """Copy the array to numpy."""
        return np.array(to_numpy(self.getTorchVar()))

    def saveCupy(self, saveFileName: FileName) -> None:
        """Write the array to a .npy file."""
        array = to_numpy(self.getTorchVar())
        with replacing(npy_path(saveFileName)) as part, part.open("wb") as file:
            np.save(file, array, allow_pickle=False)

    def loadCupy(self, loadFileName: FileName) -> None:
        """Replace the array by the array of a .npy file."""
        self._store(open_npy(loadFileName))

    def close(self) -> None:
        """Release the memory."""
        self._tensor = None


class MappedArray(StoredArray):
    """An array in a .npy file that is mapped into memory."""

    fileName: Any
    _storage = "disk"
    _mapped: Any = None

    def _map(self, name: FileName) -> None:
        """Open a file, for writing if the file allows it."""
        mapped: Any = open_npy(name, "c")
        if os.access(mapped.filename, os.W_OK):
            mapped = open_npy(name, "r+")
        self.close()
        self._mapped, self._tensor, self.fileName = mapped, torch.from_numpy(mapped), str(mapped.filename)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Replace rows by number, or any part, in the file."""
        self.getTorchVar()
        if self._mapped.mode == "c":
            raise FlatbedError(f"{self.fileName} may only be read: change its permissions, or use DataGadget")
        super().insertData(dataObject, indexes)

    def saveCupy(self, saveFileName: FileName) -> None:
        """Write a copy to another .npy file, or all changes to the file itself."""
        path = npy_path(saveFileName)
        if self._tensor is not None and path.exists() and path.samefile(self.fileName):
            self.checkpoint()
        else:
            super().saveCupy(path)

    def checkpoint(self) -> None:
        """Write all changes to the file."""
        self.getTorchVar()
        self._mapped.flush()

    def close(self) -> None:
        """Write all changes to the file and close it."""
        if self._mapped is not None:
            self._mapped.flush()
        self._tensor = self._mapped = None


# A dataclass takes its fields as arguments. They are in the order of SpeedTorch's constructors.


@dataclass(eq=False, repr=False)
class DataGadget(StoredArray):
    """The array of a .npy file (or an array) on the GPU, or with `CPUPinn` in host memory.

    >>> import numpy as np, torch, flatbed.compat.speedtorch as SpeedTorch
    >>> gadget = SpeedTorch.DataGadget(np.arange(12.0).reshape(4, 3), CPUPinn=True)
    >>> gadget.gadgetInit()
    >>> gadget.getData(np.array([3, 0], dtype=np.int32)).tolist()
    [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0]]
    >>> gadget.insertData(torch.zeros(4), (slice(None), 1))
    >>> gadget.getNumpyVersion()[3]
    array([ 9.,  0., 11.])
    """

    fileName: Any
    CPUPinn: bool = False

    _init_method = "gadgetInit()"

    def __post_init__(self) -> None:
        self._choose_storage()

    def gadgetInit(self) -> None:
        """Read the file."""
        if isinstance(self.fileName, str | os.PathLike):
            self.loadCupy(self.fileName)
        else:
            self._store(as_array(self.fileName))


@dataclass(eq=False, repr=False)
class DataGadgetMM(MappedArray):
    """The array of a .npy file, mapped into memory: `insertData` writes to the file.

    `CPUPinn` changes nothing.
    """

    fileName: Any
    CPUPinn: bool = False

    _init_method = "gadgetInit()"

    def gadgetInit(self) -> None:
        """Open the file, for writing if the file allows it."""
        self._map(self.fileName)

    def loadCupy(self, loadFileName: FileName) -> None:
        """Open another .npy file instead."""
        self._map(loadFileName)


# ---- co-occurrence matrices, from which GloVe is trained


MOST = 1 << 53  # sums are float64, which are exact up to this count


@dataclass(eq=False, repr=False)
class CountMatrix(StoredArray):
    """Counts, (total_classes, total_classes)."""

    total_classes: int

    _init_method = "comInit()"
    CUPYCom = StoredArray.CUPYcorpus

    def __post_init__(self) -> None:
        self.datatype = as_dtype(self.datatype)
        self._choose_storage()

    def comInit(self, CPUPinn: bool = False) -> None:
        """Start with zeros; with `CPUPinn`, in host memory."""
        if CPUPinn:
            self._storage = "host"
        zero = to_numpy(torch.zeros((), dtype=self.datatype))
        self._store(np.broadcast_to(zero, (self.total_classes, self.total_classes)))

    def _store(self, array: Array) -> None:
        self._check_shape(array)
        super()._store(array)

    def _check_shape(self, array: Array) -> None:
        shape = (self.total_classes, self.total_classes)
        if array.shape != shape:
            raise ValueError(f"the matrix must have shape {shape}; found {array.shape}")
        self.datatype = as_dtype(array.dtype)

    def addCounts(self, rowIndexes: Any, columnIndexes: Any, counts: Any = None) -> None:
        """Add `counts`, by default 1, to each entry, repeats included; raise if a sum does not fit."""
        rows, columns = (row_ids(self.total_classes, flat_ids(ids)) for ids in (rowIndexes, columnIndexes))
        given = np.ones(len(rows)) if counts is None else as_array(counts).reshape(-1).astype(np.float64)
        if not len(rows) == len(columns) == len(given):
            raise ValueError(
                f"found {len(rows)} rows, {len(columns)} columns and {len(given)} counts; expected one number"
            )
        keys, inverse = np.unique(rows * self.total_classes + columns, return_inverse=True)
        entries = divmod(keys, self.total_classes)
        totals = to_numpy(self.getData(entries)) + np.bincount(inverse.reshape(-1), given, len(keys))
        self._check_totals(totals)
        self.insertData(totals, entries)

    def _check_totals(self, totals: Array) -> None:
        """Raise for sums that the datatype cannot hold, or to which it cannot add 1 exactly."""
        is_float = self.datatype.is_floating_point
        limit = 2 / torch.finfo(self.datatype).eps if is_float else torch.iinfo(self.datatype).max
        limit = min(int(limit), MOST)
        fits = (totals >= 0) & (totals <= limit) & (is_float | (totals == np.floor(totals)))
        if not fits.all():
            raise ValueError(
                f"a sum of {totals[~fits][0]:.16g} does not fit: {self.datatype} counts from 0 to {limit}; "
                "use a wider datatype; nothing was added"
            )

    def getEntries(self) -> tuple[Array, Array, Array]:
        """Return rows, columns and counts of all entries that are not 0, as numpy arrays."""
        rows, columns = signed(self.getTorchVar()).nonzero(as_tuple=True)
        return to_numpy(rows), to_numpy(columns), to_numpy(self.getData((rows, columns)))


@dataclass(eq=False, repr=False)
class COM(CountMatrix):
    """A co-occurrence matrix on the GPU (without one: in memory), or with `CPUPinn` in host memory.

    >>> import flatbed.compat.speedtorch as SpeedTorch
    >>> matrix = SpeedTorch.COM(total_classes=5)
    >>> matrix.comInit()
    >>> matrix.addCounts([0, 0, 4], [3, 3, 1])
    >>> matrix.getEntries()[2]
    array([2, 1], dtype=uint32)
    """

    datatype: Any = "uint32"
    CPUPinn: bool = False


@dataclass(eq=False, repr=False)
class COMMM(CountMatrix, MappedArray):
    """A co-occurrence matrix in a .npy file, `DISKNAME0.npy` or the next number that is free.

    `checkpoint()` and `close()` save the counts, `openFile()` continues with them; `CPUPinn` changes nothing.
    """

    diskname: FileName = "COM"
    datatype: Any = "uint32"
    CPUPinn: bool = False
    fileName = None

    def _store(self, array: Array) -> None:
        """Copy an array to a new file."""
        self._check_shape(array)
        path = free_path(self.diskname, ".npy")
        np.lib.format.open_memmap(path, "w+", array.dtype.newbyteorder("="), array.shape)[...] = array
        self._map(path)

    def openFile(self, fileName: FileName) -> None:
        """Continue with the counts in a file."""
        self._check_shape(open_npy(fileName))
        self._map(fileName)


@dataclass(eq=False, repr=False)
class PytorchCOM(CountMatrix):
    """A co-occurrence matrix: `deviceType` "cuda" for the GPU, "cpu" for host memory."""

    datatype: Any = "int32"
    deviceType: str = "cuda"
    pinType: bool = False


@dataclass(eq=False, repr=False)
class GPUPytorchCOM(CountMatrix):
    """A co-occurrence matrix on the GPU."""

    datatype: Any = "int32"


@dataclass(eq=False, repr=False)
class CPUPytorchCOM(CountMatrix):
    """A co-occurrence matrix in host memory."""

    datatype: Any = "int32"
    _storage = "host"
