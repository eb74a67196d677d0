"""The layout of named tensors in flat buffers. Pure data: no tensor is touched here."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

ALIGNMENT = 64  # elements: 256 bytes of fp32, as CUDA's allocator aligns. A cast does not change a layout.
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


@dataclass(slots=True)
class BufferLayout:
    """One buffer: its length in elements, and the positions of its tensors in the input."""

    key: Hashable
    numel: int = 0
    members: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of every tensor: `segments[i]` belongs to the i-th spec."""

    segments: list[Segment]
    buffers: list[BufferLayout]


def plan(specs: Iterable[Spec], *, max_bytes: int = MAX_BUFFER_BYTES) -> Layout:
    """Place tensors in their order: aligned segments, a new buffer per key and per `max_bytes`.

    A tensor of more than `max_bytes` gets a buffer of its own. No buffer is empty, even when all of its
    tensors are.

    >>> layout = plan([Spec("w", (3, 5), (5, 1), 4), Spec("b", (), (), 4)])
    >>> [segment.offset for segment in layout.segments], layout.buffers[0].numel
    ([0, 64], 128)
    """
    layout = Layout([], [])
    open_buffers: dict[Hashable, int] = {}
    for position, spec in enumerate(specs):
        limit = max_bytes // spec.itemsize
        padded = -(-math.prod(spec.shape) // ALIGNMENT) * ALIGNMENT
        number = open_buffers.get(spec.key, -1)
        if number < 0 or layout.buffers[number].numel + padded > limit:
            number = len(layout.buffers)
            layout.buffers.append(BufferLayout(spec.key))
            if padded <= limit:
                open_buffers[spec.key] = number
        buffer = layout.buffers[number]
        stride = dense_stride(spec.shape, spec.stride)
        layout.segments.append(Segment(spec.name, spec.shape, stride, buffer.numel, number))
        buffer.members.append(position)
        # An empty tensor needs no elements, but its buffer must have some.
        buffer.numel = max(buffer.numel + padded, ALIGNMENT)
    return layout


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
