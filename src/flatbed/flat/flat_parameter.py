"""The parameter an optimizer holds: one per buffer, whose `.grad` gathers the originals' gradients."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from flatbed.flat.buffer import Buffer
    from flatbed.flat.params import FlatParams

_GRAD: Any = torch.Tensor.grad  # the slot of C++, which autograd writes and the property below hides
_own_grad = _GRAD.__get__
_set_own_grad = _GRAD.__set__


class FlatParameter(nn.Parameter):
    """All parameters of one buffer as one parameter; created by `FlatParams`."""

    _owner: FlatParams
    buffer: Buffer

    @staticmethod
    def over(owner: FlatParams, buffer: Buffer) -> FlatParameter:
        """A flat parameter over the memory of one of `owner`'s buffers."""
        flat = torch.Tensor._make_subclass(FlatParameter, buffer.data, True)
        flat._owner = owner
        flat.buffer = buffer
        buffer.flat = weakref.ref(flat)
        return flat

    @property
    def grad(self) -> torch.Tensor | None:
        """The originals' gradients, gathered; None when none of them has one."""
        if torch.compiler.is_compiling():
            return _read_outside_of_the_graph(self)
        gathered = self.buffer.read_in_step()
        if gathered is not None:
            return gathered
        self._owner._repair(self.buffer)
        return self.gather_grad()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_own_grad(self, None)
        in_place = value is None and self.buffer.in_place()
        if not in_place:
            self._owner._repair(self.buffer)
        self.buffer.drop_grads(in_place=in_place) if value is None else self.buffer.assign_grad(value)

    def gather_grad(self) -> torch.Tensor | None:
        """Gather gradients of originals that lie in the buffer."""
        grad, own = self.buffer.gather(), _own_grad(self)
        if own is not None and own is not self.buffer.grad:
            # Autograd differentiated something with respect to the flat parameter itself.
            _set_own_grad(self, None)
            self.buffer.assign_grad(own if grad is None else own + grad)
            return self.buffer.grad
        return grad

    def show_grad(self, grad: torch.Tensor | None) -> None:
        """Put the gradient into the slot of C++ for the time of a step, where a compiled step reads it."""
        _set_own_grad(self, grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self._owner, memo).parameters()[self.buffer.number]
        twin: FlatParameter = memo[id(self)]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _flat_parameter, (self._owner, self.buffer.number)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatParameter({self.numel()} elements, {self.dtype}, {self.device})"


@torch._disable_dynamo  # type: ignore[attr-defined]
def _read_outside_of_the_graph(flat: FlatParameter) -> torch.Tensor | None:
    flat._owner._repair(flat.buffer)
    return flat.buffer.gather()


def _flat_parameter(owner: FlatParams, number: int) -> FlatParameter:
    return owner.parameters()[number]
