"""COM and its variants: a matrix of how often classes occur together, as GloVe trains from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flatbed.compat.speedtorch.arrays import (
    Array,
    FileName,
    MappedArray,
    StoredArray,
    as_array,
    as_dtype,
    flat_ids,
    free_path,
    open_npy,
    row_ids,
    signed,
    to_numpy,
)

MOST = 1 << 53  # sums are float64, which count exactly to here


class CountMatrix(StoredArray):
    """Counts, (total_classes, total_classes)."""

    total_classes: int
    datatype: Any
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
        self.getTorchVar()
        rows, columns = (row_ids(self.total_classes, flat_ids(ids)) for ids in (rowIndexes, columnIndexes))
        given = np.ones(len(rows)) if counts is None else as_array(counts).reshape(-1).astype(np.float64)
        if not len(rows) == len(columns) == len(given):
            raise ValueError(
                f"found {len(rows)} rows, {len(columns)} columns and {len(given)} counts; expected one number"
            )
        if not len(rows):
            return
        keys, inverse = np.unique(rows * self.total_classes + columns, return_inverse=True)
        entries = divmod(keys, self.total_classes)
        current = to_numpy(self.getData(entries))
        totals = current + np.bincount(inverse.reshape(-1), given)
        self._check_totals(totals)
        self.insertData(totals, entries)

    def _check_totals(self, totals: Array) -> None:
        """Raise for sums that the datatype cannot hold or cannot count on from."""
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


# A dataclass takes its fields as arguments, in their order: that of SpeedTorch's constructors.


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

    total_classes: int
    datatype: Any = "uint32"
    CPUPinn: bool = False


@dataclass(eq=False, repr=False)
class COMMM(CountMatrix, MappedArray):
    """A co-occurrence matrix in a .npy file, `DISKNAME0.npy` or the next number that is free.

    `checkpoint()` and `close()` save the counts, `openFile()` continues with them; `CPUPinn` changes nothing.
    """

    total_classes: int
    diskname: FileName = "COM"
    datatype: Any = "uint32"
    CPUPinn: bool = False

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

    total_classes: int
    datatype: Any = "int32"
    deviceType: str = "cuda"
    pinType: bool = False


@dataclass(eq=False, repr=False)
class GPUPytorchCOM(CountMatrix):
    """A co-occurrence matrix on the GPU."""

    total_classes: int
    datatype: Any = "int32"


@dataclass(eq=False, repr=False)
class CPUPytorchCOM(CountMatrix):
    """A co-occurrence matrix in host memory."""

    total_classes: int
    datatype: Any = "int32"
    _storage = "host"
