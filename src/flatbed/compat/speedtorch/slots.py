"""Slots of a variable: the rows they hold, and one gradient for all slots of a row."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from flatbed import FlatbedError
from flatbed.kernels import rows as ops
from flatbed.kernels.records import UniqueRows
from flatbed.tables.ids import as_ids, check_range, to_device

_SLOTS: Any = WeakTensorKeyDictionary()
_current_node = getattr(torch._C, "_current_autograd_node", lambda: None)
MAX_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class SlotBatch:
    """Rows in the first slots of a variable, one id for each slot."""

    ids: Tensor
    """(n,) of int64, a copy."""
    rows: Tensor
    """`ids` on the variable's device."""
    unique: UniqueRows
    first: Tensor
    """First slot of every unique row."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_repeats(self) -> bool:
        """False only if that is known without waiting for a GPU."""
        return self.unique.order is not None or len(self.unique.rows) != len(self)

    def same(self, ids: Tensor) -> bool:
        """Compare ids."""
        return ids.shape == self.ids.shape and torch.equal(ids.to(self.ids.device), self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedBatch:
    """A batch in a variable or in an optimizer's state, and the switcher that copied it there."""

    switcher: weakref.ref[Any]
    batch: SlotBatch


def flatten(positive: Any, negative: Any, n_rows: int) -> Tensor:
    """Copy ids in the order of their slots: all positive ids, then all negative ones."""
    parts = [as_ids(positive)] + ([] if negative is None else [as_ids(negative)])
    for part in parts:
        check_range(part, n_rows)
    return torch.cat([part.reshape(-1).to(parts[0].device) for part in parts])


class Slots:
    """Rows in a variable's slots, shared by all switchers of the variable."""

    def __init__(self, variable: Tensor) -> None:
        self._variable = weakref.ref(variable)
        self.batch: SlotBatch | None = None
        self.collection: weakref.ref[Any] | None = None
        """Storage of all rows of the variable."""
        self.loaded: weakref.WeakKeyDictionary[Any, LoadedBatch] = weakref.WeakKeyDictionary()
        """Batches in the variable (by the variable's `Slots`) and in optimizers' state (by optimizer)."""
        self._batch_of_grad: SlotBatch | None = None
        self._hook: Any = None

    @staticmethod
    def of(variable: Tensor) -> Slots:
        """Return the one object for a variable."""
        slots: Slots | None = _SLOTS.get(variable)
        if slots is None:
            slots = _SLOTS[variable] = Slots(variable)
        return slots

    @property
    def variable(self) -> Tensor:
        variable = self._variable()
        assert variable is not None
        return variable

    def prepare(self, ids: Tensor, n_rows: int) -> SlotBatch:
        """Return a batch of these ids, without loading it; the loaded one if its ids are the same."""
        loaded, device = self.batch, self.variable.device
        if loaded is not None and loaded.rows.device == device and loaded.same(ids):
            return loaded
        rows = to_device(ids, device)
        is_int32 = device.type == "cuda" and n_rows <= MAX_INT32  # kernels sort int32 in half the time
        unique = ops.unique(rows.int() if is_int32 else rows, n_rows)
        first = torch.full((len(unique.rows),), max(len(rows) - 1, 0), device=device)
        positions = torch.arange(len(rows), device=device)
        return SlotBatch(ids, rows, unique, first.scatter_reduce_(0, unique.inverse, positions, "amin"))

    def load(self, batch: SlotBatch) -> None:
        """Record that the slots hold a batch: from now on gradients belong to its rows."""
        if batch is not self.batch:
            self.batch = batch
            replace_data(self.variable, self.variable.data)
        if self._hook is None and self.variable.requires_grad:
            self._hook = self.variable.register_hook(self._sum_over_rows)  # type: ignore[no-untyped-call,unused-ignore]

    @unserializable_hook  # type: ignore[no-untyped-call,untyped-decorator,unused-ignore]
    def _sum_over_rows(self, grad: Tensor) -> Tensor | None:
        """Give every slot the gradient's sum over all slots of its row."""
        batch = self.batch
        if batch is None:
            return None
        self._refuse_old_graph()
        self._refuse_old_grad()
        if grad.is_sparse:
            return _sum_sparse(grad, batch)
        n, n_slots = len(batch), len(grad)
        if n < n_slots and bool(grad[n:].any()):
            raise _unloaded_slots(n, n_slots)
        if not batch.has_repeats:
            return None
        _, sums = ops.segment_sum(grad[:n], batch.unique, None)
        shared = sums.index_select(0, batch.unique.inverse).to(grad.dtype)
        return shared if n == n_slots else torch.cat([shared, grad.new_zeros(n_slots - n, grad.shape[1])])

    def _refuse_old_graph(self) -> None:
        """Raise if the forward pass looked up rows of an earlier batch: its graph has another leaf node."""
        node = _current_node()
        if node is None or not node.name().endswith("AccumulateGrad"):
            return
        if node is not torch.autograd.graph.get_gradient_edge(self.variable).node:
            raise FlatbedError(
                "found backward() of a forward pass over rows of an earlier batch, while the variable holds "
                "other rows: call backward() before the next beforeForwardPass()"
            )

    def _refuse_old_grad(self) -> None:
        """Raise if the gradient would be added to that of other rows."""
        grad = self.variable.grad
        if grad is not None and self._batch_of_grad is not self.batch:
            values = grad._values() if grad.is_sparse else grad
            if bool(values.any()):
                raise FlatbedError(
                    "the variable still has the gradient of an earlier batch's rows: call zero_grad() before "
                    "backward(), and accumulate gradients over the same ids only"
                )
        self._batch_of_grad = self.batch


