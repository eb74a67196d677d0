"""DataGadget and DataGadgetMM: an array in memory or in a .npy file, whose parts become tensors."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed import FlatbedError
from flatbed.compat.speedtorch import files, storage
from flatbed.compat.speedtorch.files import Array, FileName
from flatbed.compat.speedtorch.storage import MemoryRows
from flatbed.compat.speedtorch.stored import Stored
from flatbed.compat.speedtorch.variants import as_dtype, computing_device
from flatbed.tables.ids import as_ids, check_range, to_device

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Datatypes that torch can copy but not index, and those that stand in for them."""


def signed(values: Tensor) -> Tensor:
    """View unsigned numbers as signed ones of the same size."""
    return values.view(SIGNED[values.dtype]) if values.dtype in SIGNED else values


def row_ids(indexes: Any) -> Tensor | None:
    """Return ids for indexes that are a list of row numbers, and None for any other index."""
    if isinstance(indexes, list | range) and len(indexes):
        indexes = np.asarray(indexes)
    if isinstance(indexes, np.ndarray) and indexes.dtype.kind in "fc":
        raise TypeError(
            f"indexes must be integers, slices or a mask; found an array of {indexes.dtype} (insertData takes"
            " the data first)"
        )
    is_mask = getattr(indexes, "dtype", None) in (np.bool_, torch.bool)
    is_list = isinstance(indexes, np.ndarray | Tensor) and indexes.ndim and not is_mask
    return as_ids(indexes) if is_list else None


def as_stored(values: Any, dtype: np.dtype[Any]) -> Tensor:
    """Convert values to an array's datatype; raise if it cannot hold them."""
    given = files.to_numpy(values) if isinstance(values, Tensor) else np.asarray(values)
    if given.dtype.kind not in "biufc" or (given.dtype.kind == "c" and dtype.kind != "c"):
        raise TypeError(f"values must be numbers for an array of {dtype}; found {given.dtype}")
    stored = given.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(stored, given):
        raise ValueError(f"values from {given.min()} to {given.max()} do not fit among {dtype}: convert them")
    return torch.as_tensor(stored)


def _index(indexes: Any, array: Any) -> Any:
    """Convert the arrays in an index to numpy's or to tensors, as the array needs them."""
    if isinstance(indexes, tuple):
        return tuple(_index(one, array) for one in indexes)
    if isinstance(array, Tensor) and isinstance(indexes, np.ndarray | list | range):
        return torch.as_tensor(np.asarray(indexes), device=array.device)
    return indexes.cpu().numpy() if isinstance(indexes, Tensor) and not isinstance(array, Tensor) else indexes


