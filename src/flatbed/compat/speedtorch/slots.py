"""Slots of a variable, which hold the rows of a batch.

Several slots may hold one row. They get one gradient, the sum over all of them.
"""

from __future__ import annotations

import weakref
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from flatbed import FlatbedError
from flatbed.compat.speedtorch.arrays import Array, row_ids

_SLOTS: Any = WeakTensorKeyDictionary()


class SlotBatch:
    """Rows in the first slots of a variable, one id for each slot.

    - `scratch`: memory for a number per row of the table. Its contents do not matter.
    """

    def __init__(self, ids: Array, device: torch.device, scratch: Array) -> None:
        self.ids, self.device = ids, device
        self._bytes = ids.tobytes()
        self.end = int(ids.max()) + 1 if len(ids) else 0
        slots = np.arange(len(ids))
        scratch[ids] = slots
        self._last_of_row = scratch[ids]  # for every slot; sorting would take longer
        self.has_repeats = not (self._last_of_row == slots).all()

    @cached_property
    def _last_and_inverse(self) -> tuple[Array, Array]:
        """The last slot of every row, and for every slot the position of its row among these."""
        last = np.flatnonzero(self._last_of_row == np.arange(len(self.ids)))
        position = np.empty_like(self._last_of_row)
        position[last] = np.arange(len(last))
        return last, position[self._last_of_row]

    def holds(self, ids: Array) -> bool:
        """Return whether the slots hold these ids, which may have any dtype."""
        # Comparing bytes takes a quarter of the time of (ids == self.ids).all().
        return ids.dtype.kind in "iu" and ids.astype(np.int64).tobytes() == self._bytes

    @property
    def unique(self) -> Array:
        """The rows, each once."""
        return self.ids[self._last_and_inverse[0]]

    @cached_property
    def index(self) -> Tensor:
        """The ids, on the CPU."""
        return torch.from_numpy(self.ids)

    @cached_property
    def last(self) -> Tensor:
        """The last slot of every row in `unique`."""
        return torch.from_numpy(self._last_and_inverse[0]).to(self.device)

    @cached_property
    def inverse(self) -> Tensor:
        """For every slot, the position of its row in `unique`."""
        return torch.from_numpy(self._last_and_inverse[1]).to(self.device)

    @cached_property
    def repeated(self) -> tuple[Tensor, Tensor, int]:
        """The slots of repeated rows; for each of these slots, its row's number; the number of such rows.

        Repeated rows, which have several slots, are numbered from 0.
        """
        inverse = self._last_and_inverse[1]
        is_repeated = np.bincount(inverse) > 1
        slots = np.flatnonzero(is_repeated[inverse])
        numbers = np.cumsum(is_repeated) - 1
        rows = torch.from_numpy(numbers[inverse[slots]])
        return torch.from_numpy(slots).to(self.device), rows.to(self.device), int(numbers[-1]) + 1