def replace_data(variable: Tensor, data: Tensor) -> None:
    """Assign data of any shape, and detach the variable from graphs that the user still holds.

    torch makes a new leaf node for a tensor whose dtype has changed, as `module.double()` changes it. Old
    graphs keep the old node, which has the old shape and tells their gradients from those of the new data.
    """
    other = torch.float32 if variable.dtype == torch.float64 else torch.float64
    with torch.inference_mode(False):
        variable.data = torch.empty(0, dtype=other, device=variable.device)
        variable.data = data


def _sum_sparse(grad: Tensor, batch: SlotBatch) -> Tensor | None:
    """Sum a sparse gradient. Slots that the model did not look up take part if their row was looked up."""
    at, n = grad._indices()[0], len(batch)
    if n < len(grad) and bool((at >= n).any()):
        raise _unloaded_slots(n, len(grad))
    if not batch.has_repeats or not len(at):
        return None
    inverse, n_rows = batch.unique.inverse, len(batch.unique.rows)
    ranks, sums = ops.segment_sum(grad._values(), ops.unique(inverse.index_select(0, at), n_rows), None)
    sum_of_row = torch.full((n_rows + 1,), -1, dtype=torch.int64, device=at.device)
    # On a GPU there are more ranks than rows; the others, of -1, go to the last place.
    sum_of_row[torch.where(ranks < 0, n_rows, ranks)] = torch.arange(len(ranks), device=at.device)
    sum_of_slot = sum_of_row.index_select(0, inverse)
    slots = (sum_of_slot >= 0).nonzero().flatten()
    shared = sums.index_select(0, sum_of_slot.index_select(0, slots)).to(grad.dtype)
    return torch.sparse_coo_tensor(
        slots.unsqueeze(0), shared, grad.shape, is_coalesced=True, check_invariants=False
    )


def _unloaded_slots(n: int, n_slots: int) -> IndexError:
    return IndexError(
        f"the model looked up slots from {n} on, but beforeForwardPass was given {n} ids for the {n_slots} "
        f"slots: use dummy inputs below {n} for this batch"
    )
