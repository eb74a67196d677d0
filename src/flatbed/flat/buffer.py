"""One buffer: the parameters' values side by side, and their gradients when somebody asks for them.

The invariant that makes a flat gradient correct: whenever `gather` returns a tensor, that tensor holds
every original's gradient, each original that has one has *this memory* as its `.grad`, and everything
else in it is zero. Clipping either one is then clipping the other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, gt, is_
from typing import TYPE_CHECKING

import torch

from flatbed.errors import FlatbedError
from flatbed.layout import ALIGNMENT, Run, Segment, equal_runs

if TYPE_CHECKING:
    from flatbed.flat.parameter import FlatParameter

get_grad = attrgetter("grad")
get_version = attrgetter("_version")
get_requires_grad = attrgetter("requires_grad")
get_layout = attrgetter("layout")
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = torch.Tensor.grad.__set__  # type: ignore[union-attr]
data_ptr = torch.Tensor.data_ptr


def aligned_zeros(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose first element sits on a 256-byte address (torch's CPU allocator promises only 64)."""
    unit = ALIGNMENT // dtype.itemsize
    raw = torch.zeros(numel + (unit if device.type == "cpu" else 0), dtype=dtype, device=device)
    skip = (-raw.data_ptr() % ALIGNMENT) // dtype.itemsize if device.type == "cpu" else 0
    return raw[skip : skip + numel].detach()


