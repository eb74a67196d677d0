"""All weights of a table as one tensor, which raises once the rows have moved; their copy in state dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from flatbed.errors import FlatbedError
from flatbed.tables.grads import TableGrad
from flatbed.tables.record import WEIGHT

if TYPE_CHECKING:
    from flatbed.tables.table import Table


class GuardedTensor(Tensor):
    """A tensor in whose place numpy, copies and pickles get plain tensors."""

    def _plain(self) -> Tensor:
        """Return a plain tensor with the same values; numpy arrays of it are read-only."""
        return self.detach().clone()

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array that cannot be written: a change would have no effect."""
        found = self._plain().numpy(force=force)
        found.flags.writeable = False
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.numpy()
        return found.astype(found.dtype if dtype is None else dtype, copy=copy is True)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call,unused-ignore]


class WeightView(GuardedTensor):
    """A view of the table's memory, made by `emb.weight`. It raises after the rows have moved."""

    _table: Table
    _version_seen: int
    _whole: bool
    """True for `emb.weight` itself, False for parts of it and for `.data`."""
    _detached: bool
    """True if the caller detached it, so that no gradient is expected."""

    @staticmethod
    def of(table: Table) -> Tensor:
        """Return the weights in the table's memory, (num_embeddings, embedding_dim)."""
        if table.storage == "disk":
            raise FlatbedError(
                "a table on disk has no `weight` tensor: use read_rows(ids) and write_rows(ids, values)"
            )
        storage = table._store.ensure_layout()
        table._store.flush(drop=True)
        storage.check()
        assert storage.memory is not None
        plain = storage.record.view(storage.memory, WEIGHT)
        return _guarded(plain, table, table._store.version, whole=True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if TableGrad in types:
            raise FlatbedError(
                "table.grad has the rows of table.grad_rows alone, and emb.weight has all of them: train the "
                "table with an optimizer of flatbed.optim (from_torch takes classes of your own), or write "
                "`with torch.no_grad(): emb.weight[table.grad_rows] -= lr * table.grad`"
            )
        kwargs = kwargs or {}
        views = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WeightView)]
        for view in views:
            _check(view)
        if views and views[0]._whole and args and args[0] is views[0]:
            answer = _of_the_table(func, views[0], args, kwargs)
            if answer is not NotImplemented:
                return answer
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if not views or any(result is one for one in (*args, kwargs.get("out"))):  # in place
            return result
        untracked = func in DETACHING or getattr(func, "__self__", None) is Tensor.data
        return _wrapped(result, views[0], detached=untracked or all(view._detached for view in views))

    def set_(self, *_: Any, **__: Any) -> Any:
        """Raise: torch calls no `__torch_function__` here."""
        raise FlatbedError("a table's weights cannot be replaced: use emb.weight.copy_(values)")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override,unused-ignore]
        return repr(self.detach().clone())


Source: TypeAlias = "tuple[Table, Tensor]"
"""A table, and a copy of all of its weights."""


