"""The layout of named tensors in flat buffers. Pure data: no tensor is touched here."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT = 256  # bytes: fits the widest vector loads, and equals the alignment of CUDA's allocator
MAX_BUFFER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor to be placed. Tensors with equal `key` may share a buffer."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class Segment:
    """The place of one named tensor in a flat buffer; offset, length and stride count elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    buffer: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One buffer: its length in elements, and the positions of its tensors in the input."""

    key: Hashable
    numel: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of every tensor: `segments[i]` belongs to the i-th spec."""

    segments: tuple[Segment, ...]
    buffers: tuple[BufferLayout, ...]

    def segments_of(self, buffer: int) -> tuple[Segment, ...]:
        """The segments of one buffer, in order of their offsets."""
        return tuple(self.segments[i] for i in self.buffers[buffer].members)


def plan(specs: Iterable[Spec], *, alignment: int = ALIGNMENT, max_bytes: int = MAX_BUFFER_BYTES) -> Layout:
    """Place tensors in their order: aligned segments, a new buffer per key and per `max_bytes`.

    A tensor of more than `max_bytes` gets a buffer of its own. No buffer is empty, even when all of its
    tensors are.

    >>> layout = plan([Spec("w", (3, 5), (5, 1), 4), Spec("b", (), (), 4)])
    >>> [segment.offset for segment in layout.segments], layout.buffers[0].numel
    ([0, 64], 128)
    """
    open_buffer: dict[Hashable, int] = {}
    members: list[list[int]] = []
    lengths: list[int] = []
    keys: list[Hashable] = []
    segments: list[Segment] = []

    def new_buffer(key: Hashable) -> int:
        members.append([])
        lengths.append(0)
        keys.append(key)
        return len(keys) - 1

    for position, spec in enumerate(specs):
        unit = max(1, alignment // spec.itemsize)
        limit = max_bytes // spec.itemsize
        padded = _round_up(math.prod(spec.shape), unit)
        if padded > limit:
            buffer = new_buffer(spec.key)
        else:
            buffer = open_buffer.get(spec.key, -1)
            if buffer < 0 or lengths[buffer] + padded > limit:
                buffer = open_buffer[spec.key] = new_buffer(spec.key)
        stride = dense_stride(spec.shape, spec.stride)
        segments.append(Segment(spec.name, spec.shape, stride, lengths[buffer], buffer))
        members[buffer].append(position)
        # An empty tensor needs no elements, but its buffer must have some.
        lengths[buffer] = max(lengths[buffer] + padded, unit)
    buffers = tuple(
        BufferLayout(key, numel, tuple(held)) for key, numel, held in zip(keys, lengths, members, strict=True)
    )
    return Layout(tuple(segments), buffers)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments of equal length at equal distances: the rows of a matrix with gaps."""

    offset: int
    n_rows: int
    length: int
    step: int


def equal_runs(segments: Sequence[Segment]) -> list[Run]:
    """Group the segments of one buffer into the fewest matrices, in order.

    >>> equal_runs(plan([Spec(n, (3,), (1,), 4) for n in "abc"]).segments)
    [Run(offset=0, n_rows=3, length=3, step=64)]
    """
    runs: list[Run] = []
    for segment in segments:
        if runs and runs[-1].length == segment.numel:
            last = runs[-1]
            gap = segment.offset - (last.offset + (last.n_rows - 1) * last.step)
            if last.n_rows == 1 or gap == last.step:
                runs[-1] = Run(last.offset, last.n_rows + 1, last.length, gap)
                continue
        runs.append(Run(segment.offset, 1, segment.numel, max(1, segment.numel)))
    return runs


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements fill their span without holes or overlaps, in any order of dimensions."""
    expected = 1
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if size == 0:
            return True
        if step != expected:
            return False
        expected *= size
    return True


def overlaps_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether two indices may address the same element, as in an expanded tensor."""
    if 0 in shape:
        return False
    reach = 0
    for step, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without holes that keep the order of dimensions, as torch's `preserve_format` does."""
    if is_dense(shape, stride):
        return stride
    order = sorted(range(len(shape)), key=lambda d: (stride[d], -d))
    dense = [0] * len(shape)
    step = 1
    for d in order:
        dense[d] = step
        step *= max(1, shape[d])
    return tuple(dense)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
