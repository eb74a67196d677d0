"""The parameter that torch sees in place of a table."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.errors import FlatbedError


class TableParameter(nn.Parameter):
    """An empty tensor with the shape of a table's weight.

    Initialisers and `data` act on the rows. Operations that would compute with the empty tensor raise.
    """

    @property
    @abstractmethod
    def num_embeddings(self) -> int: ...

    @property
    @abstractmethod
    def embedding_dim(self) -> int: ...

    @property
    @abstractmethod
    def weight(self) -> Tensor: ...

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func is Tensor.type and len(args) == 1:  # torch.typename: how torch's errors name it
            return "flatbed.Table"
        if getattr(func, "__self__", None) is Tensor.data:  # a copy_ into it takes effect, or raises
            if name == "__set__":
                raise FlatbedError("a table's data cannot be replaced: use emb.weight.copy_(values)")
            return args[0].weight.detach()
        if func in _ALLOWED or name in ("__get__", "__set__", "__delete__"):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call,unused-ignore]
        table = args[0] if args else kwargs.get("tensor")
        if name in _INITIALIZERS and isinstance(table, TableParameter):
            rest = {key: value for key, value in kwargs.items() if key != "tensor"}
            others = [one.weight if isinstance(one, TableParameter) else one for one in args[1:]]
            with torch.no_grad():
                func(table.weight, *others, **rest)
            return table
        if func in (Tensor.detach, torch.detach):
            return torch.Tensor._make_subclass(
                DetachedTable, torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            )
        raise _no_tensor(func)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override,unused-ignore]
        """(num_embeddings, embedding_dim)."""
        return torch.Size((self.num_embeddings, self.embedding_dim))

    @property
    def ndim(self) -> int:  # type: ignore[override,unused-ignore]
        return 2

    def dim(self) -> int:
        return 2

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its dimensions."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of weights, as parameter counts expect."""
        return self.num_embeddings * self.embedding_dim

    def __len__(self) -> int:
        return self.num_embeddings

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __bool__(self) -> bool:
        return True

    __hash__ = nn.Parameter.__hash__

    def __eq__(self, other: object) -> Any:
        return self is other


class DetachedTable(Tensor):
    """The result of `table.detach()`: empty for state dicts and DDP, an error for other operations."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED or getattr(func, "__name__", "") in ("__get__", "__repr__"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call,unused-ignore]
        raise _no_tensor(func)


def _no_tensor(func: Any) -> FlatbedError:
    if func is Tensor.is_contiguous:  # the first question of FSDP2
        return FlatbedError(
            "is_contiguous was called on a table, whose rows are not one tensor: leave flatbed.tables(model) "
            "out. fully_shard does, given ignored_params=set(flatbed.tables(model))"
        )
    if func is Tensor._is_view:  # the first question of torch.export
        return FlatbedError(
            "a table cannot become a fake tensor, as torch.export needs: export a copy of the model with "
            "emb.to_torch() in place of each flatbed module"
        )
    if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
        return FlatbedError(
            "a hook on a table would be called without its gradient, which is one of rows: register it on "
            "the output of the lookup, or read table.grad after the backward pass"
        )
    name = getattr(func, "__name__", str(func))
    return FlatbedError(
        f"{name} was called on a table, whose rows are not one tensor: use emb.weight, table.read_rows(ids) "
        "or table.write_rows(ids, values) for its rows, and an optimizer of flatbed.optim to train it: "
        "flatbed.optim.Adam(model) for example, or flatbed.optim.from_torch of torch's class"
    )


_INITIALIZERS = {"uniform_", "normal_", "fill_", "zero_", "copy_", "constant_", "zeros_", "ones_"}
_ALLOWED = {
    Tensor.__dir__,
    Tensor.requires_grad_,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.numel,
    Tensor.size,
    Tensor.dim,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.element_size,
    torch.numel,
    Tensor.__hash__,
    torch.is_complex,
    torch.is_floating_point,
    torch.autograd.backward,
}
