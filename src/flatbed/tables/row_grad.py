"""The gradient of a table as `table.grad` shows it: norms and in-place scaling act on the row gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flatbed.errors import FlatbedError

if TYPE_CHECKING:
    from flatbed.tables.table import Table


class RowGrad(Tensor):
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
    def of(table: Table) -> RowGrad:
        """Return the gradient of a table that has one."""
        dtype = torch.promote_types(table._storage.config.dtype, torch.float32)
        empty = torch.empty(0, dtype=dtype, device=table._storage.device)
        grad: RowGrad = torch.Tensor._make_subclass(RowGrad, empty)
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
        if getattr(func, "__self__", None) in _ATTRIBUTES or func in _WITHOUT_EFFECT:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            return args[0] if func in _WITHOUT_EFFECT else result
        found: dict[int, RowGrad] = {}

        def values(grad: RowGrad) -> Tensor:
            grad.check()
            packed = grad._table._row_grads(compact=name not in _ELEMENTWISE)
            found[id(packed.grads)] = grad
            return packed.grads

        plain_args, plain_kwargs = tree_map_only(RowGrad, values, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if name in ("zero_", "_foreach_zero_"):
            for grad in found.values():
                grad._table.grad = None
        return found.get(id(result), result)  # in place: the gradient itself, as of any tensor

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call,unused-ignore]


_ATTRIBUTES = {
    *(Tensor.device, Tensor.dtype, Tensor.layout, Tensor.is_sparse, Tensor.is_cuda, Tensor.is_cpu),
    *(Tensor.is_leaf, Tensor.is_meta, Tensor.grad_fn, Tensor.requires_grad),
}
"""Read from the tensor that stands for the gradient, without computing it."""

_WITHOUT_EFFECT = (Tensor.detach_, Tensor.requires_grad_)

_ELEMENTWISE = {
    *("mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "zero_"),
    *("linalg_vector_norm", "norm", "_foreach_norm", "_foreach_mul_", "_foreach_div_", "_foreach_zero_"),
    *("_foreach_clamp_min_", "_foreach_clamp_max_", "_amp_foreach_non_finite_check_and_unscale_"),
}
"""Operations that may see extra rows of zeros: removing those would wait for the GPU."""
