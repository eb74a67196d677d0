"""What all switchers have in common: a collection of rows, and the batch of them that is out."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.compat.speedtorch import files
from flatbed.compat.speedtorch.collection import Collection, Column, Fill, Home, as_dtype, natural
from flatbed.compat.speedtorch.slots import Batch, Held, Slots, flatten
from flatbed.errors import FlatbedError

FileName = str | os.PathLike[str]


class Switcher(ABC):
    """Rows go out with `beforeForwardPass` and come home with `afterOptimizerStep`."""

    _stacked = False
    """Whether it has several tensors."""
    _first_call = ""
    """What has to be called first."""

    def __init__(self, total_classes: int, embed_dimension: int, datatype: object, home: Home) -> None:
        self.total_classes = natural("total_classes", total_classes)
        self.embed_dimension = natural("embed_dimension", embed_dimension)
        self.datatype = as_dtype(datatype, floating=True)
        self._home = home
        self._collection: Collection | None = None
        self._out: Batch | None = None
        self._told = False  # of changes that are about to be lost

    # ---- to be said by each kind

    @abstractmethod
    def _variable(self) -> Tensor:
        """The variable as it is now, checked."""

    @abstractmethod
    def _columns(self) -> list[Column]:
        """The tensors of a row."""

    @abstractmethod
    def _held(self, slots: Slots) -> Held | None:
        """What is where its rows go to."""

    @abstractmethod
    def _has_changed(self) -> bool:
        """Whether a step has changed what is out."""

    # ---- the collection

    def _begin(self, fill: Fill | None = None) -> Collection:
        """A new collection instead of the one there was."""
        made = self._made(fill)
        self._adopt(made)
        return made

    def _made(self, fill: Fill | None = None) -> Collection:
        device = self._variable().device
        return Collection(self._columns(), self.total_classes, self._home, device, fill=fill)

    def _adopt(self, made: Collection) -> None:
        if self._collection is not None:
            self._collection.close()
        self._collection, self._out = made, None

    def _rows(self) -> Collection:
        if self._collection is None:
            raise FlatbedError(
                f"{type(self).__name__} has no rows yet: call {self._first_call} before anything else"
            )
        return self._collection

    @property
    def fileName(self) -> str | None:
        """The collection's file, if it is on disk."""
        path = None if self._collection is None else self._collection.path
        return None if path is None else str(path)

    def checkpoint(self) -> None:
        """Let the file of a collection on disk hold all rows as they are now, all or nothing."""
        self._rows().checkpoint()

    def close(self) -> None:
        """Give the collection's memory or file back. A file holds its last checkpoint."""
        if self._collection is not None:
            self._collection.close()
        self._collection = self._out = None

    # ---- rows of a batch

    def _ids(self, positive: Any, negative: Any) -> Tensor:
        return flatten(positive, negative, self.total_classes)

    def _check_home(self) -> None:
        """Raise if other rows are about to replace some that a step has changed; for each of them once."""
        lost = self._out is not None and not self._told and self._has_changed()
        self._told = lost
        if lost:
            raise FlatbedError(
                f"{type(self).__name__}.beforeForwardPass(), but the rows of the last one have been through "
                "a step and not come home: call afterOptimizerStep() with their ids after every "
                "optimizer.step(); or call beforeForwardPass() once more to go on without their changes"
            )

    def _taken(self, positive: Any, negative: Any) -> Batch:
        """The batch of an `afterOptimizerStep`: the one that is out."""
        ids, batch = self._ids(positive, negative), self._out
        if batch is None:
            raise FlatbedError(
                f"{type(self).__name__}.afterOptimizerStep() without a beforeForwardPass() since the last "
                "one, or since rows were made or loaded: there are no rows to bring home"
            )
        if not batch.same(ids):
            raise FlatbedError(
                "afterOptimizerStep() was given other ids than beforeForwardPass(): the variable holds the "
                "rows of the latter; nothing was written"
            )
        slots = Slots.of(self._variable())
        if slots.batch is not batch:
            raise FlatbedError(
                "another switcher of this variable was given other ids since beforeForwardPass(): give all "
                "switchers of a variable the same ids; nothing was written"
            )
        held = self._held(slots)
        if held is None or held.by() is not self:
            raise FlatbedError(
                f"another switcher of this variable has put rows of another collection where those of this "
                f"{type(self).__name__} were: bring rows home before that; nothing was written"
            )
        return batch

    # ---- all rows

    def getNumpyVersion(self) -> Any:
        """All rows as a numpy array, a copy; of an optimizer's, a dict of arrays by name."""
        rows = self._rows()
        found = {name: files.numpy_copy(rows.copied(name)) for name in rows.columns}
        return found if self._stacked else next(iter(found.values()))

    def getTorchVar(self) -> Any:
        """All rows as a tensor over the collection's memory; of an optimizer's, a dict of them."""
        rows = self._rows()
        found = {name: rows.whole(name) for name in rows.columns}
        if any(one is None for one in found.values()):
            raise FlatbedError(
                f"the collection is in {self.fileName}, not in memory: use getNumpyVersion() for a copy"
            )
        return found if self._stacked else next(iter(found.values()))

    def getCupyVar(self) -> Any:
        """The same as a CuPy array on a GPU, if CuPy is there, and as a numpy array on the host."""
        found = self.getTorchVar()
        if self._stacked:
            return {name: files.as_array(one) for name, one in found.items()}
        return files.as_array(found)

    getCupyMM = getCupyVar

    @property
    def CUPYcorpus(self) -> Any:
        """What `getCupyVar` gives."""
        return self.getCupyVar()

    def saveCupy(self, saveFileName: FileName) -> None:
        """Write all rows to a .npy file; an optimizer's as (tensors, rows, dimension)."""
        files.save_npy(saveFileName, self._rows(), stacked=self._stacked)

    def loadCupy(self, loadFileName: FileName) -> None:
        """Read what `saveCupy` has written. No other call is needed first."""
        self._load(lambda rows: files.load_npy(loadFileName, rows, stacked=self._stacked))

    def saveTorch(self, saveFileName: FileName) -> None:
        """Write all rows with torch.save: a tensor; an optimizer's as a dict of tensors."""
        files.save_torch(saveFileName, self._rows(), stacked=self._stacked)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Read what `saveTorch` has written. Only plain tensors are loaded."""
        self._load(lambda rows: files.load_torch(loadFileName, rows, stacked=self._stacked))

    def _load(self, read: Callable[[Collection], None]) -> None:
        """Read into the collection that there is; into a new one, which is discarded if that fails."""
        rows = self._made() if self._collection is None else self._collection
        try:
            read(rows)
        except BaseException:
            if rows is not self._collection:
                rows.discard()
            raise
        if rows is not self._collection:
            self._adopt(rows)
        self._out = None  # what is out is no longer theirs
        self._has_loaded()

    def _has_loaded(self) -> None:  # noqa: B027 (most have nothing to do)
        """Rows are others than those that were made."""


def dummy_inputs(batch_size: int, n_positive: int, n_negative: int | None) -> Any:
    """Slots as (batch_size, n_positive), and those after them as (batch_size, n_negative)."""
    size = natural("batchSize", batch_size)
    positive = size * natural("posPerBatch", n_positive)
    first = np.arange(positive).reshape(size, -1)
    if n_negative is None:
        return first
    negative = size * natural("negPerBatch", n_negative)
    return first, np.arange(positive, positive + negative).reshape(size, -1)


def check_variable(variable: Tensor, embed_dimension: int, datatype: torch.dtype, what: str) -> None:
    """Raise if rows of a collection do not fit into a variable."""
    if variable.dim() != 2 or variable.shape[1] != embed_dimension:
        raise ValueError(
            f"{what} has shape {tuple(variable.shape)}; expected (rows of a batch, {embed_dimension}), since "
            f"embed_dimension={embed_dimension}"
        )
    if variable.dtype != datatype:
        raise ValueError(
            f"{what} is of {variable.dtype}, but its collection of {datatype}: pass the variable's as the "
            "switcher's datatype"
        )
