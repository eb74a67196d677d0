"""DataGadget and DataGadgetMM: an array whose rows, or any part, come as tensors to compute with."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.compat.speedtorch import files
from flatbed.compat.speedtorch.collection import (
    STAND_IN,
    Collection,
    Column,
    Home,
    as_dtype,
    computing_device,
)
from flatbed.compat.speedtorch.homes import cupy_home
from flatbed.errors import FlatbedError
from flatbed.tables.ids import as_ids, check_range, to_device
from flatbed.tables.tensor_file import as_path

DATA = "data"
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""What torch computes with instead of numbers it can do little with; sums are the same bits."""


def ids_of(indexes: Any) -> Tensor | None:
    """Indexes that are a list of rows, as ids."""
    if isinstance(indexes, (list, range)) and len(indexes):
        indexes = np.asarray(indexes)
    if isinstance(indexes, np.ndarray) and indexes.ndim and indexes.dtype.kind in "iu":
        return as_ids(indexes)
    if isinstance(indexes, np.ndarray) and indexes.dtype.kind in "fc":
        raise TypeError(
            f"indexes must be integers, slices or a mask; found an array of {indexes.dtype} (insertData "
            "takes the data first)"
        )
    if isinstance(indexes, Tensor) and indexes.dim() and indexes.dtype not in (torch.bool, torch.uint8):
        return as_ids(indexes)
    return None


def as_values(values: Any) -> Tensor:
    """Numbers as a tensor."""
    try:
        return values.detach() if isinstance(values, Tensor) else torch.as_tensor(_native(np.asarray(values)))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"values must be numbers in a tensor, an array or a list; found {type(values).__name__}"
        ) from None


def as_data(values: Any, dtype: torch.dtype, ids: Tensor | None, row_shape: tuple[int, ...]) -> Tensor:
    """Values that are to be stored among numbers of a datatype; for ids, as many rows."""
    given = as_values(values)
    if not torch.can_cast(given.dtype, dtype):
        raise TypeError(f"values of {given.dtype} cannot be stored among {dtype}: convert them first")
    refuse_overflow(given, dtype)
    if ids is not None and tuple(given.shape) != (*ids.shape, *row_shape):
        raise ValueError(
            f"data for these indexes must have shape {(*ids.shape, *row_shape)}; found {tuple(given.shape)}"
        )
    return given


def refuse_overflow(given: Tensor, dtype: torch.dtype) -> None:
    """Whole numbers must not wrap."""
    if dtype in (given.dtype, torch.bool) or dtype.is_floating_point or dtype.is_complex or not given.numel():
        return
    values = given.cpu().numpy() if given.dtype in SIGNED else given
    low, high, info = int(values.min()), int(values.max()), torch.iinfo(dtype)
    if low < info.min or high > info.max:
        raise ValueError(f"values from {low} to {high} do not fit among {dtype} ({info.min} to {info.max})")


def _native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same numbers in this machine's order of bytes."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _bits(values: Tensor) -> Tensor:
    """What numpy can move; it does not know bfloat16."""
    return values.view(torch.int16) if values.dtype == files.BFLOAT else values


def as_index(indexes: Any, *, to_torch: bool, device: torch.device) -> Any:
    """Any other index, in the terms of the array that it is for."""
    if isinstance(indexes, tuple):
        return tuple(as_index(one, to_torch=to_torch, device=device) for one in indexes)
    if isinstance(indexes, Tensor) and not to_torch:
        return indexes.detach().cpu().numpy()
    if isinstance(indexes, (np.ndarray, list, range)) and to_torch:
        return torch.as_tensor(np.asarray(indexes), device=device)
    return indexes


