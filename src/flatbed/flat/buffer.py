"""One buffer: the values of its parameters side by side, their gradients, and the flat parameter over both.

The invariant of the flat gradient: whenever `gather` returns a tensor, that tensor holds the gradient of
every original. Each original that has a gradient has a view of it as its `.grad`, and the rest is zero.
Clipping the flat gradient and clipping the originals' gradients are therefore the same.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatbed.cuda.streams import is_capturing
from flatbed.errors import FlatbedError
from flatbed.kernels import check_values_exist
from flatbed.layout import BufferLayout, Segment
from flatbed.optim.state import own_storage

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams

# The value of a zeroed bound gradient. Adding any gradient to it gives exactly that gradient, and scaling
# keeps it. A segment full of it received no gradient, even if gradients were clipped or unscaled since.
UNTOUCHED = -0.0


def view(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The segment's tensor inside `buffer`, with a version counter of its own.

    `.data` separates the counters: an in-place change of one gradient must not look like a change of all.
    """
    return buffer.as_strided(segment.shape, segment.stride, buffer.storage_offset() + segment.offset).data


class Buffer:
    """The values and gradients of its originals, one segment each.

    `number` is its place among the buffers, and `group` the source's param group. `flat` is the flat
    parameter. It holds its FlatParams, so a strong reference would be a cycle and keep a dropped model's
    memory.
    """

    def __init__(
        self, number: int, layout: BufferLayout, segments: list[Segment], originals: list[torch.Tensor]
    ) -> None:
        self.number = number
        self.group: int = layout.key[0]  # type: ignore[index]
        self.segments = segments
        self.originals = originals
        self.flat: Callable[[], FlatParameter | None] = lambda: None
        self.bound = False
        self.grad: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.in_step = False  # an optimizer is stepping, and nothing else replaces the gathered gradients
        self.no_backward = False  # bound: autograd wrote nothing since the gradient was zeroed
        self.zeroed_versions: list[int] | None = None  # bound: the views' versions when last zeroed
        self._allocate(layout.numel, originals[0].dtype, originals[0].device)

    # ---- values

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.zeros(numel, dtype=dtype, device=device)
        self.data_ptrs = [0] * len(self.segments)
        self._adopt(range(len(self.segments)))

    def _adopt(self, positions: Iterable[int]) -> None:
        """Copy originals of the buffer's device and dtype into their segments."""
        for i in positions:
            p, target = self.originals[i], own_storage(view(self.data, self.segments[i]))
            target.copy_(p.data.clone() if p.data_ptr() == target.data_ptr() else p.data)
            p.data = target  # frees the old memory at once: flattening never holds two copies of all
            self.data_ptrs[i] = p.data_ptr()

    def bring_back(self, positions: list[int], device: torch.device, dtype: torch.dtype) -> None:
        """Copy originals that lie elsewhere into the buffer, which moves to their device and dtype first.

        The flat gradient is dropped, since `Module.to` moves gradients as well. The originals keep theirs,
        and the next gather copies them into a new flat gradient.
        """
        if (device, dtype) == (self.data.device, self.data.dtype):
            self._adopt(positions)
        else:
            self._allocate(len(self.data), dtype, device)
            flat = self.flat()
            if flat is not None:
                flat.data = self.data
        self.grad, self.views, self.in_step = None, [], False
        if self.bound:
            self.bind_grads()
            self.zeroed_versions = None  # copies have no history: the values tell which received a gradient

    def relocated(self) -> list[int]:
        """Positions of the originals whose values lie outside their segments."""
        ptrs = list(map(torch.Tensor.data_ptr, self.originals))
        if ptrs == self.data_ptrs:
            return []
        return [i for i, (ptr, own) in enumerate(zip(ptrs, self.data_ptrs, strict=True)) if ptr != own]

    def flat_is_relocated(self) -> bool:
        """Return whether the flat parameter itself was given other memory."""
        flat = self.flat()
        return flat is not None and (flat.data_ptr() != self.data.data_ptr() or flat.dtype != self.data.dtype)

    def bring_flat_back(self) -> None:
        """Copy the values of a flat parameter that was given other memory into the buffer."""
        flat = self.flat()
        if flat is not None and self.flat_is_relocated():
            self.data.copy_(flat.data)  # neither requires grad
            flat.data = self.data

    # ---- gradients

    def _make_views(self) -> None:
        if not self.views:
            self.grad = torch.zeros_like(self.data)
            self.views = [own_storage(view(self.grad, segment)) for segment in self.segments]
            starts = [*(segment.offset for segment in self.segments[1:]), len(self.data)]
            gaps = [
                torch.arange(s.end, start, device="cpu")
                for s, start in zip(self.segments, starts, strict=True)
            ]
            self.padding = torch.cat(gaps).to(self.data.device)

    def bind_grads(self) -> None:
        """Bound mode: make every gradient a view; existing gradients are copied, absent ones are zeros."""
        self.bound = True
        self._make_views()
        for p, own in zip(self.originals, self.views, strict=True):
            own.fill_(UNTOUCHED) if p.grad is None else own.copy_(p.grad)
            p.grad = own
        self.zeroed_versions = [own._version for own in self.views]

    def gather(self) -> torch.Tensor | None:
        """The flat gradient, or None when no original has one; afterwards nothing is left to copy.

        Padding is zero: scaled by a norm that was NaN, it would be NaN in all later norms.
        """
        grads = [p.grad for p in self.originals]
        if all(g is None for g in grads):
            return None
        check_values_exist("gathering gradients")
        self._make_views()
        assert self.grad is not None
        if len(self.padding):
            with torch.no_grad():
                self.grad.index_fill_(0, self.padding, 0.0)
        if all(map(is_, grads, self.views)):
            return self.grad
        arrived: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for p, grad, own, segment in zip(self.originals, grads, self.views, self.segments, strict=True):
                if grad is None:
                    own.zero_()
                elif grad.layout != torch.strided:
                    raise FlatbedError(
                        f"the gradient of '{segment.name}' is sparse; use sparse=False in its embedding, or "
                        f"train it outside the flat parameters"
                    )
                elif grad is not own:
                    arrived.append((p, grad, own))
            if arrived:
                torch._foreach_copy_([own for _, _, own in arrived], [grad for _, grad, _ in arrived])
        for p, _, own in arrived:
            p.grad = own
        return self.grad

    def drop_grads(self) -> None:
        """Do what `zero_grad` asks for: drop the originals' gradients, or zero bound ones."""
        if not self.bound:
            for p in self.originals:
                p.grad = None
            return
        assert self.grad is not None
        self.grad.fill_(UNTOUCHED)
        for p, own in zip(self.originals, self.views, strict=True):
            p.grad = own
        self.zeroed_versions = [own._version for own in self.views]

    def assign_grad(self, value: torch.Tensor) -> None:
        """Make a tensor assigned to the flat `.grad` the gradient of every original."""
        grad = value.detach().clone()
        self._make_views()
        for p, own, segment in zip(self.originals, self.views, self.segments, strict=True):
            own.copy_(view(grad, segment))  # the padding stays zero
            p.grad = own

    # ---- missing gradients; ask after a gather

    def missing_grads(self) -> list[int]:
        """Positions of the originals that received no gradient."""
        absent = [i for i, p in enumerate(self.originals) if p.grad is None]
        return sorted(absent + self._untouched()) if self.bound else absent

    def _untouched(self) -> list[int]:
        """Positions whose bound gradient, never None, received nothing since it was zeroed.

        If all versions of the views moved alike, all received a gradient. If none moved, a replayed CUDA
        graph may have written them. Gradients are read only where some versions lag behind, since that waits
        for the GPU.
        """
        late = list(range(len(self.views)))
        self.no_backward = False
        if self.zeroed_versions is not None:
            moves = [v._version - before for v, before in zip(self.views, self.zeroed_versions, strict=True)]
            most = max(moves)
            self.no_backward = most == 0
            late = [i for i in late if moves[i] < most]
        late = [i for i in late if self.views[i].numel()]
        if not late or is_capturing(self.data.device):
            return []
        is_zeroed = [((v == 0) & torch.signbit(v)).all() for v in (self.views[i] for i in late)]
        return [i for i, untouched in zip(late, torch.stack(is_zeroed).tolist(), strict=True) if untouched]