def view(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The segment's tensor inside `buffer`, with a version counter of its own.

    `.data` is what separates the counters: in-place work on one gradient must not look like work on all.
    """
    return buffer.as_strided(segment.shape, segment.stride, buffer.storage_offset() + segment.offset).data


class Buffer:
    """The values and gradients of some originals, one segment each; knows nothing of modules or groups."""

    def __init__(
        self,
        segments: Sequence[Segment],
        originals: list[torch.Tensor],
        numel: int,
        *,
        bound: bool,
    ) -> None:
        self.segments = tuple(segments)
        self.originals = originals
        self.bound = bound
        self.flat_ref: weakref.ref[FlatParameter] | None = None
        self.grad: torch.Tensor | None = None
        self.complete = False  # the last gather found a gradient for every original
        self.views: list[torch.Tensor] = []
        self.gaps: list[torch.Tensor | None] | None = None
        self.trusted = False  # inside a step: gathered, and nobody can have replaced a gradient since
        self.unmoved = False  # bound: the last census found that autograd brought nothing at all
        self.touched = False  # the flat gradient was read or zeroed since the last full look at the originals
        # Bound: the views' versions when last zeroed, and when last zeroed or stepped with.
        self.zeroed_at: list[int] = []
        self.seen_at: list[int] = []
        self.runs: list[Run] = []
        self.data_ptrs: list[int] = []
        self.fill(numel, originals[0].dtype, originals[0].device)
        if bound:
            self.bind_grads()

    @property
    def flat(self) -> FlatParameter | None:
        """The flat parameter over this buffer, if anybody holds it."""
        return None if self.flat_ref is None else self.flat_ref()

    # ---- values

    def fill(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take new memory, copy the originals in, and make each of them a view of it."""
        self.data = aligned_zeros(numel, dtype=dtype, device=device)
        self.runs = equal_runs(self.segments)
        self.data_ptrs = []
        for p, segment in zip(self.originals, self.segments, strict=True):
            self._adopt(p, segment)
            self.data_ptrs.append(p.data_ptr())
        if self.flat is not None:
            self.flat.data = self.data

    def _adopt(self, p: torch.Tensor, segment: Segment) -> None:
        home = view(self.data, segment)
        home.copy_(p.data)
        p.data = home  # frees the old memory at once, so that flattening never holds two copies of all

    def strayed(self) -> list[int]:
        """Positions of the originals whose values lie elsewhere."""
        ptrs = list(map(data_ptr, self.originals))
        if ptrs == self.data_ptrs:
            return []
        return [i for i, (ptr, home) in enumerate(zip(ptrs, self.data_ptrs, strict=True)) if ptr != home]

    def flat_strayed(self) -> bool:
        """Whether the flat parameter itself was given other memory."""
        flat = self.flat
        return flat is not None and (flat.data_ptr() != self.data.data_ptr() or flat.dtype != self.data.dtype)

    def take_back(self, positions: Sequence[int]) -> None:
        """Copy strayed originals home; they have the buffer's device and dtype."""
        for i in positions:
            self._adopt(self.originals[i], self.segments[i])
            self.data_ptrs[i] = self.originals[i].data_ptr()

    def bump_versions(self, *, frozen_too: bool = True) -> None:
        """Tell autograd that the originals changed: their counters do not see writes through the buffer."""
        changed = self.originals if frozen_too else [p for p in self.originals if p.requires_grad]
        torch.autograd.graph.increment_version(changed)

    # ---- gradients

    def _make_views(self) -> None:
        if self.grad is None:
            self.grad = aligned_zeros(self.data.numel(), dtype=self.data.dtype, device=self.data.device)
        self.views = [view(self.grad, segment) for segment in self.segments]
        self.gaps = self._find_gaps()
        self.zeroed_at = [-1] * len(self.views)
        self.seen_at = [-1] * len(self.views)

    def _find_gaps(self) -> list[torch.Tensor | None] | None:
        """The padding after each segment, as zeros or None, if all are vectors on the CPU (biases, norms).

        One `torch.cat` then copies them in half the time that separate copies take.
        """
        if self.data.device.type != "cpu" or any(s.stride != (1,) for s in self.segments):
            return None
        ends = [*(s.offset for s in self.segments[1:]), self.data.numel()]
        sizes = [end - s.end for s, end in zip(self.segments, ends, strict=True)]
        return [self.data.new_zeros(size) if size else None for size in sizes]

    def bind_grads(self) -> None:
        """Bound mode: existing gradients move in; absent ones become zeros in place."""
        self._make_views()
        for i, (p, home) in enumerate(zip(self.originals, self.views, strict=True)):
            if p.grad is not None:
                home.copy_(p.grad)
            else:
                self.zeroed_at[i] = self.seen_at[i] = home._version
            if p.requires_grad:
                p.grad = home

    def remake_grads(self) -> None:
        """After a move: the flat gradient is made anew where the originals are now.

        They keep their own gradients, which `Module.to` moved along; the next gather collects those.
        """
        arrived = [home._version != v for home, v in zip(self.views, self.zeroed_at, strict=True)]
        self.grad = None
        self.views = []
        if self.bound:
            self.bind_grads()
            for i, came in enumerate(arrived):
                if not came:
                    self.zeroed_at[i] = self.seen_at[i] = self.views[i]._version

    def owns_grad(self, i: int) -> bool:
        """Whether the i-th gradient view is still in the flat gradient; `Module.to` moves it in secret."""
        if self.grad is None or self.segments[i].numel == 0:
            return True
        home = self.grad.data_ptr() + self.segments[i].offset * self.grad.element_size()
        return self.views[i].data_ptr() == home

    def spot_check(self) -> bool:
        """Whether the first and last originals are at home: enough to notice a model moved as a whole."""
        first, last = self.originals[0], self.originals[-1]
        return first.data_ptr() == self.data_ptrs[0] and last.data_ptr() == self.data_ptrs[-1]

    def in_place(self) -> bool:
        """Whether every original's gradient already is its view."""
        return bool(self.views) and all(map(is_, map(get_grad, self.originals), self.views))

    def gather(self, *, look_first: Callable[[], None] | None = None) -> torch.Tensor | None:
        """The flat gradient, or None when no original has one; afterwards nothing is left to copy.

        `look_first` is called before anything is copied, to bring back originals that have left.
        """
        if self.in_place():
            self.complete = True
            return self.grad
        if look_first is not None:
            look_first()
        grads = list(map(get_grad, self.originals))
        n_absent = sum(map(is_, grads, repeat(None)))
        self.complete = n_absent == 0
        if n_absent == len(grads):
            return None
        if not self.views:
            self._make_views()
        if self.complete and not any(map(is_, grads, self.views)):  # the usual case when following
            self._copy_in(self.originals, grads, self.views)
            self.zeroed_at = self.seen_at = [-1] * len(grads)
            return self.grad
        arrived = [i for i, g in enumerate(grads) if g is not None and g is not self.views[i]]
        if not self.complete:
            with torch.no_grad():
                torch._foreach_zero_([home for g, home in zip(grads, self.views, strict=True) if g is None])
        if arrived:
            self._copy_in(*([column[i] for i in arrived] for column in (self.originals, grads, self.views)))
        for i in arrived:
            self.zeroed_at[i] = self.seen_at[i] = -1
        return self.grad

    def _copy_in(
        self, originals: list[torch.Tensor], grads: list[torch.Tensor], homes: list[torch.Tensor]
    ) -> None:
        """Copy gradients into their views and make the views the originals' gradients."""
        if set(map(get_layout, grads)) != {torch.strided} or grads[0].dtype != self.data.dtype:
            self._refuse_unfit_grads()
        try:
            with torch.no_grad():
                if self.gaps is not None and len(grads) == len(self.segments):
                    pairs = zip(grads, self.gaps, strict=True)
                    pieces = [t for g, gap in pairs for t in ((g,) if gap is None else (g, gap))]
                    torch.cat(pieces, out=self.grad)
                else:
                    torch._foreach_copy_(homes, grads)
            deque(map(set_grad, originals, homes), maxlen=0)
        except RuntimeError:  # a gradient of another dtype: torch lets nobody mix them
            self._refuse_unfit_grads()
            raise

    def _refuse_unfit_grads(self) -> None:
        for p, segment in zip(self.originals, self.segments, strict=True):
            reason = None if p.grad is None else unfit_grad(p, p.grad)
            if reason is not None:
                raise FlatbedError(f"the gradient of '{segment.name}' cannot be gathered: it {reason}")

    def drop_grads(self, *, in_place: bool = False) -> None:
        """What `zero_grad` means: follow, forget the originals' gradients; bound, zero them in place.

        `in_place` says that every gradient is known to be its view.
        """
        self.trusted = False
        if not self.bound or self.grad is None:
            deque(map(set_grad, self.originals, repeat(None)), maxlen=0)
            return
        self.touched = True
        self.grad.zero_()
        if not (in_place and self.complete) and not self.in_place():
            for p, home in zip(self.originals, self.views, strict=True):
                if p.grad is not home:
                    p.grad = home if p.requires_grad else None
        # Nothing happened since the step if the outermost views did not move: spare the scan.
        same = self.views[0]._version == self.seen_at[0] and self.views[-1]._version == self.seen_at[-1]
        self.zeroed_at = self.seen_at if same else list(map(get_version, self.views))
        self.seen_at = self.zeroed_at.copy()

    def set_grad(self, value: torch.Tensor) -> None:
        """Assigning a tensor to the flat `.grad`: it becomes every original's gradient."""
        if value.shape != self.data.shape or value.is_sparse:
            raise ValueError(
                f"the gradient of a flat parameter of shape {tuple(self.data.shape)} was assigned a "
                f"{'sparse ' if value.is_sparse else ''}tensor of shape {tuple(value.shape)}"
            )
        if not self.views:
            self._make_views()
        assert self.grad is not None
        self.grad.copy_(value.detach())
        for p, home in zip(self.originals, self.views, strict=True):
            if p.grad is not home:
                p.grad = home
        self.zeroed_at = [-1] * len(self.views)
        self.seen_at = [-1] * len(self.views)

    def census(self) -> tuple[list[int], list[int]]:
        """Positions of originals that lack a gradient, and of frozen ones; ask after a gather.

        Bound gradients are never None: there, a gradient that arrived has moved its view's version. When
        none has, they were written past autograd (a replayed CUDA graph) and all are there. Whatever moved
        since the last step was trained, so only the rest has to be asked whether it is frozen.
        """
        self.unmoved = False
        if self.bound:
            before, self.seen_at = self.seen_at, list(map(get_version, self.views))
            if self.complete and all(map(gt, self.seen_at, before)):
                return [], []
        elif self.complete and all(map(get_requires_grad, self.originals)):
            return [], []
        frozen = [i for i, p in enumerate(self.originals) if not p.requires_grad]
        absent = [] if self.complete else [i for i, p in enumerate(self.originals) if p.grad is None]
        if self.bound:
            still = {i for i, v in enumerate(self.seen_at) if v == self.zeroed_at[i]}
            self.unmoved = not absent and len(still) == len(self.seen_at)
            if not self.unmoved:
                absent = sorted(still.union(absent))
        return absent, frozen


def unfit_grad(p: torch.Tensor, grad: torch.Tensor) -> str | None:
    """Why this gradient cannot be copied into a flat one, or None."""
    if grad.layout != torch.strided:
        return (
            "is sparse; use sparse=False in its embedding, or keep that parameter out of the FlatParams "
            "and give it to torch.optim.SparseAdam"
        )
    if grad.dtype != p.dtype:
        return f"is {grad.dtype} while the parameter is {p.dtype}; leave grad_dtype at its default"
    if grad.device != p.device:
        return f"is on {grad.device} while the parameter is on {p.device}; move both together"
    return None
