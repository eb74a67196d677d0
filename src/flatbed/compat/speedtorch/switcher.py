"""Base of all switchers: the storage of all rows, and the batch whose rows the model trains."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flatbed import FlatbedError
from flatbed.compat.speedtorch import files, storage
from flatbed.compat.speedtorch.files import FileName
from flatbed.compat.speedtorch.slots import LoadedBatch, SlotBatch, Slots, flatten
from flatbed.compat.speedtorch.storage import FileRows, RowStorage
from flatbed.compat.speedtorch.stored import Stored
from flatbed.compat.speedtorch.variants import as_dtype, natural

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Switcher(Stored[RowStorage], ABC):
    """Copies rows of a batch out of storage before the forward pass, and back after the step."""

    _stacked: ClassVar[bool] = False
    """Has several tensors, by name, and not just one."""
    _names: Sequence[str] = ()
    """Names of the tensors of a row."""
    total_classes: int
    embed_dimension: int
    datatype: Any
    diskname: Any = None

    def _setup(self) -> None:
        self.total_classes = natural("total_classes", self.total_classes)
        self.embed_dimension = natural("embed_dimension", self.embed_dimension)
        given, self.datatype = self.datatype, as_dtype(self.datatype)
        if self.datatype not in DTYPES:
            raise TypeError(f"a variable is trained in a floating point datatype; found datatype {given!r}")
        self._batch: SlotBatch | None = None
        self._has_warned = False  # of changes that are about to be lost
        self._version = 0  # of the variable that has the batch

    @abstractmethod
    def _variable(self) -> nn.Parameter:
        """Return the variable as it is now, checked."""

    @abstractmethod
    def _target(self, slots: Slots) -> Any:
        """Return the key in `Slots.loaded` of the place that this switcher copies rows to."""

    @abstractmethod
    def _has_stepped(self, slots: Slots) -> bool:
        """Return True if the optimizer has changed the rows of the batch."""

    @abstractmethod
    def _copy_in(self, rows: RowStorage, variable: nn.Parameter, batch: SlotBatch) -> None:
        """Copy rows from storage to the model or the optimizer."""

    @abstractmethod
    def _copy_out(self, rows: RowStorage, variable: nn.Parameter, batch: SlotBatch) -> None:
        """Copy rows back to storage."""

    def _check_variable(self, variable: nn.Parameter, what: str) -> nn.Parameter:
        if variable.dim() != 2 or variable.shape[1] != self.embed_dimension:
            raise ValueError(
                f"{what} has shape {tuple(variable.shape)}; expected (rows of a batch, "
                f"{self.embed_dimension}), since embed_dimension={self.embed_dimension}"
            )
        if variable.dtype != self.datatype:
            raise ValueError(
                f"{what} is of {variable.dtype}; expected {self.datatype}: pass the variable's datatype"
            )
        return variable

    # ---- storage

    def _create(self, init: Any = "zeros") -> RowStorage:
        if not self._names:
            raise FlatbedError(f"{type(self).__name__} has no state per row to store")
        shape = (self.total_classes, len(self._names), self.embed_dimension)
        return storage.create(self._spec, shape, self.datatype, self._variable().device, init)

    def _fill_new(self, fill: Callable[[RowStorage], None]) -> None:
        """Create storage and fill it; the storage that there was stays if that fails."""
        rows = self._create()
        try:
            fill(rows)
        except BaseException:
            rows.close(discard=True)
            raise
        self._adopt(rows)

    def _adopt(self, rows: RowStorage) -> None:
        if self._stored is not None:
            self._stored.close()
        self._stored, self._batch = rows, None

    @property
    def fileName(self) -> str | None:
        """Path of the file; None for rows in memory."""
        rows = self._stored
        return None if rows is None or rows.path is None else str(rows.path)

    def openFile(self, fileName: FileName) -> None:
        """Continue with the rows in the file of a switcher on disk, as its last checkpoint left them."""
        path = files.as_path(fileName)
        if not path.is_file() or self._spec.kind != "disk":
            raise FlatbedError(f"{type(self).__name__} found no file at {path} that it can open")
        shape = (self.total_classes, len(self._names), self.embed_dimension)
        self._adopt(FileRows(shape, self.datatype, path, self._variable().device))
        self._after_load()

    def checkpoint(self) -> None:
        """Save all rows of a switcher on disk to its file, all or nothing."""
        rows = self._rows()
        if not isinstance(rows, FileRows):
            raise FlatbedError("found rows in memory, without a file: save them with saveCupy or saveTorch")
        rows.table.checkpoint()

    def close(self) -> None:
        """Release the memory, or save and close the file."""
        if self._stored is not None:
            self._stored.close()
        self._stored = self._batch = None

    # ---- rows of a batch

    def _ids(self, positive: Any, negative: Any) -> Tensor:
        return flatten(positive, negative, self.total_classes)

    @torch.no_grad()
    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy rows from storage: those of the positive ids, then those of the negative ids."""
        rows, variable = self._rows() if self._names else None, self._variable()
        slots, ids = Slots.of(variable), self._ids(retrievedPosIndexes, retrievedNegIndexes)
        is_lost = self._batch is not None and not self._has_warned and self._has_stepped(slots)
        self._has_warned = is_lost
        if is_lost:
            raise FlatbedError(
                f"{type(self).__name__}.beforeForwardPass() would lose the last optimizer.step(): call "
                "afterOptimizerStep() with the ids of that batch first, or call beforeForwardPass() again to "
                "drop its changes"
            )
        batch = slots.prepare(ids, self.total_classes)
        if rows is not None:
            rows.move(variable.device)
            self._copy_in(rows, variable, batch)
        slots.load(batch)
        slots.loaded[self._target(slots)] = LoadedBatch(weakref.ref(self), batch)
        self._batch, self._version = batch, variable._version

    @torch.no_grad()
    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the rows of the last `beforeForwardPass` back to storage."""
        rows, variable = self._rows() if self._names else None, self._variable()
        batch = self._batch_to_store(Slots.of(variable), retrievedPosIndexes, retrievedNegIndexes)
        if rows is not None:
            rows.move(variable.device)
            self._copy_out(rows, variable, batch)
        self._batch = None

    def _batch_to_store(self, slots: Slots, positive: Any, negative: Any) -> SlotBatch:
        """Return the loaded batch, if it is still where this switcher copied it."""
        ids, batch, found = self._ids(positive, negative), self._batch, slots.loaded.get(self._target(slots))
        if batch is None:
            problem = "without a beforeForwardPass() since the last one, or since rows were loaded"
        elif not batch.same(ids):
            problem = "with other ids than beforeForwardPass()"
        elif slots.batch is not batch:
            problem = "after another switcher of this variable was given other ids: give all of them the same"
        elif found is None or found.switcher() is not self:
            problem = "after another switcher of this variable has replaced the rows: call it before that"
        else:
            return batch
        raise FlatbedError(f"{type(self).__name__}.afterOptimizerStep() {problem}; nothing was written")

    # ---- all rows

    def _by_name(self, whole: Tensor, convert: Callable[[Tensor], Any]) -> Any:
        parts = {name: convert(whole[:, at]) for at, name in enumerate(self._names)}
        return parts if self._stacked else parts[self._names[0]]

    def _file_name(self, name: FileName | None) -> Any:
        return self.diskname if name is None and isinstance(self.diskname, str | os.PathLike) else name

    def saveCupy(self, saveFileName: FileName | None = None) -> None:
        """Write all rows to a .npy file, by default `diskname`; of an optimizer, (tensors, rows, numbers)."""
        files.save_rows(self._file_name(saveFileName), self._rows(), stacked=self._stacked)

    def loadCupy(self, loadFileName: FileName | None = None) -> None:
        """Read what `saveCupy` has written. No init is needed before."""
        name = self._file_name(loadFileName)
        self._load(lambda rows: files.load_rows(name, rows, stacked=self._stacked))

    def saveTorch(self, saveFileName: FileName) -> None:
        """Write all rows with torch.save: a tensor; an optimizer's as a dict of tensors."""
        files.save_torch(saveFileName, self._rows(), self._names, stacked=self._stacked)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Read what `saveTorch` has written. Only plain tensors are loaded."""
        self._load(lambda rows: files.load_torch(loadFileName, rows, self._names, stacked=self._stacked))

    def _load(self, read: Callable[[RowStorage], None]) -> None:
        if self._stored is None:
            self._fill_new(read)
        else:
            read(self._stored)
        self._after_load()

    def _after_load(self) -> None:
        """Forget the loaded batch, whose rows are no longer those of the storage."""
        self._batch = None
