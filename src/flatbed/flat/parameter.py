"""The parameter an optimizer sees: one per buffer, whose `.grad` gathers the originals' gradients."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams

_GRAD: Any = torch.Tensor.grad  # C++'s own slot, which autograd writes and a subclass's property hides
_own_grad = _GRAD.__get__
_set_own_grad = _GRAD.__set__
_ZERO_GRAD_CODE = inspect.unwrap(torch.optim.Optimizer.zero_grad).__code__


@torch._disable_dynamo  # type: ignore[attr-defined]
def _gathered(flat: FlatParameter) -> torch.Tensor | None:
    return flat._owner._gather(flat._index)


class FlatParameter(nn.Parameter):
    """All parameters of one buffer as one, for an optimizer; made by `FlatParams`, not by hand."""

    _owner: FlatParams
    _index: int

    def __new__(cls, *_: Any, **__: Any) -> FlatParameter:
        raise TypeError(
            "a FlatParameter is made by a FlatParams, not by hand: FlatParams(model).parameters()"
        )

    @staticmethod
    def over(data: torch.Tensor, owner: FlatParams, index: int) -> FlatParameter:
        """A flat parameter over `data`, the memory of `owner`'s buffer number `index`."""
        flat = torch.Tensor._make_subclass(FlatParameter, data, True)
        flat._owner = owner
        flat._index = index
        return flat

    @property
    def grad(self) -> torch.Tensor | None:
        """The originals' gradients, gathered; None when none of them has one."""
        if torch.compiler.is_compiling():
            return _gathered(self)
        frame = sys._getframe(1)
        if frame.f_code is _ZERO_GRAD_CODE and frame.f_locals.get("set_to_none"):
            # zero_grad only asks whether there is anything to drop: nothing is copied in order to be dropped.
            return self.data
        buffer = self._owner._buffers[self._index]
        if buffer.trusted_by and id(frame.f_locals.get("self")) == buffer.trusted_by:
            return buffer.grad  # the optimizer's own code, inside the step whose gradients were just gathered
        grad = self._owner._gather(self._index)
        own = _own_grad(self)
        if own is not None and own is not buffer.grad:
            # Something was differentiated with respect to the flat parameter itself.
            _set_own_grad(self, None)
            grad = self._owner._add_grad(self._index, own)
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_own_grad(self, None)
        self._owner._set_grad(self._index, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def show_grad(self, grad: torch.Tensor | None) -> None:
        """Let C++ see the gradient too, for the time of a step: a compiled `optimizer.step` looks there."""
        _set_own_grad(self, grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self._owner, memo).parameters()[self._index]
        twin: FlatParameter = memo[id(self)]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _flat_parameter, (self._owner, self._index)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatParameter({self.numel()} elements, {self.dtype}, {self.device})"


def _flat_parameter(owner: FlatParams, index: int) -> FlatParameter:
    return owner.parameters()[index]