class Rows:
    """An array over a collection: the first dimension counts rows."""

    _first_call = ""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._shape: tuple[int, ...] = ()
        self._collection: Collection | None = None

    def _begin(self, shape: tuple[int, ...], dtype: torch.dtype) -> Collection:
        count = int(np.prod(shape[1:]))
        if not shape or not shape[0] or not count:
            raise ValueError(f"an array of shape {shape} has no rows: use one with at least a number in it")
        columns = [Column(DATA, dtype, count)]
        made = Collection(columns, shape[0], self._home, computing_device())
        if self._collection is not None:
            self._collection.close()
        self._collection, self._shape = made, shape
        return made

    def _rows(self) -> Collection:
        if self._collection is None:
            raise FlatbedError(f"{type(self).__name__} has no data yet: call {self._first_call} first")
        return self._collection

    def _view(self) -> Tensor:
        """All of it where it lies, in its own shape."""
        whole = self._rows().whole(DATA)
        if whole is None:
            raise FlatbedError(
                f"the data is in {self._rows().path}, not in memory: ask for rows, or for getNumpyVersion()"
            )
        return whole.view(self._shape)

    # ---- parts of it

    def getData(self, indexes: Any) -> Tensor:
        """Rows by number, (n, …), or any part that an array can be asked for: a tensor to compute with."""
        rows, ids = self._rows(), ids_of(indexes)
        if ids is not None:
            check_range(ids, self._shape[0])
            found = rows.gather(to_device(ids.reshape(-1), rows.device))[DATA]
            return found.reshape(*ids.shape, *self._shape[1:])
        view = self._view()
        if view.is_cuda:
            part = _signed(view)[as_index(indexes, to_torch=True, device=view.device)]
            return part.view(view.dtype).clone()
        copied = np.array(_bits(view).numpy()[as_index(indexes, to_torch=False, device=view.device)])
        return torch.from_numpy(copied).view(view.dtype).to(rows.device)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Replace rows, or any part, by a tensor's or an array's values. Of repeated rows the last counts."""
        rows, ids = self._rows(), ids_of(indexes)
        if ids is not None:
            check_range(ids, self._shape[0])
        dtype = rows.columns[DATA].dtype
        given = as_data(dataObject, dtype, ids, self._shape[1:])
        if ids is None:
            self._insert_part(given.to(dtype), indexes)
            return
        wanted = ids.reshape(-1).to(rows.device)
        unique, inverse = torch.unique(wanted, return_inverse=True)
        last = torch.zeros_like(unique).scatter_reduce_(
            0, inverse, torch.arange(len(wanted), device=rows.device), "amax"
        )
        values = _signed(given.to(rows.device, dtype).reshape(len(wanted), -1))
        rows.scatter_(unique, {DATA: values.index_select(0, last).view(dtype)})

    def _insert_part(self, given: Tensor, indexes: Any) -> None:
        view = self._view()
        if view.is_cuda:
            index = as_index(indexes, to_torch=True, device=view.device)
            _signed(view)[index] = _signed(given.to(view.device))
        else:
            index = as_index(indexes, to_torch=False, device=view.device)
            _bits(view).numpy()[index] = _bits(given.cpu()).numpy()

    # ---- all of it

    def getNumpyVersion(self) -> Any:
        """A copy as a numpy array."""
        return files.numpy_copy(self._rows().copied(DATA)).reshape(self._shape)

    def getTorchVar(self) -> Tensor:
        """A tensor over the memory it is in."""
        return self._view()

    def getCupyVar(self) -> Any:
        """A CuPy array over its memory on a GPU, if CuPy is there; a numpy array over it on the host."""
        return files.as_array(self._view())

    getCupyMM = getCupyVar

    @property
    def CUPYcorpus(self) -> Any:
        """What `getCupyVar` gives."""
        return self.getCupyVar()

    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """Write it to a .npy file."""
        files.save_npy(saveFileName, self._rows(), stacked=False, shape=self._shape)

    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Replace it by the array in a .npy file."""
        self._load(files.open_npy(loadFileName))

    def _load(self, array: np.ndarray[Any, Any]) -> None:
        array = _native(array)
        dtype = as_dtype(array.dtype)
        if dtype.itemsize not in STAND_IN:
            raise TypeError(f"arrays of {array.dtype} cannot be stored: use real numbers of at most 8 bytes")
        rows = self._begin(array.shape, dtype)
        for start, stop in rows.blocks():
            rows.write_(DATA, start, torch.from_numpy(np.array(array[start:stop])).reshape(stop - start, -1))

    def close(self) -> None:
        """Give the memory or the file back."""
        if self._collection is not None:
            self._collection.close()
        self._collection = None


