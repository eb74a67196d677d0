"""The parameter an optimizer holds: one per buffer, whose `.grad` gathers the originals' gradients."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from flatbed.flat.buffer import Buffer
    from flatbed.flat.params import FlatParams

_GRAD: Any = torch.Tensor.grad  # the slot of C++, which autograd writes and the property below hides
_own_grad = _GRAD.__get__
_set_own_grad = _GRAD.__set__


@torch._disable_dynamo  # type: ignore[attr-defined]
def _gathered(flat: FlatParameter) -> torch.Tensor | None:
    return flat._owner._gather(flat._index)


class FlatParameter(nn.Parameter):
    """All parameters of one buffer as one parameter; created by `FlatParams`."""

    _owner: FlatParams
    _index: int

    def __new__(cls, *_: Any, **__: Any) -> FlatParameter:
        raise TypeError("a FlatParameter is created by FlatParams(model).parameters(), not by hand")

    @staticmethod
    def over(owner: FlatParams, index: int) -> FlatParameter:
        """A flat parameter over the memory of `owner`'s buffer number `index`."""
        flat = torch.Tensor._make_subclass(FlatParameter, owner._buffers[index].data, True)
        flat._owner = owner
        flat._index = index
        return flat

    @property
    def buffer(self) -> Buffer:
        return self._owner._buffers[self._index]

    @property
    def grad(self) -> torch.Tensor | None:
        """The originals' gradients, gathered; None when none of them has one."""
        if torch.compiler.is_compiling():
            return _gathered(self)
        grad = self.buffer.read_in_step()
        if grad is not None:
            return grad
        grad = self._owner._gather(self._index)
        own = _own_grad(self)
        if own is not None and own is not self.buffer.grad:
            # Autograd differentiated something with respect to the flat parameter itself.
            self.grad = own if grad is None else own + grad
            grad = self.buffer.grad
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_own_grad(self, None)
        self._owner._set_grad(self._index, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def show_grad(self, grad: torch.Tensor | None) -> None:
        """Put the gradient into the slot of C++ for the time of a step, where a compiled step reads it."""
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
