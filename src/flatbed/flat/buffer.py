"""One buffer: the values of its parameters side by side, and their gradients once they are read.

The invariant of the flat gradient: whenever `gather` returns a tensor, that tensor holds the gradient of
every original. Each original that has a gradient has a view of it as its `.grad`, and the rest is zero.
Clipping the flat gradient and clipping the originals' gradients are therefore the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_, sub
from typing import TYPE_CHECKING

import torch

from flatbed.cuda.streams import is_capturing
from flatbed.errors import FlatbedError
from flatbed.layout import BufferLayout, Run, Segment, Spec, equal_runs, plan
from flatbed.optim.state_builder import own_storage

if TYPE_CHECKING:
    from flatbed.flat.flat_parameter import FlatParameter

get_grad = attrgetter("grad")
get_version = attrgetter("_version")
get_requires_grad = attrgetter("requires_grad")
get_layout = attrgetter("layout")
Tensors = tuple[torch.Tensor, ...]
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = torch.Tensor.grad.__set__  # type: ignore[union-attr]
data_ptr = torch.Tensor.data_ptr

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

    `number` is its place among the buffers, `group` the source's param group, and `positions` are those of
    the originals among all flattened parameters. `flat` is the flat parameter. It holds its FlatParams, so
    a strong reference would be a cycle and keep a dropped model's memory.
    """

    def __init__(
        self, number: int, layout: BufferLayout, segments: Sequence[Segment], originals: list[torch.Tensor]
    ) -> None:
        self.number = number
        self.group: int = layout.key[0]  # type: ignore[index]
        self.positions = layout.members
        self.segments = tuple(segments)
        self.originals = originals
        self.flat: Callable[[], FlatParameter | None] = lambda: None
        self.bound = False
        self.grad: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.complete = False  # the last gather found a gradient for every original
        self.in_step = False  # an optimizer that holds this buffer is stepping: its gradients are gathered
        self.no_backward = False  # bound: autograd wrote nothing since the gradient was zeroed
        self.zeroed_versions: list[int] | None = None  # bound: the views' versions when last zeroed
        self._allocate(layout.numel, originals[0].dtype, originals[0].device)

    # ---- values

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate memory, copy the originals in, and make each of them a tensor over it."""
        self.data = torch.zeros(numel, dtype=dtype, device=device)
        self.runs: list[Run] = equal_runs(self.segments)
        self.data_ptrs = [0] * len(self.segments)
        self._adopt(range(len(self.segments)))
        filled = [s.offset for s in self.segments if s.numel] or [0]
        self.first_elements = torch.tensor(filled, device=device)

    def _adopt(self, positions: Sequence[int]) -> None:
        """Copy originals of the buffer's device and dtype into their segments."""
        for i in positions:
            p, target = self.originals[i], own_storage(view(self.data, self.segments[i]))
            target.copy_(p.data.clone() if p.data_ptr() == target.data_ptr() else p.data)
            p.data = target  # frees the old memory at once: flattening never holds two copies of all
            self.data_ptrs[i] = p.data_ptr()

    def bring_back(self, positions: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        """Copy originals that lie elsewhere into the buffer, which moves to their device and dtype first."""
        if (device, dtype) == (self.data.device, self.data.dtype):
            self._adopt(positions)
        else:  # offsets depend on the size of an element
            specs = [Spec(s.name, s.shape, s.stride, dtype.itemsize) for s in self.segments]
            layout = plan(specs, max_bytes=1 << 62)
            self.segments = tuple(replace(s, buffer=self.number) for s in layout.segments)
            self._allocate(layout.buffers[0].numel, dtype, device)
            flat = self.flat()
            if flat is not None:
                flat.data = self.data
        self._remake_grads()

    def relocated(self) -> list[int]:
        """Positions of the originals whose values lie outside their segments."""
        ptrs = list(map(data_ptr, self.originals))
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

    def bump_versions(self, *, include_frozen: bool = True) -> None:
        """Tell autograd that the originals changed: their counters miss writes through the buffer."""
        changed = self.originals if include_frozen else [p for p in self.originals if p.requires_grad]
        torch.autograd.graph.increment_version(changed)

    # ---- gradients

    def _make_views(self) -> None:
        self.grad = torch.zeros_like(self.data)
        self.views = [own_storage(view(self.grad, segment)) for segment in self.segments]

    def bind_grads(self) -> None:
        """Bound mode: make every gradient a view; existing gradients are copied, absent ones are zeros."""
        self.bound = True
        self._make_views()
        for p, target in zip(self.originals, self.views, strict=True):
            target.fill_(UNTOUCHED) if p.grad is None else target.copy_(p.grad)
            p.grad = target
        self.zeroed_versions = list(map(get_version, self.views))

    def _remake_grads(self) -> None:
        """Drop the flat gradient after originals moved, since `Module.to` moves gradient views as well.

        The originals keep their gradients; the next gather copies them into a new flat gradient.
        """
        self.grad, self.views, self.in_step = None, [], False
        if self.bound:
            self.bind_grads()
            self.zeroed_versions = None  # copies have no history: the values tell which received a gradient

    def in_place(self) -> bool:
        """Return whether the gradient of every original is its view."""
        return bool(self.views) and all(map(is_, map(get_grad, self.originals), self.views))

    def read_in_step(self) -> torch.Tensor | None:
        """The flat gradient if an optimizer's step gathered it, otherwise None.

        The first gradient is compared since an exception inside a step leaves the flag behind.
        """
        return self.grad if self.in_step and self.originals[0].grad is self.views[0] else None

    def gather(self) -> torch.Tensor | None:
        """The flat gradient, or None when no original has one; afterwards nothing is left to copy."""
        if self.in_place():
            self.complete = True
            return self.grad
        grads = list(map(get_grad, self.originals))
        n_absent = sum(map(is_, grads, repeat(None)))
        self.complete = n_absent == 0
        if n_absent == len(grads):
            return None
        if not self.views:
            self._make_views()
        if not self.complete:
            with torch.no_grad():
                torch._foreach_zero_([v for g, v in zip(grads, self.views, strict=True) if g is None])
        trios = zip(self.originals, grads, self.views, strict=True)
        arrived = [(p, g, own) for p, g, own in trios if g is not None and g is not own]
        if arrived:
            self._copy_in(*zip(*arrived, strict=True))
        return self.grad

    def _copy_in(self, originals: Tensors, grads: Tensors, views: Tensors) -> None:
        """Copy gradients into their views and make the views the originals' gradients."""
        if set(map(get_layout, grads)) != {torch.strided}:
            pairs = zip(self.originals, self.segments, strict=True)
            names = [s.name for p, s in pairs if p.grad is not None and p.grad.layout != torch.strided]
            raise FlatbedError(
                f"the gradient of '{names[0]}' is sparse; use sparse=False in its embedding, or train it "
                f"outside the FlatParams"
            )
        with torch.no_grad():
            torch._foreach_copy_(views, grads)
        deque(map(set_grad, originals, views), maxlen=0)

    def drop_grads(self, *, in_place: bool) -> None:
        """Do what `zero_grad` asks for: drop the originals' gradients, or zero bound ones.

        `in_place` says that every gradient is its view already.
        """
        if not self.bound or self.grad is None:
            deque(map(set_grad, self.originals, repeat(None)), maxlen=0)
            return
        self.grad.fill_(UNTOUCHED)
        if not in_place:
            deque(map(set_grad, self.originals, self.views), maxlen=0)
        self.zeroed_versions = list(map(get_version, self.views))

    def assign_grad(self, value: torch.Tensor) -> None:
        """Make a tensor assigned to the flat `.grad` the gradient of every original."""
        found = (tuple(value.shape), value.dtype, value.layout)
        expected = (tuple(self.data.shape), self.data.dtype, torch.strided)
        if found != expected:
            raise ValueError(f"the gradient of a flat parameter is None or like {expected}; found {found}")
        grad = value.detach().clone()
        if not self.views:
            self._make_views()
        assert self.grad is not None
        self.grad.zero_()  # the padding stays zero
        for p, own, segment in zip(self.originals, self.views, self.segments, strict=True):
            own.copy_(view(grad, segment))
            p.grad = own

    # ---- missing gradients; ask after a gather

    def missing_grads(self) -> list[int]:
        """Positions of the originals that received no gradient."""
        self.no_backward = False
        absent = [] if self.complete else [i for i, p in enumerate(self.originals) if p.grad is None]
        return sorted({*absent, *self._untouched()}) if self.bound else absent

    def frozen(self) -> list[int]:
        """Positions of the originals that are frozen now."""
        if all(map(get_requires_grad, self.originals)):
            return []
        return [i for i, p in enumerate(self.originals) if not p.requires_grad]

    def _untouched(self) -> list[int]:
        """Positions whose bound gradient, never None, received nothing since it was zeroed.

        On the CPU the first elements settle most steps. Otherwise the views' versions tell: if all moved
        alike, all received a gradient; if none moved, a replayed CUDA graph may have written them. Gradients
        are read only where some versions lag behind, since that waits for the GPU.
        """
        assert self.grad is not None
        if self.grad.device.type == "cpu" and not _is_untouched(self.grad[self.first_elements]).any():
            return []
        late = [i for i, s in enumerate(self.segments) if s.numel]
        if self.zeroed_versions is not None:
            moves = list(map(sub, map(get_version, self.views), self.zeroed_versions))
            most = max(moves)
            self.no_backward = most == 0
            late = [i for i in late if moves[i] < most]
        if not late or is_capturing(self.data.device):
            return []
        found = torch.stack([_is_untouched(self.views[i]).all() for i in late]).tolist()
        return [i for i, untouched in zip(late, found, strict=True) if untouched]

    # ---- norms, summed in the order in which torch sums them over separate parameters

    @torch.no_grad()
    def param_norms(self) -> torch.Tensor:
        """The norm of the values of each original, in the order of the segments."""
        return self._norms(self.originals, self.data, 2.0)

    def grad_norms(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the gradient of each original, 0 where there is none; gather first."""
        present = [p.grad is not None for p in self.originals]
        if self.grad is None or not any(present):
            return torch.zeros(len(self.segments), device=self.data.device)
        found = self._norms(self.views, self.grad, norm_type)
        return found if all(present) else found * torch.tensor(present, device=found.device)

    def _norms(self, tensors: Sequence[torch.Tensor], flat: torch.Tensor, norm_type: float) -> torch.Tensor:
        if flat.device.type == "cpu" and 4 * len(self.runs) <= len(tensors):
            return torch.cat([_row_norms(flat, run, norm_type) for run in self.runs])
        filled = [t for t in tensors if t.numel()]  # an empty tensor has no largest element
        found = iter(torch._foreach_norm(filled, norm_type) if filled else ())
        return torch.stack([next(found) if t.numel() else flat.new_zeros(()) for t in tensors])


def _is_untouched(grad: torch.Tensor) -> torch.Tensor:
    return (grad == 0) & torch.signbit(grad)


def _row_norms(flat: torch.Tensor, run: Run, norm_type: float) -> torch.Tensor:
    """One reduction for a run of equal neighbours: each row of a matrix is summed as it would be alone."""
    if not run.length:
        return flat.new_zeros(run.n_rows)
    rows = flat.as_strided((run.n_rows, run.length), (run.step, 1), flat.storage_offset() + run.offset)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, norm_type, dim=1)
    return norms


def check_max_norm(max_norm: float) -> None:
    """Raise for a negative norm, with which clipping would reverse the gradients."""
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative; found {max_norm}")


@torch.no_grad()
def clip(buffers: Sequence[Buffer], max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale all gradients by the factor that torch would use, and return their norm; gather first."""
    total = total_norm(buffers, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for buffer in buffers:
        assert buffer.grad is not None
        buffer.grad.mul_(factor.to(buffer.grad.device))
    return total


def total_norm(buffers: Sequence[Buffer], norm_type: float) -> torch.Tensor:
    """The norm over all gradients; gather first.

    On the CPU it is bitwise equal to torch's norm over the parameters in the order of the source. On other
    devices it is one reduction per buffer.
    """
    if not buffers:
        return torch.tensor(0.0)
    device = buffers[0].data.device
    if any(buffer.data.device.type != "cpu" for buffer in buffers) and norm_type > 0:
        whole: list[torch.Tensor] = [
            torch.linalg.vector_norm(b.grad, norm_type).to(device) for b in buffers if b.grad is not None
        ]
        return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole), norm_type)
    parts: list[torch.Tensor] = []
    positions: list[int] = []
    for buffer in buffers:
        assert buffer.grad is not None
        found, held = buffer._norms(buffer.views, buffer.grad, norm_type), buffer.positions
        if not buffer.complete:  # torch counts only present gradients, and zeros would change its sum
            present = [i for i, p in enumerate(buffer.originals) if p.grad is not None]
            found, held = found[torch.tensor(present, device=found.device)], tuple(held[i] for i in present)
        parts.append(found.to(device))
        positions += held
    order = sorted(range(len(positions)), key=positions.__getitem__)
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.tensor(order, device=device)]
    total: torch.Tensor = torch.linalg.vector_norm(joined, norm_type)
    return total
