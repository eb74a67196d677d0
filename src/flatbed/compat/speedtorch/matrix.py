"""COM and its variants: a matrix of how often classes occur together, as GloVe trains from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.compat.speedtorch import files
from flatbed.compat.speedtorch.data import MappedArray, StoredArray, signed
from flatbed.compat.speedtorch.files import Array, FileName
from flatbed.compat.speedtorch.storage import MemoryRows
from flatbed.compat.speedtorch.variants import StorageSpec, as_dtype, computing_device, is_pinned, natural
from flatbed.tables.ids import as_ids, check_range


class _Matrix(StoredArray):
    """Counts, (total_classes, total_classes)."""

    _required = ("total_classes",)
    _init_method = "comInit()"
    total_classes: int
    datatype: Any

    def _setup(self) -> None:
        super()._setup()
        self.total_classes = natural("total_classes", self.total_classes)
        self.datatype = _checked_dtype(as_dtype(self.datatype))

    def comInit(self, CPUPinn: bool = False) -> None:
        """Start with zeros; with `CPUPinn`, in host memory."""
        if is_pinned(CPUPinn) and self._spec.kind == "device":
            self._spec = StorageSpec("host")
        self._create()

    def _create(self) -> None:
        shape = (self.total_classes, self.total_classes)
        self._stored = MemoryRows(shape, self.datatype, self._spec.kind, computing_device())

    def _checked(self, array: Array) -> Array:
        """Check the shape and datatype of a file's matrix."""
        shape = (self.total_classes, self.total_classes)
        if array.shape != shape:
            raise ValueError(f"the matrix must have shape {shape}; found {array.shape}")
        self.datatype = _checked_dtype(as_dtype(array.dtype.newbyteorder("=")))
        return array

    def loadCupy(self, loadFileName: FileName) -> None:
        """Replace the matrix by that of a .npy file."""
        self._store(self._checked(files.open_npy(loadFileName)))

    @property
    def CUPYCom(self) -> Any:
        """The matrix, as `getCupyVar` returns it."""
        return self.getCupyVar()

    def addCounts(self, rowIndexes: Any, columnIndexes: Any, counts: Any = None) -> None:
        """Add `counts`, by default 1, to each entry, repeats included; raise if a sum does not fit."""
        self._rows()
        rows, columns = (as_ids(ids).reshape(-1).cpu() for ids in (rowIndexes, columnIndexes))
        for ids in (rows, columns):
            check_range(ids, self.total_classes)
        given = np.asarray(files.to_numpy(counts) if isinstance(counts, Tensor) else counts)
        given = np.ones(len(rows), np.int64) if counts is None else given.reshape(-1)
        if given.dtype.kind not in "biuf" or (
            given.dtype.kind == "f" and not self.datatype.is_floating_point
        ):
            raise TypeError(f"counts must be numbers that {self.datatype} can hold; found {given.dtype}")
        if not len(rows) == len(columns) == len(given):
            raise ValueError(
                f"found {len(rows)} rows, {len(columns)} columns and {len(given)} counts; expected one number"
            )
        if not len(rows):
            return
        keys, inverse = np.unique((rows * self.total_classes + columns).numpy(), return_inverse=True)
        entries = divmod(keys, self.total_classes)
        current = files.to_numpy(self.getData(entries))
        self.insertData(add_exactly(current, inverse.reshape(-1), given), entries)

    def getEntries(self) -> tuple[Array, Array, Array]:
        """Return rows, columns and counts of all entries that are not 0, as numpy arrays."""
        whole = self._rows().tensor
        rows, columns = signed(whole).nonzero(as_tuple=True)
        counts = signed(whole)[rows, columns].view(whole.dtype)
        return files.to_numpy(rows), files.to_numpy(columns), files.to_numpy(counts)


def _checked_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex or dtype == torch.bfloat16:
        raise TypeError(f"counts are real numbers of numpy; found datatype {dtype}: use one such as 'uint32'")
    return dtype


def add_exactly(current: Array, inverse: Array, counts: Array) -> Array:
    """Add counts to entries; raise if the entries' datatype cannot hold a sum."""
    if not np.isfinite(counts).all():
        raise ValueError("counts must be finite; found nan or inf")
    if (counts < 0).any():
        raise ValueError(f"counts must not be negative; found {counts[counts < 0][0]}")
    dtype, are_whole = current.dtype, counts.dtype.kind != "f"
    # Sums beyond int64 are Python's own integers.
    is_small = float(counts.sum(dtype=np.float64)) + float(current.max()) < 2.0**62
    wide: Any = np.float64 if dtype.kind == "f" or not are_whole else np.int64 if is_small else object
    added = np.zeros(len(current), wide)
    np.add.at(added, inverse, counts.astype(wide))
    totals = current.astype(wide) + added
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            stored = totals.astype(dtype)
        was_whole = current == np.floor(current)
        lost = ~np.isfinite(stored) | (are_whole & was_whole & (stored.astype(wide) - current != added))
        limit = 2 / float(np.finfo(dtype).eps) if are_whole else float(np.finfo(dtype).max)
    else:
        limit = 1 if dtype.kind == "b" else int(np.iinfo(dtype).max)
        lost = totals > limit
    if lost.any():
        raise ValueError(
            f"a sum of {int(totals[lost][0])} does not fit: {dtype} counts to at most {int(limit)}; use a "
            "wider datatype; nothing was added"
        )
    return totals.astype(dtype)


class COM(_Matrix, datatype="uint32", CPUPinn=False):
    """A co-occurrence matrix on the GPU (without one: in memory), or with `CPUPinn` in host memory.

    >>> matrix = COM(total_classes=5)
    >>> matrix.comInit()
    >>> matrix.addCounts([0, 0, 4], [3, 3, 1])
    >>> matrix.getEntries()[2]
    array([2, 1], dtype=uint32)
    """


class COMMM(_Matrix, MappedArray, storage="disk", diskname="COM", datatype="uint32", CPUPinn=False):
    """A co-occurrence matrix in a .npy file, `DISKNAME0.npy` or the next number that is free.

    `checkpoint()` and `close()` save the counts, `openFile()` continues with them; `CPUPinn` changes nothing.
    """

    def _create(self) -> None:
        path, shape = self._spec.next_path(".npy"), (self.total_classes, self.total_classes)
        dtype = files.numpy_dtype(self.datatype)
        self._map(np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape))

    def _store(self, array: Array) -> None:
        self._create()
        self._mapped[...] = array

    def openFile(self, fileName: FileName) -> None:
        """Continue with the counts in a file."""
        self._map(self._checked(files.open_npy(fileName, mode="r+")))


class PytorchCOM(_Matrix, datatype="int32", deviceType="cuda", pinType=False):
    """A co-occurrence matrix: `deviceType` "cuda" for the GPU, "cpu" for host memory."""


class GPUPytorchCOM(_Matrix, storage="device", datatype="int32"):
    """A co-occurrence matrix on the GPU."""


class CPUPytorchCOM(_Matrix, storage="host", datatype="int32"):
    """A co-occurrence matrix in host memory."""
