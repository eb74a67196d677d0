"""Base of all switchers: a table of all rows, and the slots of a variable, which hold the rows of a batch.

Several slots may hold one row. They get one gradient, the sum over all of them.
"""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from flatbed import Embedding, FlatbedError, Table
from flatbed.compat.speedtorch.arrays import (
    Array,
    ArrayViews,
    FileName,
    as_dtype,
    free_path,
    npy_path,
    open_npy,
    row_ids,
    to_numpy,
)

_SLOTS: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class SlotBatch:
    """Rows in the first slots of a variable, one id for each slot."""

    ids: Array
    unique: Array
    first: Tensor
    """First slot of every unique row, on the variable's device."""
    inverse: Tensor
    """For every slot, the position of its row in `unique`."""


class Slots:
    """Rows in a variable's slots, shared by all switchers of the variable."""

    def __init__(self, variable: Tensor) -> None:
        self._variable = weakref.ref(variable)
        self._batch: SlotBatch | None = None
        self._batch_of_grad: SlotBatch | None = None
        self._hook: Any = None
        self.switchers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Switchers that last copied rows to the variable, and to each optimizer's state."""

    @staticmethod
    def of(variable: Tensor) -> Slots:
        """Return the one object for a variable."""
        slots: Slots | None = _SLOTS.get(variable)
        if slots is None:
            slots = _SLOTS[variable] = Slots(variable)
        return slots

    def batch_of(self, ids: Array, device: torch.device) -> SlotBatch:
        """Return a batch of these ids; the loaded one if its ids are the same."""
        loaded = self._batch
        if loaded is not None and loaded.first.device == device and np.array_equal(ids, loaded.ids):
            return loaded
        unique, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        positions = [torch.from_numpy(array).to(device) for array in (first, inverse.reshape(-1))]
        return SlotBatch(ids, unique, *positions)

    def load(self, batch: SlotBatch) -> None:
        """Record that the slots hold a batch: from now on gradients belong to its rows."""
        self._batch = batch
        variable = self._variable()
        if self._hook is None and variable is not None and variable.requires_grad:
            self._hook = variable.register_hook(self._sum_over_rows)  # type: ignore[no-untyped-call,unused-ignore]

    @unserializable_hook  # type: ignore[no-untyped-call,untyped-decorator,unused-ignore]
    def _sum_over_rows(self, grad: Tensor) -> Tensor | None:
        """Give every slot the gradient's sum over all slots of its row."""
        batch = self._batch
        assert batch is not None
        self._refuse_old_grad()
        n = len(batch.ids)
        if grad.is_sparse:
            slots, values = grad._indices()[0], grad._values()
            has_unloaded = n < len(grad) and bool((slots >= n).any())
        else:
            slots, values = torch.arange(n, device=grad.device), grad[:n]
            has_unloaded = n < len(grad) and bool(grad[n:].any())
        if has_unloaded:
            raise IndexError(
                f"the model looked up slots from {n} on, but beforeForwardPass was given {n} ids for the "
                f"{len(grad)} slots: use dummy inputs below {n} for this batch"
            )
        if n == len(batch.unique):
            return None
        return _shared(grad, batch, batch.inverse[slots], values)

    def _refuse_old_grad(self) -> None:
        """Raise if the gradient would be added to that of other rows."""
        variable = self._variable()
        grad = None if variable is None else variable.grad
        if grad is not None and self._batch_of_grad is not self._batch and bool(grad.norm()):
            raise FlatbedError(
                "the variable still has the gradient of an earlier batch's rows: call zero_grad() before "
                "backward(), and accumulate gradients over the same ids only"
            )
        self._batch_of_grad = self._batch


def _shared(grad: Tensor, batch: SlotBatch, rows: Tensor, values: Tensor) -> Tensor:
    """Sum gradients in the order of the slots, as nn.Embedding does, and copy the sums to all slots.

    A sparse gradient stays sparse: it gains the other slots of the rows that were looked up.
    """
    n_unique = len(batch.unique)
    sums = torch.ops.aten.embedding_dense_backward(values, rows, n_unique, -1, False)
    if not grad.is_sparse:
        whole = torch.zeros_like(grad)
        whole[: len(batch.ids)] = sums[batch.inverse]
        return whole
    was_looked_up = torch.zeros(n_unique, dtype=torch.bool, device=grad.device)
    was_looked_up[rows] = True
    slots = was_looked_up[batch.inverse].nonzero().flatten()
    return torch.sparse_coo_tensor(
        slots.unsqueeze(0),
        sums[batch.inverse[slots]],
        grad.shape,
        is_coalesced=True,
        check_invariants=False,
    )


BLOCK_BYTES = 1 << 26  # copied at once