def _signed(values: Tensor) -> Tensor:
    return values.view(SIGNED[values.dtype]) if values.dtype in SIGNED else values


class DataGadget(Rows):
    """The array of a .npy file (or an array) on the GPU, or with `CPUPinn` in host memory that it addresses.

    >>> gadget = DataGadget(np.arange(12.0).reshape(4, 3), CPUPinn=True)
    >>> gadget.gadgetInit()
    >>> gadget.getData(np.array([3, 0], dtype=np.int32)).tolist()
    [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0]]
    >>> gadget.insertData(torch.zeros(4, dtype=torch.float64), (slice(None), 1))
    >>> gadget.getNumpyVersion()[3]
    array([ 9.,  0., 11.])
    """

    _first_call = "gadgetInit()"

    def __init__(self, fileName: Any, CPUPinn: bool = False) -> None:
        super().__init__(cupy_home(CPUPinn))
        self.fileName, self.CPUPinn = fileName, CPUPinn

    def gadgetInit(self) -> None:
        """Read the file."""
        given = self.fileName
        self._load(files.open_npy(given) if isinstance(given, (str, os.PathLike)) else np.asarray(given))


def _mode(name: str | os.PathLike[str]) -> str:
    path = files.npy_path(name)
    path = path if path.exists() else as_path(name, "the file's name")
    forbidden = path.exists() and not os.access(path, os.W_OK)
    return "r" if forbidden else "r+"


class DataGadgetMM:
    """The array of a .npy file, left where it is: parts are read as they are asked for.

    `insertData` writes to the file. `CPUPinn` changes nothing.
    """

    def __init__(self, fileName: str | os.PathLike[str], CPUPinn: bool = False) -> None:
        if not isinstance(fileName, (str, os.PathLike)):
            raise TypeError(f"fileName must be the path of a .npy file; found {type(fileName).__name__}")
        self.fileName, self.CPUPinn = fileName, CPUPinn
        self._array: Any = None

    def gadgetInit(self) -> None:
        """Open the file, for writing if that is allowed."""
        self._array = self._opened(self.fileName)

    @staticmethod
    def _opened(name: str | os.PathLike[str]) -> Any:
        array = files.open_npy(name, mode=_mode(name))
        as_dtype(array.dtype.newbyteorder("="))  # raises for what is no numbers
        return array

    def _mapped(self) -> Any:
        if self._array is None:
            raise FlatbedError("DataGadgetMM has no data yet: call gadgetInit() first")
        return self._array

    def _index(self, indexes: Any, ids: Tensor | None) -> Any:
        if ids is None:
            return as_index(indexes, to_torch=False, device=torch.device("cpu"))
        check_range(ids, len(self._mapped()))
        return ids.cpu().numpy()

    def getData(self, indexes: Any) -> Tensor:
        """Rows by number, (n, …), or any part that an array can be asked for: a tensor to compute with."""
        index = self._index(indexes, ids_of(indexes))
        part = torch.from_numpy(_native(np.array(self._mapped()[index])))
        device = computing_device()
        return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Replace rows, or any part, by the values of a tensor or an array, in the file."""
        array, ids = self._mapped(), ids_of(indexes)
        index = self._index(indexes, ids)
        given = as_data(dataObject, as_dtype(array.dtype.newbyteorder("=")), ids, array.shape[1:])
        array[index] = files.numpy_copy(given.cpu())
        array.flush()

    def getNumpyVersion(self) -> Any:
        """A copy as a numpy array."""
        return np.array(self._mapped())

    def getCupyVar(self) -> Any:
        """The mapped array itself."""
        return self._mapped()

    getCupyMM = getCupyVar

    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """Write a copy to another .npy file."""
        path = files.npy_path(saveFileName)
        if path.exists() and path.samefile(files.npy_path(self.fileName)):
            raise ValueError(f"{path} is the file itself, which holds the data already: choose another name")
        if not path.parent.is_dir():
            raise FlatbedError(f"there is no folder {path.parent} to write {path.name} to: make it first")
        np.save(path, self._mapped(), allow_pickle=False)

    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Open another .npy file instead."""
        self._array, self.fileName = self._opened(loadFileName), loadFileName
