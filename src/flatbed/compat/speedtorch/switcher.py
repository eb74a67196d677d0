"""Base of all switchers: a table of all rows, and the batch whose rows the model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flatbed import Embedding, FlatbedError, Table
from flatbed.compat.speedtorch.arrays import (
    Array,
    ArrayViews,
    FileName,
    as_dtype,
    flat_ids,
    free_path,
    npy_path,
    open_npy,
    replacing,
    row_ids,
    to_numpy,
)
from flatbed.compat.speedtorch.slots import SlotBatch, Slots

BLOCK_BYTES = 1 << 26  # copied at once
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as any datatype; numpy has no bfloat16."""


class Switcher(ArrayViews):
    """Copies rows of a batch out of storage before the forward pass, and back after the step.

    A `flatbed.Embedding` stores all rows. Its rows hold all tensors of a switcher side by side. A subclass
    has `_variable()`, which returns the present variable. Its `_copy_in` copies rows of a batch from storage
    to the model or the optimizer, and its `_copy_out` copies them back.
    """

    _variable: Callable[[], nn.Parameter]
    _copy_in: Callable[[nn.Parameter, SlotBatch], None]
    _copy_out: Callable[[nn.Parameter, SlotBatch], None]
    _key: int
    """Key in `Slots.switchers`: 0 if this switcher fills the variable, else the id() of the optimizer."""
    _init_method: ClassVar[str]
    _is_stacked: ClassVar[bool] = False
    """True for several tensors, by name."""
    _names: Sequence[str] = ("weight",)
    """Names of the tensors of a row."""
    total_classes: int
    embed_dimension: int
    datatype: Any
    diskname: Any = None
    fileName: str | None = None
    """Path of the file; None for rows in memory."""

    def _set_up(self) -> None:
        """Check the arguments of a constructor, and begin without rows."""
        self.datatype = as_dtype(self.datatype)
        self._choose_storage()
        self._module: Embedding | None = None
        self._parts: list[tuple[Tensor, Array]] = []
        """Rows in memory that the CPU computes with, for each name: as a tensor, and their bits in numpy."""
        self._last_slots: Slots | None = None
        self._batch: SlotBatch | None = None
        self._is_pending = False
        """True between `beforeForwardPass` and `afterOptimizerStep`."""
        self._version = 0
        """Version of the variable in `beforeForwardPass`. Steps of the optimizer change the version."""
        variable = self._variable()
        if variable.shape[1:] != (self.embed_dimension,) or variable.dtype != self.datatype:
            raise ValueError(
                f"the variable is {variable.dtype} of shape {tuple(variable.shape)}; expected "
                f"{self.datatype} of (rows of a batch, {self.embed_dimension}): check embed_dimension and "
                "datatype"
            )

    def _slots(self, variable: nn.Parameter) -> Slots:
        """Return the slots of the variable. They are kept, since finding them takes time."""
        if self._last_slots is None or self._last_slots.variable() is not variable:
            self._last_slots = Slots.of(variable)
        return self._last_slots

    # ---- storage

    def _create(self, init: Any = "zeros", path: Path | None = None, *, resume: bool | None = None) -> None:
        """Store all rows in a new table, or in the table of an existing file."""
        if self._storage == "disk" and path is None:
            path = free_path(self.diskname, ".bed")
        module = Embedding(
            self.total_classes,
            len(self._names) * self.embed_dimension,
            storage=self._storage,
            path=path,
            dtype=self.datatype,
            device=self._variable().device,
            init=init,
            resume=resume,
            replicate=False,
            cache_rows=0,
        )
        if path is not None:
            module.table.checkpoint()  # creates the file
        self.close()
        self._module, self.fileName = module, None if path is None else str(path)
        self._slots(self._variable()).switchers[self._key] = self

    def _table(self) -> Table:
        """Return the table, on the variable's device."""
        if self._module is None:
            raise FlatbedError(f"{type(self).__name__} has no rows yet: call {self._init_method} first")
        device = self._variable().device
        if self._module.table.device != device:
            self._module.to(device)
            self._parts = []
        return self._module.table

    def _memory(self, device: torch.device) -> list[tuple[Tensor, Array]]:
        """Return the rows' memory if the CPU computes with it; otherwise nothing."""
        if device.type != "cpu" or self._storage == "disk":
            return []
        if not self._parts:
            table = self._table()
            with torch._C.DisableTorchFunctionSubclass():  # a table's own view checks every operation
                weight = table.weight.detach().as_subclass(Tensor)
            self._parts = [(part, self._bits(part)) for part in weight.chunk(len(self._names), dim=1)]
        return self._parts

    def _bits(self, tensor: Tensor) -> Array:
        bits: Array = tensor.view(BITS[self.datatype.itemsize]).numpy()
        return bits

    def close(self) -> None:
        """Release the memory, or save and close the file."""
        if self._module is not None:
            self._module.table.close()
        self._module, self._parts = None, []
        self._forget_batch()

    def _forget_batch(self) -> None:
        """Forget the loaded batch. Its rows are no longer equal to the rows in storage."""
        self._batch, self._is_pending = None, False

    def _read(self, batch: SlotBatch, tensors: Sequence[Tensor]) -> None:
        """Copy the rows of a batch to the first slots of tensors, one for each name; zero the others."""
        n = len(batch.ids)
        if memory := self._memory(batch.device):
            for (part, _), tensor in zip(memory, tensors, strict=True):
                out = tensor if n == tensor.shape[0] else tensor[:n]
                torch.index_select(part, 0, batch.index, out=out)
        else:  # each row is read once
            rows = self._table().read_rows(batch.unique).index_select(0, batch.inverse)
            for part, tensor in zip(rows.chunk(len(tensors), dim=1), tensors, strict=True):
                tensor[:n] = part
        for tensor in tensors:
            if n < tensor.shape[0]:
                tensor[n:] = 0

    def _write(self, batch: SlotBatch, tensors: Sequence[Tensor]) -> None:
        """Replace the rows of a batch by those in their slots. All slots of a row have the same values."""
        if memory := self._memory(batch.device):  # torch's index_copy_ takes twice as long
            for (_, bits), tensor in zip(memory, tensors, strict=True):
                bits[batch.ids] = self._bits(tensor)[: len(batch.ids)]
        else:
            rows = torch.cat([tensor.index_select(0, batch.last) for tensor in tensors], dim=1)
            self._table().write_rows(batch.unique, rows)

    # ---- rows of a batch

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy rows from storage: first for the positive ids, then for the negative ids."""
        variable = self._variable()
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes)
        if not self._names:  # an optimizer without state
            row_ids(self.total_classes, ids)
            return
        if self._is_pending and variable._version != self._version:
            self._version = variable._version
            raise FlatbedError(
                f"{type(self).__name__}.beforeForwardPass() would lose the last optimizer.step(): call "
                "afterOptimizerStep() with the ids of that batch first, or call beforeForwardPass() again to "
                "drop its changes"
            )
        slots = self._slots(variable)
        batch = slots.batch_of(ids, variable.device, self.total_classes)
        self._copy_in(variable, batch)
        slots.switchers[self._key] = self
        self._batch, self._is_pending, self._version = batch, True, variable._version

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the rows of the last `beforeForwardPass` back to storage."""
        variable = self._variable()
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes)
        batch, switchers = self._batch, self._slots(variable).switchers
        has_same_ids = self._holds(ids)
        if not has_same_ids:
            row_ids(self.total_classes, ids)
        if not self._names:
            return
        others: list[Switcher] = []
        if variable._version != self._version:  # the optimizer has stepped: all switchers must hold these ids
            others = [one for one in switchers.values() if one._batch is not batch and not one._holds(ids)]
        if batch is None or not self._is_pending:
            problem = "without a beforeForwardPass() since the last one, or since rows were loaded"
        elif not has_same_ids:
            problem = "with other ids than beforeForwardPass()"
        elif switchers.get(self._key) is not self:
            problem = "after another switcher has replaced the rows: call it before that"
        elif others:
            problem = (
                f"after a step with other rows in {type(others[0]).__name__}: call beforeForwardPass() of "
                "all switchers with the same ids, in every batch"
            )
        else:
            self._copy_out(variable, batch)
            self._is_pending = False
            return
        raise FlatbedError(f"{type(self).__name__}.afterOptimizerStep() {problem}; nothing was written")

    def _holds(self, ids: Array) -> bool:
        return self._batch is not None and self._batch.holds(ids)

    # ---- all rows

    def _blocks(self) -> Iterator[slice]:
        """Yield ranges of rows to copy at once; nothing for an optimizer without state."""
        n_bytes = len(self._names) * self.embed_dimension * self.datatype.itemsize
        step = max(1, BLOCK_BYTES // max(1, n_bytes))
        for start in range(0, self.total_classes if n_bytes else 0, step):
            yield slice(start, min(start + step, self.total_classes))

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self._names), self.total_classes, self.embed_dimension

    def _by_name(self, tensors: Any) -> Any:
        return dict(zip(self._names, tensors, strict=True)) if self._is_stacked else tensors[0]

    def _copied(self, out: Tensor | None = None) -> Tensor:
        """Copy all rows to a tensor (tensors, rows, dimension)."""
        out = torch.empty(self._shape, dtype=self.datatype) if out is None else out
        for block in self._blocks():
            out[:, block] = self._read_block(block)
        return out

    def _read_block(self, block: slice) -> Tensor:
        """Copy consecutive rows: (tensors, rows, dimension)."""
        rows = self._table().read_rows(np.arange(block.start, block.stop))
        return rows.view(-1, len(self._names), self.embed_dimension).transpose(0, 1)

    def _fill(self, rows_of: Callable[[slice], Tensor]) -> None:
        """Replace all rows, block by block: (tensors, rows, dimension)."""
        for block in self._blocks():
            rows = rows_of(block).transpose(0, 1).flatten(1)
            self._table().write_rows(np.arange(block.start, block.stop), rows)
        self._forget_batch()

    def getNumpyVersion(self) -> Any:
        """Copy all rows to a numpy array; for an optimizer, to a dict of arrays by name."""
        return self._by_name(to_numpy(self._copied()))

    def getTorchVar(self) -> Any:
        """Return all rows as a tensor over their memory, or a copy of a file; for an optimizer, as a dict."""
        if self._storage == "disk" or not self._names:
            return self._by_name(self._copied())
        return self._by_name(self._table().weight.detach().chunk(len(self._names), dim=1))

    # ---- files

    def saveCupy(self, saveFileName: FileName | None = None) -> None:
        """Write all rows to a .npy file, by default `diskname`; for an optimizer, (tensors, rows, dim)."""
        if self._names:
            self._table()  # raises before a file is made
        shape = self._shape if self._is_stacked else self._shape[1:]
        dtype = to_numpy(torch.empty(0, dtype=self.datatype)).dtype
        with replacing(npy_path(saveFileName or self.diskname)) as part:
            array = np.lib.format.open_memmap(part, "w+", dtype, shape)
            self._copied(torch.from_numpy(array).view(self._shape))
            array.flush()

    def loadCupy(self, loadFileName: FileName | None = None) -> None:
        """Read what `saveCupy` has written. No init is needed before."""
        array = open_npy(loadFileName or self.diskname, "c")
        self._load(torch.from_numpy(array if self._is_stacked else array[None]))

    def saveTorch(self, saveFileName: FileName) -> None:
        """Write all rows with torch.save, as a tensor; for an optimizer, as a dict of tensors."""
        with replacing(Path(saveFileName)) as part:
            torch.save(self._by_name([tensor.clone() for tensor in self._copied()]), part)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Read what `saveTorch` has written. Only plain tensors are loaded."""
        found = torch.load(loadFileName, map_location="cpu", weights_only=True)
        parts = [found[name] for name in self._names] if self._is_stacked else [found]
        self._load(torch.stack(parts) if parts else torch.empty(self._shape))

    def _load(self, values: Tensor) -> None:
        """Replace all rows; change nothing if the values do not fit."""
        if tuple(values.shape) != self._shape:
            raise ValueError(f"found rows of shape {tuple(values.shape)}; expected {self._shape}")
        if self._module is None and self._names:
            self._create()
        self._fill(lambda block: values[:, block])


class DiskSwitcher(Switcher):
    """Switcher with its rows in a file, `DISKNAME0.bed` or the next number that is free."""

    _storage = "disk"

    def checkpoint(self) -> None:
        """Save all rows to the file, all or nothing."""
        if self._names:
            self._table().checkpoint()

    def openFile(self, fileName: FileName) -> None:
        """Continue with the rows in the file of another switcher, as its last checkpoint left them."""
        if not Path(fileName).is_file():
            raise FileNotFoundError(f"found no file at {fileName}: check the path")
        self._create(init=None, path=Path(fileName), resume=True)