class Switcher(ArrayViews):
    """Copies rows of a batch out of storage before the forward pass, and back after the step.

    A `flatbed.Embedding` stores all rows. Its rows hold all tensors of a switcher side by side.
    """

    _init_method: ClassVar[str]
    _is_stacked: ClassVar[bool] = False
    """True for several tensors, by name."""
    _storage: str = "device"
    _names: Sequence[str] = ("weight",)
    """Names of the tensors of a row."""
    diskname: Any = None
    fileName: str | None = None
    """Path of the file; None for rows in memory."""

    def __init__(self, total_classes: int, embed_dimension: int, datatype: Any) -> None:
        self.total_classes, self.embed_dimension = total_classes, embed_dimension
        self.datatype = as_dtype(datatype)
        self._module: Embedding | None = None
        self._batch: SlotBatch | None = None
        self._is_pending = False
        """True between `beforeForwardPass` and `afterOptimizerStep`."""
        self._version = 0
        """Version of the variable in `beforeForwardPass`. Steps of the optimizer change the version."""
        variable = self._variable()
        if variable.shape[1:] != (embed_dimension,) or variable.dtype != self.datatype:
            raise ValueError(
                f"the variable is {variable.dtype} of shape {tuple(variable.shape)}; expected "
                f"{self.datatype} of (rows of a batch, {embed_dimension}): check embed_dimension and datatype"
            )

    @abstractmethod
    def _variable(self) -> nn.Parameter:
        """Return the variable as it is now."""

    @property
    @abstractmethod
    def _key(self) -> int:
        """Key in `Slots.switchers` of the place that this switcher copies rows to."""

    @abstractmethod
    def _copy_in(self, variable: nn.Parameter, batch: SlotBatch) -> None:
        """Copy rows from storage to the model or the optimizer."""

    @abstractmethod
    def _copy_out(self, variable: nn.Parameter, batch: SlotBatch) -> None:
        """Copy rows back to storage."""

    # ---- storage

    def _create(self, init: Any = "zeros", path: Path | None = None) -> None:
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
            replicate=False,
            cache_rows=0,
        )
        if path is not None:
            module.table.checkpoint()  # creates the file
        self.close()
        self._module, self.fileName = module, None if path is None else str(path)

    def _table(self) -> Table:
        """Return the table, on the variable's device."""
        if self._module is None:
            raise FlatbedError(f"{type(self).__name__} has no rows yet: call {self._init_method} first")
        device = self._variable().device
        if self._module.table.device != device:
            self._module.to(device)
        return self._module.table

    def close(self) -> None:
        """Release the memory, or save and close the file."""
        if self._module is not None:
            if self._storage == "disk":
                self._module.table.checkpoint()
            self._module.table.close()
        self._module = None
        self._forget_batch()

    def _forget_batch(self) -> None:
        """Forget the loaded batch, whose rows are no longer those of the storage."""
        self._batch, self._is_pending = None, False

    def _read(self, batch: SlotBatch) -> Tensor:
        """Copy the rows of a batch to its slots: (slots, tensors, dimension). Each row is read once."""
        rows = self._table().read_rows(batch.unique).index_select(0, batch.inverse)
        return rows.view(-1, len(self._names), self.embed_dimension)

    def _write(self, batch: SlotBatch, tensors: Sequence[Tensor]) -> None:
        """Replace the rows of a batch by those in the first of their slots."""
        rows = torch.cat([tensor.detach().index_select(0, batch.first) for tensor in tensors], dim=1)
        self._table().write_rows(batch.unique, rows)

    # ---- rows of a batch

    @torch.no_grad()
    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy rows from storage: those of the positive ids, then those of the negative ids."""
        variable = self._variable()
        ids = self._ids(retrievedPosIndexes, retrievedNegIndexes)
        if not self._names:  # an optimizer without state
            return
        if self._is_pending and variable._version != self._version:
            self._version = variable._version
            raise FlatbedError(
                f"{type(self).__name__}.beforeForwardPass() would lose the last optimizer.step(): call "
                "afterOptimizerStep() with the ids of that batch first, or call beforeForwardPass() again to "
                "drop its changes"
            )
        slots = Slots.of(variable)
        batch = slots.batch_of(ids, variable.device)
        self._copy_in(variable, batch)
        slots.switchers[self._key] = self
        self._batch, self._is_pending, self._version = batch, True, variable._version

    @torch.no_grad()
    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the rows of the last `beforeForwardPass` back to storage."""
        variable = self._variable()
        ids = self._ids(retrievedPosIndexes, retrievedNegIndexes)
        if not self._names:
            return
        switchers = Slots.of(variable).switchers
        if self._batch is None or not self._is_pending:
            problem = "without a beforeForwardPass() since the last one, or since rows were loaded"
        elif not self._holds(ids):
            problem = "with other ids than beforeForwardPass()"
        elif switchers.get(self._key) is not self:
            problem = "after another switcher has replaced the rows: call it before that"
        elif other := self._with_other_rows(switchers.values(), ids, variable):
            problem = (
                f"after a step with other rows in {type(other).__name__}: call beforeForwardPass() of all "
                "switchers with the same ids, in every batch"
            )
        else:
            self._copy_out(variable, self._batch)
            self._is_pending = False
            return
        raise FlatbedError(f"{type(self).__name__}.afterOptimizerStep() {problem}; nothing was written")

    def _ids(self, positive: Any, negative: Any) -> Array:
        """Return ids in the order of their slots: all positive ids, then all negative ones."""
        return row_ids(self.total_classes, *([positive] if negative is None else [positive, negative]))

    def _holds(self, ids: Array) -> bool:
        return self._batch is not None and np.array_equal(ids, self._batch.ids)

    def _with_other_rows(self, switchers: Any, ids: Array, variable: nn.Parameter) -> Switcher | None:
        """Return a switcher of the variable that held other rows than this one in the optimizer's step."""
        if variable._version == self._version:
            return None
        found: Switcher | None = next((one for one in switchers if not one._holds(ids)), None)
        return found

    # ---- all rows

    def _blocks(self) -> Iterator[slice]:
        """Ranges of rows to copy at once."""
        n_bytes = len(self._names) * self.embed_dimension * self.datatype.itemsize
        step = max(1, BLOCK_BYTES // n_bytes)
        for start in range(0, self.total_classes, step):
            yield slice(start, min(start + step, self.total_classes))

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self._names), self.total_classes, self.embed_dimension

    def _by_name(self, tensors: Any) -> Any:
        return dict(zip(self._names, tensors, strict=True)) if self._is_stacked else tensors[0]

    def _copy_to(self, out: Tensor) -> Tensor:
        """Copy all rows to a tensor (tensors, rows, dimension)."""
        for block in self._blocks():
            out[:, block] = self._read_block(block)
        return out

    def _copied(self) -> Tensor:
        return self._copy_to(torch.empty(self._shape, dtype=self.datatype))

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
        """Copy all rows to a numpy array; of an optimizer, to a dict of arrays by name."""
        return self._by_name(to_numpy(self._copied()))

    def getTorchVar(self) -> Any:
        """Return all rows as a tensor over their memory, or a copy of a file; of an optimizer, as a dict."""
        if self._storage == "disk":
            return self._by_name(self._copied())
        weight, dim = self._table().weight.detach(), self.embed_dimension
        return self._by_name([weight[:, at * dim : (at + 1) * dim] for at in range(len(self._names))])

    # ---- files

    def saveCupy(self, saveFileName: FileName | None = None) -> None:
        """Write all rows to a .npy file, by default `diskname`; of an optimizer, (tensors, rows, numbers)."""
        self._table()
        path = npy_path(saveFileName or self.diskname)
        part = path.with_name(f"{path.name}.part")
        shape = self._shape if self._is_stacked else self._shape[1:]
        dtype = to_numpy(torch.empty(0, dtype=self.datatype)).dtype
        array = np.lib.format.open_memmap(part, "w+", dtype, shape)
        self._copy_to(torch.from_numpy(array).view(self._shape))
        array.flush()
        os.replace(part, path)

    def loadCupy(self, loadFileName: FileName | None = None) -> None:
        """Read what `saveCupy` has written. No init is needed before."""
        array = open_npy(loadFileName or self.diskname, "c")
        self._load(torch.from_numpy(array if self._is_stacked else array[None]))

    def saveTorch(self, saveFileName: FileName) -> None:
        """Write all rows with torch.save: a tensor; an optimizer's as a dict of tensors."""
        part = Path(f"{os.fspath(saveFileName)}.part")
        torch.save(self._by_name([tensor.clone() for tensor in self._copied()]), part)
        os.replace(part, saveFileName)

    def loadTorch(self, loadFileName: FileName) -> None:
        """Read what `saveTorch` has written. Only plain tensors are loaded."""
        found = torch.load(loadFileName, map_location="cpu", weights_only=True)
        self._load(torch.stack([found[name] for name in self._names]) if self._is_stacked else found[None])

    def _load(self, values: Tensor) -> None:
        """Replace all rows; change nothing if the values do not fit."""
        if tuple(values.shape) != self._shape:
            raise ValueError(f"found rows of shape {tuple(values.shape)}; expected {self._shape}")
        if self._module is None:
            self._create()
        self._fill(lambda block: values[:, block])


class DiskSwitcher(Switcher):
    """Switcher with its rows in a file, `DISKNAME0.bed` or the next number that is free."""

    _storage = "disk"

    def checkpoint(self) -> None:
        """Save all rows to the file, all or nothing."""
        self._table().checkpoint()

    def openFile(self, fileName: FileName) -> None:
        """Continue with the rows in the file of another switcher, as its last checkpoint left them."""
        if not Path(fileName).is_file():
            raise FileNotFoundError(f"found no file at {fileName}: check the path")
        self._create(path=Path(fileName))
