"""Slots of a variable: the rows they hold, and one gradient for all slots of a row."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from flatbed import FlatbedError
from flatbed.compat.speedtorch.views import Array

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
