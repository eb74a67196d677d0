"""One buffer: the parameters' values side by side, and their gradients when somebody asks for them.

The invariant that makes a flat gradient correct: whenever `gather` returns a tensor, that tensor holds
every original's gradient, each original that has one has *this memory* as its `.grad`, and everything
else in it is zero. Clipping either one is then clipping the other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter, is_, sub
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

# What a zeroed bound gradient holds. Adding to it gives exactly what was added, even a zero, and scaling
# leaves it as it is, so a segment full of it has met no gradient, whatever was clipped or unscaled meanwhile.
UNTOUCHED = -0.0


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
        self.trusted_by = 0  # id of the optimizer inside whose step nobody can have replaced a gradient
        self.unmoved = False  # bound: the last census found that autograd brought nothing at all
        self.touched = False  # the flat gradient was read or zeroed since the last full look at the originals
        self.zeroed_at: list[int] = []  # bound: the views' versions when last zeroed
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
        filled = [i for i, s in enumerate(self.segments) if s.numel] or [0]
        self.outermost = (filled[0], filled[-1])
        self.firsts = torch.tensor([self.segments[i].offset for i in filled], device=device)
        self.wide = [i for i, s in enumerate(self.segments) if len(s.shape) > 1 and s.numel > 1]
        if self.flat is not None:
            self.flat.data = self.data

    def _adopt(self, p: torch.Tensor, segment: Segment) -> None:
        home = view(self.data, segment)
        home.copy_(p.data.clone() if p.data_ptr() == home.data_ptr() else p.data)
        p.data = home  # frees the old memory at once, so that flattening never holds two copies of all

    def strayed(self, *, closely: bool = False) -> list[int]:
        """Positions of the originals whose values lie elsewhere, or there in another shape.

        Vectors can hardly be turned around in place, so their shape is looked at only `closely`.
        """
        ptrs = list(map(data_ptr, self.originals))
        away = set()
        if ptrs != self.data_ptrs:
            pairs = zip(ptrs, self.data_ptrs, strict=True)
            away = {i for i, (ptr, home) in enumerate(pairs) if ptr != home}
        for i in range(len(self.segments)) if closely else self.wide:
            p, segment = self.originals[i], self.segments[i]
            if p.stride() != segment.stride or p.shape != segment.shape:
                away.add(i)
        return sorted(away)

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

    def _find_gaps(self) -> list[torch.Tensor | None] | None:
        """The padding after each segment, as zeros or None, if all are vectors on the CPU (biases, norms).

        One `torch.cat` then copies them in half the time that separate copies take.
        """
        if self.data.device.type != "cpu" or any(s.stride != (1,) for s in self.segments):
            return None
        return [
            self.data.new_zeros(stop - start) if stop > start else None for start, stop in self._padding()
        ]

    def _padding(self) -> Iterator[tuple[int, int]]:
        """Where the padding after each segment begins and ends."""
        starts = [*(s.offset for s in self.segments[1:]), self.data.numel()]
        return ((s.end, after) for s, after in zip(self.segments, starts, strict=True))

    def zero_padding_(self, memory: torch.Tensor) -> None:
        """Zero what lies between the segments of the values or of the gradient."""
        for start, stop in self._padding():
            memory[start:stop].zero_()

    def bind_grads(self) -> None:
        """Bound mode: existing gradients move in; absent ones become zeros in place."""
        self._make_views()
        for p, home in zip(self.originals, self.views, strict=True):
            home.fill_(UNTOUCHED) if p.grad is None else home.copy_(p.grad)
            if p.requires_grad:
                p.grad = home
        self.zeroed_at = list(map(get_version, self.views))

    def remake_grads(self) -> None:
        """After a move: the flat gradient is made anew where the originals are now.

        They keep their own gradients, which `Module.to` moved along; the next gather collects those.
        """
        moves = list(map(sub, map(get_version, self.views), self.zeroed_at)) if self.bound else []
        self.grad = None
        self.views = []
        self.trusted_by = 0
        if self.bound:
            self.bind_grads()
            self.zeroed_at = list(map(sub, self.zeroed_at, moves))

    def owns_grad(self, i: int) -> bool:
        """Whether the i-th gradient view is still in the flat gradient; `Module.to` moves it in secret."""
        if self.grad is None or self.segments[i].numel == 0:
            return True
        home = self.grad.data_ptr() + self.segments[i].offset * self.grad.element_size()
        return self.views[i].data_ptr() == home

    def spot_check(self) -> bool:
        """Whether the outermost originals are at home: enough to notice a model moved as a whole."""
        return all(self.originals[i].data_ptr() == self.data_ptrs[i] for i in self.outermost)

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
            return self.grad
        arrived = [i for i, g in enumerate(grads) if g is not None and g is not self.views[i]]
        if not self.complete:
            with torch.no_grad():
                torch._foreach_zero_([home for g, home in zip(grads, self.views, strict=True) if g is None])
        if arrived:
            self._copy_in(*([column[i] for i in arrived] for column in (self.originals, grads, self.views)))
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
        self.trusted_by = 0
        if not self.bound or self.grad is None:
            deque(map(set_grad, self.originals, repeat(None)), maxlen=0)
            return
        self.touched = True
        self.grad.fill_(UNTOUCHED)
        if not (in_place and self.complete) and not self.in_place():
            for p, home in zip(self.originals, self.views, strict=True):
                if p.grad is not home:
                    p.grad = home if p.requires_grad else None
        self.zeroed_at = list(map(get_version, self.views))

    def set_grad(self, value: torch.Tensor) -> None:
        """Assigning a tensor to the flat `.grad`: it becomes every original's gradient."""
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the gradient of a flat parameter is a tensor of its shape {tuple(self.data.shape)}, or "
                f"None; found {value!r}"
            )
        if value.shape != self.data.shape or value.is_sparse or value.dtype != self.data.dtype:
            raise ValueError(
                f"the gradient of a flat parameter of {self.data.dtype} and shape {tuple(self.data.shape)} "
                f"was assigned a {'sparse ' if value.is_sparse else ''}tensor of {value.dtype} and shape "
                f"{tuple(value.shape)}: assign one like it, or None"
            )
        if not self.views:
            self._make_views()
        assert self.grad is not None
        self.grad.copy_(value.detach())
        self.zero_padding_(self.grad)
        for p, home in zip(self.originals, self.views, strict=True):
            if p.grad is not home:
                p.grad = home

    def census(self) -> tuple[list[int], list[int]]:
        """Positions of originals that lack a gradient, and of frozen ones; ask after a gather."""
        self.unmoved = False
        absent = [] if self.complete else [i for i, p in enumerate(self.originals) if p.grad is None]
        if self.bound:
            absent = sorted({*absent, *self._untouched()})
        if all(map(get_requires_grad, self.originals)):
            return absent, []
        return absent, [i for i, p in enumerate(self.originals) if not p.requires_grad]

    def _untouched(self) -> list[int]:
        """Positions whose bound gradient, never None, has met nothing since it was zeroed.

        On the CPU a look at the first elements settles most steps. Otherwise the views' versions tell: if
        all moved alike, all got a gradient; if none moved, they were written past autograd (by a replayed
        CUDA graph).
        Only where some lag behind are the gradients read, which on a GPU waits for it.
        """
        assert self.grad is not None
        if self.grad.device.type == "cpu" and not _is_untouched(self.grad[self.firsts]).any():
            return []
        moves = list(map(sub, map(get_version, self.views), self.zeroed_at))
        most = max(moves)
        self.unmoved = most == 0
        late = [i for i, n in enumerate(moves) if n < most and self.segments[i].numel]
        if not late or capturing():
            return []
        found = torch.stack([_is_untouched(self.views[i]).all() for i in late]).tolist()
        return [i for i, untouched in zip(late, found, strict=True) if untouched]


def _is_untouched(grad: torch.Tensor) -> torch.Tensor:
    return (grad == 0) & torch.signbit(grad)


def capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may wait for the GPU."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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
