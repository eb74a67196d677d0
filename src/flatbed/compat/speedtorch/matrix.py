"""COM and its variants: a matrix of how often classes occur together, to train GloVe from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.compat.speedtorch import files
from flatbed.compat.speedtorch.collection import Home, as_dtype, natural
from flatbed.compat.speedtorch.data import DATA, Rows, _signed, as_values
from flatbed.compat.speedtorch.homes import cupy_home, torch_home
from flatbed.tables.ids import as_ids, check_range


class _Matrix(Rows):
    """(total_classes, total_classes) of counts."""

    _first_call = "comInit()"

    def __init__(self, total_classes: int, datatype: object, home: Home) -> None:
        super().__init__(home)
        self.total_classes = natural("total_classes", total_classes)
        self.datatype = _real(as_dtype(datatype))

    def comInit(self, CPUPinn: bool = False) -> None:
        """Begin with zeros; with `CPUPinn`, in host memory."""
        if cupy_home(CPUPinn).kind == "host":
            self._home = Home("host") if self._home.kind == "device" else self._home
        self._begin((self.total_classes, self.total_classes), self.datatype)

    @property
    def CUPYCom(self) -> Any:
        """What `getCupyVar` gives."""
        return self.getCupyVar()

    def _load(self, array: np.ndarray[Any, Any]) -> None:
        shape = (self.total_classes, self.total_classes)
        if array.shape != shape:
            raise ValueError(f"the matrix must have shape {shape}; found {array.shape}")
        _real(as_dtype(array.dtype.newbyteorder("=")))
        super()._load(array)

    def _dtype(self) -> torch.dtype:
        return self._rows().columns[DATA].dtype

    def addCounts(self, rowIndexes: Any, columnIndexes: Any, counts: Any = None) -> None:
        """Add to entries, one by one, repeats included: `counts`, or 1 each. What would not fit raises."""
        rows, columns = as_ids(rowIndexes).reshape(-1).cpu(), as_ids(columnIndexes).reshape(-1).cpu()
        for ids in (rows, columns):
            check_range(ids, self.total_classes)
        given = np.ones(len(rows), np.int64) if counts is None else counts
        values = as_values(given).cpu().reshape(-1)
        if not len(rows) == len(columns) == len(values):
            raise ValueError(
                f"rows, columns and counts must be as many; found {len(rows)}, {len(columns)}, {len(values)}"
            )
        dtype = self._dtype()
        if counts is not None and not torch.can_cast(values.dtype, dtype):
            raise TypeError(f"counts of {values.dtype} cannot be added to {dtype}: convert them")
        if len(rows):
            keys, inverse = np.unique((rows * self.total_classes + columns).numpy(), return_inverse=True)
            totals = added(self._present(keys), inverse.reshape(-1), files.numpy_copy(values), dtype)
            self._put(keys, totals)

    def _parts(self, keys: np.ndarray[Any, Any]) -> Iterator[tuple[slice, int, Tensor, Any]]:
        """Where entries are, by sorted keys: which of them, the first row there, rows, and their places."""
        held, n = self._rows(), self.total_classes
        whole = held.whole(DATA)
        for start, stop in held.blocks() if whole is None else [(0, n)]:
            first, last = np.searchsorted(keys, [start * n, stop * n]).tolist()
            if first < last:
                block = held.read(DATA, start, stop) if whole is None else whole
                local = torch.from_numpy(keys[first:last] - start * n).to(block.device)
                yield slice(first, last), start, block, (local // n, local % n)

    def _present(self, keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found = torch.empty(len(keys), dtype=self._dtype())
        for part, _, block, at in self._parts(keys):
            _signed(found)[part] = _signed(block)[at].cpu()
        return files.numpy_copy(found)

    def _put(self, keys: np.ndarray[Any, Any], values: Tensor) -> None:
        in_memory = self._rows().path is None
        for part, start, block, at in self._parts(keys):
            _signed(block)[at] = _signed(values)[part].to(block.device)
            if not in_memory:
                self._rows().write_(DATA, start, block)

    def getEntries(self) -> tuple[Any, Any, Any]:
        """All entries that are not 0: their rows, columns and counts, as numpy arrays."""
        held = self._rows()
        parts = []
        for start, stop in held.blocks():
            block = held.read(DATA, start, stop)
            row, column = _signed(block).nonzero(as_tuple=True)
            parts.append((row + start, column, _signed(block)[row, column]))
        rows, columns, counts = (torch.cat(one) for one in zip(*parts, strict=True))
        return rows.numpy(), columns.numpy(), files.numpy_copy(counts.view(self._dtype()))


def _real(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        raise TypeError(f"counts are real numbers; found datatype {dtype}: use one such as 'uint32'")
    return dtype


def added(
    present: np.ndarray[Any, Any],
    inverse: np.ndarray[Any, Any],
    counts: np.ndarray[Any, Any],
    dtype: torch.dtype,
) -> Tensor:
    """Entries with their counts added; raise if the datatype cannot hold a sum."""
    if not np.isfinite(counts).all():
        raise ValueError("counts must be finite; found nan or inf")
    if (counts < 0).any():
        raise ValueError(f"counts must not be negative; found {counts[counts < 0][0]}")
    whole = counts.dtype.kind != "f"
    # sums are exact: beyond what int64 holds, by Python's own numbers
    small = float(counts.sum(dtype=np.float64)) + float(present.max()) < 2.0**62
    kind = np.float64 if not whole else np.int64 if small else object
    sums = np.zeros(len(present), kind)
    np.add.at(sums, inverse, counts.astype(kind))
    if dtype.is_floating_point:
        return _added_floats(present.astype(np.float64), sums, dtype, whole=whole)
    totals = present.astype(kind) + sums
    limit = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    if (totals > limit).any():
        raise _too_many(totals.max(), dtype, f"counts to at most {limit}")
    return torch.from_numpy(totals.astype(present.dtype))


def _added_floats(present: Any, sums: Any, dtype: torch.dtype, *, whole: bool) -> Tensor:
    """Weights are rounded; whole counts are not."""
    totals = present + sums.astype(np.float64)
    stored = torch.from_numpy(totals).to(dtype)
    rounded = stored.double().numpy()
    if not np.isfinite(rounded).all():
        raise _too_many(totals.max(), dtype, f"holds at most {torch.finfo(dtype).max}")
    lost = (present == np.floor(present)) & (rounded - present != sums)
    if whole and lost.any():
        exact = int(2 / torch.finfo(dtype).eps)
        raise _too_many(int(totals[lost][0]), dtype, f"counts exactly to at most {exact}")
    return stored


def _too_many(total: Any, dtype: torch.dtype, reason: str) -> ValueError:
    name = str(dtype).removeprefix("torch.")
    return ValueError(
        f"a sum of {total} does not fit: {name} {reason}; use a wider datatype; nothing was added"
    )


class COM(_Matrix):
    """A co-occurrence matrix on the GPU (without one: in memory), or with `CPUPinn` in host memory.

    >>> matrix = COM(total_classes=5)
    >>> matrix.comInit()
    >>> matrix.addCounts([0, 0, 4], [3, 3, 1])
    >>> matrix.getEntries()[2]
    array([2, 1], dtype=uint32)
    """

    def __init__(self, total_classes: int, datatype: Any = "uint32", CPUPinn: bool = False) -> None:
        super().__init__(total_classes, datatype, cupy_home(CPUPinn))
        self.CPUPinn = CPUPinn


class COMMM(_Matrix):
    """A co-occurrence matrix in a file, `DISKNAME0.bed` or the next number that is free."""

    def __init__(
        self, total_classes: int, diskname: str = "COM", datatype: Any = "uint32", CPUPinn: bool = False
    ) -> None:
        super().__init__(total_classes, datatype, Home("disk", diskname))
        self.diskname, self.CPUPinn = diskname, CPUPinn


class PytorchCOM(_Matrix):
    """A co-occurrence matrix: `deviceType` "cuda" for the GPU, "cpu" for host memory."""

    def __init__(
        self, total_classes: int, datatype: Any = "int32", deviceType: str = "cuda", pinType: bool = False
    ) -> None:
        super().__init__(total_classes, datatype, torch_home(deviceType, pinType))


class GPUPytorchCOM(_Matrix):
    """A co-occurrence matrix on the GPU."""

    def __init__(self, total_classes: int, datatype: Any = "int32") -> None:
        super().__init__(total_classes, datatype, Home("device"))


class CPUPytorchCOM(_Matrix):
    """A co-occurrence matrix in host memory."""

    def __init__(self, total_classes: int, datatype: Any = "int32") -> None:
        super().__init__(total_classes, datatype, Home("host"))