@torch.no_grad()
def clip(owner: FlatParams, buffers: Sequence[Buffer], max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale all gradients by the factor that torch would use, and return their norm; gather first."""
    if not max_norm >= 0:  # it would reverse the gradients
        raise ValueError(f"max_norm must not be negative; found {max_norm}")
    total = total_norm(owner, buffers, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for buffer in buffers:
        assert buffer.grad is not None
        buffer.grad.mul_(factor.to(buffer.grad.device))
    return total


def total_norm(owner: FlatParams, buffers: Sequence[Buffer], norm_type: float) -> torch.Tensor:
    """The norm over all gradients, which are in these buffers; gather first.

    On the CPU it is bitwise equal to torch's norm over the parameters in the order of the source. On other
    devices it is one reduction per buffer.
    """
    if any(buffer.data.device.type != "cpu" for buffer in buffers) and norm_type > 0:
        device = buffers[0].data.device
        whole: list[torch.Tensor] = [
            torch.linalg.vector_norm(b.grad, norm_type).to(device) for b in buffers if b.grad is not None
        ]
        return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole), norm_type)
    grads = [p.grad for p in owner.originals() if p.grad is not None]
    if norm_type == float("inf"):  # an empty tensor has no largest element
        grads = [grad for grad in grads if grad.numel()]
    return nn.utils.get_total_norm(grads, norm_type)


# ---- the flat parameter

_GRAD: Any = torch.Tensor.grad  # the slot of C++, which autograd writes and the property below hides


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
        buffer = self.buffer
        if buffer.in_step and buffer.originals[0].grad is buffer.views[0]:
            return buffer.grad  # an exception may have ended the step
        self._owner._repair(buffer)
        return self.gather_grad()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._owner._repair(self.buffer)
        _GRAD.__set__(self, value)  # torch checks its shape, dtype and device
        _GRAD.__set__(self, None)
        self.buffer.drop_grads() if value is None else self.buffer.assign_grad(value)

    def gather_grad(self) -> torch.Tensor | None:
        """Gather gradients of originals that lie in the buffer."""
        grad, own = self.buffer.gather(), _GRAD.__get__(self)
        if own is not None and own is not self.buffer.grad:
            # Autograd differentiated something with respect to the flat parameter itself.
            _GRAD.__set__(self, None)
            self.buffer.assign_grad(own if grad is None else own + grad)
            return self.buffer.grad
        return grad

    def show_grad(self, is_gathered: bool) -> None:
        """Put the gathered gradient into the slot of C++ for the time of a step, or take it out.

        A compiled step reads the slot.
        """
        if is_gathered or _GRAD.__get__(self) is self.buffer.grad:
            _GRAD.__set__(self, self.buffer.grad if is_gathered else None)

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