class SavedWeight(GuardedTensor):
    """Weights in a state dict: a copy, which `load_state_dict` takes.

    The entries of torch's state dicts share memory with the model, so that writing into them changes it.
    Here `entry.detach().copy_(values)`, with which `torch.distributed.checkpoint` loads, also writes to the
    table. All other in-place operations raise, also on parts. Parameters made of an entry
    (`load_state_dict(assign=True)`) are free.
    """

    _source: Source | None = None
    _is_detached = False

    @staticmethod
    def of(table: Table, whole: Tensor) -> SavedWeight:
        """Guard a copy of all weights."""
        return SavedWeight._part(whole, (table, whole))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        first = args[0] if args else kwargs.get("tensor")  # initialisers pass it by name
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        target = first if in_place and func is not Tensor.requires_grad_ else kwargs.get("out")
        targets = target if isinstance(target, (list, tuple)) else (target,)
        guarded = [one for one in targets if isinstance(one, cls) and one._is_guarded()]
        if guarded and not (func is Tensor.copy_ and guarded[0]._is_detached):
            raise FlatbedError(
                f"{name} was called on a table's weights in a state dict, which are a copy: write into "
                f"emb.weight (a table on disk: emb.write_rows(ids, values)), or clone them and call "
                f"load_state_dict"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for one in guarded:
            one._write_back()
        if target is not None or result is first:
            return result
        source = first._source if isinstance(first, cls) and first._is_guarded() else None
        with torch._C.DisableTorchFunctionSubclass():
            if func in DETACHING:
                return cls._part(result, source, is_detached=True)
            return _map_tensors(
                lambda one: (
                    one.as_subclass(Tensor)
                    if source is None or not _shared(one, first)
                    else cls._part(one, source, is_detached=first._is_detached)
                ),
                result,
            )

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array, which cannot be written unless a parameter was made of the entry."""
        return super().numpy(force=force) if self._is_guarded() else self._plain().numpy(force=force)

    def __deepcopy__(self, memo: Any) -> Tensor:
        plain = self._plain().clone()
        return nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain

    @staticmethod
    def _part(plain: Tensor, source: Source | None, *, is_detached: bool = False) -> SavedWeight:
        part = plain.as_subclass(SavedWeight)
        part._source, part._is_detached = source, is_detached
        return part

    def _is_guarded(self) -> bool:
        return self._source is not None and not isinstance(self, nn.Parameter)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)

    def _write_back(self) -> None:
        """Write the rows of this part of the copy to the table."""
        part = self._plain()
        if self._source is None or part.numel() == 0:
            return
        table, whole = self._source
        first = part.storage_offset()
        last = first + sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True))
        rows = range(first // whole.shape[1], last // whole.shape[1] + 1)
        table.write_rows(rows, whole[rows.start : rows.stop])


def _shared(one: Tensor, other: Any) -> bool:
    """Return True if both are tensors in the same memory."""
    if not isinstance(other, Tensor) or {one.layout, other.layout} != {torch.strided}:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


def _of_the_table(func: Any, view: WeightView, args: Any, kwargs: Any) -> Any:
    """Apply to the table what concerns all of it: `requires_grad`, and `emb.weight.data = …`.

    Returns NotImplemented for other operations.
    """
    if func is Tensor.requires_grad_:
        view._table.requires_grad_(*args[1:], **kwargs)
        return view
    attribute = getattr(func, "__self__", None)
    setting = getattr(func, "__name__", "") == "__set__"
    if attribute is Tensor.requires_grad:
        if not setting:
            return view._table.requires_grad
        view._table.requires_grad = args[1]
        return None
    if attribute is Tensor.grad:
        if setting and args[1] is None:
            view._table.grad = None
            return None
        if setting or view._table.grad is not None:
            raise FlatbedError(
                "emb.weight has no gradient of its own: give optimizers and clip_grad_norm_ "
                "emb.parameters(). The gradient of the batch's rows is emb.table.grad"
            )
        return None
    if attribute is Tensor.data and setting:
        if args[1].shape != view.shape:
            raise ValueError(f"weights of shape {tuple(view.shape)} cannot become {tuple(args[1].shape)}")
        view.copy_(args[1])
        return None
    return NotImplemented


def _check(view: WeightView) -> None:
    store = view._table._store
    store.check_process()
    if store.version != view._version_seen:
        raise FlatbedError(
            "this view of a table's weights is stale: rows have moved since (an optimizer was attached, the "
            "table was resized, moved or closed). Read emb.weight again"
        )
    store.flush(drop=True)
    store.writes += 1  # if this is one


def _guarded(
    plain: Tensor, table: Table, version: int, *, whole: bool = False, detached: bool = False
) -> WeightView:
    view: WeightView = torch.Tensor._make_subclass(WeightView, plain)
    view._table, view._version_seen, view._whole, view._detached = table, version, whole, detached
    return view


class Untracked(torch.autograd.Function):
    """Marks a result computed from `emb.weight`: its backward raises, since rows get no gradient from it."""

    @staticmethod
    def forward(ctx: Any, table: Table, held: list[Tensor]) -> Tensor:
        return held[0]  # in a list, so that the output is not a view of an input

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise FlatbedError(
            "a loss was computed from emb.weight, and gradients do not flow into a table that way: look the "
            "rows up (emb(ids)), or use emb.weight.detach() if it is not meant to be trained through"
        )


DETACHING = (Tensor.detach, Tensor.detach_, torch.detach)


def _wrapped(result: Any, view: WeightView, *, detached: bool) -> Any:
    """Return views of the view as guarded views, and results with memory of their own as plain tensors."""
    table = view._table
    tracks = not detached and table.requires_grad and torch.is_grad_enabled()

    def wrap(one: Tensor) -> Tensor:
        if one is view or one.layout is not torch.strided:
            return one
        if _shared(one, view):
            return _guarded(one.as_subclass(Tensor), table, view._version_seen, detached=detached)
        plain: Tensor = one.as_subclass(Tensor) if isinstance(one, WeightView) else one
        if tracks and plain.is_floating_point():
            plain = Untracked.apply(table, [plain])  # type: ignore[no-untyped-call,unused-ignore]
        return plain

    with torch._C.DisableTorchFunctionSubclass():
        return _map_tensors(wrap, result)


def _map_tensors(function: Callable[[Tensor], Tensor], result: Any) -> Any:
    """Replace the tensors of a result. A size stays one, where `tree_map_only` would return a tuple."""
    return result if isinstance(result, torch.Size) else tree_map_only(Tensor, function, result)