class StoredArray(Stored[MemoryRows]):
    """An array on the GPU, in host memory or mapped from a file."""

    def _store(self, array: Array) -> None:
        """Copy an array to memory."""
        if not array.ndim or not array.size:
            raise ValueError(f"found an array of shape {array.shape}; expected at least one row of numbers")
        native = array.dtype.newbyteorder("=")
        rows = MemoryRows(array.shape, as_dtype(native), self._spec.kind, computing_device())
        for start, stop in storage.blocks(rows):
            rows.write_(start, torch.from_numpy(np.array(array[start:stop], native)))
        self._stored = rows

    def _array(self) -> Any:
        """Return the memory for indexing: numpy's array, or a tensor of signed numbers on a GPU."""
        whole = self._rows().tensor
        return signed(whole) if whole.is_cuda else whole.numpy()

    def getData(self, indexes: Any) -> Tensor:
        """Copy rows by number, or any part that an array can be indexed with, to the computing device."""
        rows, ids = self._rows(), row_ids(indexes)
        if ids is not None:
            check_range(ids, rows.shape[0])
            found = rows.gather(to_device(ids.reshape(-1), rows.device))
            return found.view(*ids.shape, *rows.shape[1:])
        array = self._array()
        part = array[_index(indexes, array)]
        copy = part.clone() if isinstance(part, Tensor) else torch.from_numpy(np.array(part))
        return copy.view(rows.dtype).to(rows.device)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Replace rows by number, or any part; of a row that is named twice, the last values count."""
        rows, ids = self._rows(), row_ids(indexes)
        if ids is not None:
            check_range(ids, rows.shape[0])
        if isinstance(dataObject, Tensor) and dataObject.dtype == rows.dtype:
            values = dataObject.detach()
        else:
            values = as_stored(dataObject, files.numpy_dtype(rows.dtype))
        if ids is None:
            array = self._array()
            on_gpu = isinstance(array, Tensor)
            part = signed(values.to(rows.device)) if on_gpu else values.cpu().numpy()
            array[_index(indexes, array)] = part
            return
        expected = (*ids.shape, *rows.shape[1:])
        if tuple(values.shape) != expected:
            raise ValueError(f"data for rows has shape {tuple(values.shape)}; expected {expected}")
        numbers = ids.cpu().numpy().reshape(-1)
        unique, from_the_end = np.unique(numbers[::-1], return_index=True)
        last = torch.from_numpy(len(numbers) - 1 - from_the_end).to(values.device)
        values = signed(values.reshape(len(numbers), *rows.shape[1:])).index_select(0, last)
        rows.scatter_(torch.from_numpy(unique).to(rows.device), values.to(rows.device))

    def saveCupy(self, saveFileName: FileName) -> None:
        """Write the array to a .npy file."""
        files.save_npy(saveFileName, files.to_numpy(self._rows().tensor))

    def loadCupy(self, loadFileName: FileName) -> None:
        """Replace the array by that of a .npy file."""
        self._store(files.open_npy(loadFileName))

    def close(self) -> None:
        """Release the memory."""
        self._stored = None


class MappedArray(StoredArray):
    """An array in a .npy file that is mapped into memory."""

    fileName: Any = None
    _mapped: Any = None

    def _map(self, array: Any) -> None:
        """Use a mapped array as the storage of rows."""
        if not array.flags.c_contiguous or not array.dtype.isnative:
            raise TypeError(
                f"{array.filename} holds {array.dtype} by columns or with swapped bytes, which cannot be "
                "mapped: use DataGadget"
            )
        self.close()
        whole = torch.from_numpy(array)
        self._mapped = array
        self._stored = MemoryRows(whole.shape, whole.dtype, "file", computing_device(), whole)
        self.fileName = str(array.filename)

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Replace rows by number, or any part, in the file."""
        self._rows()
        if not self._mapped.flags.writeable:
            raise FlatbedError(f"{self.fileName} may only be read: change its permissions, or use DataGadget")
        super().insertData(dataObject, indexes)

    def saveCupy(self, saveFileName: FileName) -> None:
        """Write a copy to another .npy file."""
        path = files.as_path(saveFileName, ".npy")
        self._rows()
        if path.exists() and path.samefile(self.fileName):
            raise ValueError(f"{path} is the file itself, which holds the data already: choose another name")
        super().saveCupy(path)

    def checkpoint(self) -> None:
        """Write all changes to the file."""
        self._rows()
        self._mapped.flush()

    def close(self) -> None:
        """Write all changes to the file and close it."""
        if self._mapped is not None:
            self._mapped.flush()
        self._stored = self._mapped = None


class DataGadget(StoredArray, CPUPinn=False):
    """The array of a .npy file (or an array) on the GPU, or with `CPUPinn` in host memory.

    >>> gadget = DataGadget(np.arange(12.0).reshape(4, 3), CPUPinn=True)
    >>> gadget.gadgetInit()
    >>> gadget.getData(np.array([3, 0], dtype=np.int32)).tolist()
    [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0]]
    >>> gadget.insertData(torch.zeros(4, dtype=torch.float64), (slice(None), 1))
    >>> gadget.getNumpyVersion()[3]
    array([ 9.,  0., 11.])
    """

    _required = ("fileName",)
    _init_method = "gadgetInit()"
    fileName: Any

    def gadgetInit(self) -> None:
        """Read the file."""
        is_name = isinstance(self.fileName, str | os.PathLike)
        self._store(files.open_npy(self.fileName) if is_name else np.asarray(self.fileName))


class DataGadgetMM(MappedArray, CPUPinn=False):
    """The array of a .npy file, mapped into memory: `insertData` writes to the file.

    `CPUPinn` changes nothing.
    """

    _required = ("fileName",)
    _init_method = "gadgetInit()"

    def _setup(self) -> None:
        super()._setup()
        files.as_path(self.fileName)

    def gadgetInit(self) -> None:
        """Open the file, for writing if the file allows it."""
        self.loadCupy(self.fileName)

    def loadCupy(self, loadFileName: FileName) -> None:
        """Open another .npy file instead."""
        path = files.npy_path(loadFileName)
        self._map(files.open_npy(path, mode="r+" if os.access(path, os.W_OK) else "r"))