class Slots:
    """Rows in a variable's slots, shared by all switchers of the variable."""

    def __init__(self, variable: Tensor) -> None:
        self.variable = weakref.ref(variable)
        self._batch: SlotBatch | None = None
        self._batch_of_grad: SlotBatch | None = None
        self._scratch: Array = np.empty(0, np.int64)
        self._hook: Any = None
        self.switchers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """The last switcher to copy rows to the variable, and to each optimizer's state, by its key."""

    @staticmethod
    def of(variable: Tensor) -> Slots:
        """Return the one object for a variable."""
        slots: Slots | None = _SLOTS.get(variable)
        if slots is None:
            slots = _SLOTS[variable] = Slots(variable)
        return slots

    def batch_of(self, ids: Array, device: torch.device, n_rows: int) -> SlotBatch:
        """Check ids, (n,), and return a batch of them: the loaded one if its ids are the same."""
        loaded = self._batch
        is_loaded = loaded is not None and loaded.device == device and loaded.holds(ids)
        if loaded is not None and is_loaded and loaded.end <= n_rows:
            return loaded
        ids = row_ids(n_rows, ids)
        if len(self._scratch) < n_rows:
            self._scratch = np.empty(n_rows, np.int64)
        return SlotBatch(ids, device, self._scratch)

    def load(self, batch: SlotBatch) -> None:
        """Record that the slots hold a batch: from now on gradients belong to its rows."""
        variable = self.variable()
        if variable is not None and variable.requires_grad:
            if self._hook is None:
                self._hook = variable.register_hook(self._sum_over_rows)  # type: ignore[no-untyped-call,unused-ignore]
            if batch is not self._batch:
                _replace_leaf_node(variable)
        self._batch = batch

    @unserializable_hook  # type: ignore[no-untyped-call,untyped-decorator,unused-ignore]
    def _sum_over_rows(self, grad: Tensor) -> Tensor | None:
        """Give every slot the gradient's sum over all slots of its row."""
        batch = self._batch
        assert batch is not None
        self._refuse_old_grad()
        n = len(batch.ids)
        if n < grad.shape[0]:
            unloaded = grad._indices()[0] >= n if grad.is_sparse else grad[n:]
            if bool(unloaded.any()):
                raise IndexError(
                    f"the model looked up slots from {n} on, but beforeForwardPass was given {n} ids for the "
                    f"{len(grad)} slots: use dummy inputs below {n} for this batch"
                )
        if not batch.has_repeats:
            return None
        return _shared_sparse(grad, batch) if grad.is_sparse else _shared(grad, batch)

    def _refuse_old_grad(self) -> None:
        """Raise if the gradient belongs to rows of an earlier batch, or would be added to such a gradient."""
        variable, node = self.variable(), torch._C._current_autograd_node()
        assert variable is not None
        # Hooks of autograd.grad may run at another node.
        if type(node).__name__ == "AccumulateGrad" and node is not get_gradient_edge(variable).node:
            raise FlatbedError(
                "found backward() of a forward pass over rows of an earlier batch, while the variable holds "
                "other rows: call backward() before the next beforeForwardPass()"
            )
        if variable.grad is not None and self._batch_of_grad is not self._batch and variable.grad.norm():
            raise FlatbedError(
                "the variable still has the gradient of an earlier batch's rows: call zero_grad() before "
                "backward(), and accumulate gradients over the same ids only"
            )
        self._batch_of_grad = self._batch


def _replace_leaf_node(variable: Tensor) -> None:
    """Give the variable a new leaf node. Graphs of earlier forward passes keep the old one.

    torch makes a new node for a tensor whose dtype has changed, as `module.double()` changes it.
    """
    data = variable.data
    variable.data = _empty(torch.float32 if data.dtype == torch.float64 else torch.float64, data.device)
    variable.data = data


@lru_cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _shared(grad: Tensor, batch: SlotBatch) -> Tensor:
    """Sum gradients of repeated rows in the order of the slots, as nn.Embedding does."""
    slots, rows, n_rows = batch.repeated
    sums = torch.ops.aten.embedding_dense_backward(grad.index_select(0, slots), rows, n_rows, -1, False)
    return grad.index_copy(0, slots, sums.index_select(0, rows))


def _shared_sparse(grad: Tensor, batch: SlotBatch) -> Tensor:
    """Sum gradients by row. All slots of a row get the sum, also those that were not looked up."""
    rows, n_unique = batch.inverse[grad._indices()[0]], len(batch.unique)
    sums = torch.ops.aten.embedding_dense_backward(grad._values(), rows, n_unique, -1, False)
    was_looked_up = torch.zeros(n_unique, dtype=torch.bool, device=grad.device)
    was_looked_up[rows] = True
    slots = was_looked_up[batch.inverse].nonzero().flatten()
    values = sums[batch.inverse[slots]]
    return torch.sparse_coo_tensor(
        slots.unsqueeze(0), values, grad.shape, is_coalesced=True, check_invariants=False
    )
