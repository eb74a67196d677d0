"""All weights of a table as one tensor that knows when it has become stale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.tables.record import WEIGHT

if TYPE_CHECKING:
    from flatbed.tables.table import Table


class WeightView(Tensor):
    """A view of the table's memory. After the rows have moved to another place it raises instead."""

    _table: Table
    _version_seen: int
    _whole: bool
    """Whether it is what `emb.weight` gives; parts of it, `.data` and the like are not."""
    _detached: bool
    """Whether it was said that no gradients are wanted."""

    @staticmethod
    def of(table: Table) -> Tensor:
        """The weights as they lie in memory, (num_embeddings, embedding_dim)."""
        if table.storage == "disk":
            raise FlatbedError(
                "a table on disk has no `weight` tensor: use read_rows(ids) and write_rows(ids, values)"
            )
        storage = table.store.ensure_layout()
        table.store.flush(drop=True)
        storage.check()
        assert storage.memory is not None
        view = _guarded(storage.record.view(storage.memory, WEIGHT), table, table.store.version)
        view._whole = True
        return view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = list(_views((args, kwargs)))
        for view in found:
            _check(view)
        if found and found[0]._whole and args and args[0] is found[0]:
            answer = _of_the_table(func, found[0], args, kwargs or {})
            if answer is not None:
                return answer[0]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if not found:
            return result
        untracked = func in DETACHING or getattr(func, "__self__", None) is Tensor.data
        if any(result is one for one in (*args, (kwargs or {}).get("out"))):  # changed in place
            return result
        return _wrapped(result, found[0], detached=untracked or all(view._detached for view in found))

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call,unused-ignore]

    def numpy(self, *, force: bool = False) -> Any:
        """A copy: numpy could not tell when it is stale."""
        return self.detach().clone().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("numpy gets a copy of a table's weights: use copy=None or copy=True")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override,unused-ignore]
        return repr(self.detach().clone())


def _of_the_table(func: Any, view: WeightView, args: Any, kwargs: Any) -> tuple[Any] | None:
    """What is the table's affair, done: freezing, and new values for all of it (`emb.weight.data = …`)."""
    if func is Tensor.requires_grad_:
        view._table.requires_grad_(*args[1:], **kwargs)
        return (view,)
    attribute = getattr(func, "__self__", None)
    setting = getattr(func, "__name__", "") == "__set__"
    if attribute is Tensor.requires_grad:
        if not setting:
            return (view._table.requires_grad,)
        view._table.requires_grad = args[1]
        return (None,)
    if attribute is Tensor.data and setting:
        if args[1].shape != view.shape:
            raise ValueError(f"weights of shape {tuple(view.shape)} cannot become {tuple(args[1].shape)}")
        view.copy_(args[1])
        return (None,)
    return None


def _views(value: Any) -> Any:
    if isinstance(value, WeightView):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _views(one)
    elif isinstance(value, dict):
        yield from _views(list(value.values()))


def _check(view: WeightView) -> None:
    store = view._table.store
    store.check_process()
    if store.version != view._version_seen:
        raise FlatbedError(
            "this view of a table's weights is stale: the rows have been laid out anew since (an optimizer "
            "was attached, the table was resized, moved or closed). Take emb.weight again"
        )
    store.flush(drop=True)
    store.writes += 1  # if this is one


def _guarded(plain: Tensor, table: Table, version: int) -> WeightView:
    view: WeightView = torch.Tensor._make_subclass(WeightView, plain)
    view._table, view._version_seen, view._whole, view._detached = table, version, False, False
    return view


class Untracked(torch.autograd.Function):
    """What was computed from `emb.weight`: nobody could add its gradient to the rows, so backward says so."""

    @staticmethod
    def forward(ctx: Any, table: Table, held: list[Tensor]) -> Tensor:
        return held[0]  # no argument itself, of which it would be a view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise FlatbedError(
            "a loss was computed from emb.weight, and gradients do not flow into a table that way: look the "
            "rows up (emb(ids)), or use emb.weight.detach() if it is not meant to be trained through"
        )


DETACHING = (Tensor.detach, Tensor.detach_, torch.detach)


def _tracked(result: Tensor, view: WeightView) -> Tensor:
    table = view._table
    if not (table.requires_grad and torch.is_grad_enabled() and result.is_floating_point()):
        return result
    marked: Tensor = Untracked.apply(table, [result])  # type: ignore[no-untyped-call,unused-ignore]
    return marked


def _wrapped(result: Any, view: WeightView, *, detached: bool) -> Any:
    """Views of the view are guarded, too; what has memory of its own is an ordinary tensor."""
    if isinstance(result, (tuple, list)):
        kind = type(result)
        wrapped = [_wrapped(one, view, detached=detached) for one in result]
        return kind(*wrapped) if hasattr(result, "_fields") else kind(wrapped)
    if not isinstance(result, Tensor):
        return result
    with torch._C.DisableTorchFunctionSubclass():
        if result is view or result.layout is not torch.strided:
            return result
        if result.untyped_storage().data_ptr() != view.untyped_storage().data_ptr():
            plain = result.as_subclass(Tensor) if isinstance(result, WeightView) else result
            return plain if detached else _tracked(plain, view)
        part = _guarded(result.as_subclass(Tensor), view._table, view._version_seen)
        part._detached = detached
        return part
