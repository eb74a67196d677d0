"""COM and its variants: a matrix of how often classes occur together, to train GloVe from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.compat.speedtorch.collection import Home, as_dtype, natural
from flatbed.compat.speedtorch.data import DATA, Rows, _signed, as_values
from flatbed.compat.speedtorch.homes import cupy_home, torch_home
from flatbed.rows.ids import as_ids, check_range


class _Matrix(Rows):
    """(total_classes, total_classes) of counts."""

    _first_call = "comInit()"

    def __init__(self, total_classes: int, datatype: object, home: Home) -> None:
        super().__init__(home)
        self.total_classes = natural("total_classes", total_classes)
        self.datatype = as_dtype(datatype)

    def comInit(self, CPUPinn: bool = False) -> None:
        """Begin with zeros; with `CPUPinn`, in host memory."""
        if cupy_home(CPUPinn).kind == "host":
            self._home = Home("host") if self._home.kind == "device" else self._home
        self._begin((self.total_classes, self.total_classes), self.datatype)

    @property
    def CUPYCom(self) -> Any:
        """What `getCupyVar` gives."""
        return self.getCupyVar()

    def addCounts(self, rowIndexes: Any, columnIndexes: Any, counts: Any = None) -> None:
        """Add to entries, one by one, repeats included: `counts`, or 1 each."""
        rows, columns = as_ids(rowIndexes).reshape(-1).cpu(), as_ids(columnIndexes).reshape(-1).cpu()
        for ids in (rows, columns):
            check_range(ids, self.total_classes)
        given = np.ones(len(rows)) if counts is None else counts
        values = as_values(given).cpu().reshape(-1)
        if not len(rows) == len(columns) == len(values):
            raise ValueError(
                f"rows, columns and counts must be as many; found {len(rows)}, {len(columns)}, {len(values)}"
            )
        if counts is not None and not torch.can_cast(values.dtype, self.datatype):
            raise TypeError(f"counts of {values.dtype} cannot be added to {self.datatype}: convert them")
        dtype = _signed(torch.empty(0, dtype=self.datatype)).dtype
        self._add(rows, columns, values.to(dtype))

    def _add(self, rows: Tensor, columns: Tensor, values: Tensor) -> None:
        held = self._rows()
        whole = held.whole(DATA)
        if whole is not None:
            at = (rows.to(whole.device), columns.to(whole.device))
            _signed(whole).index_put_(at, values.to(whole.device), accumulate=True)
            return
        for start, stop in held.blocks():
            here = (rows >= start) & (rows < stop)
            if bool(here.any()):
                block = held.read(DATA, start, stop)
                _signed(block).index_put_((rows[here] - start, columns[here]), values[here], accumulate=True)
                held.write_(DATA, start, block)

    def getEntries(self) -> tuple[Any, Any, Any]:
        """All entries that are not 0: their rows, columns and counts, as numpy arrays."""
        held = self._rows()
        parts = []
        for start, stop in held.blocks():
            block = held.read(DATA, start, stop)
            row, column = _signed(block).nonzero(as_tuple=True)
            parts.append((row + start, column, _signed(block)[row, column]))
        rows, columns, counts = (torch.cat(one) for one in zip(*parts, strict=True))
        return rows.numpy(), columns.numpy(), counts.view(self.datatype).numpy()


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
