"""Gradients of a table's rows: recorded in backward passes, summed when asked for, shown as `table.grad`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flatbed.cuda.streams import OrderedLock, is_capturing
from flatbed.distributed.dense_shards import is_dtensor
from flatbed.errors import FlatbedError
from flatbed.kernels import NONE, SENTINEL
from flatbed.kernels.rows import segment_sum, unique
from flatbed.tables.cache.base import LookupBatch

if TYPE_CHECKING:
    from flatbed.tables.row_store import RowStore
    from flatbed.tables.table import Table

MAX_PARTS = 16  # recorded parts; more are summed at once


@dataclass(slots=True)
class RowGrads:
    """Unique rows and their gradients; the gradient of the row -1 is zero."""

    rows: Tensor
    grads: Tensor
    task: int = -1  # the backward pass that recorded it
    is_mean: bool = False  # True if it is the mean over all ranks already
    # The lookup that the rows are of; for a sum over several lookups one that stands for all, or None.
    batch: LookupBatch | None = None
    captured: bool | None = False  # True if it is part of a CUDA graph, None if some of its parts are

    @staticmethod
    def empty(store: RowStore) -> RowGrads:
        """Return gradients of no row."""
        dtype = torch.promote_types(store.config.dtype, torch.float32)
        rows = torch.empty(0, dtype=torch.int64, device=store.device)
        return RowGrads(rows, torch.empty((0, store.config.dim), dtype=dtype, device=store.device))


@dataclass(slots=True)
class GradAccumulator:
    """Gradients that backward passes have recorded. Backward passes may run in several threads."""

    n_rows: int
    parts: list[RowGrads] = field(default_factory=list)
    n_cleared: int = 0
    """How often gradients were dropped: `table.grad` of an earlier count is stale."""
    lock: OrderedLock = field(default_factory=lambda: OrderedLock("gradients"), repr=False)

    def record(self, rows: Tensor, grads: Tensor, batch: LookupBatch | None = None) -> None:
        """Add the gradients of a lookup."""
        task = torch._C._current_graph_task_id()
        part = RowGrads(rows, grads, task, batch=batch, captured=is_capturing(rows.device))
        with self.lock:
            self.parts.append(part)
            if len(self.parts) > MAX_PARTS:  # the current pass is summed apart until it ends
                current = [part for part in self.parts if part.task == task and not part.is_mean]
                earlier = [part for part in self.parts if part.task != task or part.is_mean]
                self.parts = [*self._sums(earlier), merge_grads(current, self.n_rows)]

    def _sums(self, parts: list[RowGrads]) -> list[RowGrads]:
        """Sum to at most two parts: the one that ranks have exchanged, and the one that they have not."""
        sums = []
        for is_mean in (True, False):
            passes: dict[int, list[RowGrads]] = {}
            for part in parts:
                if part.is_mean == is_mean:
                    passes.setdefault(part.task, []).append(part)
            # As in torch: first within a backward pass, then over passes.
            merged = [merge_grads(found, self.n_rows) for found in passes.values()]
            if merged:
                sums.append(merge_grads(merged, self.n_rows))
        return sums

    def total(self, *, compact: bool = False) -> RowGrads | None:
        """Return the sum of all parts, with each row once; rows may hold -1.

        With `compact`, the row -1 is left out, which waits for the GPU.
        """
        with self.lock:
            if len(self.parts) > 1:
                self.parts = [merge_grads(self._sums(self.parts), self.n_rows)]
            if self.parts and compact:
                self.parts = [compacted(self.parts[0])]
            return self.parts[0] if self.parts else None

    def total_of_rank(self, *, compact: bool = False) -> RowGrads | None:
        """Return the sum of the parts that ranks have not exchanged."""
        own = [part for part in self.parts if not part.is_mean]
        return GradAccumulator(self.n_rows, own).total(compact=compact)

    def set_mean(self, mean: RowGrads) -> None:
        """Replace the parts that ranks have not exchanged by their mean."""
        mean.is_mean = True
        self.parts = [*(part for part in self.parts if part.is_mean), mean]


def compacted(grads: RowGrads) -> RowGrads:
    """Return gradients without the row -1."""
    present = grads.rows >= 0
    if bool(present.all()):
        return grads
    # Without the batch, whose weights are those of all rows.
    return replace(grads, rows=grads.rows[present], grads=grads.grads[present], batch=None)


def merge_grads(parts: list[RowGrads], n_rows: int) -> RowGrads:
    """Sum parts in their order."""
    if len(parts) == 1:
        return parts[0]
    rows = torch.cat([part.rows for part in parts])
    grads = torch.cat([part.grads for part in parts])  # in the widest dtype
    found = unique(torch.where(rows == NONE, SENTINEL, rows), n_rows)
    summed = RowGrads(*segment_sum(grads, found, None), parts[0].task, all(part.is_mean for part in parts))
    is_uniform = len({part.captured for part in parts}) == 1
    summed.captured, summed.batch = parts[0].captured if is_uniform else None, _covering_batch(parts)
    return summed


def _covering_batch(parts: list[RowGrads]) -> LookupBatch | None:
    """Return a batch whose protection in the cache holds for the rows of all parts; None if there is none."""
    batches = [part.batch for part in parts if part.batch is not None]
    cache = batches[0].cache if batches else None
    if cache is None or len(batches) < len(parts) or any(batch.cache is not cache for batch in batches):
        return None
    batch = cache.covering(batches)
    return None if batch is None else replace(batch, weights=None)


class TableGrad(Tensor):
    """The gradient of the rows that were looked up since the last `zero_grad`.

    It stands for a tensor of shape (n, embedding_dim), whose rows are `table.grad_rows`, and is computed
    when an operation reads or writes it: testing it against None costs nothing, and with several ranks no
    communication. `torch.nn.utils.clip_grad_norm_`, `GradScaler.unscale_` and `grad.mul_(0.5)` change the
    gradient that the next step uses; `grad.zero_()` drops it, so that no row is updated. Other operations
    give ordinary tensors.
    """

    _table: Table
    _n_cleared: int

    @staticmethod
    def of(table: Table) -> TableGrad:
        """Return the gradient of a table that has one."""
        dtype = torch.promote_types(table._store.config.dtype, torch.float32)
        empty = torch.empty(0, dtype=dtype, device=table._store.device)
        grad: TableGrad = torch.Tensor._make_subclass(TableGrad, empty)
        grad._table, grad._n_cleared = table, table._grads.n_cleared
        return grad

    def check(self) -> None:
        """Raise if the gradient that this object stood for was dropped."""
        if self._n_cleared != self._table._grads.n_cleared:
            raise FlatbedError(
                "this gradient of a table was dropped (zero_grad): read table.grad again, or keep values by "
                "table.grad.clone() before"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if getattr(func, "__self__", None) is Tensor.data and name == "__get__":
            return args[0]  # code that changes `grad.data` changes the gradient
        if getattr(func, "__self__", None) in _ATTRIBUTES or func in _WITHOUT_EFFECT:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            return args[0] if func in _WITHOUT_EFFECT else result
        found: dict[int, TableGrad] = {}

        def values(grad: TableGrad) -> Tensor:
            grad.check()
            if name in _NORMS and grad._table._shards is not None:
                raise FlatbedError(
                    "the gradient of a sharded table is that of this rank's rows, and so would be "
                    "its norm: clip by max_norm= of the optimizer, which adds up the squares of all ranks"
                )
            total = grad._table._row_grads(compact=name not in _ELEMENTWISE).grads
            found[id(total)] = grad
            return total

        plain_args, plain_kwargs = tree_map_only(TableGrad, values, (args, kwargs))
        call = partial(_check_overflow, func) if name == _CHECK_OVERFLOW else func
        result = call(*plain_args, **plain_kwargs)
        if name == _CHECK_OVERFLOW:  # a GradScaler must find the same on all ranks
            shards = [grad._table._shards for grad in found.values()]
            for channel in dict.fromkeys(one.channel for one in shards if one is not None):
                channel.share_flag_(plain_args[1])
        if name in ("zero_", "_foreach_zero_"):
            for grad in found.values():
                grad._table.grad = None
        return found.get(id(result), result)  # in place: the gradient itself, as of any tensor

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call,unused-ignore]


def _check_overflow(check: Any, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale DTensors and other gradients in calls of their own: torch refuses lists of both."""
    for some in ([g for g in grads if is_dtensor(g)], [g for g in grads if not is_dtensor(g)]):
        if some:
            check(some, found_inf, inv_scale)


_ATTRIBUTES = {
    *(Tensor.device, Tensor.dtype, Tensor.layout, Tensor.is_sparse, Tensor.is_cuda, Tensor.is_cpu),
    *(Tensor.is_leaf, Tensor.is_meta, Tensor.grad_fn, Tensor.requires_grad),
}
"""Read from the tensor that stands for the gradient, without computing it."""

_WITHOUT_EFFECT = (Tensor.detach_, Tensor.requires_grad_)

_CHECK_OVERFLOW = "_amp_foreach_non_finite_check_and_unscale_"
_NORMS = {"linalg_vector_norm", "norm", "_foreach_norm"}

_ELEMENTWISE = {
    *_NORMS,
    *("mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "zero_"),
    *("_foreach_mul_", "_foreach_div_", "_foreach_zero_"),
    *("_foreach_clamp_min_", "_foreach_clamp_max_", _CHECK_OVERFLOW),
}
"""Operations that may see extra rows of zeros: removing those would wait for the GPU."""
