"""Layouts: property tests over open-ended shapes, strides and sizes."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatbed.layout import Spec, dense_stride, is_dense, overlaps_itself, plan

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    stride, step = [0] * len(shape), 1
    for d in order:
        stride[d] = step
        step *= max(1, shape[d]) + draw(st.sampled_from([0, 0, 0, 1]))  # sometimes a hole
    key = draw(st.sampled_from("ab"))
    return Spec(draw(st.text(max_size=3)), shape, tuple(stride), {"a": 4, "b": 2}[key], key)


@given(st.lists(specs(), max_size=12), st.sampled_from([1 << 9, 1 << 10, 1 << 30]))
def test_segments_are_aligned_and_apart(items: list[Spec], max_bytes: int) -> None:
    layout = plan(items, max_bytes=max_bytes)
    assert [s.name for s in layout.segments] == [i.name for i in items]
    assert sorted(i for b in layout.buffers for i in b.members) == list(range(len(items)))
    for buffer in layout.buffers:
        held = [layout.segments[i] for i in buffer.members]
        itemsize = items[buffer.members[0]].itemsize
        assert {items[i].key for i in buffer.members} == {buffer.key}
        assert all(s.offset % 64 == 0 for s in held)
        assert all(a.end <= b.offset for a, b in itertools.pairwise(held))
        assert held[-1].end <= buffer.numel
        assert buffer.numel > 0
        if buffer.numel * itemsize > max_bytes:
            assert len([s for s in held if s.numel]) == 1, "only a larger parameter exceeds the limit, alone"


@given(st.lists(specs(), min_size=1, max_size=8))
def test_values_round_trip(items: list[Spec]) -> None:
    items = [i for i in items if i.key == "a"] or [Spec("x", (2,), (1,), 4, "a")]
    layout = plan(items)
    memory = torch.zeros(layout.buffers[0].numel)
    values = [torch.randn(i.shape) for i in items]
    for s, v in zip(layout.segments, values, strict=True):
        memory.as_strided(s.shape, s.stride, s.offset).copy_(v)
    for s, v, i in zip(layout.segments, values, items, strict=True):
        assert torch.equal(memory.as_strided(s.shape, s.stride, s.offset), v)
        if is_dense(i.shape, i.stride):
            assert s.stride == i.stride
    assert int((memory != 0).sum()) <= sum(math.prod(i.shape) for i in items)


@given(specs().filter(lambda item: 0 not in item.shape))
def test_strides_agree_with_torch(item: Spec) -> None:
    span = 1 + sum((n - 1) * s for n, s in zip(item.shape, item.stride, strict=True))
    tensor = torch.empty(span).as_strided(item.shape, item.stride)
    dense = torch.empty_like(tensor, memory_format=torch.preserve_format)
    real = [d for d, n in enumerate(item.shape) if n > 1]
    ours = dense_stride(item.shape, item.stride)
    assert [ours[d] for d in real] == [dense.stride()[d] for d in real]
    assert is_dense(item.shape, ours)
    assert not overlaps_itself(item.shape, item.stride)


def test_expanded_overlaps() -> None:
    assert overlaps_itself((3, 4), (0, 1))
    assert overlaps_itself((2, 3), (2, 1))
    assert not overlaps_itself((1, 4), (0, 1))


def test_sizes_of_buffers() -> None:
    """A large parameter has its own. Others share buffers of at most one GiB."""
    small = [Spec(n, (10,), (1,), 4) for n in "abc"]
    layout = plan([small[0], Spec("big", (1000,), (1,), 4), *small[1:]], max_bytes=1024)
    assert [s.buffer for s in layout.segments] == [0, 1, 0, 0]
    assert layout.buffers[1].members == [1]
    quarter = (1 << 30) // 16  # elements of a quarter of a GiB, in fp32
    layout = plan(Spec(str(i), (quarter,), (1,), 4) for i in range(10))
    assert [len(b.members) for b in layout.buffers] == [4, 4, 2]
    assert max(b.numel * 4 for b in layout.buffers) == 1 << 30
