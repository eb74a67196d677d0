"""The slots of a variable: which rows they hold, and one gradient for all slots of the same row."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from flatbed.compat.speedtorch.collection import Collection
from flatbed.errors import FlatbedError
from flatbed.kernels import rows as ops
from flatbed.kernels.rows import UniqueRows
from flatbed.tables.ids import as_ids, check_range, to_device

_KNOWN: Any = WeakTensorKeyDictionary()
_current_node = getattr(torch._C, "_current_autograd_node", lambda: None)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows in the first slots of a variable, one id for each."""

    ids: Tensor
    """(n,) of int64, a copy."""
    found: UniqueRows
    """The distinct ones among them, on the variable's device."""
    first: Tensor
    """For every distinct row, the first slot that holds it."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def without_repeats(self) -> bool:
        """With kernels it is never known: nothing waits for them, and `rows` is as long as it can be."""
        return self.found.order is None and len(self.found.rows) == len(self)

    def same(self, ids: Tensor) -> bool:
        """Whether these are its ids, too."""
        return ids.shape == self.ids.shape and torch.equal(ids.to(self.ids.device), self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a switcher has put into the variable, or into its optimizer's state."""

    by: weakref.ref[Any]
    batch: Batch


def flatten(positive: Any, negative: Any, n_rows: int) -> Tensor:
    """Ids in the order of their slots: all positive ones, then all negative ones. A copy, in range."""
    parts = [as_ids(positive)] + ([] if negative is None else [as_ids(negative)])
    for part in parts:
        check_range(part, n_rows)
    return torch.cat([part.reshape(-1).to(parts[0].device) for part in parts])


class Slots:
    """What is known of a variable, by all of its switchers."""

    def __init__(self, variable: Tensor) -> None:
        self._variable = weakref.ref(variable)
        self.batch: Batch | None = None
        self.weights: weakref.ref[Collection] | None = None
        """The collection of all of the variable's rows, if it has one."""
        self.model: Held | None = None
        """The rows in the variable."""
        self.states: weakref.WeakKeyDictionary[torch.optim.Optimizer, Held] = weakref.WeakKeyDictionary()
        """The rows in the state of each optimizer."""
        self._turn = 0
        self._graded = 0  # the turn of the gradient that the variable has
        self._hook: Any = None

    @staticmethod
    def of(variable: Tensor) -> Slots:
        """The same for every switcher of a variable."""
        found: Slots | None = _KNOWN.get(variable)
        if found is None:
            found = _KNOWN[variable] = Slots(variable)
        return found

    @property
    def variable(self) -> Tensor:
        variable = self._variable()
        assert variable is not None
        return variable

    def prepare(self, ids: Tensor, n_rows: int) -> Batch:
        """A batch of these ids; the one that is held, if they are the same. Changes nothing."""
        held, device = self.batch, self.variable.device
        if held is not None and held.found.rows.device == device and held.same(ids):
            return held
        rows = to_device(ids, device)
        found = ops.unique(ops.to_int32_keys(rows, n_rows), n_rows)
        n = len(rows)
        slots = torch.arange(n, device=device)
        first = torch.full((len(found.rows),), max(n - 1, 0), dtype=torch.int64, device=device)
        return Batch(ids, found, first.scatter_reduce_(0, found.inverse, slots, "amin"))

    def hold(self, batch: Batch) -> None:
        """From now on the slots hold this batch, and gradients are those of its rows."""
        if batch is not self.batch:
            self.batch = batch
            self._turn += 1
            part_from_graphs(self.variable, self.variable.data)
        if self._hook is None and self.variable.requires_grad:
            self._hook = self.variable.register_hook(self._summed)  # type: ignore[no-untyped-call,unused-ignore]

    @unserializable_hook  # type: ignore[no-untyped-call,untyped-decorator,unused-ignore]
    def _summed(self, grad: Tensor) -> Tensor | None:
        """The gradient of one backward pass, with the sum over a row's slots in each of them."""
        batch = self.batch
        if batch is None:
            return None
        self._refuse_old_graphs()
        self._refuse_others()
        if grad.is_sparse:
            return _summed_sparse(grad, batch)
        n, n_slots = len(batch), len(grad)
        if n < n_slots and bool(grad[n:].any()):
            raise _stale(n, n_slots)
        if batch.without_repeats:
            return None
        _, sums = ops.segment_sum(grad[:n], batch.found, None)
        shared = sums.index_select(0, batch.found.inverse).to(grad.dtype)
        return shared if n == n_slots else torch.cat([shared, grad.new_zeros(n_slots - n, grad.shape[1])])

    def _refuse_old_graphs(self) -> None:
        """A forward pass of rows that were switched out since has another node for the variable."""
        node = _current_node()
        if node is None or not node.name().endswith("AccumulateGrad"):
            return
        if node is not torch.autograd.graph.get_gradient_edge(self.variable).node:
            raise FlatbedError(
                "backward() of a forward pass over rows that were switched in before: the variable holds "
                "other rows since; call backward() before the next beforeForwardPass()"
            )

    def _refuse_others(self) -> None:
        """A gradient of other rows must not be added to."""
        left = self.variable.grad
        if left is not None and self._graded != self._turn:
            values = left._values() if left.is_sparse else left
            if bool(values.any()):
                raise FlatbedError(
                    "the variable still has the gradient of the rows that were switched in before: call "
                    "zero_grad() before backward(), and accumulate gradients over the same ids only"
                )
        self._graded = self._turn


def part_from_graphs(variable: Tensor, data: Tensor) -> None:
    """Give a variable its data anew: old graphs, which someone may hold, are no longer about it."""
    other = torch.float32 if variable.dtype == torch.float64 else torch.float64
    with torch.inference_mode(False):
        variable.data = torch.empty(
            0, dtype=other, device=variable.device
        )  # torch forgets, for another dtype
        variable.data = data


def _summed_sparse(grad: Tensor, batch: Batch) -> Tensor | None:
    """The same for a sparse gradient: slots that were not looked up take part, if their row was."""
    at, values, n = grad._indices()[0], grad._values(), len(batch)
    if n < len(grad) and bool((at >= n).any()):
        raise _stale(n, len(grad))
    if batch.without_repeats or not len(at):
        return None
    inverse, n_rows = batch.found.inverse, len(batch.found.rows)
    found = ops.unique(inverse.index_select(0, at), n_rows)
    ranks, sums = ops.segment_sum(values, found, None)
    ranks = torch.where(ranks < 0, n_rows, ranks)  # on a GPU, there are more places than rows
    where = torch.full((n_rows + 1,), -1, dtype=torch.int64, device=at.device)
    where[ranks] = torch.arange(len(ranks), device=at.device)
    place = where.index_select(0, inverse)  # of every slot's row among the sums; -1: none
    slots = (place >= 0).nonzero().flatten()
    shared = sums.index_select(0, place.index_select(0, slots)).to(grad.dtype)
    return torch.sparse_coo_tensor(
        slots.unsqueeze(0), shared, grad.shape, is_coalesced=True, check_invariants=False
    )


def _stale(n: int, n_slots: int) -> IndexError:
    return IndexError(
        f"the model looked up slots from {n} on, but beforeForwardPass was given {n} ids for the {n_slots} "
        f"slots: use dummy inputs below {n} for this batch"
    )
